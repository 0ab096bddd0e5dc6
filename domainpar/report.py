"""Show a run as one HTML file that opens anywhere: training curves, scores, tracks, one event, and the time of ranks.

Without a run it shows the newest. It shows scores and tracks if `infer --tracks greedy` has made them.

Examples:
  python -m domainpar.report runs/0001                             writes runs/0001/report.html
  python -m domainpar.report runs/0001 runs/0002                   two runs: what differs, metrics and curves of both
  python -m domainpar.report runs/0001 --event 000000004 --parts 16 --out event4.html
  python -m domainpar.report runs/0001 --png pictures              also the charts as pictures, for a talk
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from domainpar.common.problems import as_problem
from domainpar.parallel.launcher import started_as_root
from domainpar.tracking.command_line import refuse_like_flags, run_command
from domainpar.tracking.config import ConfigError, ReportConfig

if TYPE_CHECKING:
    from domainpar.tracking.display.sections import Page


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report as the command line says; returns the exit code. Under a launcher the first rank does it all."""
    return run_command(ReportConfig, _work, __doc__, argv)


def _work(config: ReportConfig) -> int:
    if not started_as_root():  # nothing is shared: the others have nothing to do
        return 0
    try:
        with refuse_like_flags("report"):
            for line in write_report(config, build_report(config)):
                print(line)
    except ModuleNotFoundError as error:
        needed = str(error.name).split(".")[0]
        if needed not in ("jinja2", "matplotlib"):
            raise
        raise ConfigError(f"the report needs {needed}", "pip install 'domainpar[report]'") from error
    return 0


def build_report(config: ReportConfig) -> "Page":
    """Read a run, and the one beside it, and lay out their report.

    Raises:
        ValueError: If there is no run, or its files cannot be shown, or the other run is the same.
    """
    from domainpar.runs.directory import newest_run
    from domainpar.tracking.display.run_files import read_run_files
    from domainpar.tracking.display.sections import build_page
    from domainpar.tracking.training.pretrained import as_run

    scores, store = (None if named is None else Path(named) for named in (config.scores, config.store))
    run = read_run_files(newest_run() if config.run is None else as_run(config.run), scores, store)
    other = None
    if config.beside is not None:
        other = read_run_files(as_run(config.beside))
        if scores is None and other.directory.resolve() == run.directory.resolve():
            raise ValueError(f"{config.beside} is the run itself: name another one to lie beside it.")
    return build_page(run, other, config.event, config.parts)


def write_report(config: ReportConfig, page: "Page") -> list[str]:
    """Write a report as HTML, its numbers as CSV and, where they are asked for, its pictures; the lines to be printed.

    Raises:
        ValueError: If a file of such a name is none of ours; NotWritten if a disk does not take the pictures.
        OSError: If a file cannot be written.
        ModuleNotFoundError: If jinja2, or matplotlib for pictures, is not installed.
    """
    from domainpar.common.atomic_files import write_whole
    from domainpar.tracking.display.html import HEADING, binned_numbers, render

    path = Path(config.out or page.directory / "report.html")
    numbers, content = path.with_suffix(".csv"), render(page).encode()
    for file, written, begins, what in (
        (path, content, b"<!doctype html", "report"),
        (numbers, binned_numbers(page).encode(), ",".join(HEADING).encode(), "table of one"),
    ):
        # Any page may be replaced, but never a file of the run.
        if file.exists() and not file.read_bytes()[: len(begins) + 64].lstrip().lower().startswith(begins):
            raise ValueError(f"{file} is there and is no {what}; choose another --out.")
        write_whole(file, written)
    pictures: list[Path] = []
    if config.png is not None:
        from domainpar.tracking.display.pictures import draw_pictures

        try:
            pictures = draw_pictures(page, Path(config.png))
        except OSError as error:
            raise as_problem(error, "--png") or error from error
    return [
        f"report: {path} ({len(content) / 1e6:.1f} MB), one file; open it in a browser",
        f"numbers: {numbers}, the bins of its curves of tracks",
        *(f"missing: {sentence}" for sentence in page.missing),
        *(f"picture: {picture}" for picture in pictures),
    ]


if __name__ == "__main__":
    sys.exit(main())
