"""What was found as a table for a terminal or a bug report, and as JSON."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from domainpar.diagnosis.verdicts import Finding, Verdict, exit_code
from domainpar.parallel.launcher import detect

COLOURS = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "dim"}
WIDTH_OF_A_FILE = 118


def as_text(findings: Sequence[Finding], width: int = WIDTH_OF_A_FILE, colours: bool = False) -> str:
    """The table, one row a check, and a line that counts verdicts."""
    table = Table(show_edge=False, pad_edge=False, expand=True)  # else columns take no shares
    for name, share in (("check", 2), ("", 0), ("what was found", 8), ("what to do", 4)):
        table.add_column(name, ratio=share or None, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=COLOURS[finding.verdict])
        table.add_row(Text(finding.check), verdict, Text(finding.found), Text(finding.advice))
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=colours, color_system="standard" if colours else None)
    console.print(table)
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    return "\n".join([*lines, counted(findings)]) + "\n"


def counted(findings: Sequence[Finding]) -> str:
    """How many checks ended how, in words."""
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    told = [f"{counts[verdict]} {verdict}" for verdict in (Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.SKIP)]
    return f"doctor: {', '.join(told)}; exit code {exit_code(findings)}"


def started_by_launcher() -> bool:
    """Whether what is printed goes through a launcher."""
    try:
        return detect().kind != "none"
    except ValueError:  # variables of a launcher, but spoilt ones
        return True


def show(findings: Sequence[Finding]) -> None:
    """Print the table in one piece: lines of several ranks would tear."""
    # A launcher may hand out terminals of its own, which know neither width nor colours of the user's.
    on_terminal = sys.stdout.isatty() and not started_by_launcher()
    width = shutil.get_terminal_size().columns if on_terminal else WIDTH_OF_A_FILE
    sys.stdout.write(as_text(findings, width, on_terminal and "NO_COLOR" not in os.environ))
    sys.stdout.flush()


def as_record(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same as plain values."""
    return {"checks": [asdict(finding) for finding in findings], "exit_code": exit_code(findings)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write plain values to a file, whole or not at all.

    Raises:
        OSError: If that cannot be.
    """
    from domainpar.atomic_files import write_whole

    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
