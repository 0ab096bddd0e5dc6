"""Rules for operators of the user and of other packages: one line says where the rows of each argument lie."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.placed.axes import Axis, Names, Reach
from domainpar.placed.dispatch import bound, forget, name_of, on_whole
from domainpar.placed.dispatch import rule as internal_rule
from domainpar.placed.ranks import NotExact
from domainpar.placed.rules.each_row import share
from domainpar.placed.rules.indexing import reach_of
from domainpar.placed.tensor import (
    Placed,
    brought_home,
    is_rows,
    local_rows,
    mapped,
    placed_in,
    plain,
    rows_in,
    same,
    settle,
    table_of,
)

_ARGUMENT, _RESULT = re.compile(r"\.|([a-z])(?:>([a-z]))?"), re.compile(r"\.|(\+?)([a-z]?)")


class Argument(NamedTuple):
    """What an argument has: rows of a letter, and values that number rows of another; empty for none."""

    rows: str
    names: str


class Result(NamedTuple):
    """What a result has: rows of a letter, and whether ranks have shares of it."""

    rows: str
    shares: bool


def rule(operator: Any, signature: str) -> None:
    """Say how an operator that torch does not know works on rows, so that it runs on placed tensors.

    An operator registered with `torch.library`, yours or another package's, is called with the rows that this rank
    holds. Every rank gives the same rule before the first call. The backward pass needs one for each operator that it
    calls. `verify` then compares your model whole and split.

    Args:
        operator: `torch.ops.PACKAGE.NAME`, or what `torch.library.custom_op` returned. It must take tensors without
            rows, too, since a rank may own none, and must not write into its arguments.
        signature: A word for each argument, `->`, and a word for each result, such as `"n e e>n e>m m -> +m"`. Letters
            stand for kinds of rows, along the first dimension; which rows they are is read from the tensors.

            `n`, of an argument: rows. Where an index numbers them (`e>n`), the operator gets this rank's rows and,
            behind them, those of other ranks that the index names. A number `n` is how many rows there are.
            `e>n`: an index with rows `e`, whose values number rows `n`.
            `.`: what every rank holds whole, or no tensor.
            `n`, of a result: each row computed by itself.
            `+n`: sums at rows `n`, of which each rank has a share. `+`: one sum over all rows.
            `.`, of a result: the same on every rank, computed from what every rank holds.

    Raises:
        ValueError: If the signature does not fit the operator, or torch has the operator itself.
    """
    operator = getattr(operator, "_opoverload", operator)
    if hasattr(operator, "overloads"):
        operator = getattr(operator, operator.overloads()[0])
    schema = operator._schema
    arguments, results = _parsed(signature, schema)
    if operator.namespace in ("aten", "prims") or schema.is_mutable:
        why = "writes into its arguments" if schema.is_mutable else "is torch's own"
        raise ValueError(f"{schema.name} {why}, and takes no rule.")

    def by_signature(func: Any, args: Any, kwargs: Any) -> Any:
        return _called(func, bound(func, args, kwargs), arguments, results)

    internal_rule(operator)(by_signature)
    forget(operator)


def _parsed(signature: str, schema: Any) -> tuple[list[Argument], list[Result]]:
    """The words of a signature.

    Raises:
        ValueError: If one means nothing, or there are more or fewer than the operator has arguments and results.
    """
    given, arrow, got = signature.partition("->")
    ones, others = (
        [word.fullmatch(text) for text in part.split()] for word, part in ((_ARGUMENT, given), (_RESULT, got))
    )
    if not arrow or None in ones or None in others:
        raise ValueError(f"{signature!r} is no signature of an operator; write one like 'n e e>n e>m m -> +m'.")
    if len(ones) != len(schema.arguments) or len(others) != len(schema.returns):
        raise ValueError(
            f"{signature!r} has {len(ones)} arguments and {len(others)} results, and {schema.name} has "
            f"{len(schema.arguments)} and {len(schema.returns)}."
        )
    arguments = [Argument(one[1] or "", one[2] or "") for one in ones if one is not None]
    return arguments, [Result(other[2] or "", bool(other[1])) for other in others if other is not None]


def _called(func: Any, given: list[Any], arguments: list[Argument], results: list[Result]) -> Any:
    """An operator with what this rank holds. *Collective* if it reads rows of others, or sums over ranks."""
    names = [argument.name for argument in func._schema.arguments]
    first = sum(not argument.kwarg_only for argument in func._schema.arguments)  # argument that has to be named
    placed = placed_in(given)
    if not any(map(is_rows, placed)):
        return on_whole(func, given[:first], dict(zip(names[first:], given[first:])))
    if placed[0].ranks.same_bits:  # its kernel may take other ways for other numbers of rows
        raise NotExact(f"{name_of(func)}, an operator with a rule of its own, where bits are to be the same")
    axes = _axes(func, given, arguments)
    rows, halos = _reached(func, given, arguments, axes)
    ranks = placed[0].ranks

    def here_of(at: int, one: Argument, value: Any) -> Any:
        axis = axes.get(one.rows)
        if at in rows:
            return rows[at]
        if isinstance(value, int) and axis is not None:
            return axis.length + _behind(halos[one.rows])
        return mapped(value, Tensor, lambda x: plain(x, ranks) if axis is None else _table(x, axis, halos[one.rows]))

    values = [here_of(at, one, value) for at, (one, value) in enumerate(zip(arguments, given))]
    out = func(*values[:first], **dict(zip(names[first:], values[first:])))
    outs = (out,) if len(results) == 1 else out

    def held(one: Result) -> Any:
        return lambda local: _held(func, local, one, axes.get(one.rows), halos.get(one.rows), ranks)

    placed_outs = [mapped(local, Tensor, held(one)) for one, local in zip(results, outs)]
    return placed_outs[0] if len(results) == 1 else tuple(placed_outs)


def _axes(func: Any, given: list[Any], arguments: list[Argument]) -> dict[str, Axis]:
    """The axis of each letter; none for one whose rows every rank holds.

    Raises:
        NotExact: If a tensor has rows where the signature says that it has none.
    """
    axes: dict[str, Axis] = {}
    for one, value in zip(arguments, given):
        for x in placed_in(value):
            place = settle(x).place
            if not is_rows(x):
                continue
            if not one.rows or place.dim:
                says = f"rows {one.rows} along dimension 0" if one.rows else "no rows"
                raise NotExact(f"{name_of(func)} of {place}, where its rule has {says}")
            axes.setdefault(one.rows, place.axis)
    sizes = {one.rows: value for one, value in zip(arguments, given) if one.rows and isinstance(value, int)}
    for one, x in zip(arguments, given):
        if not one.names or one.names in axes or not is_rows(x):
            continue
        size, of_names = sizes.get(one.names), x.names.axis if isinstance(x.names, Names) else None
        fitting = [axis for axis in (of_names, *x.place.axis.family) if axis is not None and size in (None, axis.total)]
        if fitting and (of_names is not None or (size is not None and size > 1)):
            axes[one.names] = fitting[0]
    return axes


def _reached(
    func: Any, given: list[Any], arguments: list[Argument], axes: dict[str, Axis]
) -> tuple[dict[int, Tensor], dict[str, Any]]:
    """Where the rows lie that indices name, by argument, and by letter the exchange that brings those of other ranks.

    *Collective* the first time for an index, and each time if several into the same rows need different exchanges.

    Raises:
        NotExact: If every rank holds the whole index.
    """
    rows: dict[int, Tensor] = {}
    halos: dict[str, Any] = {}
    for letter, axis in axes.items():
        indices: dict[int, Placed] = {}
        for at, (one, x) in enumerate(zip(arguments, given)):
            if one.names != letter or not isinstance(x, Tensor):
                continue
            if not is_rows(x):
                if one.rows not in axes:
                    raise NotExact(f"{name_of(func)} with an index that every rank holds, into rows of {axis}")
                of = axes[one.rows]
                x = Placed(rows_in(plain(x, of.ranks), of, 0), of.rows(0))
            indices[at] = x
        reaches = {at: reach_of(x, axis) for at, x in indices.items()}
        needed = {reach.halo for reach in reaches.values()} - {None}
        if len(needed) > 1:  # one exchange for all
            joint = axis.reach(torch.cat([x.local.reshape(-1).to(torch.int64) for x in indices.values()]))
            pieces = joint.rows.split([x.local.numel() for x in indices.values()])
            reaches = {
                at: Reach(piece.view(x.local.shape), joint.halo) for (at, x), piece in zip(indices.items(), pieces)
            }
            needed = {joint.halo}
        rows |= {at: reaches[at].rows.expand(x.local.shape) for at, x in indices.items()}
        halos[letter] = next(iter(needed), None)
    return rows, halos


def _behind(halo: Any) -> int:
    """How many rows lie behind the owned ones."""
    return 0 if halo is None else int(halo.plan.num_ghosts)


def _table(x: Tensor, axis: Axis, halo: Any) -> Tensor:
    """This rank's rows, and behind them those that an exchange brings. *Collective* if it does."""
    own = isinstance(x, Placed) and is_rows(x) and x.place.axis is axis
    return table_of(settle(x) if own else Placed(local_rows(x, axis, 0), axis.rows(0)), halo)  # type: ignore[arg-type]


def _held(func: Any, local: Tensor, one: Result, axis: Axis | None, halo: Any, ranks: Any) -> Placed:
    """A result of which this rank holds what an operator gave. *Collective* if it is a sum over ranks."""
    if axis is None:
        return share(local, ranks) if one.shares else same(local, ranks)
    count = axis.length + _behind(halo)
    if not local.dim() or len(local) != count:
        raise RuntimeError(
            f"{name_of(func)} gave a tensor of shape {tuple(local.shape)} for {count} rows '{one.rows}' of this rank."
        )
    if halo is None or not one.shares:
        return Placed(local.narrow(0, 0, axis.length).contiguous(), axis.rows(0))
    if halo is axis.halo and local.is_floating_point():
        return Placed(local.contiguous(), axis.rows(0, True))
    return Placed(brought_home(local, axis, 0, halo), axis.rows(0))
