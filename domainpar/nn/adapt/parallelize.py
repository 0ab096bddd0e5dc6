"""A module that computes on a split graph what it computes on the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from domainpar.nn.adapt import rules as _rules  # noqa: F401  registers them
from domainpar.nn.adapt.across import counted_once
from domainpar.nn.adapt.part import GraphPart
from domainpar.nn.adapt.rows import UNKNOWN, NotExact, Rows, rows_of, unwatched
from domainpar.nn.adapt.watch import Watch, tensors_in
from domainpar.nn.noise import key_of
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.world import World


def parallelize(module: nn.Module, world: World, *, seed: int = 0) -> Parallel:
    """Let a module, unchanged, run on a split graph: the result of one rank, to rounding. *Collective*.

    Its parameters and buffers are set to those of rank 0. Give the result tensors of a `GraphPart`; see `Parallel`.

    Args:
        module: Any module of torch and torch_geometric functions.
        world: The ranks; gradients are summed over all of them.
        seed: Of dropout.
    """
    _take_from_root(module, world)
    return Parallel(module, world, seed)


class Parallel(nn.Module):
    """A module on a split graph. Call it like the module itself, with tensors marked by a `GraphPart`.

    Every torch call of the forward pass is watched: rows of ghosts are fetched where an edge reads them and they are
    out of date; sums, means, norms and pooling over nodes or edges run over all ranks; dropout is drawn by the global
    number of a row. What has no exact form raises `NotExact` naming the module and the reason, on every rank.

    The loss is the caller's: a sum over the rows that come back, divided by a number of the whole graph, so that the
    losses of all ranks add up to the loss. `sum_gradients` then makes the gradient of that loss of each rank's share.

    Attributes:
        module: The module itself; `state_dict` of it is what to save.
        world: The ranks.
    """

    def __init__(self, module: nn.Module, world: World, seed: int = 0) -> None:
        super().__init__()
        self.module, self.world, self.seed = module, world, seed
        self._constants = set(map(id, _tensors_of(module)))
        self._calls = 0
        for name, child in module.named_modules():
            if hasattr(child, "propagate") and hasattr(child, "node_dim"):
                child.register_forward_pre_hook(_Refresh(name), with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, of the rows this rank owns. *Collective*, forward and backward.

        Args:
            *args: Arguments of the module; tensors are marked by a `GraphPart`, all by the same.
            **kwargs: The same by name.

        Returns:
            The module's result: of tensors of nodes or edges the rows that this rank owns, in the order of global ids;
            other tensors, the same on every rank, whole. Their gradient counts once, so compute with them alike on
            every rank.

        Raises:
            NotExact: If the module does what has no exact form, or an argument is not marked.
        """
        part = _part_of((args, kwargs))
        self._calls += 1
        uses = iter(range(2**62))
        watch = Watch(part, self._constants, lambda: key_of(self.seed, "forward", self._calls, next(uses)))
        try:
            with watch:
                result = self.module(*args, **kwargs)
        except NotExact as refused:
            raise NotExact(f"{self._where(refused)}: {refused}") from refused
        return _owned(result, watch)

    def _where(self, refused: NotExact) -> str:
        """The innermost module whose code was running."""
        names = {id(module): name for name, module in self.module.named_modules()}
        found: Any = self.module
        trace = refused.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            found = owner if id(owner) in names else found
            trace = trace.tb_next
        return f"{names[id(found)] or 'the model'} ({type(found).__name__})"

    def sum_gradients(self) -> None:
        """Leave in each parameter's `grad` the sum over all ranks, the same bits on every rank. *Collective*.

        Every parameter takes part, also one that this rank had no use for.

        Raises:
            RuntimeError: On all ranks alike, if a gradient is not finite.
        """
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        flat = torch.cat([_gradient(parameter).flatten().double() for parameter in parameters] or [torch.zeros(0)])
        sums = IntegerSums(len(flat))
        sums.add(flat)
        sums.reduce(self.world.transport)
        if sums.rejected:
            raise RuntimeError(f"{sums.rejected} gradients of some rank are not finite or larger than 2^31.")
        first = 0
        for parameter in parameters:
            total = sums.total()[first : first + parameter.numel()]
            parameter.grad = total.view_as(parameter).to(parameter.device, parameter.dtype)
            first += parameter.numel()


class _Refresh:
    """Before a layer that passes messages: node values that are out of date are fetched, once for all it does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        watch = _watching()
        if watch is None or watch.alone:
            return None
        return _with_ghosts(watch, args), {name: _with_ghosts(watch, value) for name, value in kwargs.items()}


def _watching() -> Watch | None:
    from torch.overrides import _get_current_function_mode_stack

    return next((mode for mode in reversed(_get_current_function_mode_stack()) if isinstance(mode, Watch)), None)


def _with_ghosts(watch: Watch, value: Any) -> Any:
    if isinstance(value, Tensor):
        rows = rows_of(value)
        if isinstance(rows, Rows) and rows.axis is watch.part.node_axis and rows.names is None and not rows.fresh:
            with unwatched():
                return watch.with_ghosts(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_with_ghosts(watch, item) for item in value)
    return value


def _part_of(arguments: Any) -> GraphPart:
    found: dict[int, GraphPart] = {}
    for tensor in _all_tensors(arguments):
        rows = rows_of(tensor)
        if rows is UNKNOWN:
            raise NotExact(
                f"an argument of shape {tuple(tensor.shape)} is not marked; say what its rows are with part.nodes, "
                "part.edges or, for a tensor that every rank has, part.same_everywhere."
            )
        if rows is not None:
            found[id(rows.axis.part)] = rows.axis.part
    if len(found) != 1:
        raise NotExact(f"the arguments are of {len(found)} parts of graphs; give tensors of one.")
    return next(iter(found.values()))


def _all_tensors(value: Any) -> Iterator[Tensor]:
    """Tensors of arguments, also inside a PyG `Data`."""
    yield from tensors_in(value)
    for item in [*value[0], *value[1].values()]:
        if hasattr(item, "to_dict") and hasattr(item, "edge_index"):
            yield from tensors_in(item.to_dict())


def _owned(result: Any, watch: Watch) -> Any:
    if isinstance(result, Tensor):
        rows = watch.rows(result)
        if rows is None:
            return counted_once(result, watch.part)
        return watch.counted(result)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_owned(item, watch) for item in result))
    if isinstance(result, (tuple, list)):
        return type(result)(_owned(item, watch) for item in result)
    if isinstance(result, dict):
        return {name: _owned(item, watch) for name, item in result.items()}
    return result


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a module holds, also outside its parameters and buffers."""
    for child in module.modules():
        yield from child.parameters(recurse=False)
        yield from child.buffers(recurse=False)
        yield from tensors_in({name: value for name, value in vars(child).items() if not name.startswith("_")})


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _take_from_root(module: nn.Module, world: World) -> None:
    """Parameters and buffers of rank 0 on every rank. *Collective*."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise ValueError(
                    "the module has parameters whose size is not known yet (-1 channels); run it once on a small graph "
                    "or give the sizes, so that every rank begins with the same weights."
                )
            host = tensor.detach().contiguous().cpu()
            payload = host.view(-1).view(torch.uint8).numpy().tobytes() if world.is_root and host.numel() else b""
            payload = world.transport.broadcast(payload if world.is_root else None)
            if host.numel() and not world.is_root:
                tensor.copy_(torch.frombuffer(bytearray(payload), dtype=host.dtype).view(host.shape))
