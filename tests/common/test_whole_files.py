"""Files of runs, scores and stores appear whole or not at all: nothing in the program writes a file in another way."""

import ast
from pathlib import Path

import pytest
from killed import names_and_syncs

from domainpar.common.atomic_files import write_whole

ROOT = Path(__file__).parents[2]
FILES = sorted(path for room in ("domainpar", "partitioners") for path in (ROOT / room).rglob("*.py"))

WRITERS = {"write_text", "write_bytes", "write_synced", "to_csv", "to_parquet", "savez", "save_file", "write_html"}
ELSEWHERE = {
    "domainpar/common/atomic_files.py": "the place itself",
    "domainpar/tracking/command_line.py": "/dev/null",
    "domainpar/diagnosis/launcher_checks.py": "a temporary file of a process that is waited for",
    "domainpar/testing.py": "likewise",
    "domainpar/runs/checkpoint_files.py": "a folder that appears whole",
    "domainpar/measure/forecast.py": "/proc",
    "domainpar/tracking/training/record.py": "lines that are added",
    "domainpar/runs/directory.py": "a trial whether there is room",
    "domainpar/tracking/events/acts_maker.py": "a temporary folder, from which finished files move to their place",
    "domainpar/tracking/scoring/acts_finder.py": "a temporary folder",
}
"""Files with another way to write, and why."""


def writers(text):
    """The names of calls that write a file under its own name."""
    found = []
    if not any(name in text for name in (*WRITERS, "open")):
        return found
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [one.value for one in (*node.args, *(word.value for word in node.keywords))
                 if isinstance(one, ast.Constant) and isinstance(one.value, str)]  # fmt: skip
        if name in WRITERS or (name == "open" and any(mode and set(mode) <= set("waxbt+") for mode in modes)):
            found.append(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_writes_a_file_in_place(path):
    name = str(path.relative_to(ROOT))
    assert name in ELSEWHERE or not writers(path.read_text())


def test_what_is_looked_for_is_found():
    for text in ("p.write_text(t)", "open(p, 'w')", "p.open('ab')", "open(p, mode='x')", "frame.to_csv(p)"):
        assert writers(text), text
    for text in ("open(p)", "p.open('rb')", "store.open(record)", "write_whole(p, b'')"):
        assert not writers(text), text


def test_each_other_way_is_there():
    assert all(writers((ROOT / name).read_text()) for name in ELSEWHERE)


def test_a_file_is_on_the_disk_and_then_its_name_before_the_call_returns(tmp_path, monkeypatch):
    done = names_and_syncs(monkeypatch)
    write_whole(tmp_path / "new" / "a", b"1")
    assert done[:3] == ["file", "replace", "directory"]
