"""How systems take turns, and what a benchmark refuses to print as an agreement."""

from dataclasses import replace
from types import SimpleNamespace

import measuring
import pytest
import systems
from flags import USUAL
from on_ranks import Job
from systems import Measured, Network, System

SMALL = Network(100, 1000, 16, 2)


def ran(seconds, losses=(1.0, 0.5), sha256="a"):
    return [
        {"seconds": seconds, "losses": list(losses), "sha256": sha256, "first_step": 1.0, "bare_rss": 1, "peak_rss": 3}
    ]


def turns(monkeypatch, tmp_path, network=SMALL, rounds=2, run=lambda system: ran([1.0])):
    order = []

    def recorded(system, job, timeout):
        order.append(system.name)
        return run(system)

    monkeypatch.setattr(System, "run", recorded)
    compared = [System("domainpar"), System.plain("eager")]
    measured = systems.take_turns(compared, Job(tmp_path, USUAL), network, rounds, 1.0)
    return order, list({id(of_system): of_system for of_system in measured}.values())


def test_systems_take_turns_in_rounds(monkeypatch, tmp_path):
    order, measured = turns(monkeypatch, tmp_path)
    assert order == ["domainpar", "PyG eager"] * 2
    assert [len(of_system.runs) for of_system in measured] == [2, 2]


def test_every_allocator_setting_is_said_in_words():
    said = measuring.allocators_in_words(measuring.ALLOCATORS)
    for name, settings in measuring.ALLOCATORS.items():
        assert f"allocator {name}: " in said
        assert all(f"{variable}={value}" in said for variable, value in settings.items())


def test_what_does_not_fit_into_memory_is_not_started(monkeypatch, tmp_path):
    order, measured = turns(monkeypatch, tmp_path, network=Network(10**9, 10**10, 64, 4))
    assert order == []
    assert all("GiB are free" in of_system.problem for of_system in measured)


def test_a_plain_form_may_fail_but_domainpar_may_not(monkeypatch, tmp_path):
    def fails(system):
        if system.form == "eager":
            raise RuntimeError("rank 0 failed:\nno compiler")
        return ran([1.0])

    order, (ours, eager) = turns(monkeypatch, tmp_path, run=fails)
    assert order == ["domainpar", "PyG eager", "domainpar"], "what failed once was tried again"
    assert (ours.problem, eager.problem) == (None, "failed: no compiler")

    def all_fail(system):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        turns(monkeypatch, tmp_path, run=all_fail)


def test_figures_are_of_the_slowest_rank_and_ratios_of_rounds():
    ours = Measured(System("domainpar", ranks=2), [ran([1.0, 2.0]) + ran([3.0, 1.0]), ran([4.0, 4.0]) * 2])
    eager = Measured(System.plain("eager"), [ran([5.0, 5.0]), ran([20.0, 20.0])])
    assert ours.spread("seconds") == systems.Spread(3.5, 2.0, 4.0, 4)
    assert systems.ratio(eager, ours) == systems.Spread(3.5, 2.0, 5.0, 2)
    assert ours.above_bare == [2, 2]


def test_other_parameters_and_other_losses_are_seen():
    said = []
    results = SimpleNamespace(console=SimpleNamespace(print=said.append))
    row = {"changes": {}, "sha256": ["a"]}
    of_bf16 = {"changes": {"precision": "bf16"}, "sha256": ["c"]}
    assert systems.same_hash([row, row, of_bf16], results)
    assert not systems.same_hash([row, {**row, "sha256": ["b"]}], results)
    assert said[-1] == "PARAMETERS DIFFER: 2 hashes"
    one, other = (Measured(System("domainpar"), [ran([1.0], losses)]) for losses in ((1.0, 0.5), (1.0, 0.6)))
    assert systems.loss_difference(other, one) == pytest.approx(0.2)


# --- layouts and ratios ----------------------------------------------------------------------------------------------


def test_ranks_and_threads_are_varied_one_at_a_time():
    named = systems.compared(["keep"], [1, 2], [1, 3], ["eager"], {"domainpar": {}, "bf16": {"precision": "bf16"}})
    layouts = [(system.name, system.ranks, system.threads) for system in named]
    ours = [(1, 1), (2, 1), (1, 3)]
    assert layouts == [
        *(("domainpar", *layout) for layout in ours),
        *(("bf16", *layout) for layout in ours),
        ("PyG eager", 1, 1),
        ("PyG eager", 1, 3),
    ]
    assert {system.allocator for system in named} == {"keep"}
    assert named[3].changes == {"precision": "bf16"}
    (both,) = systems.compared(["default"], [4], [2], [], {"domainpar": {}})
    assert (both.ranks, both.threads) == (4, 2), "one number of each is taken as it is"


def test_threads_of_a_system_reach_its_training(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(systems, "run_ranks", lambda function, ranks, job, *rest, **how: asked.append((ranks, job)))
    job = Job(tmp_path, replace(USUAL, hidden=32))
    System("domainpar", ranks=2, threads=3, changes={"precision": "bf16"}).run(job, 1.0)
    ((ranks, job),) = asked
    assert (ranks, job.training) == (2, replace(USUAL, hidden=32, threads=3, precision="bf16"))


def test_a_system_is_compared_with_others_of_its_allocator_and_of_as_many_threads():
    def measured(system, *seconds):
        return Measured(system, [ran([value]) for value in seconds])

    one = measured(System("domainpar", "keep"), 4.0, 8.0)
    threads = measured(System("domainpar", "keep", threads=2), 2.0, 5.0)
    ranks = measured(System("domainpar", "keep", ranks=2), 1.0, 2.0)
    eager = measured(System.plain("eager", "keep"), 10.0, 10.0)
    eager_threads = measured(System.plain("eager", "keep", 2), 6.0, 10.0)
    eager_default = measured(System.plain("eager", "default"), 20.0, 20.0)
    failed = Measured(System.plain("eager", "keep"), problem="failed")
    found = systems.ratios(threads, [failed, one, threads, ranks, eager_default, eager, eager_threads])
    medians = {name: value.median for name, value in found.items() if name != "bytes_of_eager"}
    assert medians == {
        "speed_up": pytest.approx((4 / 2 + 8 / 5) / 2),
        "than_ranks": pytest.approx((1 / 2 + 2 / 5) / 2),
        "than_eager_alike": pytest.approx((10 / 2 + 10 / 5) / 2),
        "than_eager_default": pytest.approx((20 / 2 + 20 / 5) / 2),
        "than_eager_equal": pytest.approx((6 / 2 + 10 / 5) / 2),
    }
    assert found["bytes_of_eager"] == 1
    alone = systems.ratios(ranks, [ranks])
    assert alone.pop("speed_up").median == 1
    assert set(alone.values()) == {None}
