"""Memory of any network, weighed before its first step, and runs that are held to a limit."""

import json

import psutil
import pytest
import torch
from marks import slow
from random_store import write_random_store

from domainpar.common.agreement import Refused
from domainpar.measure.forecast import OF_PROCESS, OF_TORCH, PartMemory, PerRow, TensorMeter
from domainpar.nn.options import NetworkOptions
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import BITWISE, TrainConfig
from domainpar.tracking.cost import event_pieces as pieces
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.networks.catalogue import ORDERS, build_model
from domainpar.train import train

SIZES = {"hidden": 16, "graph_iters": 4, "max_steps": 1, "lr": 1e-2}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), 2, 1, 400, 3000, compared=False)


def _trained(world, store, out, flags):
    return train(TrainConfig(out=str(out), **SIZES, **flags), store, world).trainer.model.recompute_every


def trained(store, out, num_ranks=1, **flags):
    """How much was recomputed, and what the run wrote of itself."""
    everywhere = run_ranks(_trained, num_ranks, store, out, flags)
    assert len(set(everywhere)) == 1
    return everywhere[0], json.loads((out / "run.json").read_text())


@pytest.mark.parametrize(
    ("model", "settings"),
    [("acorn2", [None, 1]), ("own_models:evolving", [None]), slow("acorn", [None, 3, 2])],
    ids=str,
)
def test_the_memory_of_any_network_is_expected_and_less_where_it_recomputes(store, tmp_path, model, settings):
    expected, hashes = [], set()
    for every in settings:
        _, about = trained(store, tmp_path / str(every), model=model, recompute_every=every)
        expected.append(about["memory"]["expected_bytes"][0])
        hashes.add(about["parameters_sha256"])
    assert len(hashes) == 1
    fixed = OF_PROCESS + (0 if model in BITWISE else OF_TORCH)
    assert expected[0] > fixed
    assert len(settings) == 1 or expected[0] - fixed > 1.5 * (min(expected[1:]) - fixed)


def test_tensors_are_counted_from_when_they_are_made_until_nobody_holds_them():
    x = torch.ones(1000)
    with TensorMeter("cpu") as counted:
        y = x * 2
        z = y[:500] * 3
        del y
        w = z + 1
        x.add_(1)
    assert counted.peak == 4000 + 2000, "of y and z; views and what was there before take nothing"
    assert counted.now == z.nbytes + w.nbytes


def taken(of_edge, fixed=0):
    """A network of which an edge takes so many bytes, by how much is computed again."""
    return lambda *_, every, **__: PartMemory(fixed, PerRow(edge=of_edge[every]))


def test_what_a_network_took_on_two_pieces_is_scaled(store, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "weighed", taken({None: 300}, 7000))
    _, about = trained(store, tmp_path / "run", model="acorn2", allocator="system")
    edges = 3000 + 37
    data = 72 * (3 * 3000 + 3 * 37 + 3 * 400 + 30)  # those of the other events, too
    fixed = 7000 + OF_PROCESS + OF_TORCH
    assert about["memory"]["expected_bytes"][0] == pytest.approx(fixed + 300 * edges + data, abs=16)


def test_pieces_of_an_event_grow_and_are_shared(store, monkeypatch):
    opened, seen = EventStore(store), []
    from_pieces = PartMemory.from_pieces
    monkeypatch.setattr(PartMemory, "from_pieces", staticmethod(lambda found: seen.append(found) or from_pieces(found)))
    model = build_model("acorn2", 3, 6, NetworkOptions(hidden=16, graph_iters=2))
    for ranks in (1, 2):
        pieces.weighed(model, opened, opened.events()[0], ranks=ranks)
    alone, shared = seen
    assert 0 < alone[0].edges < alone[1].edges == 3000
    assert alone[0].bytes < alone[1].bytes
    assert shared[1].edges < 3000
    assert shared[1].bytes < alone[1].bytes


@pytest.mark.parametrize(
    ("num_ranks", "gib", "expected"),
    [(1, 400, None), (3, 60, 3), (1, 20, 2), slow(3, 400, None), slow(1, 60, 3), slow(3, 20, 2)],
)
def test_auto_recomputes_no_more_than_a_limit_makes_necessary(store, tmp_path, monkeypatch, num_ranks, gib, expected):
    gibibyte_of_event = 2**30 / 3037 * 1.05 * num_ranks
    monkeypatch.setattr(
        pieces, "weighed", taken({None: 100 * gibibyte_of_event, 3: 25 * gibibyte_of_event, 2: 10 * gibibyte_of_event})
    )
    # The limit is for the whole process, which holds what tests before have left in it.
    held = psutil.Process().memory_info().rss / 2**30
    flags = {"recompute_every": "auto", "memory_limit": gib + held}
    assert trained(store, tmp_path / "run", num_ranks, model="acorn", **flags)[0] == expected


def test_of_built_in_networks_as_little_as_possible_is_computed_again(store, tmp_path):
    flags = {"recompute_every": "auto"}
    assert trained(store, tmp_path / "run", **flags)[0] is None


@pytest.mark.parametrize(
    ("model", "num_ranks", "every", "hint"),
    [
        ("acorn", 1, "auto", "--scratch DIR on a disk, more ranks, a smaller"),
        ("acorn", 2, None, "--recompute-every auto, --scratch DIR on a disk, more ranks"),
        ("acorn2", 2, None, "--recompute-every auto, more ranks, a smaller"),
        ("own_models:evolving", 2, None, "more ranks, a smaller"),
        slow("acorn", 2, "auto", "--scratch DIR on a disk, more ranks, a smaller"),
        slow("acorn", 1, None, "--recompute-every auto, --scratch DIR on a disk, more ranks"),
    ],
)
def test_a_limit_that_cannot_be_met_is_refused_before_a_file_is_touched(store, tmp_path, model, num_ranks, every, hint):
    flags = {"model": model, "recompute_every": every, "memory_limit": 0.001}
    with pytest.raises(Refused, match="--memory-limit 0.001 GiB: event .* will take .* of the bare process") as refused:
        trained(store, tmp_path / "run", num_ranks, **flags)
    assert refused.value.hint.startswith(hint)
    assert not (tmp_path / "run").exists()


def test_a_network_that_cannot_be_measured_is_refused_by_what_it_says(store, tmp_path, monkeypatch):
    def broken(self, *args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("domainpar.nn.published.InteractionGNN2.logits", broken)
    config = TrainConfig(out=str(tmp_path / "run"), model="acorn2", memory_limit=9.0, **SIZES)
    with pytest.raises(Refused, match="cannot be run on a piece of an event: RuntimeError: no such thing"):
        train(config, store, World.alone())


def test_the_names_of_networks_on_stages_are_known_without_torch():
    assert set(BITWISE) == {*ORDERS, "acorn"}
