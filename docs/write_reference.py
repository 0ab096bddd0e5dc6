"""Write what comes from the code: the pages flags.md, names.md and features.md of docs/reference/, tables of others.

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
from domainpar.tracking.events.source_table import page as sources
from domainpar.tracking.reco.performance.rates import definitions as track_metrics
from domainpar.tracking.training.metrics import definitions as metrics


def flags() -> str:
    """The help of every command, as it is printed."""
    lines = [
        "# Commands and flags",
        "",
        "Each command is `python -m domainpar.<command>`, or `domainpar <command>`, alone or after a launcher such as",
        "`mpiexec -n 8`. `evaluate` and `import_acorn` need a file; the others run without flags. Any flag can also",
        "stand in a YAML file for `--config` (`hidden: 64`). A run keeps its flags in `config.yaml`.",
        "",
        "| command | what it does |",
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
        "A store holds each feature as the value of its formula divided by the number in column *over*, in float32.",
        "A network gets the numbers of the store.",
        "",
        "- x, y, z are in mm, angles in rad. `[src]` and `[dst]` are the hits in which an edge starts and ends.",
        "- Candidate edges that `prepare` makes lead outward. Edges from files keep their direction, and the signs of",
        "  their features follow from it.",
        "- `wrapped` adds or subtracts a full turn, so that the result lies in [-pi, pi).",
        "- A name in a formula is a feature further up in the table, before its division.",
        "- Features of clusters need `--cluster-features`. `ch0`, `ch1` and `value` are columns of the cells of a hit;",
        "  `module_t`, `pitch_u` and `pitch_v` are columns of its module.",
        "",
        *table(),
        "",
        "With `--standardise`, the network itself then shifts and scales the features.",
        "",
        "Files of acorn already hold features. With `--node-features` and `--edge-features` a store gets the columns",
        "of these names, divided by `--node-scales` and `--edge-scales`. If a file lacks `dr`, `dphi`, `dz`, `deta`,",
        "`phislope` or `rphislope`, they are computed by the formulas above from the divided node features.",
        "",
        "PyG graphs, and your own programs, define their own features. The metadata of an",
        "[exported network](../export.md#the-contract) holds the definition of each of its features.",
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str, table: list[str]) -> str:
    """A page with a table anew, which is found by its heading."""
    start = page.index(table[0])
    return page[:start] + "\n".join(table) + page[page.index("\n\n", start) :]


TABLES = {"your_data.md": sources, "tracks.md": track_metrics, "reference/files.md": metrics}
PAGES = {"flags.md": flags, "names.md": names, "features.md": features}

if __name__ == "__main__":
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "reference")
    for page, write in PAGES.items():
        (directory / page).write_text(write(), encoding="utf-8")
        print(directory / page)
    for name, table_of in TABLES.items():
        path = Path(__file__).parent / name
        path.write_text(with_table(path.read_text(encoding="utf-8"), table_of()), encoding="utf-8")
        print(path)
