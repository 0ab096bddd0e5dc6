"""Rules for operators of the user and of other packages: one line says where the rows of each argument lie."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domainpar.placed.axes import Axis, Names, Reach
from domainpar.placed.dispatch import bound, forget, name_of, rule_of_rows
from domainpar.placed.moves import local_rows, plain, table_of
from domainpar.placed.ranks import NotExact
from domainpar.placed.rules.each_row import share
from domainpar.placed.rules.indexing import reach_of
from domainpar.placed.tensor import Placed, brought_home, is_rows, mapped, placed_in

_ARGUMENT, _RESULT = re.compile(r"\.|([a-z])(?:>([a-z]))?"), re.compile(r"\.|(\+?)([a-z]?)")


class Word(NamedTuple):
    """A word of a signature: the letter of its rows; the letter of the rows that its values number; whether a share."""

    rows: str
    names: str = ""
    shares: bool = False


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
    if operator.namespace in ("aten", "prims") or schema.is_mutable:
        why = "writes into its arguments" if schema.is_mutable else "is torch's own"
        raise ValueError(f"{schema.name} {why}, and takes no rule.")
    arguments = [Word(one[1] or "", names=one[2] or "") for one in ones if one is not None]
    results = [Word(other[2] or "", shares=bool(other[1])) for other in others if other is not None]
    rule_of_rows(operator)(lambda func, args, kwargs: _called(func, bound(func, args, kwargs), arguments, results))
    forget(operator)


def _called(func: Any, given: list[Any], arguments: list[Word], results: list[Word]) -> Any:
    """An operator with what this rank holds. *Collective* if it reads rows of others, or sums over ranks."""
    names = [argument.name for argument in func._schema.arguments]
    first = sum(not argument.kwarg_only for argument in func._schema.arguments)  # argument that has to be named
    ranks = placed_in(given)[0].ranks
    if ranks.same_bits:  # its kernel may take other paths for other numbers of rows
        raise NotExact(f"{name_of(func)}, an operator with a rule of its own, where bits are to be the same")
    axes = _axes(func, given, arguments)
    rows, halos = _reached(func, given, arguments, axes)
    behind = {letter: 0 if halo is None else int(halo.plan.num_ghosts) for letter, halo in halos.items()}

    def here_of(at: int, one: Word, value: Any) -> Any:
        axis, halo = axes.get(one.rows), halos.get(one.rows)
        if at in rows:
            return rows[at]
        if axis is None:
            return mapped(value, Tensor, lambda x: plain(x, ranks))
        if isinstance(value, int):
            return axis.length + behind[one.rows]

        def table(x: Any) -> Tensor:
            own = is_rows(x) and x.place.axis is axis
            return table_of(x if own else Placed(local_rows(x, axis, 0), axis.rows(0)), halo)

        return mapped(value, Tensor, table)

    values = [here_of(at, one, value) for at, (one, value) in enumerate(zip(arguments, given))]
    out = func(*values[:first], **dict(zip(names[first:], values[first:])))

    def held(one: Word, local: Tensor) -> Placed:
        axis, halo = axes.get(one.rows), halos.get(one.rows)
        if axis is None:
            return share(local, ranks) if one.shares else Placed(local, ranks.same)
        count = axis.length + behind[one.rows]
        if not local.dim() or len(local) != count:
            what = f"a tensor of shape {tuple(local.shape)} for {count} rows '{one.rows}' of this rank."
            raise RuntimeError(f"{name_of(func)} gave {what}")
        if halo is None or not one.shares:
            return Placed(local.narrow(0, 0, axis.length).contiguous(), axis.rows(0))
        if halo is axis.halo and local.is_floating_point():
            return Placed(local.contiguous(), axis.rows(0, True))
        return Placed(brought_home(local, axis, 0, halo), axis.rows(0))

    outs = [mapped(each, Tensor, partial(held, one)) for one, each in zip(results, out if len(results) != 1 else [out])]
    return outs[0] if len(results) == 1 else tuple(outs)


def _axes(func: Any, given: list[Any], arguments: list[Word]) -> dict[str, Axis]:
    """The axis of each letter; none for one whose rows every rank holds.

    Raises:
        NotExact: If a tensor has rows where the signature says that it has none.
    """
    axes: dict[str, Axis] = {}
    for one, value in zip(arguments, given):
        for place in (x.place for x in placed_in(value) if is_rows(x)):
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
    func: Any, given: list[Any], arguments: list[Word], axes: dict[str, Axis]
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
            if not is_rows(x) and one.rows not in axes:
                raise NotExact(f"{name_of(func)} with an index that every rank holds, into rows of {axis}")
            of = axes[one.rows]
            indices[at] = x if is_rows(x) else Placed(local_rows(x, of, 0), of.rows(0))  # type: ignore[assignment]
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
