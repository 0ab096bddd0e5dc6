"""Show a run as one HTML file that opens anywhere: curves, scores, tracks, an event to look into, ranks and their time.

Without a run it shows the newest. Scores and tracks are in it once `infer --tracks walk` has made them.

Examples:
  python -m domainpar.report runs/0001                             writes runs/0001/report.html
  python -m domainpar.report runs/0001 --naive runs/0002           with the naive run beside it
  python -m domainpar.report runs/0001 --event 000000004 --parts 16 --out event4.html
  python -m domainpar.report runs/0001 --png pictures              the same as pictures too, for a talk or a terminal
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from domainpar.command_line import run_command
from domainpar.config import ConfigError, ReportConfig
from domainpar.parallel.launcher import started_as_root
from domainpar.problems import NotWritten, expected, told

if TYPE_CHECKING:
    from domainpar.display.reading import RunFiles


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report as the command line says; returns the exit code. Under a launcher the first rank does it all."""
    return run_command(ReportConfig, _work, __doc__, named(sys.argv[1:] if argv is None else argv))


def named(argv: Sequence[str]) -> list[str]:
    """The words of a command line with `--run` before the run, which may stand alone.

    Every flag of this command takes one value, so a word that follows none is the run.
    """
    words = list(argv)
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 1 if "=" in words[place] else 2
    if place < len(words) and not any(word.split("=")[0] == "--run" for word in words):
        words.insert(place, "--run")
    return words


def _work(config: ReportConfig) -> int:
    if not started_as_root():  # nothing is shared: the others have nothing to do
        return 0
    try:
        path, size, missing = write_report(config)
        pictures = [] if config.png is None else write_pictures(config)
    except NotWritten:
        raise
    except ValueError as error:
        about = told(error)
        hint = about.pop("hint") or "python -m domainpar.report --help explains the flags"
        raise ConfigError(hint=hint, **about) from error
    except ModuleNotFoundError as error:
        needed = str(error.name).split(".")[0]
        if needed not in ("plotly", "jinja2", "matplotlib"):
            raise
        raise ConfigError(f"the report needs {needed}", "pip install 'domainpar[report]'") from error
    print(f"report: {path} ({size / 1e6:.1f} MB), one file; open it in a browser")
    for sentence in missing:
        print(f"missing: {sentence}")
    for picture in pictures:
        print(f"picture: {picture}")
    return 0


def write_report(config: ReportConfig) -> tuple[Path, int, tuple[str, ...]]:
    """Write the report of a run; returns its path, its size in bytes, and what it lacks.

    Raises:
        ValueError: If there is no run, or what it holds cannot be shown.
        OSError: If the file cannot be written.
        ModuleNotFoundError: If plotly or jinja2 is not installed.
    """
    from domainpar.atomic_files import write_whole
    from domainpar.display.html import render
    from domainpar.display.page import build_page

    run, other = _runs(config)
    page = build_page(run, other, config.event, config.parts)
    content = render(page).encode()
    path = Path(config.out) if config.out is not None else run.directory / "report.html"
    if path.exists() and not _is_report(path):
        raise ValueError(f"{path} is there and is no report; choose another --out.")
    write_whole(path, content)
    return path, len(content), page.missing


def _is_report(path: Path) -> bool:
    """Whether a file may be replaced: any page, but never a file of the run."""
    with path.open("rb") as file:
        return file.read(64).lstrip().lower().startswith(b"<!doctype html")


def write_pictures(config: ReportConfig) -> list[Path]:
    """Draw the same as PNG pictures; returns their paths.

    Raises:
        ValueError: As `write_report`; NotWritten if a disk does not take them.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    from domainpar.display.pictures.drawing import draw_pictures

    directory = Path(config.png or "pictures")
    run, other = _runs(config)
    try:
        return draw_pictures(run, directory, other, config.event, config.parts)
    except OSError as error:
        raise expected(error, "--png") or error from error


def _runs(config: ReportConfig) -> "tuple[RunFiles, RunFiles | None]":
    """The run, and the naive one beside it."""
    from domainpar.display.checking import check_comparable
    from domainpar.display.reading import read_run_files

    run = read_run_files(_directory(config.run), _path(config.scores), _path(config.store))
    if config.naive is None:
        return run, None
    other = _naive(Path(config.naive))
    check_comparable(run, other)
    return run, other


def _directory(named: str | None) -> Path:
    if named is not None:
        return Path(named)
    from domainpar.training.rundir import newest_run

    return newest_run()


def _naive(directory: Path) -> "RunFiles":
    from domainpar.display.reading import read_run_files

    other = read_run_files(directory)
    if not (other.approximate or (other.scores and other.scores.approximate)):
        raise ValueError(f"--naive {directory} is no naive run: it was trained and scored on whole events.")
    return other


def _path(named: str | None) -> Path | None:
    return None if named is None else Path(named)


if __name__ == "__main__":
    sys.exit(main())
