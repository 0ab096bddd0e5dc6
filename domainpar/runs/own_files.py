"""The files of runs and of scores, known by their names: `--overwrite` removes these, and refuses where others lie.

They are listed here, because scores lie in the directory of their run, but training and scoring are separate rooms.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from domainpar.common.atomic_files import PARTIAL

Look = Callable[[Path], Iterator[Path]]
"""Finds the files in a directory that are not ours."""

UNFINISHED = "unfinished"
"""Folder of scores that are being written; those of all events leave it together."""

TUNING = "tuning"
"""Folder of scores that cuts are chosen by; they are removed then."""

TUNED = "tracks.json"
"""Cuts of track building, chosen for a run."""

PROFILE = Path("profile", "profile.json")
"""The summary of a profile, as seen from its run; traces of ranks lie beside it."""

TRACKERS = "trackers"
"""Folder of a run for event files, under names that TensorBoard gives."""

_PARTIAL = rf"{re.escape(PARTIAL)}.*"
_RUN = (
    r"run\.json|tracks\.json|config\.yaml|metrics\.(jsonl|partial)|report\.(html|csv)|model\.(onnx|pt2)"
    r"|run\.lock|\.trial-.*"
)
_CHECKPOINT = r"\w+\.safetensors|(state|manifest)\.json"
_SCORES = r"(scores|timings)\.json|event.*(\.scores\.zarr\.zip|-tracks\.csv|-trackparams\.csv)"
_ACORN_FOLDER = r"(train|val|test)set(_tracks)?"
_ACORN_FILE = r"event.*\.(pyg|txt)"


def strangers_in_run(directory: Path) -> Iterator[Path]:
    """Files in the directory of a run that no command wrote, in order."""
    checkpoint = {r"(\.partial-|\.replaced-)?step_\d+": partial(_strangers, names=_CHECKPOINT)}
    folders: dict[str, Look] = {
        "checkpoints": partial(_strangers, names="last|best", folders=checkpoint),
        "logs": partial(_strangers, names=r"rank_\d+\.txt"),
        PROFILE.parent.name: partial(_strangers, names=r"(profile|rank_\d+)\.json"),
        TRACKERS: lambda folder: iter(()),
        "faults": partial(_strangers, names=r"status_of_rank_\d+\.txt"),
        "scores": strangers_in_scores,
    }
    return _strangers(directory, _RUN, folders)


def strangers_in_scores(directory: Path) -> Iterator[Path]:
    """Files in a directory of scores that no command wrote, in order.

    A folder named as acorn names its own may be a user's only copy: it is ours if finished scores of the same events
    lie beside it, or while they are written.
    """
    unfinished = partial(
        _strangers, names=_SCORES, folders={
            _ACORN_FOLDER: partial(_strangers, names=_ACORN_FILE), TUNING: partial(_strangers, names=_SCORES),
        },
    )  # fmt: skip
    return _strangers(directory, _SCORES, {_ACORN_FOLDER: _without_scores, UNFINISHED: unfinished})


def _without_scores(folder: Path) -> Iterator[Path]:
    def is_ours(file: Path) -> bool:
        scored = re.fullmatch(_ACORN_FILE, file.name) and (folder.parent / f"{file.stem}.scores.zarr.zip").is_file()
        return file.is_file() and bool(scored or re.fullmatch(_PARTIAL, file.name))

    if not (folder.parent / "scores.json").is_file() or not all(map(is_ours, folder.iterdir())):
        yield folder


def _strangers(directory: Path, names: str, folders: Mapping[str, Look] | None = None) -> Iterator[Path]:
    """Files of other names, outside these folders. A link to a folder leads elsewhere."""
    for path in sorted(directory.iterdir()):
        look = next((look for name, look in (folders or {}).items() if re.fullmatch(name, path.name)), None)
        if look is not None and path.is_dir() and not path.is_symlink():
            yield from look(path)
        elif path.is_dir() or not re.fullmatch(f"{names}|{_PARTIAL}", path.name):
            yield path


def remove(paths: Iterable[Path]) -> list[str]:
    """Remove files and folders in their order; returns their names, folders with a slash."""
    names = []
    for path in paths:
        is_folder = path.is_dir() and not path.is_symlink()
        names.append(path.name + "/" * is_folder)
        if is_folder:
            shutil.rmtree(path)
        else:
            path.unlink()
    return names
