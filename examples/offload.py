"""What waits for the backward pass on a GPU, in the memory of its host: for `domainpar train`, or around your own call.

    python -m domainpar.train --device cuda --model examples.offload:acorn2

The GPU copies activations between its kernels, so a step takes longer by the time of the bus. With ranks enough, or
with checkpoints, nothing has to be copied. On a CPU it changes nothing.
"""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from domainpar import Placed
from domainpar.nn.published import OF_THE_FIELD


class Offloaded(nn.Module):
    """A network whose saved tensors lie on the host until the backward pass asks for them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """What the network returns."""
        with kept_on_host():
            return self.network(x, edge_index, edge_attr)


def acorn2(node_features: int, edge_features: int, hidden: int = 64, graph_iters: int = 3, seed: int = 0) -> Offloaded:
    """The network `acorn2` of `train`."""
    return Offloaded(
        OF_THE_FIELD["acorn2"](node_features, edge_features, hidden=hidden, graph_iters=graph_iters, seed=seed)
    )


def kept_on_host() -> saved_tensors_hooks:
    """Around a forward pass: what autograd keeps lies in pinned memory of the host."""
    return saved_tensors_hooks(_to_host, _to_device)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """The stream copies it, in its turn, while the host goes on."""
    if isinstance(tensor, Placed):  # this rank's rows
        device, kept = _to_host(tensor.local)
        return device, Placed(kept, tensor.place, tensor.names)
    if not tensor.is_cuda or tensor.layout != torch.strided or not tensor.is_floating_point():  # such as row numbers
        return tensor.device, tensor
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def _to_device(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = kept
    if isinstance(tensor, Placed):
        return Placed(tensor.local.to(device, non_blocking=True), tensor.place, tensor.names)
    return tensor.to(device, non_blocking=True)
