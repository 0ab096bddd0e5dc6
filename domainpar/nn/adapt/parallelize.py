"""Run a module on a split graph as if on the whole graph: `parallelize`, and the `GraphParallel` that it returns."""

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
    """Make a module run on a split graph, unchanged, with the result of one rank up to rounding. *Collective*.

    Its parameters and buffers get the values of rank 0. Tensors with rows of a part that the module keeps, such as the
    edges of a graph that never changes, stay as they are. Call the returned module with tensors of a `GraphPart`.

    Args:
        module: Any module that is made of functions of torch and torch_geometric.
        world: The ranks. `reduce_gradients` sums over all of them.
        seed: Seed of dropout and of all other random numbers of the forward pass.
        node_parameters: Names of parameters and buffers with a row for each node of the whole graph, [N, ...], such as
            `embedding.weight`. Every rank holds them whole; in the forward pass the module reads this rank's rows of
            them.
        recompute_every: To save memory: keep for the backward pass only the states with which every K-th iteration
            begins, and compute all others again, with the same bits and without an exchange. An iteration begins where
            edges read states of nodes that were summed from edges. None: keep all but what the module itself
            checkpoints.

    Returns:
        The module on a split graph. `state_dict()` of its `module` is what to save.

    Raises:
        ValueError: If `recompute_every` is below 1, the module is parallel already, its parameters have no size yet or
            are sharded over ranks (FSDP), it has hooks on gradients, or it has no parameter or buffer of a given name.
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

    Every torch call of the forward pass goes through a rule. Rows of ghost nodes are fetched where an edge reads them
    and they are out of date. Sums, means, norms and pooling over nodes or edges run over all ranks. Dropout is drawn by
    the global id of a row. A call without an exact form raises `NotExact` on every rank, with the module and the
    reason.

    The caller computes the loss of a rank: a sum over the rows that come back, divided by a number of the whole graph.
    So the losses of all ranks add up to the loss, and `reduce_gradients` adds up their gradients.

    Args:
        module: The module itself. Its `state_dict()` is what to save.
        world: The ranks; None if gradients are summed elsewhere.
        seed: As for `parallelize`.
        node_parameters: As for `parallelize`.
        recompute_every: As for `parallelize`.

    Attributes:
        rng_step: Number of forward passes so far, int64 []. It decides together with `seed` which numbers dropout
            takes, so it belongs in a checkpoint.
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
        """Call the module and return the rows that this rank owns. *Collective*, and so is its backward pass.

        Args:
            *args: Arguments of the module. Tensors are marked by a `GraphPart`, all of them by the same one.
            **kwargs: Arguments by name, in the same way.

        Returns:
            The module's result. Of a tensor with a row for each node or edge: the rows that this rank owns, in the
            order of global ids. Numbers of rows become global ids. Other tensors are whole and the same on every rank;
            their gradient counts once, so compute with them in the same way on every rank.

        Raises:
            NotExact: If the module makes a call that has no exact form, or an argument is not marked.
            Refused: On all ranks alike, if the ranks were given different tensors.
            ValueError: If its parameters were sharded over ranks (FSDP) after `parallelize`.
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
        """Compare on all ranks what they hold and were given; return the arguments, with stale ghost rows cut off."""
        arguments = tensors_in((args, kwargs))
        for tensor in arguments:
            if rows_of(tensor) is None and was_written(tensor):
                part.inputs.remember("an argument that is the same everywhere, changed in place,", tensor)
        state = bytes(5) if self._replicas is None else self._replicas.state()
        of_ranks = part.inputs.compare(state + bytes(was_written(tensor) for tensor in arguments))
        if self._replicas is not None:
            self._replicas.compare([of_rank[:5] for of_rank in of_ranks], part.transport)
        # What one rank has written all ranks have: they read the same.
        written = [any(flags) for flags in itertools.zip_longest(*(of_rank[5:] for of_rank in of_ranks))]
        late = {id(tensor) for tensor, any_rank in zip(arguments, written) if any_rank}
        if not late:
            return args, kwargs  # the very objects that were given
        args, kwargs = rebuilt(
            (args, kwargs), lambda value: _without_ghosts(value, part) if id(value) in late else value
        )
        return args, kwargs

    def begin(self) -> None:
        """All ranks hold the same parameters now: compare them until the world closes. *Collective*."""
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
        """`forward` with a given key of its random numbers. *Collective*.

        Args:
            part: The part that the arguments belong to.
            args: As for `forward`.
            kwargs: As for `forward`.
            key: Key of the random numbers, the same on every rank; None: a draw is refused.
            check: Called with the module's result while the kind of its rows is known, before it is cut to owned rows.
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
        """Replace each parameter's `grad` by its sum over all ranks, the same bits on every rank. *Collective*.

        Every parameter takes part, also one that this rank did not use. Call it once in a step, after the last backward
        pass. A second call without `zero_grad` in between is refused, because it would sum the sums. If it is left out,
        the next forward pass, or closing the world, finds parameters that differ between ranks.

        Where groups of ranks have graphs of their own, their buffers may differ, such as running means. A buffer of
        floats then changes by the mean of the groups' changes, one of integers by their sum.

        Raises:
            RuntimeError: On all ranks alike, if a gradient is not finite or was summed before, or if the parameters of
                groups differ.
        """
        if self.world is None:
            raise RuntimeError("no ranks to sum over; make it with parallelize(module, world).")
        if GradientSums(self.module).reduce(self.world.transport):
            raise RuntimeError("a gradient of some rank is not finite; look at the loss and the learning rate.")
        if self._replicas is not None:
            self._replicas.note_sum()
            self._replicas.settle_groups(self.world)

    def _explained(self, refused: NotExact) -> str:
        """The reason of a refusal, with the innermost module that was running and what is known of its class."""
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
    """Before a layer that passes messages: fetch stale ghost rows of its arguments, once for the whole layer."""
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
    """An argument that was written in place after it was marked, without its ghost rows: the pass fetches new ones.

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
                f"an argument of shape {tuple(tensor.shape)} is not marked; mark it by part.nodes, part.edges or, "
                "if it is the same on every rank, part.replicate; edges are part.edge_index, or part.src and part.dst. "
                "Torch calls outside of the model make tensors without a mark (x + model(x)): compute them in the "
                "model, or write in place."
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
    """The states of the random generators of a device and of the host."""
    of_host = torch.get_rng_state()
    return torch.cat([of_host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else of_host
