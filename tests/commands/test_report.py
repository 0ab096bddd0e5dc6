"""`python -m domainpar.report`: one file of a run, or one clear refusal and nothing written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import drawn, write_run

from domainpar.report import main
from domainpar.testing import patient
from domainpar.tracking.command_line import parse
from domainpar.tracking.config import ConfigError, ExportConfig, ReportConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    graphs = [drawn(6, num_edges=5, event_id=name) for name in "abc"]
    return write_run(tmp_path_factory.mktemp("report"), graphs, tracks=False)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("r", {"run": "r"}),
        ("r --event e", {"run": "r", "event": "e"}),
        ("--event e r", {"run": "r", "event": "e"}),
        ("--event=e r", {"run": "r", "event": "e"}),
        ("--run r --out o", {"run": "r", "out": "o"}),
        ("", {}),
    ],
)
def test_the_run_may_stand_alone(typed, read):
    assert parse(ExportConfig, "", typed.split()) == ExportConfig(**read)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("r s", {"run": "r", "beside": "s"}),
        ("--event e r --out o s", {"run": "r", "beside": "s", "event": "e", "out": "o"}),
        ("--run=r s", {"run": "r", "beside": "s"}),
    ],
)
def test_a_second_run_may_stand_behind_it(typed, read):
    assert parse(ReportConfig, "", typed.split()) == ReportConfig(**read)


@pytest.mark.parametrize(
    ("config_class", "typed"), [(ExportConfig, "--run=r s"), (ReportConfig, "r --beside s t"), (ReportConfig, "r s t")]
)
def test_one_run_more_than_there_are_places_for_is_refused(config_class, typed):
    with pytest.raises(ConfigError, match=f"no flag: {typed[-1]}"):
        parse(config_class, "", typed.split())


@pytest.mark.parametrize("words", [[], ["--run"]], ids=["alone", "with its flag"])
def test_one_file_is_written_into_the_run(run, capsys, words):
    assert main([*words, str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"report: {run / 'report.html'} (")
    text = (run / "report.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert 5e4 < len(text) < 5e5
    (run / "report.html").unlink()


def test_event_parts_and_file_can_be_named(run, tmp_path):
    assert main([str(run), "--event", "b", "--parts", "3", "--out", str(tmp_path / "x" / "b.html")]) == 0
    text = (tmp_path / "x" / "b.html").read_text()
    assert re.search("Event b .*train.* 6 hits, 5 candidate edges.* 3 parts", text)
    assert not (run / "report.html").exists()


@pytest.mark.slow
def test_pictures_are_drawn_on_request_and_what_is_left_out_is_named(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([str(run), "--png", str(tmp_path / "p"), "--out", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    drawn_ones = sorted(path.name for path in (tmp_path / "p").iterdir())
    assert {"training.png", "event-parts.png"} <= set(drawn_ones)
    for name in drawn_ones:
        assert f"picture: {tmp_path / 'p' / name}" in printed
    assert "track-efficiency.png left out: " in printed
    (tmp_path / "a file").touch()
    assert main([str(run), "--png", str(tmp_path / "a file"), "--out", str(tmp_path / "page.html")]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.endswith(f"(errno 17) | file {tmp_path / 'a file'}")
    assert "--png" in hint
    pictures = tmp_path / "p"
    assert main([str(run), "--png", str(pictures), "--out", str(tmp_path / "page.html")]) == 0
    (pictures / "training.png").write_bytes(b"of somebody else")
    for name in set(drawn_ones) - {"training.png"}:
        (pictures / name).unlink()
    capsys.readouterr()
    assert main([str(run), "--png", str(pictures), "--out", str(tmp_path / "page.html")]) == 2
    assert re.search(f"{pictures / 'training.png'} .*\nhint: move", capsys.readouterr().err)
    assert {path.name: path.read_bytes() for path in pictures.iterdir()} == {"training.png": b"of somebody else"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no-such-run"], "no-such-run is not a run: it has no run.json"),
        (["{run}", "--event", "z"], "has no event 'z' to show; it has c, a, b"),
        (["{run}", "--parts", "0"], "--parts is 0; it must be at least 1"),
        (["{run}", "--scores", "{run}"], "holds no scores"),
        (["{run}", "another"], "another is not a run: it has no run.json"),
        (["{run}", "{run}"], "is the run itself: name another one to lie beside it"),
        (["{run}", "one", "more"], "belong to no flag: more"),
        (["{run}", "--beside", "pretrained:none"], "no network 'none' is shipped"),
        (["{run}", "--even", "z"], "unknown flag --even"),
    ],
)
def test_what_cannot_be_shown_is_refused_once(run, capfd, words, told):
    before = sorted(run.iterdir())
    assert main([word.format(run=run) for word in words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert told in err.splitlines()[0]
    assert err.splitlines()[1].startswith("hint: ")
    assert sorted(run.iterdir()) == before


def test_without_a_run_the_newest_is_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert "no run in runs/" in capfd.readouterr().err
    write_run(tmp_path / "elsewhere", [drawn(6, num_edges=5)]).rename(tmp_path / "first")
    (tmp_path / "runs").mkdir()
    (tmp_path / "first").rename(tmp_path / "runs" / "0007")
    assert main([]) == 0
    assert (tmp_path / "runs" / "0007" / "report.html").is_file()


def test_a_run_that_was_moved_is_shown_whole_and_what_is_missing_is_said(tmp_path, monkeypatch, capsys):
    graphs = [drawn(6, num_edges=5, event_id=name) for name in "abc"]
    run = write_run(tmp_path / "one", graphs, tracks=False)
    alone = shutil.copytree(run, tmp_path / "far" / "away" / "x")
    together = (tmp_path / "one").rename(tmp_path / "deeper") / "run"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([str(together)]) == 0
    assert "Event c (val split): 6 hits" in (together / "report.html").read_text()
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("missing: No")] == printed[2:]
    assert not any("No events" in line for line in printed)
    assert main([str(alone)]) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "No events" in line)
    assert f" {tmp_path}/far/away/store nor {tmp_path}/one/store " in said
    assert "--store" in said
    (tmp_path / "deeper").rename(tmp_path / "one")
    assert main([str(alone)]) == 0
    assert "No events" not in capsys.readouterr().out
    assert "Event c (val split): 6 hits" in (alone / "report.html").read_text()


def test_a_store_that_cannot_be_read_is_said_with_its_remedy_in_one_line(tmp_path, capsys):
    run = write_run(tmp_path, [drawn(6, num_edges=5)], tracks=False)
    manifest = tmp_path / "store" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 1}))
    assert main([str(run)]) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "No events" in line)
    assert "it is of schema version 1" in said
    assert "; prepare the store again (--overwrite)" in said


def test_of_several_ranks_the_first_writes_and_the_others_do_nothing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main([str(run), "--out", str(tmp_path / "r.html")]) == 0
    assert not (tmp_path / "r.html").exists()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("PMI_RANK", "0")
    assert main([str(run), "--out", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").exists()


def test_a_naive_run_lies_beside(run, tmp_path):
    naive = write_run(tmp_path, [drawn(6, num_edges=5, event_id=name) for name in "abc"], naive=4, tracks=False)
    assert main([str(run), str(naive), "--out", str(tmp_path / "r.html")]) == 0
    assert "naive, 4 sectors (approximate)" in (tmp_path / "r.html").read_text()


def test_any_two_runs_lie_side_by_side_scored_or_not(run, tmp_path, capsys):
    graphs = [drawn(6, num_edges=5, event_id=name) for name in "abc"]
    other = write_run(tmp_path, graphs, steps=4, scores=False)
    out = str(tmp_path / "r.html")
    for first, second in ((run, other), (other, run)):
        assert main([str(first), str(second), "--out", out]) == 0
        text = (tmp_path / "r.html").read_text()
        assert f"No scores of {other}" in text
        assert "No flag differs." in text
    assert f"missing: {run}: No times of the inference" in capsys.readouterr().out


def test_a_naive_run_that_was_counted_otherwise_is_marked_so(run, tmp_path):
    naive = write_run(tmp_path, [drawn(6, num_edges=5)], naive=4, tracks=False)
    assert main([str(run), str(naive), "--out", str(tmp_path / "r.html")]) == 0
    assert "counted otherwise" in (tmp_path / "r.html").read_text()


def test_without_jinja2_the_way_to_get_it_is_told(run, monkeypatch, capfd):
    for name in [name for name in sys.modules if name.startswith(("jinja2", "domainpar.tracking.display"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main([str(run)]) == 2
    err = capfd.readouterr().err
    assert "the report needs jinja2" in err
    assert "pip install 'domainpar[report]'" in err


def test_reading_a_run_loads_no_torch_and_no_figures():
    heavy = "{'torch', 'matplotlib', 'jinja2'}"
    program = f"import sys, domainpar.tracking.display.sections; print(sorted({heavy} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=patient(60)
    )
    assert ended.stdout.strip() == "[]", ended.stderr


def test_a_full_disk_is_told_with_the_file(run, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    assert main([str(run), "--out", str(tmp_path / "page.html")]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.endswith(f"(errno 28) | file {tmp_path / 'page.html'}")
    assert "--out" in hint
    assert list(tmp_path.iterdir()) == []
    assert main([str(run), "--out", str(run / "run.json" / "page.html")]) == 1
    assert re.search("run.json\nhint: .*--out", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.jsonl"])
def test_no_file_of_a_run_is_replaced_by_its_report(run, capsys, name):
    before = (run / name).read_bytes()
    assert main([str(run), "--out", str(run / name)]) == 2
    assert "--out" in capsys.readouterr().err
    assert (run / name).read_bytes() == before
