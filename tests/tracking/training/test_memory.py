"""Memory of a run: what is expected before the first step, what is seen afterwards, and what both are counted from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from random_events import random_assignment, random_event
from random_store import write_graph, write_random_store

from domainpar.common import limits
from domainpar.common.agreement import Refused
from domainpar.measure import forecast
from domainpar.measure.forecast import Forecast, MemoryMeter, PartMemory, PerRow, Share, free_memory
from domainpar.parallel.allocator import set_up_allocator
from domainpar.testing import run_ranks
from domainpar.tracking.config import InferConfig, TrainConfig
from domainpar.tracking.events.store import EventStore, write_manifest
from domainpar.tracking.scoring import scoring_memory as of_scoring
from domainpar.tracking.training import step_memory as of_training
from domainpar.tracking.training import summary
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of
from domainpar.train import train

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_edges=700, compared=False)


# --- expected ---------------------------------------------------------------------------------------------------------


WEIGHT = PartMemory(5000, PerRow(owned=400, ghost=100, edge=300, pair=50), [(True, 64), (False, 32)])


def _sizes(graph):
    return graph.num_owned, graph.plan.num_ghosts, graph.num_edges


class Trained:
    """What the forecast of a training looks at, and what stays in memory of all samples."""

    def __init__(self, world, store, kept=(0, 0)):
        self.world, self.loader, self.model = world, PartLoader(EventStore(store), world), SimpleNamespace()
        self.model.ways_to_recompute, self.loader.kept = (None,), lambda _: kept
        self.train = samples_of(EventStore(store).events("train"), None)
        self.val = []


def _expect(world, store, kept):
    trained = Trained(world, store, kept)
    found = of_training._expected(trained, trained, MemoryMeter(CPU), trained.train[-1], WEIGHT)
    graph = trained.loader.load(trained.train[-1]).graph
    owned, ghosts, edges = counts = _sizes(graph)
    of_rows = 400 * owned + 100 * ghosts + 300 * edges + 50 * len(graph.tiles.pair_rows)
    return found, counts, 5000 + of_rows + 64 * edges + 32 * owned


def test_every_rank_knows_what_all_ranks_will_hold(store):
    found = run_ranks(_expect, 3, store, (0, 0))
    assert len({expected for expected, _, _ in found}) == 1
    for share, (_, counts, of_part) in zip(found[0][0].shares, found):
        assert (share.owned, share.ghosts, share.edges) == counts
        assert share.expected == of_part + forecast.OF_PROCESS
    assert sum(share.owned for share in found[0][0].shares) == 170


def test_data_of_other_events_that_stay_in_memory_are_counted(store):
    (alone, (nodes, _, edges), _), (among, _, _) = (
        run_ranks(_expect, 1, store, kept)[0] for kept in ((0, 0), (50_000, 100_000))
    )
    others = 72 * (50_000 - nodes + 100_000 - edges)
    assert among.shares[0].expected - alone.shares[0].expected == others


@pytest.mark.parametrize(("times", "share"), [(0.5, 0.4), (2.0, 0.4), (2.0, 1.0)])
def test_of_two_networks_the_one_that_takes_more_is_expected(store, monkeypatch, times, share):
    first, then = WEIGHT, WEIGHT.plus(times=times)
    weights = iter([first, then])
    monkeypatch.setattr(of_scoring, "weight_of", lambda *_, **__: next(weights))
    opened = EventStore(store)
    record = max(opened.events(), key=lambda record: record.num_edges)
    surveyed = {"edges_per_hit": [0.0, share * record.num_edges / record.num_nodes]}
    network = SimpleNamespace(trained=TrainConfig(), model=None)
    network.record = SimpleNamespace(store=SimpleNamespace(surveyed=surveyed))
    config = InferConfig(run="r", tracks="cc")

    def expect(world):
        found = of_scoring.expected_memory(config, [network] * 2, opened, [record], world, MemoryMeter(CPU), True)
        graph = PartLoader(opened, world).load(samples_of([record], None)[0]).graph
        (owned, ghosts, edges), pairs = _sizes(graph), len(graph.tiles.pair_rows)
        of_both = first.of(owned, ghosts, edges, pairs), then.of(owned, ghosts, int(edges * share), int(pairs * share))
        return found, max(map(int, of_both))

    ((expected, of_both),) = run_ranks(expect, 1)
    of_tracks = of_scoring.OF_TRACKS * record.num_nodes
    assert expected.shares[0].expected == pytest.approx(of_both + of_tracks + forecast.OF_PROCESS, abs=32)


def _kept(world, store, keep_edges):
    return PartLoader(EventStore(store), world, keep_edges=keep_edges).kept(
        samples_of(EventStore(store).events(), None)
    )


def test_parts_of_all_events_stay_as_long_as_there_is_room(store):
    nodes, edges = 150 + 160 + 170 + 180, 700 + 737 + 774 + 811
    assert run_ranks(_kept, 2, store, 10_000) == [(nodes // 2, edges // 2)] * 2
    assert run_ranks(_kept, 2, store, 1000) == [(nodes * 1000 // edges, 1000)] * 2


def share(expected, where="here", free=8 * GIB, card=""):
    return Share(
        owned=900, ghosts=100, edges=12_345, expected=expected, bare=400 * MIB, where=where, free=free, card=card
    )


def test_ranks_of_one_machine_share_its_memory():
    shares = (share(3 * GIB), share(4 * GIB, "there", 5 * GIB), share(6 * GIB), share(5 * GIB, "roomy", 5 * GIB))
    expected = Forecast(shares)
    assert expected.fullest == 2
    assert expected.shortages() == [[shares[0], shares[2]]]
    assert (expected.needed, expected.free, expected.fits) == (9 * GIB, 8 * GIB, False)
    with pytest.raises(
        Refused, match="2 ranks on here need 9.00 GiB for 24,690 edges, and 8.00 GiB are free"
    ) as refused:
        expected.check()
    assert "more ranks on more machines, or recompute" in refused.value.hint
    assert Forecast(shares[1:2]).check().fits


def test_gpus_are_told_apart_by_what_they_are_whatever_ranks_call_them():
    """Each rank may see one GPU, which it calls 0; and those that share one may call it by several numbers."""
    own = tuple(share(5 * GIB, "GPU 0 of n1", card=card) for card in "ABCD")
    assert Forecast(own).fits
    shared = (share(5 * GIB, "GPU 0 of n1", card="A"), share(6 * GIB, "GPU 1 of n1", card="A"))
    assert Forecast(shared).shortages() == [list(shared)]


def test_what_is_expected_is_said_with_the_part_it_is_for():
    lines = summary.memory_expected(Forecast((share(3 * GIB), share(3 * GIB + 300 * MIB)), sample="7"))
    assert re.search("3.29 GiB .* 2 ranks .rank 1., .*400 MiB", lines[0])
    assert "12,345 edges, 900 nodes and 100 ghost nodes of event 7" in lines[1]
    (alone,) = summary.memory_expected(Forecast((share(3 * GIB),), sample="7"))
    assert re.search("3.00 GiB .*400 MiB .*12,345 edges and 900 nodes of event 7", alone)


@pytest.mark.parametrize(
    ("leaner", "way"),
    [(3, "To take less: --recompute-every 3, more ranks"), (None, "To take less: more ranks")],
)
def test_a_run_that_will_not_fit_is_warned_with_what_helps(leaner, way):
    shares = share(6 * GIB, "node" * 4), share(7 * GIB, "node" * 4)
    lines = summary.memory_expected(Forecast(shares, sample="7", leaner=leaner))
    assert re.search("WARNING: 2 ranks on nodenodenodenode .* 13.00 GiB, 8.00 GiB", lines[2])
    assert way in lines[3]
    assert all(len(line) <= 120 for line in lines)


# --- seen -------------------------------------------------------------------------------------------------------------


def hold(count):
    """Take memory, write to it, and free it."""
    np.ones(count, np.uint8)


def _taken(world, before, during):
    hold(before)
    watch = MemoryMeter(CPU)
    hold(during)
    return watch.taken(world)


def test_a_peak_is_counted_from_when_it_is_watched():
    set_up_allocator()  # what was freed before and kept is not in use
    (taken,) = run_ranks(_taken, 1, 300 * MIB, 100 * MIB)[0]
    assert 95 * MIB < taken < 130 * MIB


def test_a_peak_that_cannot_be_told_from_an_earlier_one_is_not_claimed(monkeypatch):
    def refused(*args):
        raise OSError("read-only file system")

    monkeypatch.setattr(forecast.Path, "write_text", refused)
    assert run_ranks(_taken, 1, 300 * MIB, 100 * MIB)[0] == [None]


def test_what_was_taken_is_said_beside_what_was_expected():
    expected = Forecast((share(3 * GIB), share(GIB)), sample="7")
    assert re.search("2.00 GiB .*rank 1; 1.00 GiB", summary.memory_taken(expected, [None, 2 * GIB]))
    assert "no more than before" in summary.memory_taken(expected, [None, None])


def _run(world, store, out, flags):
    train(TrainConfig(hidden=16, graph_iters=1, epochs=1, out=str(out), **flags), store, world, "so")


@pytest.mark.parametrize("flags", [{}, {"mode": "naive", "sectors": 2}], ids=["halo", "naive"])
def test_a_run_leaves_both_figures_of_every_rank_for_its_largest_event(store, tmp_path, capsys, flags):
    run_ranks(_run, 2, store, tmp_path / "run", flags)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["allocator"] == "so"
    assert about["memory"]["sample"].startswith("000000002")  # of three to train on; one larger to validate with
    assert {name: len(about["memory"][name]) for name in ("bare_bytes", "expected_bytes", "peak_bytes")} == {
        "bare_bytes": 2,
        "expected_bytes": 2,
        "peak_bytes": 2,
    }
    lines = [line[:9] for line in capsys.readouterr().out.splitlines()]
    assert lines.count("allocator") == 1
    assert lines.count("memory   ") == 2


@pytest.mark.slow
def test_what_is_expected_is_near_what_training_takes(tmp_path):
    graph = random_event(0, 20_000, 150_000)
    record = write_graph(tmp_path, graph, np.sort(random_assignment(1, 20_000, 32)), 32, "train")
    write_manifest(tmp_path, [record], {})
    flags = ["--store", str(tmp_path), "--out", str(tmp_path / "run"), "--max-steps", "2", "--threads", "1"]
    subprocess.run([sys.executable, "-m", "domainpar.train", *flags], check=True, capture_output=True)
    about = json.loads((tmp_path / "run" / "run.json").read_text())["memory"]
    assert 0.75 < about["peak_bytes"][0] / about["expected_bytes"][0] < 1.35


def test_on_a_gpu_it_is_the_gpus_memory(monkeypatch):
    held = {"now": 5 * MIB, "peak": 9 * MIB}
    faked = {
        "memory_allocated": lambda device: held["now"],
        "max_memory_allocated": lambda device: held["peak"],
        "reset_peak_memory_stats": lambda device: held.update(peak=held["now"]),
        "mem_get_info": lambda device: (3 * GIB, 4 * GIB),
    }
    for name, function in faked.items():
        monkeypatch.setattr(torch.cuda, name, function)
    watch = MemoryMeter(torch.device("cuda", 1))
    assert free_memory(torch.device("cuda", 1))[0].startswith("GPU 1 of ")
    assert free_memory(torch.device("cuda", 1))[1] == 3 * GIB
    held["peak"] = 7 * MIB
    assert run_ranks(lambda world: watch.taken(world), 1) == [[2 * MIB]]


def test_a_limit_is_less_than_what_the_machine_has_free(monkeypatch):
    monkeypatch.setattr(limits, "memory", lambda: limits.Memory(8 * MIB, 5 * MIB))
    assert free_memory(CPU)[1] == 5 * MIB
