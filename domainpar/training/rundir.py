"""The directory of a run: chosen by rank 0, never shared with another run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

RUNS = Path("runs")


def choose_directory(out: str | None, resume: bool, overwrite: bool) -> Path:
    """Pick and make the directory of a run; called on rank 0.

    Raises:
        ValueError: If it holds another run and neither `resume` nor `overwrite` says what to do with it, if there is
            nothing to resume, or it cannot be written.
    """
    directory = Path(out) if out is not None else _next_number(RUNS)
    try:
        taken = directory.exists() and any(directory.iterdir())
        if resume and not (directory / "run.json").is_file():
            raise ValueError(f"{directory} holds no run to resume; leave --resume out to start one.")
        if taken and not resume:
            _clear(directory, overwrite)
        for name in ("checkpoints", "logs"):
            (directory / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write the run to {directory}: {error.strerror}; choose another --out.") from error
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
    """`run.json`: what a run is and how it stands."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    def update(self, **changes: Any) -> None:
        """Change some entries and replace the file."""
        self.content |= changes
        temporary = self.path.with_suffix(".partial")
        temporary.write_text(json.dumps(self.content, indent=1, sort_keys=True) + "\n")
        os.replace(temporary, self.path)


def describe_process() -> dict[str, Any]:
    """Versions, command and machine, for `run.json`."""
    packages = ("domainpar", "torch", "numpy", "numba", "pymetis", "mpi4py", "zarr")
    return {
        "argv": sys.argv,
        "host": platform.node(),
        "machine": f"{platform.machine()} {platform.system()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbered(runs: Path) -> list[Path]:
    return sorted(path for path in runs.glob("[0-9]*") if path.name.isdigit() and path.is_dir())


def _next_number(runs: Path) -> Path:
    taken = _numbered(runs)
    return runs / f"{int(taken[-1].name) + 1 if taken else 1:04d}"


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
