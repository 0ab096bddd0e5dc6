import importlib
import json
import os
from pathlib import Path

import everything
import measuring
import pytest

GOOD = '''"""Is all well?

More words."""
import flags
import measuring

parser = flags.parser(None, "good", case="small")
results = measuring.Results("good", parser.parse_args())
results.add(seconds=1.5)
results.show("A table", {"case": lambda row: "a|b", "": lambda row: "2 *"}, [None], "* a note")
'''
BAD = '"""Is all bad?"""\nprint("before it broke")\nraise SystemExit(3)\n'
LATE = '"""How long?"""\nimport time\nprint("it began")\ntime.sleep(60)\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in {"good": GOOD, "bad": BAD, "late": LATE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    benches = [everything.Bench(name, "", "--case tiny" if name == "good" else "") for name in ("bad", "good", "late")]
    monkeypatch.setattr(everything, "BENCHES", (*benches, everything.Bench("gone", "", "")))
    monkeypatch.setattr(everything, "HERE", tmp_path)
    bench = Path(measuring.__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (bench, bench.parent))))
    (tmp_path / "RESULTS.md").write_text("# Results\n\nBy hand.\n")
    return tmp_path


def run(folder, *flags):
    return everything.main([*flags, "--lines", str(folder / "lines"), "--write", str(folder / "RESULTS.md")])


def test_what_fails_is_shown_the_others_still_run_and_the_section_is_replaced_and_all_else_stays(folder, capsys):
    assert run(folder, "--only", "bad", "gone", "good") == 1
    section = (folder / "RESULTS.md").read_text()
    assert section.startswith("# Results\n\nBy hand.\n\n" + everything.BEGIN)
    assert "### bad\n\nIs all bad?\n" in section
    assert "**Failed with exit code 3.** The last it printed:\n\n```\nbefore it broke\n```" in section
    assert "gone.py does not exist" in section
    assert "Is all well?\n\n`bench/good.py --case tiny`" in section
    assert "**A table**\n\n| case |  |\n| --- | --- |\n| a\\|b | 2 * |\n\n\\* a note\n" in section
    assert "OMP_NUM_THREADS=1" in section
    assert "failed with exit code 3" in capsys.readouterr().out
    (folder / "RESULTS.md").write_text(section + "\nMore by hand.\n")
    assert run(folder, "--only", "good") == 0
    again = (folder / "RESULTS.md").read_text()
    assert again.startswith("# Results\n\nBy hand.\n")
    assert again.endswith(f"{everything.END}\n\nMore by hand.\n")
    assert again.count("A table") == 1
    assert "Is all bad?" not in again
    assert len((folder / "lines" / "good.jsonl").read_text().splitlines()) == 2  # those of this run alone


def test_what_takes_too_long_is_ended(folder):
    assert run(folder, "--only", "late", "--timeout", "2") == 1
    assert "**Its time was up.** The last it printed:\n\n```\nit began\n" in (folder / "RESULTS.md").read_text()


def test_a_section_without_an_end_is_left_alone(folder):
    text = f"{everything.BEGIN}\nno end\n"
    (folder / "RESULTS.md").write_text(text)
    with pytest.raises(SystemExit, match="found 1 and 0"):
        run(folder, "--only", "good")
    assert (folder / "RESULTS.md").read_text() == text


def test_no_bench_is_forgotten():
    programs = {path.stem for path in everything.HERE.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    assert {bench.name for bench in everything.BENCHES} | set(everything.ALONE) == programs - {"everything"}


@pytest.mark.parametrize("real", [False, True], ids=["simulated", "real"])
@pytest.mark.parametrize("full", [False, True], ids=["short", "full"])
@pytest.mark.parametrize("bench", everything.BENCHES, ids=lambda bench: bench.name)
def test_every_bench_understands_what_it_is_called_with(bench, full, real):
    flags = [*(["--full"] if full else []), *(["--data", "a folder", "--event", "1012"] if real else [])]
    arguments = everything.arguments_of(bench, everything.parse(flags))
    options = importlib.import_module(bench.name).parse(arguments)
    if real and bench.real:
        assert options.data == Path("a folder")
    else:
        assert getattr(options, "data", None) is None


def test_tables_are_kept_as_printed(tmp_path):
    import argparse

    options = argparse.Namespace(results=tmp_path / "lines.jsonl", width=80)
    results = measuring.Results("some", options)
    results.show("Title", {"a": str, "b": lambda row: f"{row / 3:.2f}"}, [1, 2], "note")
    (line,) = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert line["table"] == {
        "title": "Title",
        "headings": ["a", "b"],
        "cells": [["1", "0.33"], ["2", "0.67"]],
        "note": "note",
    }
    assert line["commit"]
