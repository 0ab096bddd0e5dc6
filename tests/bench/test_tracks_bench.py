"""`tracks.py` from the flags to the last line, on small events."""

import json

import pytest
import tracks

from domainpar.testing import find_mpiexec


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec")
@pytest.mark.slow
def test_tracks_are_measured_against_the_pass_that_scored_them(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    flags = "--hits 4000 --hidden 16 --graph-iters 2 --repeats 2 --ranks 1 2 --methods cc walk".split()
    assert tracks.main([*flags, "--cache", str(tmp_path), "--results", str(path), "--width", "200"]) == 0
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if line.get("measured") == "tracks"]
    assert [(line["ranks"], line["method"]) for line in lines] == [(1, "cc"), (1, "walk"), (2, "cc"), (2, "walk")]
    for line in lines:
        assert line["share"] == pytest.approx(line["seconds"]["median"] / line["network"]["median"])
        assert 0 < line["passing"] < 1
    # The same scores, and so the same tracks, on one rank and on two.
    one, two = lines[:2], lines[2:]
    assert [line["tracks"] for line in one] == [line["tracks"] for line in two]
    assert [line["edges"] for line in one] == [line["edges"] for line in two]
    assert "Tracks against the forward pass" in capsys.readouterr().out
