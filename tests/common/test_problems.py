"""Errors about files: what a file is comes before what its reader made of it."""

import sys
from pathlib import Path

import pytest
import small_run
from marks import fault
from random_store import write_random_store
from source_files import read_file

from domainpar.common.problems import Problem, as_problem
from domainpar.runs.checkpoint_files import FILES, CheckpointFiles
from domainpar.runs.records import run_record
from domainpar.testing import run_command
from domainpar.tracking.command_line import config_of_run
from domainpar.tracking.diagnosis.files import event_problem
from domainpar.tracking.display.run_files import read_run_files
from domainpar.tracking.events.colliderml import ColliderMLEvents
from domainpar.tracking.events.embedding import Embedding
from domainpar.tracking.events.given_edges import GivenEdges
from domainpar.tracking.events.graph import Hits
from domainpar.tracking.events.module_map import ModuleMap
from domainpar.tracking.events.store import EventStore, StoredEvent
from domainpar.tracking.scoring import tuning
from domainpar.tracking.scoring.score_files import list_of, read_scores
from domainpar.tracking.training.acorn_checkpoint import read_network

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"

READERS = {
    "event1.npz": lambda path: read_file("heptrkx", path),
    "event1.pt": lambda path: read_file("pyg", path),
    "event1.pyg": lambda path: read_file("acorn", path),
    "event1-hits.csv": lambda path: read_file("trackml", path),
    "event1-hits.csv.gz": lambda path: read_file("trackml", path),
    "ttbar_tracker_hits/train.parquet": lambda path: ColliderMLEvents(path.parent),
    "event1-graph.csv": lambda path: edges_of(path, "1", 3),
    "gnn.ckpt": read_network,
    "module_map.safetensors": ModuleMap.read,
    "embedding.safetensors": Embedding.read,
    "manifest.json": lambda path: EventStore(path.parent),
    "event1.zarr.zip": StoredEvent,
    "event1.scores.zarr.zip": read_scores,
    "scores.json": lambda path: list_of(path.parent),
    "run.json": run_record,
    "config.yaml": lambda path: config_of_run(path.parent),
    "tracks.json": lambda path: tuning.read(path.parent),
    "last": lambda path: CheckpointFiles(path.parent).pointed("last"),
}


def edges_of(path, event, num_hits):
    return GivenEdges(path.parent).edges(Hits.bare(event, range(num_hits), None), None)


def refused_as_a_pointer(path, read):
    path.parent.mkdir(exist_ok=True)
    path.write_text(POINTER)
    with pytest.raises(ValueError, match="Git LFS") as refused:
        read(path)
    text = str(refused.value)
    assert f"{path} is a Git LFS pointer" in text
    assert text.count(str(path)) == 1
    assert text.endswith(f"hint: git -C {path.parent} lfs pull")


@fault(16)
@pytest.mark.parametrize("name", READERS)
def test_every_reader_names_a_file_that_git_lfs_has_not_fetched(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install '.[parquet]')")
    refused_as_a_pointer(tmp_path / name, READERS[name])


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.jsonl", "scores/scores.json"])
def test_so_does_the_report_of_a_run(tmp_path, name):
    run = small_run.write_run(tmp_path, [small_run.drawn(6, num_edges=5)])
    refused_as_a_pointer(run / name, lambda path: read_run_files(run))


def test_so_do_a_store_and_the_doctor_for_an_event_of_it(tmp_path):
    store = EventStore(write_random_store(tmp_path, 1, 0))
    (record,) = store.events()
    refused_as_a_pointer(tmp_path / record.path, lambda path: store.open(record))
    assert "git lfs pull" in event_problem(tmp_path, vars(record))


def test_so_does_a_checkpoint_for_each_of_its_files(tmp_path):
    files = CheckpointFiles(tmp_path)
    for name in (*FILES, "manifest.json"):
        place = files.write(3, dict.fromkeys(FILES, b"some"), best=False)
        refused_as_a_pointer(place / name, lambda path: CheckpointFiles(tmp_path).read("step_000003"))
    with pytest.raises(Problem, match="git lfs pull"):
        CheckpointFiles(tmp_path).choose()


def test_a_path_that_the_locale_cannot_write_is_shown_with_the_remedy(tmp_path):
    path = tmp_path / "config.yaml"
    store = write_random_store(tmp_path / "store", 1, 0)
    path.write_text(f"out: {tmp_path}/caf\u00e9\nstore: {store}\n", encoding="utf-8")
    program = [sys.executable, "-m", "domainpar.train", "--config", str(path)]
    code, printed = run_command(program, 60, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    assert code == 2
    assert "caf\\xe9' holds letters that ascii" in printed
    assert "LC_ALL=C.UTF-8, or PYTHONUTF8=1\n" in printed


def test_another_folder_is_advised_only_where_the_flag_may_name_the_full_one():
    full = as_problem(OSError(28, "No space left on device", "/home/kernel.nbc"))
    assert full.file == "/home/kernel.nbc"
    assert "--out names that place, choose another" in full.hint
    somewhere = as_problem(OSError(28, "No space left on device"))
    assert "df -h" in somewhere.hint
    assert "choose another" not in somewhere.hint


def test_a_file_is_named_once():
    assert str(Problem("a/b.json cannot be read: it ends early", file=Path("a/b.json"))).count("a/b.json") == 1
    assert str(Problem("it ends early", file="a/b.json")) == "it ends early | file a/b.json"
    assert str(Problem("a/b.json.zip is another one", file="a/b.json")).endswith(" | file a/b.json")
