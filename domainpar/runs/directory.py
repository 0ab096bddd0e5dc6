"""The directory of a run: chosen by rank 0, never shared with another run."""

from __future__ import annotations

import contextlib
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from domainpar.common.atomic_files import write_synced, write_whole
from domainpar.common.lock import RUN, Claim, left_behind, release
from domainpar.common.problems import Problem
from domainpar.runs.checkpoint_files import CheckpointFiles
from domainpar.runs.own_files import remove, strangers_in_run
from domainpar.runs.records import RUN_FILE, RunFile, RunRecord, run_record

RUNS = Path("runs")
_BYTES_TO_TRY = 65536

Resume = bool | Literal["auto"]


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, claimed for it."""

    path: Path
    resume: bool  # whether the run continues from a checkpoint that lies there
    notes: tuple[str, ...] = ()  # for the user on the choice, a line each

    def release(self) -> None:
        """Give the directory back: another run may continue in it."""
        release(self.path, RUN)


def choose_directory(out: str | None, resume: Resume, overwrite: bool) -> RunDirectory:
    """Pick, claim and make the directory of a run, with a `run.json` that says it is one; called on rank 0.

    Raises:
        Problem: If it holds another run and neither `resume` nor `overwrite` is given, if there is nothing to resume,
            if another run is at work in it, or it cannot be written.
    """
    try:
        resumes, restarts = goes_on(out, resume), resume == "auto"
        directory = _next_number() if out is None else Path(out)
        if not resumes:
            if (directory / RUN.lock).exists() and not left_behind(directory, RUN):
                Claim.take(directory, RUN).release()  # refused, with the process that is at work
            _check_free(directory, restarts, overwrite)
            directory.mkdir(parents=True, exist_ok=True)
        elif not (directory / RUN_FILE).is_file():
            raise Problem(f"{directory} holds no run to resume", "leave --resume out to start one")
        claim = Claim.take(directory, RUN)
        try:
            notes = [claim.note]
            if not resumes:
                _check_free(directory, restarts, overwrite)  # another run may have come and gone in between
            _try_to_write(directory)
            if not resumes:
                if restarts and (directory / RUN_FILE).is_file():
                    notes.append(f"{directory} holds a run that never saved a checkpoint; starting anew")
                if overwrite:
                    # `run.json` goes last: until then it is a run. Our own lock stays.
                    paths = sorted(directory.iterdir(), key=lambda path: (path.name == RUN_FILE, path.name))
                    removed = remove(path for path in paths if path.name != RUN.lock)
                    notes += [f"--overwrite removed the run in {directory}: {', '.join(removed)}"] * bool(removed)
                (directory / "checkpoints").mkdir(exist_ok=True)
                RunFile(directory / RUN_FILE).update(state="starting")
        except BaseException:
            claim.release()
            raise
        return RunDirectory(directory, resumes, tuple(note for note in notes if note))
    except OSError as error:
        what = f"cannot write the run to {error.filename or out or RUNS}: {error.strerror} (errno {error.errno})"
        raise Problem(what, "choose another --out, or make room there") from error


def goes_on(out: str | None, resume: Resume) -> bool:
    """Whether a run is to continue in its directory, or is begun there."""
    return resume is True or (resume == "auto" and can_go_on(Path(out or "")))


def began_with(out: str | None, resume: Resume) -> RunRecord | None:
    """The record of a run that continues; None for one that begins, or had not begun when it ended."""
    path = Path(out or "") / RUN_FILE
    record = run_record(path) if goes_on(out, resume) and path.is_file() else None
    return record if record is not None and record.store.content else None


def can_go_on(directory: Path) -> bool:
    """Whether a directory holds a run that has ever saved a checkpoint, good or not."""
    return (directory / RUN_FILE).is_file() and bool(CheckpointFiles(directory / "checkpoints").names())


def newest_run() -> Path:
    """The run in `runs` that was started or resumed last; ValueError if there is none."""
    begun: dict[Path, float] = {}  # seconds since 1970
    for path in RUNS.glob(f"*/{RUN_FILE}"):
        begun[path.parent] = path.stat().st_mtime
        # Damaged: the file's time must do; the user of the run reports what is wrong.
        with contextlib.suppress(Problem, KeyError, TypeError, ValueError):
            record = run_record(path)
            if record.state == "starting":  # it has not begun to train
                del begun[path.parent]
            else:
                begun[path.parent] = datetime.fromisoformat(record.started).timestamp()
    if not begun:
        raise ValueError(
            f"no run in {RUNS}/; train one first (python -m domainpar.train), "
            "or name it with --run (pretrained:NAME for a shipped network)."
        )
    return max(begun, key=lambda run: (begun[run], run))


def figure_of(record: Mapping[str, Any], main: str) -> float | None:
    """The figure of a validation that selects the best checkpoint, the larger the better; None: not counted.

    `main` is the main task of the network: a label, or `edge`.
    """
    if record["loss"] is None:
        return None
    figures = record.get("labels", {}).get(main, {})
    if figures.get("rmse") is not None:
        return -float(figures["rmse"])
    # `edge` is `nn.heads.EDGE`, which would bring torch along.
    figure: float | None = record.get("edge_auc_pooled") if main == "edge" else figures.get("accuracy")
    return figure


def state_of(directory: Path, record: RunRecord) -> str:
    """The state of a run by its record; `died` if that says that it is at work, and its process is gone."""
    # A process that was killed could not change the word.
    at_work = record.state in ("starting", "running")
    return "died" if at_work and left_behind(directory, RUN) else record.state or "unknown"


def read_run(directory: Path) -> RunRecord:
    """The record of a run that has begun, and so knows its store; ValueError if there is none to be read."""
    path = directory / RUN_FILE
    if not path.is_file():
        raise ValueError(f"{directory} is not a run: it has no run.json; name the directory of one with --run.")
    record = run_record(path)
    for name in ("path", "digest", "feature_names", "edge_feature_names"):
        if name not in record.store.content:
            raise Problem(f"{path} cannot be read: it does not say store.{name}", "name another run")
    return record


def note_failure(directory: Path, rank: int, error: BaseException) -> None:
    """Write into a run's directory that it failed and why; called on the failed rank. The first message stays.

    If a rank did not come, `faults/` gets the board of all ranks, as rank N saw it.
    """
    with contextlib.suppress(OSError, ValueError):  # the failure matters more than this note of it
        texts = {directory / "logs" / f"rank_{rank}.txt": "".join(traceback.format_exception(error))}
        if board := getattr(error, "board", ""):
            texts[directory / "faults" / f"status_of_rank_{rank}.txt"] = board + "\n"
        for path, text in texts.items():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, text.encode())
        file = RunFile(directory / RUN_FILE, run_record(directory / RUN_FILE))
        if file.record.state != "failed":
            reason = str(error).splitlines()[0] if board else str(error)  # the rest is the board
            file.update(state="failed", error=f"rank {rank}: {type(error).__name__}: {reason}")


def _next_number() -> Path:
    """Make the next numbered directory. Of two runs that start at once, one takes the number after."""
    taken = (int(path.name) for path in RUNS.glob("[0-9]*") if path.name.isdigit() and path.is_dir())
    number = max(taken, default=0) + 1
    RUNS.mkdir(parents=True, exist_ok=True)
    while True:
        directory = RUNS / f"{number:04d}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir()  # exactly one of those that try succeeds
            return directory
        number += 1


def _check_free(directory: Path, restart: bool, overwrite: bool) -> None:
    """Refuse a directory that belongs to something else."""
    if not directory.exists() or all(path.name == RUN.lock for path in directory.iterdir()):
        return
    is_run = (directory / RUN_FILE).is_file()
    if is_run and restart and not overwrite:
        return
    if overwrite:
        stranger = next(strangers_in_run(directory) if is_run else iter(sorted(directory.iterdir())), None)
        if stranger is None:
            return
        raise Problem(
            f"{directory} holds files that are not a run ({stranger.relative_to(directory)}); --overwrite does not "
            "remove those",
            "move them away, or choose another --out",
        )
    what, instead = ("another run", ", or --resume or --overwrite it") if is_run else ("other files", "")
    raise Problem(f"{directory} holds {what}", f"choose another --out{instead}")


def _try_to_write(directory: Path) -> None:
    """Check that there is room and permission, before hours are spent on results that cannot be kept."""
    trial = directory / f".trial-{uuid.uuid4().hex}"
    try:
        write_synced(trial, bytes(_BYTES_TO_TRY))
    except OSError as error:
        error.filename = str(directory)  # a failing write names no file
        raise
    finally:
        trial.unlink(missing_ok=True)
