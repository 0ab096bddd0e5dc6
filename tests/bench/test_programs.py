"""Programs that start ranks as processes, from the flags to the last line, on small events."""

import json

import inference
import memory
import pytest
import step
import tracks

from domainpar.testing import find_mpiexec

pytest.importorskip("torch_geometric")
pytestmark = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec")

TINY = "--case tiny --hidden 16 --graph-iters 2 --rounds 1 --repeats 1 --ranks 1".split()


@pytest.fixture
def kept(tmp_path):
    """Flags that keep events and results here, and the results."""
    path = tmp_path / "results.jsonl"
    flags = ["--cache", str(tmp_path), "--results", str(path), "--width", "200"]
    return flags, lambda: [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_step_compares_domainpar_with_the_plain_network(kept, capsys):
    flags, lines = kept
    short = "--threads 1 2 --allocator default --competitors eager"
    assert step.main([*TINY, *flags, *short.split()]) == 0
    printed = capsys.readouterr().out
    assert "one hash of all parameters" in printed
    assert "losses of systems compared: 4; they agree" in printed
    ours, threads, eager, _ = rows = [line for line in lines() if line.get("measured") == "step"]
    of_systems = [(row["system"], row["threads"]) for row in rows]
    assert of_systems == [("domainpar", 1), ("domainpar", 2), ("PyG eager", 1), ("PyG eager", 2)]
    assert threads["speed_up"]["median"] == pytest.approx(ours["seconds"]["median"] / threads["seconds"]["median"])
    assert ours["than_eager_alike"]["median"] == pytest.approx(eager["seconds"]["median"] / ours["seconds"]["median"])
    assert 0 < eager["loss_difference"] < 1e-5
    assert min(ours["above_bare"] + eager["above_bare"]) > 0


@pytest.mark.slow
def test_inference_scores_alike_on_ranks_and_threads_and_like_the_plain_network(kept, capsys):
    flags, lines = kept
    short = "--ranks 1 2 --threads 1 2 --allocator default --competitors eager"
    assert inference.main([*TINY, *flags, *short.split()]) == 0
    printed = capsys.readouterr().out
    assert "one hash of all scores" in printed
    assert "logits of systems compared: 5; they agree" in printed
    rows = [line for line in lines() if line.get("measured") == "inference"]
    assert [row["ranks"] * row["threads"] for row in rows] == [1, 2, 2, 1, 2]
    assert [row["difference"] for row in rows[:3]] == [0, 0, 0]
    assert all(0 < row["difference"] < 1e-4 for row in rows[3:])
    for row in rows:
        assert row["edges_per_second"]["median"] == pytest.approx(row["edges"] / row["seconds"]["median"])
        assert min(row["above_bare"]) > 0


@pytest.mark.slow
def test_memory_shows_what_each_form_holds(kept, capsys):
    flags, lines = kept
    assert memory.main([*TINY, *flags, *"--forms checkpoint --recompute-every 2".split()]) == 0
    assert "one hash of all parameters" in capsys.readouterr().out
    rows = {line["system"]: line for line in lines() if line.get("measured") == "memory"}
    assert list(rows) == ["PyG checkpoint", "recompute every 2", "domainpar"]
    assert rows["domainpar"]["of_whole"] == rows["domainpar"]["share"] == 1


@pytest.mark.slow
def test_tracks_are_measured_against_the_pass_that_scored_them(kept, capsys):
    flags, lines = kept
    short = "--hits 4000 --hidden 16 --graph-iters 2 --repeats 2 --ranks 1 2 --methods cc greedy".split()
    tracks.main([*short, *flags])
    rows = [line for line in lines() if line.get("measured") == "tracks"]
    assert [(line["ranks"], line["method"]) for line in rows] == [(1, "cc"), (1, "greedy"), (2, "cc"), (2, "greedy")]
    for line in rows:
        assert line["share"] == pytest.approx(line["seconds"]["median"] / line["network"]["median"])
        assert 0 < line["passing"] < 1
    # The same scores, and so the same tracks, on one rank and on two.
    one, two = rows[:2], rows[2:]
    assert [line["tracks"] for line in one] == [line["tracks"] for line in two]
    assert [line["edges"] for line in one] == [line["edges"] for line in two]
    assert "Tracks against the forward pass" in capsys.readouterr().out
