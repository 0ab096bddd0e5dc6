"""Parts of samples: what the loss counts of them, and a cache on which all ranks of a domain agree."""

import threading
from collections import defaultdict

import numpy as np
import pytest
import torch
from marks import fault
from random_store import write_random_store
from refused import refused

from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training import parts
from domainpar.tracking.training.edge_classes import FAKE, OTHER, TARGET, EdgeRules, edge_classes
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_edges=700, compared=False)


@pytest.fixture
def loads(monkeypatch):
    """Names of the events that each rank read, in order."""
    seen = defaultdict(list)

    def counted(event, *args, plain=parts.read_part, **kwargs):
        seen[threading.current_thread().name].append(event.event_id[-1])
        return plain(event, *args, **kwargs)

    monkeypatch.setattr(parts, "read_part", counted)
    return seen


def _load_all(world, path, order, keep_edges, grouping):
    loader = PartLoader(EventStore(path), world, keep_edges=keep_edges, grouping=grouping)
    samples = {sample.record.event[-1]: sample for sample in samples_of(EventStore(path).events(), None)}
    return [loader.load(samples[name]).name[-1] for name in order]


ORDER = "0123012300101020"
# Events 0 to 3 have 700, 737, 774 and 811 edges.
CACHES = {
    "all fit": (10_000, "0123"),
    "two fit": (1600, "01230123012"),
    "one always stays": (0, "012301230101020"),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("keep_edges", "read"), CACHES.values(), ids=CACHES)
def test_what_is_kept_is_decided_on_sizes_of_events_so_that_all_ranks_read_or_none(
    store, loads, num_ranks, keep_edges, read
):
    """`random` parts hold very different numbers of edges; a rank that decided on its own would wait for ever."""
    found = run_ranks(_load_all, num_ranks, store, ORDER, keep_edges / num_ranks, "random", timeout=20)
    assert found == [list(ORDER)] * num_ranks
    assert {rank: "".join(names) for rank, names in loads.items()} == {f"rank {r}": read for r in range(num_ranks)}


def test_data_groups_keep_what_they_themselves_load(store, loads):
    def load(world):
        return _load_all(world, store, "0101" if world.data_group == 0 else "2323", 10_000, "contiguous")

    run_ranks(load, 4, domain_size=2)
    assert {rank: "".join(names) for rank, names in loads.items()} == {
        "rank 0": "01", "rank 1": "01", "rank 2": "23", "rank 3": "23"
    }  # fmt: skip


TARGET_PARTICLES = {"pt": [0.5, float("inf")]}
WEIGHTS = EdgeRules.by_class(target=3.0, fake=0.5, other=0.25)


def _classes(world, path):
    store = EventStore(path)
    loader = PartLoader(store, world, edge_weights=WEIGHTS, target=TARGET_PARTICLES, dtype=torch.float64)
    loaded = [loader.load(sample) for sample in samples_of(store.events(), None)]
    of_edges = [
        dict(zip(part.graph.plan.edge_ids.tolist(), zip(part.classes.tolist(), part.weights.tolist())))
        for part in loaded
    ]
    return (
        of_edges,
        loader.total([part.counted for part in loaded], len(loaded)).kinds.tolist(),
        [part.num_not_scored for part in loaded],
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_copy_of_an_edge_has_its_class_and_weight_and_is_counted_once(store, num_ranks):
    events = EventStore(store)
    found = run_ranks(_classes, num_ranks, store)
    total = np.zeros(6, int)
    for number, record in enumerate(events.events()):
        with events.open(record) as event:
            every_edge = np.arange(event.num_edges)
            particle = event.read_nodes("particle_id", event.read_edges("dst", every_edge))
            label = event.read_edges("label", every_edge)
            classes = edge_classes(label, particle, event.particles(), TARGET_PARTICLES)
        assert {FAKE, TARGET, OTHER} == set(classes.tolist())
        kinds = WEIGHTS.kinds(classes, None, None)
        total += WEIGHTS.count(kinds)
        weights = WEIGHTS.weights(kinds)
        seen = set()
        for of_edges, _, _ in found:
            seen |= of_edges[number].keys()
            assert all(one == (classes[edge], weights[edge]) for edge, one in of_edges[number].items())
        assert len(seen) == record.num_edges
    for _, counts, not_scored in found:
        assert counts == total.tolist()
        assert not_scored == [0] * 4


@fault(27)
def test_an_event_without_truth_is_refused_by_name(tmp_path):
    store = EventStore(write_random_store(tmp_path, num_train=1, num_val=0, labels=False))
    with refused(
        "it has no truth; it can be inferred on, not trained on", "000000000", store.path / store.records[0].path
    ):
        run_ranks(lambda world: PartLoader(store, world).load(samples_of(store.events(), None)[0]), 2)


@pytest.mark.parametrize(("num_ranks", "grouping"), [(1, "contiguous"), (3, "contiguous"), (3, "metis")])
def test_the_next_sample_is_read_in_the_background_and_is_the_same(store, loads, num_ranks, grouping):
    def load(world, ahead):
        loader = PartLoader(EventStore(store), world, grouping=grouping)
        samples = samples_of(EventStore(store).events(), None)
        if ahead:
            loader.prefetch(samples[1:])
            loader.prefetch(samples[1:])  # once is enough
        return [loader.load(sample) for sample in samples[:2]]

    for plain, ahead in zip(run_ranks(load, num_ranks, False), run_ranks(load, num_ranks, True)):
        for one, other in zip(plain, ahead):
            assert torch.equal(one.graph.features, other.graph.features)
            assert torch.equal(one.weights, other.weights)
            for name, values in vars(one.graph.plan).items():
                assert np.array_equal(values, vars(other.graph.plan)[name]), name
    in_background = [one for thread, of in loads.items() if thread.startswith("the next event") for one in of]
    assert in_background == ([] if num_ranks > 1 and grouping == "metis" else ["1"] * num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_event_that_cannot_be_used_is_left_out_also_where_it_is_read_ahead(tmp_path, num_ranks):
    path = write_random_store(tmp_path / "store")
    record = EventStore(path).events()[1]
    content = bytearray((path / record.path).read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    (path / record.path).write_bytes(content)

    def load(world, how):
        loader = PartLoader(EventStore(path), world, on_bad_event=how)
        samples = samples_of(EventStore(path).events(), None)
        loader.prefetch(samples[1:])
        return loader.load(samples[1])

    assert run_ranks(load, num_ranks, "skip") == [None] * num_ranks
    with pytest.raises(parts.BadEvent):
        run_ranks(load, num_ranks, "fail")
