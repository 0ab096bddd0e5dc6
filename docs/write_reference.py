"""Write the pages of docs/reference/ that come from the code: flags.md, names.md and features.md.

python docs/write_reference.py [DIRECTORY] (default: docs/reference)
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import domainpar
from domainpar.__main__ import COMMANDS
from domainpar.tracking.events.features import table


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


def features() -> str:
    """Every feature that is made here, with formula, unit and sign."""
    lines = [
        "# Features of nodes and edges",
        "",
        "What a store holds, and a network is given, is the formula over the number in the column *over*, in float32.",
        "x, y, z are in mm, angles in rad; `[src]` and `[dst]` are the hits in which an edge starts and ends.",
        "Candidate edges that are found here lead outward; others are taken as they come, and the signs follow them.",
        "`wrapped` adds or takes a whole turn, into [-pi, pi). A name in a formula is that of a line further up, not",
        "yet divided.",
        "Those of clusters are there with `--cluster-features`: `ch0`, `ch1` and `value` are columns of the cells of a",
        "hit, `module_t`, `pitch_u` and `pitch_v` those of its module.",
        "",
        *table(),
        "",
        "`--standardise` shifts and scales them inside the network. `--node-features` and `--edge-features` of acorn's",
        "files are their columns over `--node-scales` and `--edge-scales`; `dr`, `dphi`, `dz`, `deta`, `phislope` and",
        "`rphislope` that a file lacks are the formulas above of values already over the scales of the nodes.",
        "Features of graphs of PyG, and of a program of one's own, are theirs. The metadata of an",
        "[exported network](../export.md#the-contract) holds the definition of each of its features.",
    ]
    return "\n".join(lines) + "\n"


PAGES = {"flags.md": flags, "names.md": names, "features.md": features}

if __name__ == "__main__":
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "reference")
    for page, write in PAGES.items():
        (directory / page).write_text(write(), encoding="utf-8")
        print(directory / page)
