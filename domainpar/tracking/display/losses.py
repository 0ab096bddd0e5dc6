"""Tables of what is lost: target particles by the reason, and hits of found tracks layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from domainpar.tracking.display.summary import ReportTable, short
from domainpar.tracking.display.tracks import QUANTITIES, Finder
from domainpar.tracking.reco.performance.counts import BINS_OF_LOST
from domainpar.tracking.reco.performance.layers import LayerCounts, median_and_width
from domainpar.tracking.reco.performance.lost import REASONS
from domainpar.tracking.reco.performance.matching import STYLES
from domainpar.tracking.reco.performance.rates import ratio, wilson

Numbers = tuple[object, ...]
"""A line of `binned.HEADING`."""

FEWEST = 20
"""Of fewer hits of a layer no median and width are shown."""


def lost_table(finders: Sequence[Finder], style: str) -> tuple[ReportTable, ...]:
    """Lost targets of each finder by the reason, of all and in bins of pT and eta; bins without any are left out.

    Its numbers are those of all styles of matching.
    """
    rows = []
    for finder in finders:
        counts = finder.counts.styles[style]
        bins = [("all", counts.targets, counts.lost)]
        for quantity in BINS_OF_LOST:
            name, _, unit = QUANTITIES[quantity].partition(" [")
            binned = finder.counts.binned[style][quantity]
            for i, (low, high) in enumerate(zip(binned.edges, binned.edges[1:])):
                where = f"{name} {low:g} to {high:g} {unit.rstrip(']')}".rstrip().replace("_", "")
                bins.append((where, binned.targets[i], {reason: of[i] for reason, of in binned.lost.items()}))
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
    return ReportTable.of(rows, words=2, numbers=[line for finder in finders for line in _lost_numbers(finder)])


def _lost_numbers(finder: Finder) -> Iterator[Numbers]:
    for style in STYLES:
        for quantity in BINS_OF_LOST:
            name, _, unit = QUANTITIES[quantity].partition(" [")
            names = "lost", style, quantity, "", finder.label, f"true {name}", unit.rstrip("]") or "1"
            binned = finder.counts.binned[style][quantity]
            for reason in REASONS:
                bins = zip(binned.edges, binned.edges[1:], binned.lost[reason], binned.targets, strict=False)
                for low, high, part, whole in bins:
                    yield *names, low, high, f"lost, {reason}", "1", *_share(part, whole)


def layer_table(finders: Sequence[Finder]) -> tuple[ReportTable, ...]:
    """The share of a found particle's hits that its track holds on each layer, and how far these lie from the helix."""
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
            numbers += [(*of_line, *line) for line in _layer_numbers(counts)]
    note = (
        "Layers by volume and layer; of target particles with a track most of whose hits are theirs. Held: hits on the "
        "track. Across, along: median ± half of the interval that holds 68.3 % of the distances of held hits from the "
        "helix fitted to their track, in the transverse plane, and along z as seen across the flight."
    )
    return ReportTable.of([*rows.values()], note, numbers=numbers)


def _layer_numbers(counts: LayerCounts) -> Iterator[Numbers]:
    yield "held hits", "1", *_share(counts.held, counts.hits)
    for name, distances in (("across", counts.across), ("along", counts.along)):
        if (found := median_and_width(distances)) is not None:
            for what, value in zip(("median distance", "width of distances"), found):
                yield f"{what} {name}", "mm", value, "", "", "", sum(distances)


def _share(part: int, whole: int) -> Numbers:
    """`value` to `whole`; empty where there is nothing to divide by."""
    interval = wilson(part, whole)
    return ("", "", "", part, whole) if interval is None else (part / whole, *interval, part, whole)


def _spread(distances: Sequence[int]) -> str:
    found = median_and_width(distances) if sum(distances) >= FEWEST else None
    return "–" if found is None else f"{round(1000 * found[0]):+d} ± {round(1000 * found[1])}"
