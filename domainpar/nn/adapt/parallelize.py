"""A module that computes on a split graph what it computes on the whole one."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from domainpar.nn.adapt import rules as _rules  # noqa: F401  registers them
from domainpar.nn.adapt.across import GroupRank, counted_once
from domainpar.nn.adapt.gradient_sums import GradientSums, Replicas, take_from_root
from domainpar.nn.adapt.input_log import input_log
from domainpar.nn.adapt.modules import (
    check_module,
    check_whole,
    common_tensors,
    keep_rows_out_of_state,
    note_rows,
    owner_of,
    read_as_nodes,
    reason_of,
)
from domainpar.nn.adapt.nested import rebuilt, tensors_in
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.recomputation import Recomputation
from domainpar.nn.adapt.rows import (
    UNKNOWN,
    NotExact,
    Rows,
    check_written,
    counting,
    mark,
    rows_of,
    unwatched,
    was_written,
)
from domainpar.nn.adapt.watch import Watch
from domainpar.nn.noise import key_of
from domainpar.nn.recompute import checked
from domainpar.nn.uncompiled import never_compiled
from domainpar.parallel.world import World


def parallelize(
    module: nn.Module,
    world: World,
    *,
    seed: int = 0,
    node_parameters: Sequence[str] = (),
    recompute_every: int | None = None,
) -> GraphParallel:
    """Let a module, unchanged, run on a split graph: the result of one rank, to rounding. *Collective*.

    Its parameters and buffers are set to those of rank 0; rows of a part that it keeps, a static graph say, stay what
    they are. Give the result tensors of a `GraphPart`; see `GraphParallel`.

    Args:
        module: Any module of torch and torch_geometric functions.
        world: The ranks; gradients are summed over all of them.
        seed: Of dropout.
        node_parameters: Names of parameters and buffers with a row for each node of the whole graph, such as
            `embedding.weight`. Every rank holds them whole; what the module reads of them is this rank's rows.
        recompute_every: To save memory, keep of every K iterations what the first one begins with, and compute all else
            again in backward, from rows that came before; the same bits. An iteration begins where edges read what was
            summed at nodes. None: keep all but what the module itself checkpoints.

    Raises:
        ValueError: If `recompute_every` is below 1, the module is parallel already, sizes of parameters are not known
            yet or they are sharded over ranks (FSDP), there are hooks on gradients, or nothing has a given name.
        Refused: On all ranks alike, if the modules of the ranks differ in a name, a shape or a type.
    """
    if any(isinstance(child, GraphParallel) for child in module.modules()):
        raise ValueError("the module is parallel already; give parallelize the module itself, once.")
    check_module(module)
    parallel = GraphParallel(module, world, seed, node_parameters, recompute_every)
    keep_rows_out_of_state(module)
    take_from_root(common_tensors(module), world)
    parallel.begin()
    return parallel


class GraphParallel(nn.Module):
    """A module on a split graph. Call it like the module itself, with tensors marked by a `GraphPart`.

    Every torch call of the forward pass is watched: rows of ghosts are fetched where an edge reads them and they are
    out of date; sums, means, norms and pooling over nodes or edges run over all ranks; dropout is drawn by the global
    number of a row. What has no exact form raises `NotExact` naming the module and the reason, on every rank.

    The loss is the caller's: a sum over the rows that come back, divided by a number of the whole graph, so that the
    losses of all ranks add up to the loss. `reduce_gradients` then adds up what each rank has of its gradient.

    Args:
        module: The module itself; `state_dict` of it is what to save.
        world: The ranks; None if gradients are summed elsewhere.
        seed: Of dropout.
        node_parameters: As for `parallelize`.
        recompute_every: As for `parallelize`.

    Attributes:
        rng_step: Forward passes so far, int64: with `seed` it decides what is dropped, so it belongs in a checkpoint.
    """

    rng_step: Tensor

    def __init__(
        self,
        module: nn.Module,
        world: World | None = None,
        seed: int = 0,
        node_parameters: Sequence[str] = (),
        recompute_every: int | None = None,
    ) -> None:
        super().__init__()
        self.module, self.world, self.seed, self.recompute_every = module, world, seed, checked(recompute_every)
        self._replicas: Replicas | None = None
        self._node_parameters = {name: owner_of(module, name) for name in node_parameters}
        self.register_buffer("rng_step", torch.zeros((), dtype=torch.int64, device="cpu"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module, of the rows this rank owns. *Collective*, forward and backward.

        Args:
            *args: Arguments of the module; tensors are marked by a `GraphPart`, all by the same.
            **kwargs: The same by name.

        Returns:
            The module's result: of tensors of nodes or edges the rows that this rank owns, in the order of global ids;
            row numbers as global ids; other tensors, the same on every rank, whole. Their gradient counts once, so
            compute with them alike on every rank.

        Raises:
            NotExact: If the module does what has no exact form, or an argument is not marked.
            Refused: On all ranks alike, if they were given different tensors.
            ValueError: If its parameters were sharded over ranks (FSDP) since.
            RanksDiffer: On all ranks alike, if their parameters are no longer the same.
        """
        check_whole(self)
        part = _part_of((args, kwargs))
        if part.num_parts > 1:
            args, kwargs = self._compared(part, args, kwargs)
        with torch.no_grad():
            self.rng_step += 1
        return self.run(part, args, kwargs, key_of(self.seed, "forward", int(self.rng_step)))

    def _compared(self, part: GraphPart, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as they are to be read, once all ranks have compared what they hold and were given."""
        arguments = tensors_in((args, kwargs))
        for tensor in arguments:
            if rows_of(tensor) is None and was_written(tensor):
                part.inputs.remember("an argument that is the same everywhere, changed in place,", tensor)
        state = bytes(5) if self._replicas is None else self._replicas.state()
        told = part.inputs.compare(state + bytes(was_written(tensor) for tensor in arguments))
        if self._replicas is not None:
            self._replicas.compare([of_rank[:5] for of_rank in told], part.transport)
        # What one rank has written all ranks have: they read the same.
        written = [any(of_ranks) for of_ranks in itertools.zip_longest(*(of_rank[5:] for of_rank in told))]
        late = {id(tensor) for tensor, any_rank in zip(arguments, written) if any_rank}
        if not late:
            return args, kwargs  # the very objects that were given
        args, kwargs = rebuilt(
            (args, kwargs), lambda value: _without_ghosts(value, part) if id(value) in late else value
        )
        return args, kwargs

    def begin(self) -> None:
        """Take what the module holds now for what all ranks hold, compared until the world closes. *Collective*."""
        self._replicas = Replicas(self.module)
        if self.world is not None and self.world.size > 1:
            input_log(self.world.transport).compare_at_the_end(self._replicas)

    def run(
        self,
        part: GraphPart,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: int | None,
        check: Callable[[Any], None] = lambda result: None,
    ) -> Any:
        """`forward` with the key of its random numbers, the same on every rank; None to refuse them. *Collective*.

        Args:
            part: The part that the arguments are of.
            args: As for `forward`.
            kwargs: As for `forward`.
            key: Of the random numbers.
            check: Looks at the module's result while its rows are known, before it is cut to owned ones.
        """
        noise = None if key is None else partial(key_of, key)
        constants = {id(tensor): tensor for tensor in common_tensors(self.module).values()}
        watch = Watch(part, constants, noise, Recomputation(self.recompute_every))
        arguments = tensors_in((args, kwargs))
        watch.numbering.give(arguments, "arguments")
        watch.versions.keep(arguments)
        layers = [] if watch.alone else [layer for layer in self.module.modules() if _passes_messages(layer)]
        hooks = [layer.register_forward_pre_hook(partial(_refresh, watch), with_kwargs=True) for layer in layers]
        try:
            before = _random_state(part.device)
            with contextlib.ExitStack() as around:
                around.enter_context(counting())
                for name, owner in self._node_parameters.items():
                    around.enter_context(read_as_nodes(name, owner, part))
                around.enter_context(watch.recomputation.whole())
                around.enter_context(watch)
                result = self.module(*args, **kwargs)
            if not torch.equal(_random_state(part.device), before):
                raise NotExact("it draws random numbers from torch's generator, which would be others on each rank.")
            watch.versions.check_at_the_end(tensors_in(result))
            note_rows(self.module)
            check(result)
            return rebuilt(result, partial(_owned, watch))
        except NotExact as refused:
            raise NotExact(self._explained(refused)) from refused
        finally:
            for hook in hooks:
                hook.remove()

    def reduce_gradients(self) -> None:
        """Leave in each parameter's `grad` the sum over all ranks, the same bits on every rank. *Collective*.

        Every parameter takes part, also one that this rank had no use for. Call it once after the last backward pass of
        a step: what it leaves is summed already, so a second call without `zero_grad` in between is refused. Where it
        was left out, the next forward pass, or the end of the world, finds parameters that differ between ranks.

        Where groups of ranks take graphs of their own, buffers in which they differ (running means) have changed by the
        mean of what the groups changed; integers by their sum.

        Raises:
            RuntimeError: On all ranks alike, if a gradient is not finite, or was summed before; or, of groups, if their
                parameters differ.
        """
        if self.world is None:
            raise RuntimeError("no ranks to sum over; make it with parallelize(module, world).")
        if GradientSums(self.module).reduce(self.world.transport):
            raise RuntimeError("a gradient of some rank is not finite; look at the loss and the learning rate.")
        if self._replicas is not None:
            self._replicas.note_sum()
            self._replicas.settle_groups(self.world)

    def _explained(self, refused: NotExact) -> str:
        """The reason, with the innermost module whose code was running and what is known of such modules."""
        names = {id(module): name for name, module in self.module.named_modules()}
        running: list[Any] = [self.module]
        for frame, _ in traceback.walk_tb(refused.__traceback__):
            owner = frame.f_locals.get("self")
            running += [owner] if id(owner) in names else []
        innermost = running[-1]
        where = f"{names[id(innermost)] or 'the model'} ({type(innermost).__name__})"
        return f"{where}: {reason_of(running)}{refused}"


never_compiled(GraphParallel.forward, GraphParallel.reduce_gradients)


def _passes_messages(layer: nn.Module) -> bool:
    return hasattr(layer, "propagate") and hasattr(layer, "node_dim")  # as PyG's do, which need not be installed


def _refresh(watch: Watch, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Before a layer that passes messages: node values that are out of date are fetched, once for all it does."""
    return _with_ghosts(watch, args), {name: _with_ghosts(watch, value) for name, value in kwargs.items()}


def _with_ghosts(watch: Watch, value: Any) -> Any:
    if isinstance(value, Tensor):
        rows = rows_of(value)
        if isinstance(rows, Rows) and rows.axis is watch.part.node_axis and rows.names is None and not rows.fresh:
            with unwatched():
                return watch.with_ghosts(value)
    if type(value) is tuple:  # of the two ends; lists and all else stay the objects that the layer may change
        return tuple(_with_ghosts(watch, item) for item in value)
    return value


def _without_ghosts(tensor: Tensor, part: GraphPart) -> Tensor:
    """An argument that was written in place since it was marked, as it is to be read: the pass fetches its ghosts.

    Raises:
        NotExact: If there are copies of its rows that nothing fetches.
    """
    rows = rows_of(tensor)
    if not isinstance(rows, Rows):
        return tensor
    check_written(tensor, rows)
    if rows.axis is not part.node_axis or not rows.fresh:
        return tensor
    return mark(tensor.narrow(rows.dim, 0, part.plan.num_owned), rows.but(fresh=False))


def _part_of(arguments: Any) -> GraphPart:
    for item in [*arguments[0], *arguments[1].values()]:
        if hasattr(item, "node_types") and hasattr(item, "edge_types"):
            raise NotExact(
                f"a {type(item).__name__} has several sets of nodes, and a part of a graph has one; number all nodes "
                "in one set and give edges types (RGCNConv, FiLMConv and RGATConv take them), or use HeteroConv with "
                "the one set under one name."
            )
        if getattr(item, "is_sparse", False) or type(item).__name__ == "SparseTensor":
            raise NotExact("an adjacency matrix (adj_t) is given; give part.edge_index instead.")
    parts: dict[int, GroupRank] = {}
    for tensor in tensors_in(arguments):
        rows = rows_of(tensor)
        if rows is UNKNOWN:
            raise NotExact(
                f"an argument of shape {tuple(tensor.shape)} is not marked; say what its rows are with part.nodes, "
                "part.edges or, for a tensor that every rank has, part.replicate; edges are part.edge_index, or "
                "part.src and part.dst by themselves. A mark does not outlive a torch call outside of the model: what "
                "that makes of marked tensors and results (x + model(x)) is to be made in the model, or in place."
            )
        if rows is not None:
            parts[id(rows.axis.part)] = rows.axis.part
    if len(parts) != 1:
        raise NotExact(f"the arguments are of {len(parts)} parts of graphs; give tensors of one.")
    (part,) = parts.values()
    assert isinstance(part, GraphPart)
    return part


def _owned(watch: Watch, result: Any) -> Any:
    if isinstance(result, Tensor):
        if watch.rows(result) is None:
            return counted_once(result, watch.part)
        return watch.counted(watch.as_values(result))
    if result is None or isinstance(result, (bool, int, float, str)):
        return result
    raise NotExact(
        f"it returns a {type(result).__name__}, in which tensors cannot be found; return tensors, or tuples, lists, "
        "dictionaries, dataclasses or a Data of them."
    )


def _random_state(device: torch.device) -> Tensor:
    """The state of the generators of a device and of the host."""
    of_host = torch.get_rng_state()
    return torch.cat([of_host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else of_host
