"""What do all benchmarks say about this machine?

    make bench                                              a short version of all, a few minutes, simulated events
    make bench ARGS="--only step exchange"
    make bench ARGS="--data DIR --event 1012"               short versions on a real event
    make bench ARGS="--data DIR --event 1012 --full"        without the arguments that make them short: hours

Runs one after the other, each with its own time limit, and writes their tables between two lines of `RESULTS.md`; all
else in that file stays. One that fails is shown there and here, the others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measuring

from domainpar.common.atomic_files import write_whole
from domainpar.measure.programs import Ended, run_limited

HERE = Path(__file__).parent
BEGIN = "<!-- `make bench` writes from here on; what is typed here is lost -->"
END = "<!-- end of what `make bench` writes -->"
LAST_LINES = 25


@dataclass(frozen=True)
class Bench:
    """One benchmark and how it is shortened.

    Attributes:
        name: Its file, without `.py`.
        short: Arguments that make it short.
        events: Arguments for small simulated events.
        real: Arguments for real ones, in their place.
    """

    name: str
    short: str
    events: str
    real: str = "--data {data} --event {event}"


BENCHES = (
    Bench("step", "--ranks 1 2 --threads 1 2 --competitors eager --hidden 16 --rounds 1", "--case small"),
    Bench("inference", "--hidden 16 --rounds 1", "--case medium"),
    Bench("memory", "--ranks 1 2 --hidden 16 --rounds 1 --repeats 1", "--case small"),
    Bench("exchange", "--ranks 2 --repeats 10", "--case medium"),
    Bench("stored_events", "--repeats 10", "--hits 20000"),
    Bench("partition", "--groupings contiguous --parts 2 8", "--hits 30000 --tiles 64"),
    Bench("scaling", "--parts 2 4 --weak-parts 4 --weak-hits 9000 --hidden 16 --rounds 1", "--case small"),
    Bench("grid", "--sizes 3000 2000 --hidden 16 --rounds 1 --repeats 2", "", ""),
    Bench("peers", "--hidden 16 --repeats 2", "--case small"),
    Bench("overhead", "--nodes 1000 20000 --repeats 20", "", ""),
    Bench("bitwise", "--networks all --hidden 16 --graph-iters 2 --most-ranks 2", "--case tiny"),
    Bench("price", "--hidden 16 --repeats 3 --hash-ranks 1 2", "--case small"),
    Bench("overlap", "--hidden 16 --repeats 3 --ranks 2", "--case small"),
    Bench("tracks", "--ranks 1 2 --repeats 3", "--case medium"),
)

ALONE = ("certificate", "devices", "energy", "graphs", "sectors")
"""Those that take a launcher, an hour and more, or stores of one's own: started by hand."""


@dataclass
class Outcome:
    """The end of one benchmark.

    Attributes:
        command: What was typed.
        question: The first line of its description.
        ended: Its exit code, seconds and output.
        tables: Its tables, as `measuring.Results.show` keeps them.
    """

    command: str
    question: str
    ended: Ended
    tables: list[dict[str, Any]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    replaced(text_of(options.write), "")  # refuse before hours of work, not after
    provenance = measuring.provenance()
    print(f"make bench: {measuring.describe(provenance)}", flush=True)
    outcomes = [run(bench, options) for bench in BENCHES if bench.name in options.only]
    section = "\n".join(lines_of(provenance, outcomes))
    write_whole(options.write, replaced(text_of(options.write), section).encode())
    print(f"\n{'bench':<10} {'seconds':>8}")
    for outcome in outcomes:
        print(f"{Path(outcome.command.split()[0]).stem:<10} {outcome.ended.seconds:8.0f}  {verdict(outcome)}")
    print(f"tables are in {options.write}, JSON lines in {options.lines}")
    return int(any(outcome.ended.code != 0 for outcome in outcomes))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [bench.name for bench in BENCHES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, help="these alone; the section holds no others"
    )
    parser.add_argument("--data", type=Path, help="folder of real TrackML events, CSV, instead of simulated ones")
    parser.add_argument("--event", nargs="+", help="which of them, by the end of their names; with --data")
    parser.add_argument("--full", action="store_true", help="each with its own defaults, not shortened")
    parser.add_argument("--timeout", type=float, help="seconds for each; default 600, with --full no limit")
    parser.add_argument("--lines", type=Path, default=measuring.RESULTS / "short", help="folder for the JSON lines")
    parser.add_argument("--write", type=Path, default=HERE / "RESULTS.md", help="file whose section is written")
    options = parser.parse_args(argv)
    if (options.data is None) != (options.event is None):
        parser.error("--data and --event belong together: a folder, and the ends of the names of events in it.")
    return options


def arguments_of(bench: Bench, options: argparse.Namespace) -> list[str]:
    """Arguments of a benchmark, without the file for its JSON lines."""
    short = [] if options.full else shlex.split(bench.short)
    if options.data is None:
        return short if options.full else [*shlex.split(bench.events), *short]
    data, event = shlex.quote(str(options.data)), shlex.join(options.event)
    return [*shlex.split(bench.real.format(data=data, event=event)), *short]


# --- running ---------------------------------------------------------------------------------------------------------


def run(bench: Bench, options: argparse.Namespace) -> Outcome:
    """Run one benchmark and show what it prints."""
    file, arguments = HERE / f"{bench.name}.py", arguments_of(bench, options)
    command = shlex.join([f"bench/{bench.name}.py", *arguments])
    print(f"\n=== {command}", flush=True)
    if not file.exists():
        print("there is no such file", flush=True)
        return Outcome(command, bench.name, Ended(2, f"{file} does not exist", 0.0))
    text = file.read_text()
    question = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    keeps_lines = "measuring.Results(" in text
    lines = options.lines / f"{bench.name}.jsonl"
    lines.unlink(missing_ok=True)
    limit = options.timeout or (math.inf if options.full else 600.0)
    program = [sys.executable, str(file), *arguments, *(["--results", str(lines)] if keeps_lines else [])]
    ended = run_limited(program, limit, [{"PYTHONUNBUFFERED": "1"}])
    print(ended.output, flush=True)
    kept = map(json.loads, lines.read_text().splitlines() if lines.exists() else [])
    return Outcome(command, question, ended, [line["table"] for line in kept if "table" in line])


# --- the section -----------------------------------------------------------------------------------------------------


def lines_of(provenance: dict[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    """The section of `RESULTS.md`, markers included."""
    machine, versions = provenance["machine"], provenance["versions"]
    settings = " ".join(f"`{name}={value}`" for name, value in provenance["environment"].items())
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        BEGIN,
        "## This machine",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {known}. Commit {provenance['commit']}, "
        f"{provenance['time']}, load {provenance['load_average']:.1f} before it began. {settings}; nothing else is set "
        "for threads or the C allocator, but where a column says so. Short runs of small events show that things work "
        "and roughly what they cost; the other sections hold the figures that count.",
        "",
        *(line for outcome in outcomes for line in lines_of_one(outcome)),
        END,
    ]


def lines_of_one(outcome: Outcome) -> list[str]:
    """The part of the section on one benchmark: question, command, tables or why there are none."""
    name = Path(outcome.command.split()[0]).stem
    lines = [f"### {name}", "", outcome.question, "", f"`{outcome.command}`, {outcome.ended.seconds:.0f} s", ""]
    failed = outcome.ended.code != 0
    fenced = ["```", *outcome.ended.output.rstrip().splitlines()[-LAST_LINES:], "```", ""]
    if failed:
        lines += [f"**{verdict(outcome).capitalize()}.** The last it printed:", "", *fenced]
    for table in outcome.tables:
        lines += markdown(table)
    return lines if failed or outcome.tables else lines + fenced


def verdict(outcome: Outcome) -> str:
    if outcome.ended.code == 0:
        return "done"
    return "its time was up" if outcome.ended.code is None else f"failed with exit code {outcome.ended.code}"


def markdown(table: dict[str, Any]) -> list[str]:
    """One table, its title before and its note after it."""
    rows = [table["headings"], ["---"] * len(table["headings"]), *table["cells"]]
    lines = ["| " + " | ".join(cell.strip().replace("|", "\\|") for cell in row) + " |" for row in rows]
    note = [table["note"].replace("*", "\\*"), ""] if table["note"] else []
    return [f"**{table['title']}**", "", *lines, "", *note]


def replaced(text: str, section: str) -> str:
    """The text with the part between the markers, or its end, replaced by the section."""
    begins, ends = text.count(BEGIN), text.count(END)
    if (begins, ends) == (0, 0):
        return f"{text.rstrip()}\n\n{section}\n".lstrip()
    if (begins, ends) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise SystemExit(
            f"the section cannot be told apart: expected one line {BEGIN!r} and after it one {END!r}, found "
            f"{begins} and {ends}. Remove both and what is between them."
        )
    return text[: text.index(BEGIN)] + section + text[text.index(END) + len(END) :]


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
