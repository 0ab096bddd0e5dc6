"""The result of `verify` and its text: a table of layers, one line of conclusion, one line of advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from domainpar.placed.ranks import NotExact


class Check(NamedTuple):
    """One call of a layer, compared whole and split; or the gradient or buffer that differs most.

    Attributes:
        name: The layer's name in the model, as in `named_modules`; empty for the model itself. Or of the tensor.
        kind: The layer's class; or `gradient`, `buffer`.
        number: Which of its calls, from 1; 0 of a gradient or buffer.
        difference: The largest difference of its results, relative to the largest value; `inf` where ranks differ, in
            numbers, shapes, calls or random numbers; None if they were not compared.
        note: Why they were not compared, or what differs and where.
        rows: The kind of rows that its result has: nodes, edges; `graph` without rows.
    """

    name: str
    kind: str
    number: int = 1
    difference: float | None = None
    note: str = ""
    rows: str = ""

    def __str__(self) -> str:
        which = f", call {self.number}" if self.number > 1 else ""
        return f"{self.name or 'the model'} ({self.kind}{which})"

    def agrees(self, tolerance: float) -> bool:
        """Whether it differs by no more than rounding; a difference that is no number is more."""
        return self.difference is None or self.difference <= tolerance

    @property
    def size(self) -> str:
        """The difference in words."""
        return "-" if self.difference is None else f"{self.difference:.1e}"


@dataclass(frozen=True)
class Verification:
    """The comparison of a model whole and split. Print it.

    Attributes:
        exact: Whether results, gradients and buffers agree within the tolerance.
        rows: Every call of every layer, inner layers before those that contain them. Where all of them agree, also the
            gradient that differs most (of parameters, and of fields of the graph that require one), and the buffer or
            parameter after the pass.
        first_difference: The layer in whose code the two differ first, or else the gradient or buffer; None if there is
            none. Layers after it may be right and have been given wrong values.
        refused: Why the model has no exact form (`NotExact`); None if it was not refused.
        failed: Any other error of the model on the split graph, and where; None if there was none.
        exchanges, sums: How often one forward pass fetched rows of other ranks, and summed something over ranks.
        tolerance: The largest relative difference that counts as rounding.
        ranks: The ranks that the graph was split over, in words.
        remarks: Further remarks, one sentence each.
    """

    exact: bool
    rows: tuple[Check, ...] = ()
    first_difference: Check | None = None
    refused: str | None = None
    failed: str | None = None
    exchanges: int = 0
    sums: int = 0
    tolerance: float = 0.0
    ranks: str = ""
    remarks: tuple[str, ...] = ()

    def check(self) -> Verification:
        """Return this if the model is exact, raise otherwise.

        Raises:
            NotExact: If the model was refused.
            RuntimeError: If it is not exact. The text is the whole table.
        """
        if self.refused is not None:
            raise NotExact(self.refused)
        if not self.exact:
            raise RuntimeError(str(self))
        return self

    @property
    def conclusion(self) -> str:
        """The finding, in one line."""
        first, ended = self.first_difference, ""
        if self.refused is not None:
            ended = f"is refused: {self.refused}"
        elif self.failed is not None:
            ended = f"fails where the graph is split: {self.failed}"
        if first is not None:
            where, behind = f", {first.note}" if first.note else "", f" Behind it the model {ended}" if ended else ""
            return f"not exact: the first difference, {first.size}, is in {first}{where}.{behind}"
        if ended:
            return f"not exact: it {ended}"
        if not self.exact:
            return "not known: the model returns nothing that could be compared."
        return (
            f"exact on {self.ranks}: no layer, gradient or buffer differs by more than {self.tolerance:g}; "
            f"{self.exchanges} exchanges and {self.sums} sums over ranks in a forward pass."
        )

    @property
    def advice(self) -> str:
        """What to do next, in one line."""
        if self.exact:
            return "Next: domainpar.parallelize(model, world)."
        if (first := self.first_difference) is None and self.failed is None:
            return "Next: change the layer as said, and verify again."
        if first is not None and "arguments" in first.note:
            return "Next: look at `inputs`: rows must be taken by part.nodes and part.edges from tensors of all rows."
        if first is not None and not first.number:
            return (
                "Next: look for .data, .detach(), hooks and autograd.Functions of your own on the way back to a "
                "gradient, and where the model changes its buffers."
            )
        return (
            f"Next: look in the code of {first or 'the layer that failed'} for what torch cannot see: globals, "
            "counters, what was kept from an earlier call, x.local, part.plan, .data, numpy, ids of ranks or threads. "
            "If it only calls torch functions, the fault is ours: send us this table."
        )

    def __str__(self) -> str:
        lines = [("layer", "class", "rows", "difference", ""), *map(self._line, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*table, *self.remarks, self.conclusion, self.advice])

    def _line(self, row: Check) -> tuple[str, ...]:
        """A line of the table; the layer of the first difference is pointed at."""
        number = f" (call {row.number})" if row.number > 1 else ""
        first, note = self.first_difference, row.note
        if first is not None and row[:3] == first[:3]:
            note = ", ".join(filter(None, ("<- first difference", first.note)))
        return f"{row.name or 'the model'}{number}", row.kind, row.rows, row.size, note
