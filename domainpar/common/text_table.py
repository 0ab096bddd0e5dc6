"""Tables as lines of text, drawn by rich: without colours or frames, alike in a file, in a pipe and on a terminal."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WIDTH_OF_A_FILE = 118


def drawn(table: Table, width: int, colours: bool = False) -> list[str]:
    """The lines of a table that is described already."""
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=colours, color_system="standard" if colours else None)
    console.print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1, width: int = 0) -> list[str]:
    """The lines of a table; a heading takes several where it is wider than its column may be. No cell is ever broken.

    The first columns, as many as `words`, begin at the left; those that follow hold numbers. `width` is in columns of
    text; 0: those of the terminal, or as many as are read well in a file. A table whose cells want more has more.
    """
    columns = [[heading, *cells] for heading, *cells in zip(headings, *rows, strict=True)]
    wanted = width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_A_FILE)
    if sum(max(map(len, column)) + 2 for column in columns) - 2 > wanted:
        # rich would take columns of words from each other as from those of numbers: it gets no choice.
        for column in columns:
            least = max(map(len, [*column[0].split(), *column[1:], " "]))
            column[0] = textwrap.fill(column[0], least)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, (heading, *_) in enumerate(columns):
        table.add_column(Text(heading), justify="left" if place < words else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*map(Text, cells))
    return drawn(table, max(wanted, Measurement.get(Console(width=10**6), Console(width=10**6).options, table).maximum))
