"""Records of runs and scores: what a file says, the same bytes again, and known by string keys in one room only."""

import ast
import json
from pathlib import Path

import pytest

import domainpar
from domainpar.common.atomic_files import json_bytes
from domainpar.common.problems import Problem
from domainpar.runs.records import RunFile, RunRecord, ScoredEvent, ScoresRecord, StoreRecord, run_record, scores_record
from domainpar.tracking.training.pretrained import PLACE

PACKAGE = Path(domainpar.__file__).parent
OF_OTHER_FILES = {
    "format", "schema_version", "path", "events", "event", "mode", "sectors", "step", "state", "error", "store",
    "seconds", "steps", "filter", "scales", "edges", "metrics", "target", "run", "tracks", "filters", "machine",
    "host", "digest", "sha256", "ranks", "threads", "memory", "precision", "dtype", "tasks", "skipped", "versions",
    "argv", "environment", "exchanges", "checkpoint", "learned_from", "feature_names", "edge_feature_names",
    "logits_sha256", "event_sha256", "parameters_sha256", "git", "absolute", "trained_on",
}  # fmt: skip
"""Names that other files, or tables in memory, have as well."""


@pytest.mark.parametrize("path", sorted(PLACE.glob("*/run.json")), ids=lambda path: path.parent.name)
def test_a_run_that_is_shipped_is_read_and_written_byte_for_byte(path):
    assert json_bytes(run_record(path).content) == path.read_bytes()


def test_what_a_file_lacks_is_not_written_and_what_another_version_wrote_stays(tmp_path):
    content = {"state": "done", "store": {"path": "s", "of_another": 1}, "of_another": [1, {"a": None}], "error": None}
    (tmp_path / "run.json").write_bytes(json_bytes(content))
    record = run_record(tmp_path / "run.json")
    assert (record.state, record.store.path, record.store.events, record.seconds) == ("done", "s", None, None)
    file = RunFile(tmp_path / "run.json", record)
    file.update(state="running", steps=None)
    assert json.loads(file.path.read_text()) == {**content, "state": "running", "steps": None}
    assert record.without("state", "error").content == {name: content[name] for name in ("store", "of_another")}


def test_scores_list_their_events_and_are_read_back(tmp_path):
    events = [ScoredEvent("7", "event7.scores.zarr.zip", "ab", "cd", 5, 1)]
    record = ScoresRecord.of(mode="naive", events=events, store=StoreRecord.of(path="s", absolute="/s"), tasks=None)
    (tmp_path / "scores.json").write_bytes(json_bytes(record.content))
    assert scores_record(tmp_path / "scores.json") == record
    assert record.by_event["7"].edges == 5


@pytest.mark.parametrize(
    "content",
    [
        {"store": 3}, {"store": {"events": [1]}}, {"store": {"events": {"train": [["a"]], "val": []}}},
        {"store": {"events": {"train": []}}}, [1, 2], {"state": 3}, {"saved": ["a"]}, {"store": {"path": None}},
        {"skipped": [7]}, {"versions": "3.11"}, {"store": {"scales": "1"}},
    ],
)  # fmt: skip
def test_a_value_that_was_not_written_so_is_refused_with_the_file(tmp_path, content):
    (tmp_path / "run.json").write_bytes(json_bytes(content))
    with pytest.raises(Problem, match=r"run\.json cannot be read: \w+Error: "):
        run_record(tmp_path / "run.json")


def keys(tree):
    """Constant strings that a table is asked for, or is asked to get."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield node.slice.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            yield from (it.value for it in node.args[:1] if isinstance(it, ast.Constant))


def test_no_other_room_knows_the_names_in_these_files():
    names = set().union(*(kind.__struct_fields__ for kind in (RunRecord, StoreRecord, ScoresRecord, ScoredEvent)))
    names -= {*OF_OTHER_FILES, "content"}
    assert len(names) >= 19
    used = {
        f"{path.relative_to(PACKAGE)}: {key}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "runs"
        for key in keys(ast.parse(path.read_text(encoding="utf-8")))
        if key in names
    }
    assert used == set()
