"""Every run has a directory of its own, and says in it how it stands."""

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from marks import fault

from domainpar.common.lock import RUN, Holder
from domainpar.common.models import as_json, read_as
from domainpar.common.problems import Problem
from domainpar.runs import directory as rundir
from domainpar.runs.directory import (
    RunDirectory,
    can_go_on,
    choose_directory,
    newest_run,
    note_failure,
    state_of,
)
from domainpar.runs.records import RunFile, RunRecord, run_record


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(out=None, resume=False, overwrite=False):
    """The directory of a run that has ended at once."""
    directory = choose_directory(out, resume, overwrite)
    directory.release()
    return directory


def fresh(out=None):
    return chosen(out).path


def test_runs_are_numbered_after_the_largest_number():
    assert [str(fresh()) for _ in range(2)] == ["runs/0001", "runs/0002"]
    os.rename("runs/0001", "runs/9999")
    assert str(fresh()) == "runs/10000"
    fresh("runs/mine")
    assert str(fresh()) == "runs/10001"


def test_the_newest_run_is_the_one_that_was_started_last_whatever_it_is_called():
    fresh()
    with pytest.raises(ValueError, match=r"no run in runs/; .*first \(python -m domainpar.train\)"):
        newest_run()  # it has not begun
    for name, started in (("0007", "2026-03-01T12:00:00+0000"), ("on-8", "2026-03-01T14:00:00.500+02:00"), ("a", None)):
        file = RunFile(fresh(f"runs/{name}") / "run.json")
        file.update(state="done", **({} if started is None else {"started": started}))
        os.utime(file.path, (0, 0))  # of a run that does not say when, the file's time has to do
    assert str(newest_run()) == "runs/on-8"
    RunFile(Path("runs/0007/run.json"), run_record(Path("runs/0007/run.json"))).update(
        started="2026-03-01T12:00:00.501+00:00"
    )
    assert str(newest_run()) == "runs/0007"
    Path("runs/a/run.json").write_text("{")  # damaged, and written last: it is taken, and whoever takes it says so
    assert str(newest_run()) == "runs/a"


def test_two_runs_that_start_at_once_get_two_directories(monkeypatch):
    fresh()
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))  # both looked before either made it
    assert str(fresh()) == "runs/0002"


def test_a_new_directory_is_a_run_from_the_first_moment():
    directory = fresh("deep/down/run")
    assert json.loads((directory / "run.json").read_text()) == {"state": "starting"}
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoints", "run.json"]
    os.mkdir("empty")
    assert str(fresh("empty")) == "empty"


@fault(14)
def test_another_run_is_refused_and_left_as_it_is():
    directory = fresh("run")
    (directory / "metrics.jsonl").write_text("precious\n")
    with pytest.raises(ValueError, match="run holds another run\nhint: .*--out, .*--resume .*--overwrite"):
        fresh("run")
    assert (directory / "metrics.jsonl").read_text() == "precious\n"
    chosen("run", overwrite=True)
    assert not (directory / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["notes.txt", "pictures/tracks.png", "scores/notes.txt", "checkpoints/step_000001/a"])
def test_a_file_of_ones_own_in_a_run_is_named_and_nothing_is_removed(here, name):
    directory = fresh("run")
    own = directory / name
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text("precious")
    before = contents(here)
    shown = name if name != "pictures/tracks.png" else "pictures"
    with pytest.raises(Problem, match=rf"not a run \({shown}\); --overwrite "):
        choose_directory("run", resume=False, overwrite=True)
    assert contents(here) == before
    own.unlink()


def test_what_is_removed_of_a_run_is_said(here):
    directory = fresh("run")
    for name in ("scores/scores.json", "scores/event7.scores.zarr.zip", "report.html", "logs/rank_0.txt"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    found = chosen("run", overwrite=True)
    (note,) = found.notes
    assert note.endswith(" run: checkpoints/, logs/, report.html, scores/, run.json")
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoints", "run.json"]


@fault(14)
def test_files_that_are_no_run_are_never_removed(here):
    (here / "notes").mkdir()
    (here / "notes" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="notes holds other files\nhint: .*--out"):
        fresh("notes")
    with pytest.raises(ValueError, match=r"not a run \(thesis.tex\); --overwrite "):
        choose_directory("notes", resume=False, overwrite=True)
    assert (here / "notes" / "thesis.tex").read_text() == "precious"


def test_a_run_is_resumed_where_it_lies_and_nothing_is_made_where_there_is_none(here):
    directory = fresh("run")
    (directory / "metrics.jsonl").write_text("precious\n")
    found = chosen("run", resume=True)
    assert (found.path, found.resume) == (directory, True)
    assert (directory / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="none holds no run to resume"):
        choose_directory("none", resume=True, overwrite=False)
    assert not (here / "none").exists()


@fault(13)
def test_a_file_in_the_way_is_named(here):
    (here / "file").write_text("")
    for out in ("file", "file/run"):
        with pytest.raises(Problem, match=rf"{out}: .*\(errno 20\)"):
            fresh(out)


def contents(directory):
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@fault(13)
@pytest.mark.parametrize("resume", [False, True, "auto"])
def test_a_disk_that_is_full_is_found_before_training_and_nothing_is_left(here, monkeypatch, resume):
    directory = fresh("run")
    (directory / "checkpoints" / "step_000001").mkdir()
    before = contents(here)

    def fsync(descriptor, plain=os.fsync):
        if os.fstat(descriptor).st_size > 10_000:  # a small file there may be room for
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    out = "run" if resume else "other"
    with pytest.raises(Problem, match=f"{out}.*: .*errno 28"):
        choose_directory(out, resume, overwrite=False)
    monkeypatch.undo()
    assert contents(here) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_in_which_a_run_is_at_work_is_never_touched(here, overwrite):
    running = choose_directory("run", resume=False, overwrite=False)
    before = contents(here)
    for resume in (False, True, "auto"):
        with pytest.raises(Problem, match=f"process {os.getpid()} on host|holds another run"):
            choose_directory("run", resume, overwrite)
    assert contents(here) == before
    running.release()
    chosen("run", resume=True)


def test_a_run_that_has_come_and_gone_before_the_directory_was_claimed_is_not_replaced(here, monkeypatch):
    def take(directory, work, plain=rundir.Claim.take):
        (directory / "run.json").write_text("precious")
        return plain(directory, work)

    monkeypatch.setattr(rundir.Claim, "take", take)
    with pytest.raises(Problem, match="run holds another run"):
        choose_directory("run", resume=False, overwrite=False)
    assert {path.name: path.read_text() for path in (here / "run").iterdir()} == {"run.json": "precious"}


@fault(14)
def test_resume_auto_begins_where_there_is_nothing_and_goes_on_where_there_is_a_checkpoint(here):
    (here / "empty").mkdir()
    for out in ("new", "empty"):
        begun = chosen(out, resume="auto")
        assert (begun.resume, begun.notes) == (False, ())
        (begun.path / "metrics.jsonl").write_text("of the run that was killed")
        again = chosen(out, resume="auto")
        assert not again.resume
        assert "never saved a checkpoint" in again.notes[0]
        assert (begun.path / "metrics.jsonl").read_text() == "of the run that was killed"
        assert not can_go_on(begun.path)
        (begun.path / "checkpoints" / "step_000003").mkdir()  # damaged: to be refused later, never to be begun again
        assert chosen(out, resume="auto").resume
    (here / "notes").mkdir()
    (here / "notes" / "thesis.tex").write_text("precious")
    with pytest.raises(Problem, match="notes holds other files"):
        chosen("notes", resume="auto")


@pytest.mark.parametrize("state", ["starting", "running"])
def test_a_run_whose_process_is_gone_has_ended_without_a_word(here, state):
    directory = choose_directory("run", resume=False, overwrite=False)
    assert state_of(directory.path, RunRecord.of(state=state)) == state
    directory.release()
    gone = Holder.here()
    (directory.path / RUN.lock).write_text(json.dumps(asdict(gone)))
    assert state_of(directory.path, RunRecord.of(state=state)) == "died"
    elsewhere = replace(gone, host="elsewhere")
    (directory.path / RUN.lock).write_text(json.dumps(asdict(elsewhere)))
    assert state_of(directory.path, RunRecord.of(state=state)) == state, "who is there cannot be seen from here"
    (directory.path / RUN.lock).unlink()
    assert state_of(directory.path, RunRecord.of(state=state)) == "died"
    assert [state_of(directory.path, record) for record in (RunRecord.of(state="done"), RunRecord.of())] == [
        "done",
        "unknown",
    ]


def test_the_choice_travels_to_other_ranks_as_text():
    directory = choose_directory("run", resume=False, overwrite=False)
    assert read_as(RunDirectory, json.loads(json.dumps(directory, default=as_json))) == directory
    directory.release()


def test_run_json_is_replaced_whole_and_read_back(here):
    file = RunFile(here / "run.json")
    file.update(state="running", ranks=3)
    file.update(state="done")
    assert json.loads((here / "run.json").read_text()) == {"ranks": 3, "state": "done"}
    assert run_record(here / "run.json") == file.record
    assert [path.name for path in here.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "{", "3", "\xff"])
def test_a_damaged_run_json_is_named(here, text):
    (here / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"run\.json cannot be read: "):
        run_record(here / "run.json")


def test_a_failure_is_noted_by_the_first_rank_that_fails(here):
    directory = fresh("run")
    for rank in (2, 0):
        try:
            raise KeyError(f"no such thing on {rank}")
        except KeyError as error:
            note_failure(directory, rank, error)
    content = json.loads((directory / "run.json").read_text())
    assert content == {"state": "failed", "error": "rank 2: KeyError: 'no such thing on 2'"}
    assert sorted(path.name for path in (directory / "logs").iterdir()) == ["rank_0.txt", "rank_2.txt"]
    assert "Traceback" in (directory / "logs" / "rank_2.txt").read_text()
    note_failure(here / "gone", 1, KeyError())
