"""Many events: scored by all ranks of a group together, finished by one rank each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from random_events import random_assignment, random_event

from domainpar.parallel.errors import RanksFailed
from domainpar.parallel.rank_status import guard
from domainpar.testing import run_ranks
from domainpar.tracking.events.store import EventStore, event_file_name, write_event, write_manifest
from domainpar.tracking.scoring.scorer import Scorer
from domainpar.tracking.scoring.scores import score_events


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Seven events, the later ones larger."""
    directory, records = tmp_path_factory.mktemp("store"), []
    for seed in range(7):
        graph = random_event(seed, 40, 60 + 10 * seed)
        path = directory / event_file_name(graph.hits.event_id)
        records.append(replace(write_event(path, graph, random_assignment(1, 40, 4), 4), split="test"))
    write_manifest(directory, records, {})
    return EventStore(directory)


def ids_as_logits(graph, halo):
    return torch.from_numpy(graph.plan.edge_ids.astype(np.float32) + 1)


SCORE_BY_IDS = partial(score_events, ids_as_logits)


def scored(world, store, directory, finish, score=SCORE_BY_IDS, **options):
    """Events by round, in the order in which every rank heard of them."""
    scorer = Scorer(score, store, world, directory, finish, evaluate=lambda event, scores: None, **options)
    return [[outcome.scored.event for outcome in outcomes] for outcomes in scorer.rounds(store.events())]


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(1, None), (3, None), (4, 2), (3, 1), (8, None)])
def test_every_rank_finishes_an_event_of_its_own_and_all_hear_of_each_in_the_same_order(
    tmp_path, store, num_ranks, domain_size
):
    finished = []

    def run(world):
        def finish(event, scores):
            finished.append((world.rank, event.event_id))
            position = event.read_edges("original_position", np.arange(event.num_edges))
            assert scores.edge_logit.tolist() == (position.argsort() + 1).tolist()
            return scores

        return scored(world, store, tmp_path, finish)

    first, *others = run_ranks(run, num_ranks, domain_size=domain_size)
    assert others == [first] * (num_ranks - 1)
    events = [event for outcomes in first for event in outcomes]
    assert events == [f"{event:09d}" for event in reversed(range(7))]  # the largest first, on any grid
    assert {len(outcomes) for outcomes in first[:-1]} <= {num_ranks}
    assert sorted(event for _, event in finished) == sorted(events)
    of_rank = Counter(rank for rank, _ in finished).values()
    assert max(of_rank) - min(of_rank) <= 1
    assert len(of_rank) == min(7, num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "domain_size", "per_call", "calls"),
    [(1, None, 3, [3, 3, 1]), (2, None, 3, [3, 3, 1]), (2, 1, 8, [4, 3]), (4, 2, 2, [2, 2, 2, 1])],
)
def test_several_events_of_like_size_are_one_call_and_finished_by_one_rank(
    tmp_path, store, num_ranks, domain_size, per_call, calls
):
    called, finished = [], []

    def score(events, transport, root):
        if transport.rank == 0:
            called.append([event.event_id for event in events])
        return score_events(ids_as_logits, events, transport, root=root)

    def run(world):
        def finish(event, scores):
            finished.append((event.event_id, world.rank))
            return scores

        return scored(world, store, tmp_path, finish, score, events_per_call=per_call)

    first, *others = run_ranks(run, num_ranks, domain_size=domain_size)
    assert others == [first] * (num_ranks - 1)
    by_size = [f"{event:09d}" for event in reversed(range(7))]
    assert [event for outcomes in first for event in outcomes] == by_size
    assert sorted(called, reverse=True) == [by_size[sum(calls[:i]) :][:count] for i, count in enumerate(calls)]
    rank_of = dict(finished)
    assert sorted(rank_of) == sorted(event for event, _ in finished) == sorted(by_size)
    assert all(len({rank_of[event] for event in events}) == 1 for events in called)
    assert set(rank_of.values()) == set(range(min(num_ranks, len(calls))))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_finish_its_event_ends_all(tmp_path, store, failing):
    def finish_on(world):
        def finish(event, scores):
            if world.rank == failing:
                raise OSError(28, "No space left on device")
            return scores

        try:
            with guard(world.rank_status):
                scored(world, store, tmp_path, finish)
        except RanksFailed:
            return "ended by another"
        except OSError as error:
            return error.strerror
        return "done"

    ends = run_ranks(finish_on, 2)
    assert ends[failing] == "No space left on device"
    assert ends[1 - failing] == "ended by another"


def test_no_rank_reserves_memory_for_the_scores_of_an_event_that_another_rank_finishes(tmp_path, store, monkeypatch):
    reserved = []
    plain = torch.zeros

    def zeros(*size, **kinds):
        reserved.append(size[0])
        return plain(*size, **kinds)

    monkeypatch.setattr("domainpar.tracking.scoring.scores.torch.zeros", zeros)
    run_ranks(lambda world: scored(world, store, tmp_path, lambda event, scores: scores), 3)
    edges = [record.num_edges for record in store.events()]
    assert sorted(size for size in reserved if size in edges) == sorted(edges)
