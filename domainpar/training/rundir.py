"""The directory of a run: chosen by rank 0, never shared with another run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import time
import traceback
import uuid
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from domainpar import __version__

RUNS = Path("runs")


def choose_directory(out: str | None, resume: bool, overwrite: bool) -> Path:
    """Pick and make the directory of a run, with a `run.json` that says it is one; called on rank 0.

    Raises:
        ValueError: If it holds another run and neither `resume` nor `overwrite` says what to do with it, if there is
            nothing to resume, or it cannot be written.
    """
    try:
        if resume:
            return _to_resume(Path(out or ""))
        directory = _next_number(RUNS) if out is None else Path(out)
        if directory.exists() and any(directory.iterdir()):
            _clear(directory, overwrite)
        for name in ("checkpoints", "logs"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        RunFile(directory / "run.json").update(state="starting")
    except OSError as error:
        raise ValueError(f"cannot write the run to {out or RUNS}: {error.strerror}; choose another --out.") from error
    return directory


def newest_run() -> Path:
    """The numbered run that was started last.

    Raises:
        ValueError: If there is none.
    """
    runs = _numbered(RUNS)
    if not runs:
        raise ValueError(f"no run in {RUNS}/; train one first (python -m domainpar.train), or name it with --run.")
    return runs[-1]


@dataclass
class RunFile:
    """`run.json`: what a run is and how it stands.

    Attributes:
        path: The file.
        content: What it holds.
    """

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RunFile:
        """The file of an earlier run.

        Raises:
            ValueError: If it cannot be read.
        """
        try:
            return cls(path, dict(json.loads(path.read_text())))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}; name another run.") from error

    def update(self, **changes: Any) -> None:
        """Change some entries and replace the file."""
        self.content |= changes
        temporary = self.path.with_name(f".run-{uuid.uuid4().hex}.json")
        temporary.write_text(json.dumps(self.content, indent=1, sort_keys=True) + "\n")
        os.replace(temporary, self.path)


def note_failure(directory: Path, rank: int, error: BaseException) -> None:
    """Leave in a run's directory that it failed and why; called on the rank that did. The first one's words stay."""
    with contextlib.suppress(OSError, ValueError):  # why it failed matters more than that this cannot be written
        (directory / "logs" / f"rank_{rank}.txt").write_text("".join(traceback.format_exception(error)))
        file = RunFile.read(directory / "run.json")
        if file.content.get("state") != "failed":
            file.update(state="failed", error=f"rank {rank}: {type(error).__name__}: {error}")


def describe_process() -> dict[str, Any]:
    """Versions, command and machine, for `run.json`."""
    packages = ("torch", "numpy", "numba", "pymetis", "mpi4py", "zarr")
    return {
        "argv": sys.argv,
        "host": platform.node(),
        "machine": f"{platform.machine()} {platform.system()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"domainpar": __version__, "python": platform.python_version()}
        | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbered(runs: Path) -> list[Path]:
    numbered = (path for path in runs.glob("[0-9]*") if path.name.isdigit() and path.is_dir())
    return sorted(numbered, key=lambda path: int(path.name))


def _next_number(runs: Path) -> Path:
    """Make the next numbered directory. Of two runs that start at once, one takes the number after."""
    number = int(taken[-1].name) + 1 if (taken := _numbered(runs)) else 1
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            (runs / f"{number:04d}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return runs / f"{number:04d}"


def _to_resume(directory: Path) -> Path:
    if not (directory / "run.json").is_file():
        raise ValueError(f"{directory} holds no run to resume; leave --resume out to start one.")
    return directory


def _clear(directory: Path, overwrite: bool) -> None:
    """Remove another run, if that was asked for; never anything that is not a run."""
    is_run = (directory / "run.json").is_file()
    if not overwrite:
        what = "another run" if is_run else "other files"
        raise ValueError(
            f"{directory} holds {what}; choose another --out" + (", or --resume or --overwrite it." if is_run else ".")
        )
    if not is_run:
        raise ValueError(f"{directory} holds files that are not a run; --overwrite does not remove those.")
    shutil.rmtree(directory)
