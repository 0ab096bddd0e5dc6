"""Write the pages of docs/reference/ that come from the code: flags.md and names.md.

python docs/write_reference.py [DIRECTORY] (default: docs/reference)
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import domainpar
from domainpar.__main__ import COMMANDS


def flags() -> str:
    """The help of every command, as it is printed."""
    lines = [
        "# Commands and flags",
        "",
        "Each command is `python -m domainpar.<command>`, or `domainpar <command>`, alone or after a launcher, and",
        "runs without flags. Any flag can stand in a YAML file given with `--config` (`hidden: 64`); a run keeps its",
        "own in `config.yaml`.",
        "",
        "| command | from what to what |",
        "| --- | --- |",
        *(f"| [{name}](#{name}) | {purpose} |" for name, purpose in COMMANDS.items()),
    ]
    for name in COMMANDS:
        printed = subprocess.run(
            [sys.executable, "-m", f"domainpar.{name}", "--help"], capture_output=True, text=True, check=True
        ).stdout
        lines += ["", f"## {name}", "", "```text", *(line.rstrip() for line in printed.rstrip().split("\n")), "```"]
    return "\n".join(lines) + "\n"


def names() -> str:
    """Every public name with the first sentence of its docstring."""
    lines = [
        "# Public names",
        "",
        "`import domainpar` loads none of them; each is loaded when it is first used. `help(domainpar.World)` shows",
        "arguments, shapes, units and errors. *Collective* means: every rank must call it. Other names may change.",
        "",
        "| `domainpar.` | | meaning |",
        "| --- | --- | --- |",
    ]
    for name in sorted(domainpar.__all__, key=str.lower):
        value = getattr(domainpar, name)
        summary = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{name}` | {'class' if inspect.isclass(value) else 'function'} | {summary} |")
    return "\n".join(lines) + "\n"


PAGES = {"flags.md": flags, "names.md": names}

if __name__ == "__main__":
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "reference")
    for page, write in PAGES.items():
        (directory / page).write_text(write(), encoding="utf-8")
        print(directory / page)
