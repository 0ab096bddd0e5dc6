"""The result of `verify` and its text: a table of layers, one line of conclusion, one line of advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from domainpar.nn.adapt.rows import NotExact


class LayerCall(NamedTuple):
    """One call of one layer.

    Attributes:
        name: The layer's name in the model, as in `named_modules`; empty for the model itself.
        kind: Its class.
        number: Which of its calls, from 1.
    """

    name: str
    kind: str
    number: int = 1

    def __str__(self) -> str:
        which = f", call {self.number}" if self.number > 1 else ""
        return f"{self.name or 'the model'} ({self.kind}{which})"


@dataclass(frozen=True)
class LayerCheck:
    """One call of one layer, compared whole and split.

    Attributes:
        name: As in `LayerCall`.
        kind: As in `LayerCall`.
        number: As in `LayerCall`.
        difference: The largest difference of its results, relative to the largest value; `inf` where shapes or calls
            differ; None if they were not compared.
        note: Why they were not compared, or where in the layer the difference is.
        rows: The kind of rows that its result has: nodes, edges, graph.
        mode: `eval` if the model was set to evaluation for this comparison, else empty.
    """

    name: str
    kind: str
    number: int
    difference: float | None
    note: str = ""
    rows: str = ""
    mode: str = ""

    def __str__(self) -> str:
        return str(LayerCall(self.name, self.kind, self.number))


class Worst(NamedTuple):
    """The result, parameter or buffer that differs most, relative to its largest value."""

    difference: float
    name: str
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """The comparison of a model whole and split. Print it.

    Attributes:
        exact: Whether results, gradients and buffers agree within the tolerance.
        rows: Every call of every layer (`LayerCheck`), inner layers before those that contain them.
        first_difference: The layer in whose code the two differ first; None if there is none. Layers after it may be
            right and have been given wrong values.
        refused: Why the model has no exact form (`NotExact`); None if it was not refused.
        failed: Any other error of the model on the split graph, and where; None if there was none.
        gradients: The gradient that differs most, of parameters and of fields of the graph that require one; None if
            there is none or they were not compared.
        buffers: The buffer or parameter that differs most after the pass, such as running means; None if there is none.
        results: The returned tensor that differs most; None if they were not compared.
        exchanges: How often rows of ghost nodes were fetched in one forward pass.
        sums: How often something was summed over ranks in one forward pass.
        tolerance: The largest relative difference that counts as rounding.
        ranks: The ranks that the graph was split over, in words.
        remarks: Further remarks, one sentence each.
    """

    exact: bool
    rows: tuple[LayerCheck, ...]
    first_difference: LayerCheck | None = None
    refused: str | None = None
    failed: str | None = None
    gradients: Worst | None = None
    buffers: Worst | None = None
    results: Worst | None = None
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
        if (first := self.first_difference) is not None:
            where = f", {first.note}" if first.note else ""
            what_followed = (("is refused", self.refused), ("fails", self.failed))
            then = "".join(f" Behind it the model {what}: {text}" for what, text in what_followed if text is not None)
            return f"not exact: the first difference, {_number(first.difference)}, is in {first}{where}.{then}"
        if self.refused is not None:
            return f"refused: {self.refused}"
        if self.failed is not None:
            return f"not exact: it fails where the graph is split: {self.failed}"
        kinds = (("gradient of ", self.gradients), ("buffer of ", self.buffers), ("", self.results))
        for kind, worst in kinds:
            if worst is not None and not agrees(worst, self.tolerance):
                why = f" ({worst.note})" if worst.note else ""
                by = _number(worst.difference)
                return f"not exact: all layers agree, but the {kind}{worst.name} differs by {by}{why}."
        if not self.exact:
            return "not known: the model returns nothing that could be compared."
        gradients = f", gradients too ({_number(self.gradients.difference)})" if self.gradients else ""
        return (
            f"exact on {self.ranks}: no layer differs by more than {self.tolerance:g}{gradients}; "
            f"{self.exchanges} exchanges and {self.sums} sums over ranks in a forward pass."
        )

    @property
    def advice(self) -> str:
        """The advice, in one line."""
        if self.exact:
            return "Next: domainpar.parallelize(model, world)."
        if self.first_difference is not None and "arguments" in self.first_difference.note:
            return "Next: look at `inputs`: rows must be taken by part.nodes and part.edges from tensors of all rows."
        if self.first_difference is not None or self.failed is not None:
            where = self.first_difference or "the layer that failed"
            return (
                f"Next: look in the code of {where} for what torch cannot see: globals, counters and what it "
                "kept from an earlier call, .data, numpy, ids of ranks, threads or processes. If it only calls torch "
                "functions, the fault is ours: send us this table."
            )
        if self.refused is not None:
            return "Next: change the layer as said, and verify again."
        if not agrees(self.gradients, self.tolerance):
            return "Next: look for .data, .detach(), hooks and an autograd.Function of your own on the way back to it."
        return "Next: look at where the model changes its buffers, or what it returns."

    def __str__(self) -> str:
        lines = [("layer", "class", "rows", "difference", ""), *map(self._line, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*table, *self.remarks, self.conclusion, self.advice])

    def _line(self, row: LayerCheck) -> tuple[str, ...]:
        """A line of the table; the layer of the first difference is pointed at."""
        number = f" (call {row.number})" if row.number > 1 else ""
        name = f"{row.name or 'the model'}{number}{' in ' + row.mode if row.mode else ''}"
        first, note = self.first_difference, row.note
        if first is not None and (row.name, row.number, row.mode) == (first.name, first.number, first.mode):
            note = ", ".join(dict.fromkeys(filter(None, ("<- first difference", first.note, row.note))))
        return name, row.kind, row.rows, _number(row.difference), note


def agrees(worst: Worst | None, tolerance: float) -> bool:
    """Whether nothing differs by more than rounding; true as well where there is nothing to compare."""
    return worst is None or worst.difference <= tolerance


def _number(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:.1e}"
