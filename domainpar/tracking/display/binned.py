"""The binned numbers behind the charts and tables of a page as one table, CSV: a line for each bin of each curve."""

from __future__ import annotations

import csv
import io

from domainpar.tracking.display.sections import Page

HEADING = (
    "chart", "style", "panel", "title", "curve", "quantity", "quantity_unit", "low", "high", "what", "unit", "value",
    "value_low", "value_high", "part", "whole",
)  # fmt: skip


def binned_numbers(page: Page) -> str:
    """The table. `value` is `what` in the bin from `low` to `high` of `quantity`, `value_low` to `value_high` its
    interval, `part` of `whole` the numbers that were divided; of widths `whole` alone. Without a unit it is 1.
    """
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(HEADING)
    for chart in (chart for section in page.sections for chart in section.charts if chart.on_page):
        for panel in chart.panels:
            of_panel = (*_named(panel.x.label), *_named(panel.y.label))
            for series in panel.series:
                for low, high, *numbers in () if series.table is None else series.table.tolist():
                    names = chart.name, chart.variant, panel.name, panel.title, series.name, *of_panel[:2]
                    values = low, high, *of_panel[2:], *numbers
                    # What is not known is an empty cell.
                    writer.writerow([*names, *("" if one != one else one for one in values)])
    for section in page.sections:
        for table in section.tables:
            writer.writerows(table.numbers)
    return lines.getvalue()


def _named(label: str) -> tuple[str, str]:
    """The quantity along an axis, and its unit."""
    quantity, _, unit = label.partition(" [")
    return quantity, unit.rstrip("]") or "1"
