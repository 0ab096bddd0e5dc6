"""Tables of what is lost: target particles by the reason, and hits of found tracks layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from domainpar.tracking.display.finders import QUANTITIES, Finder
from domainpar.tracking.display.run_facts import ReportTable, short
from domainpar.tracking.reco.performance.counts import BINS_OF_LOST
from domainpar.tracking.reco.performance.layers import LayerCounts, median_and_width_of_bins
from domainpar.tracking.reco.performance.lost import REASONS
from domainpar.tracking.reco.performance.matching import STYLES
from domainpar.tracking.reco.performance.rates import ratio, wilson

Numbers = tuple[object, ...]
"""A line of `html.HEADING`."""

FEWEST = 20
"""Of fewer hits of a layer no median and width are shown."""


def lost_table(finders: Sequence[Finder], style: str) -> tuple[ReportTable, ...]:
    """Lost targets of each finder by the reason, of all and in bins of pT and eta; bins without any are left out.

    Its numbers are those of all styles of matching.
    """
    rows: list[dict[str, str]] = []
    numbers: list[Numbers] = []
    for finder in finders:
        counts = finder.counts.styles[style]
        bins = [("all", counts.targets, counts.lost)]
        for of, quantity in product(STYLES, BINS_OF_LOST):
            name, _, unit = QUANTITIES[quantity].partition(" [")
            unit, binned = unit.rstrip("]"), finder.counts.binned[of][quantity]
            names = "lost", of, quantity, "", finder.label, f"true {name}", unit or "1"
            ends = [*pairwise(binned.edges)]
            for reason in REASONS:
                for low_high, part, whole in zip(ends, binned.lost[reason], binned.targets, strict=False):
                    numbers.append((*names, *low_high, f"lost, {reason}", "1", *_share(part, whole)))
            for i, (low, high) in enumerate(ends if of == style else ()):
                where = f"{name} {low:g} to {high:g} {unit}".rstrip().replace("_", "")
                bins.append((where, binned.targets[i], {reason: lost[i] for reason, lost in binned.lost.items()}))
        rows += [
            {
                "found by": finder.label if where == "all" else "",
                "targets in": where,
                "targets": f"{targets:,}",
                "lost": f"{sum(lost.values()):,}",
                **{reason: f"{lost[reason]:,}" if lost[reason] else "–" for reason in REASONS},
            }
            for where, targets, lost in bins
            if where == "all" or any(lost.values())
        ]
    return ReportTable.of(rows, words=2, numbers=numbers)


def layer_table(finders: Sequence[Finder]) -> tuple[ReportTable, ...]:
    """The share of a found particle's hits that its track holds on each layer, and how far these lie from the track."""
    names = sorted(
        {name for finder in finders for name in finder.counts.layers}, key=lambda name: [*map(int, name.split("."))]
    )
    none = LayerCounts(0, 0, (), ())
    rows: dict[str, dict[str, str]] = {name: {"layer": name} for name in names}
    numbers: list[Numbers] = []
    for name, row in rows.items():
        for finder in finders:
            counts = finder.counts.layers.get(name, none)
            row[f"{finder.name}: hits"] = f"{counts.hits:,}"
            row[f"{finder.name}: held"] = short(ratio(counts.held, counts.hits))
            row[f"{finder.name}: across [µm]"] = _spread(counts.across)
            row[f"{finder.name}: along [µm]"] = _spread(counts.along)
            volume, layer = map(int, name.split("."))
            of_line = "layers", "", f"volume {volume}", "", finder.label, "layer", "1", layer, layer
            numbers.append((*of_line, "held hits", "1", *_share(counts.held, counts.hits)))
            for along, distances in (("across", counts.across), ("along", counts.along)):
                for what, value in zip(
                    ("median distance", "width of distances"), median_and_width_of_bins(distances) or ()
                ):
                    numbers.append((*of_line, f"{what} {along}", "mm", value, "", "", "", sum(distances)))
    note = (
        "Layers by volume and layer; of target particles with a track most of whose hits are theirs. Held: hits on the "
        "track. Across, along: median ± half of the interval that holds 68.3 % of the distances of held hits from what "
        "the others of their track tell, in the transverse plane, and along z as seen across the flight."
    )
    return ReportTable.of([*rows.values()], note, numbers=numbers)


def _share(part: int, whole: int) -> Numbers:
    """`value` to `whole`; empty where there is nothing to divide by."""
    interval = wilson(part, whole)
    return ("", "", "", part, whole) if interval is None else (part / whole, *interval, part, whole)


def _spread(distances: Sequence[int]) -> str:
    found = median_and_width_of_bins(distances) if sum(distances) >= FEWEST else None
    return "–" if found is None else f"{round(1000 * found[0]):+d} ± {round(1000 * found[1])}"
