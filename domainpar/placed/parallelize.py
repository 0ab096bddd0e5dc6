"""Make a module parallel: its class stays the user's, and gradients of its parameters become whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from domainpar.common.agreement import agree, difference
from domainpar.parallel.world import World
from domainpar.placed.input_log import HINT
from domainpar.placed.parameter_gradients import WholeGradients
from domainpar.placed.ranks import NotExact, ranks_of
from domainpar.placed.replicas import check_sizes, take_from_root
from domainpar.placed.tensor import Placed

Module = TypeVar("Module", bound=nn.Module)
_GONE = {
    "seed": "random numbers come from torch's generator: torch.manual_seed(seed)",
    "node_parameters": "a parameter with a row for each node is split where it meets rows of nodes",
    "recompute_every": "use torch.utils.checkpoint with context_fn=domainpar.kept_ghosts",
}


def parallelize(
    module: Module, world: World, beside: Iterable[Tensor] = (), *, same_bits: bool = False, **gone: Any
) -> Module:
    """Make a module ready for placed tensors. *Collective*.

    Its parameters and buffers get the values of rank 0. After each `loss.backward()` the gradient of each parameter is
    whole, and the same bits, on every rank: optimisers, clipping, schedules and hooks see what they see on one rank.

    Args:
        module: Any module of torch; it is changed and returned.
        world: The ranks.
        beside: Learned tensors beside the module, such as weights of losses.
        same_bits: Whether outputs, losses and gradients shall be equal to the last bit on any number of ranks, on CPU.
            It holds for all that is computed from then on with placed tensors of this world, whatever module or loss it
            belongs to, and takes more time (`docs/same_bits.md`).

    Returns:
        The module.

    Raises:
        ValueError: If its parameters have no size yet.
        Refused: On all ranks alike, if the modules of the ranks differ in a name, a shape or a type, or in `same_bits`.
        NotExact: If `same_bits` is set on a GPU.
    """
    for name in gone:
        raise TypeError(f"parallelize has no argument {name}: {_GONE.get(name, 'see its help')}.")
    check_sizes(module)
    agree(world.transport, difference(world.transport, {"parallelize's same_bits": str(same_bits)}, HINT))
    if same_bits and world.device.type != "cpu":
        raise NotExact(f"same_bits on {world.device}: kernels of GPUs give other bits for another number of rows")
    if same_bits:
        for transport in (world.transport, world.domain):
            ranks_of(transport).same_bits = True
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    extra = {f"beside {number}": tensor for number, tensor in enumerate(beside)}
    common = {name: tensor for name, tensor in {**tensors, **extra}.items() if not isinstance(tensor, Placed)}
    take_from_root(common, world)
    ranks_of(world.domain).log.name(common)
    learned = {**dict(module.named_parameters()), **extra}
    learned = {name: tensor for name, tensor in learned.items() if tensor.requires_grad}
    WholeGradients(learned, world, list(module.buffers()))
    return module
