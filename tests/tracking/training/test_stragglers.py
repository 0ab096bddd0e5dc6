"""Ranks for which all others wait, step after step, are named once, with what may be the reason."""

import json
import platform
import re

import pytest
import watched
from marks import fault
from random_store import write_random_store

from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.monitor.rank_differences import STEPS, Stragglers, lines
from domainpar.tracking.training.record import StepTotals
from domainpar.tracking.training.sampler import samples_of
from domainpar.train import train

EVEN = [1000, 1000, 1000, 1000]


def told(steps, edges=EVEN):
    """Step and straggler of everything that is told of some steps, each a list of seconds."""
    stragglers = Stragglers()
    return [(number, one) for number, seconds in enumerate(steps, 1) for one in stragglers.look(seconds, edges)]


def slow(times, rank=3, usual=0.1, num_ranks=4):
    return [usual * (times if one == rank else 1) for one in range(num_ranks)]


@fault(34)
def test_a_rank_that_is_slow_for_20_steps_is_told_of_once():
    ((step, found),) = told([slow(2.1)] * 60)
    assert (step, found["rank"], found["times"], found["times_edges"]) == (STEPS, 3, 2.1, 1.0)


@pytest.mark.parametrize("times", [1.0, 1.4])
def test_a_rank_below_the_threshold_is_not(times):
    assert told([slow(times)] * 60) == []


def test_one_fast_step_begins_the_count_anew():
    assert told(([slow(2.1)] * (STEPS - 1) + [slow(1.0)]) * 4) == []


def test_a_rank_that_recovered_may_be_told_of_again():
    steps = [slow(2.0)] * 30 + [slow(1.0)] * STEPS + [slow(3.0)] * 30
    assert [(step, one["times"]) for step, one in told(steps)] == [(20, 2.0), (70, 3.0)]


def test_a_rank_that_was_fast_for_a_moment_is_not_told_of_again():
    assert len(told([slow(2.0)] * 30 + [slow(1.0)] * 5 + [slow(2.0)] * 30)) == 1


def test_of_two_ranks_the_other_one_is_what_is_usual():
    ((_, found),) = told([slow(1.6, rank=1, num_ranks=2)] * 30, EVEN[:2])
    assert (found["rank"], found["times"]) == (1, 1.6)


def test_one_rank_alone_waits_for_nobody():
    assert told([[5.0]] * 30, [10]) == []


def test_steps_of_milliseconds_are_noise():
    assert told([slow(5.0, usual=0.001)] * 60) == []


def test_two_ranks_can_be_slow():
    assert [one["rank"] for _, one in told([[0.1, 0.2, 0.1, 0.3, 0.1]] * 30, [10] * 5)] == [1, 3]


def line(times, times_edges):
    return lines({"straggler": [{"rank": 3, "times": times, "times_edges": times_edges, "host": "n2"}]})[0]


def test_the_reason_is_looked_for_in_the_edges():
    assert re.match(r"note: rank 3 \(n2\) .*2.1x .* 20 steps .*1.02x the edges: a slow or shared core", line(2.1, 1.02))
    assert line(2.1, 2.0).endswith("with 2.00x the edges: try --grouping metis or more tiles")
    assert line(4.0, 2.0).endswith("with 2.00x the edges: a slow or shared core?"), "not for its edges alone"
    assert len(line(12.1, 12.02)) <= 120


def test_without_a_straggler_there_is_nothing_to_say():
    assert lines({"split": "train"}) == []


def _run(world, store, out):
    config = TrainConfig(hidden=16, graph_iters=1, epochs=8, out=str(out))
    train(config, store, world)


@fault(34)
def test_a_run_prints_and_keeps_it(tmp_path, monkeypatch, capsys):
    shared = StepTotals.shared

    def slowed(self):
        return shared(self) | {"seconds_compute": [0.1, 0.35, 0.1]}

    monkeypatch.setattr(StepTotals, "shared", slowed)
    store = write_random_store(tmp_path / "store", num_val=0, num_nodes=40, num_edges=120, compared=False)
    run_ranks(_run, 3, store, tmp_path / "run")
    written = [json.loads(one) for one in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ((step, (found,)),) = [(one["step"], one["straggler"]) for one in written if "straggler" in one]
    assert (step, found["rank"], found["times"]) == (STEPS, 1, 3.5)
    assert found["host"]
    assert capsys.readouterr().out.count("note: rank 1 (") == 1


def _steps(world, store):
    trainer = watched.trainer_of(store, world, graph_iters=1)
    samples = samples_of(EventStore(store).events("train"), None)[:1]
    return [trainer.step(samples, step).get("straggler") for step in range(STEPS + 2)]


def test_a_step_hands_it_on_with_its_host_on_every_rank_alike(tmp_path, monkeypatch):
    shared = StepTotals.shared

    def slowed(self):
        return shared(self) | {"seconds_compute": [0.1, 0.35, 0.1]}

    monkeypatch.setattr(StepTotals, "shared", slowed)
    store = write_random_store(tmp_path / "store", num_nodes=40, num_edges=120, compared=False)
    found = run_ranks(_steps, 3, store)
    assert found[0] == found[1] == found[2]
    assert [step for step, told_of in enumerate(found[0], 1) if told_of] == [STEPS]
    ((told_of,),) = [one for one in found[0] if one]
    assert (told_of["rank"], told_of["times"], told_of["host"]) == (1, 3.5, platform.node())
    assert 0.3 < told_of["times_edges"] < 3
