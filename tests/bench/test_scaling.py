import argparse
import os

import cases
import exchange
import pytest
import rank_by_rank
import scaling
import short_runs
import torch
from on_ranks import Job

from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.planner.steps import Training


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    parser = argparse.ArgumentParser()
    cases.add_flags(parser, "tiny")
    cache = str(tmp_path_factory.getbasetemp() / "events")
    store = cases.chosen_case(parser.parse_args(["--cache", cache])).store
    return Job(store, Training(hidden=16, graph_iters=2))


def test_ranks_take_their_turns_one_at_a_time(tmp_path):
    log = []

    def work(world):
        rank_by_rank.open_turns(tmp_path, world)
        for turn in rank_by_rank.turns(tmp_path, world, 3):
            log.append((turn, world.rank, "begins"))
            torch.randn(100_000).sort()
            log.append((turn, world.rank, "ends"))
        return len(log)

    seen = run_ranks(work, 3, timeout=20)
    assert log == [(turn, rank, what) for turn in range(3) for rank in range(3) for what in ("begins", "ends")]
    assert seen == [18, 18, 18]  # none leaves before all have had their turns


def test_a_rank_whose_turn_does_not_come_says_so(tmp_path):
    def work(world):
        rank_by_rank.open_turns(tmp_path, world)
        if world.rank == 1:
            world.transport.deadline = 0.2
            with pytest.raises(TimeoutError, match="rank 1 waited 0.2 s for turn 0"):
                next(rank_by_rank.turns(tmp_path, world, 1))

    run_ranks(work, 2, timeout=20)


def test_a_muted_rank_works_and_counts_as_if_others_answered(job):
    real, muted = (run_ranks(step_of_a_rank, 4, job, muted, timeout=50) for muted in (False, True))
    assert [rank["sent"] for rank in muted] == [rank["sent"] for rank in real]
    assert min(rank["sent"] for rank in muted) > 0
    for rank in muted:
        assert rank["counted"] >= rank["sent"]  # the direction that moves more
        assert rank["neighbours"] == rank["planned"]
        assert rank["reductions"] > 0


def step_of_a_rank(world, job, muted):
    transport = rank_by_rank.MutedTransport(world.transport)
    if muted:
        world = World.over(transport, domain_size=world.size)
    trainer, samples = job.trainer(world)
    plan = trainer.loader.load(samples[0]).graph.plan
    transport.muted = True
    record, traffic = trainer.step(samples, 0), transport.traffic
    return {
        "sent": record["halo_bytes"][world.rank],
        "counted": sum(size for _, size in traffic.exchanges),
        "neighbours": {neighbours for neighbours, _ in traffic.exchanges},
        "planned": {int(((plan.send_counts > 0) | (plan.recv_counts > 0)).sum())},
        "reductions": len(traffic.reduced),
    }


def test_nothing_comes_from_muted_ranks():
    def work(world):
        transport = rank_by_rank.MutedTransport(world.transport)
        transport.muted = True
        rows, sums = torch.ones(3, 2), torch.full((2,), world.rank)
        transport.start(torch.ones(2, 2), [0, 2] if world.rank == 0 else [2, 0], rows, [0, 3][:: 1 - 2 * world.rank])
        transport.all_reduce(sums, "sum")
        return float(rows.sum()), sums.tolist(), transport.all_gather(b"%d" % world.rank)

    assert run_ranks(work, 2) == [(0.0, [0, 0], [b"0", b"0"]), (0.0, [1, 1], [b"1", b"1"])]


def test_scaling_says_what_is_measured_and_what_is_a_projection(tmp_path_factory, tmp_path):
    flags = "--case tiny --weak-hits 2000 --ranks 1 --parts 2 4 --weak-parts 4 --hidden 16 --graph-iters 2"
    short = "--rounds 1 --repeats 1 --transport threads"
    scaling.main([*flags.split(), *short.split(), *short_runs.flags(tmp_path_factory, tmp_path)])
    rows, tables = short_runs.lines(tmp_path)
    strong, weak = ([row for row in rows if row["kind"] == kind] for kind in scaling.KINDS)
    assert [(row["how"], row["ranks"]) for row in strong] == [("measured", 1), ("PROJECTED", 2), ("PROJECTED", 4)]
    assert [(row["how"], row["ranks"]) for row in weak] == [("measured", 1), ("PROJECTED", 4)]
    for row in (strong[0], weak[0]):
        assert row["efficiency"]["median"] == row["speed_up"]["median"] == 1
    for row in strong:
        assert sum(row["share_of_nodes"]) == pytest.approx(1 + row["ghost_ratio"])
        assert sum(row["share_of_edges"]) == pytest.approx(row["edge_work"])
    assert 2 < weak[1]["edges"] / weak[0]["edges"] < 6  # small events do not grow quite like the square
    assert [line[1] for line in tables[0]["cells"]] == ["measured", "PROJECTED", "PROJECTED"]


def test_a_projection_is_the_slowest_rank_and_its_messages():
    price = exchange.Price(latency=0.5, per_byte=0.0)
    ranks = [
        {"compute": [1.0, 3.0, 2.0], "traffic": exchange.Traffic([(1, 10)])},
        {"compute": [1.9, 1.8, 9.0], "traffic": exchange.Traffic([(2, 10)])},
    ]
    assert scaling.projected_seconds(ranks, price) == pytest.approx(1.9 + 1.0)
    assert scaling.talking(ranks, scaling.PROJECTED, price) == 1.0


def test_more_ranks_than_cores_are_not_measured(capsys):
    with pytest.raises(SystemExit):
        scaling.parse(["--ranks", str(os.cpu_count() + 1)])
    assert "would measure waiting" in capsys.readouterr().err


def test_edges_of_weak_scaling_grow_like_the_square_of_hits():
    assert [scaling.weak_hits(30_000, ranks) for ranks in (1, 4, 16)] == [30_000, 60_000, 120_000]
