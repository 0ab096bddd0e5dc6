"""Every run has a directory of its own, and says in it how it stands."""

import json
import os

import pytest

from domainpar import __version__
from domainpar.training.rundir import RunFile, choose_directory, describe_process, newest_run, note_failure


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fresh(out=None):
    return choose_directory(out, resume=False, overwrite=False)


def test_runs_are_numbered_after_the_largest_number_and_the_newest_is_found():
    with pytest.raises(ValueError, match=r"no run in runs/; train one first \(python -m domainpar.train\)"):
        newest_run()
    assert [str(fresh()) for _ in range(2)] == ["runs/0001", "runs/0002"]
    os.rename("runs/0001", "runs/9999")
    assert str(fresh()) == "runs/10000"
    fresh("runs/mine")
    assert str(newest_run()) == "runs/10000"
    assert str(fresh()) == "runs/10001"


def test_two_runs_that_start_at_once_get_two_directories(monkeypatch):
    fresh()
    monkeypatch.setattr("domainpar.training.rundir._numbered", lambda runs: [])  # both looked before either made it
    assert str(fresh()) == "runs/0002"


def test_a_new_directory_is_a_run_from_the_first_moment():
    directory = fresh("deep/down/run")
    assert json.loads((directory / "run.json").read_text()) == {"state": "starting"}
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoints", "logs", "run.json"]
    os.mkdir("empty")
    assert str(fresh("empty")) == "empty"


def test_another_run_is_refused_and_left_as_it_is():
    directory = fresh("run")
    (directory / "metrics.jsonl").write_text("precious\n")
    with pytest.raises(ValueError, match="run holds another run; choose another --out, or --resume or --overwrite it"):
        fresh("run")
    assert (directory / "metrics.jsonl").read_text() == "precious\n"
    choose_directory("run", resume=False, overwrite=True)
    assert not (directory / "metrics.jsonl").exists()


def test_files_that_are_no_run_are_never_removed(here):
    (here / "notes").mkdir()
    (here / "notes" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="notes holds other files; choose another --out"):
        fresh("notes")
    with pytest.raises(ValueError, match="notes holds files that are not a run; --overwrite does not remove those"):
        choose_directory("notes", resume=False, overwrite=True)
    assert (here / "notes" / "thesis.tex").read_text() == "precious"


def test_a_run_is_resumed_where_it_lies_and_nothing_is_made_where_there_is_none(here):
    directory = fresh("run")
    (directory / "metrics.jsonl").write_text("precious\n")
    assert choose_directory("run", resume=True, overwrite=False) == directory
    assert (directory / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="none holds no run to resume"):
        choose_directory("none", resume=True, overwrite=False)
    assert not (here / "none").exists()


def test_a_file_in_the_way_is_named(here):
    (here / "file").write_text("")
    for out in ("file", "file/run"):
        with pytest.raises(ValueError, match=f"cannot write the run to {out}: Not a directory; choose another --out"):
            fresh(out)


def test_run_json_is_replaced_whole_and_read_back(here):
    file = RunFile(here / "run.json")
    file.update(state="running", ranks=3)
    file.update(state="done")
    assert RunFile.read(here / "run.json").content == {"ranks": 3, "state": "done"}
    assert [path.name for path in here.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "{", "3", "\xff"])
def test_a_damaged_run_json_is_named(here, text):
    (here / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"run\.json cannot be read: "):
        RunFile.read(here / "run.json")


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


def test_the_process_is_described_by_versions_command_and_machine():
    about = describe_process()
    assert about["versions"]["domainpar"] == __version__
    assert about["versions"]["torch"]
    assert {"argv", "host", "machine", "started"} <= set(about)
