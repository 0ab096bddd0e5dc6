"""What is measured of a network's step: its messages are those that it sends."""

import pytest
from random_store import write_random_store

from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.training.inputs import open_lessons
from domainpar.tracking.training.run import make_trainer
from domainpar.tracking.training.work import work_of


def sent(world, store, config):
    """Exchanges of a step, bytes that this rank sent, and its ghosts."""
    training_data = open_lessons(config, store, world)
    trainer = make_trainer(config, training_data, world)
    part = trainer.loader.load(training_data.train[0])
    world.take_counters()  # of planning
    record = trainer.step(training_data.train[:1], 0)
    return sum(trainer.exchanges), record["halo_bytes"][world.rank], part.graph.plan.num_ghosts


@pytest.mark.parametrize("model", ["interaction", "acorn2"])
def test_exchanges_and_bytes_of_ghosts_are_those_of_a_step(tmp_path, model):
    store = write_random_store(tmp_path / "store", num_train=1)
    config = TrainConfig(model=model, hidden=16, graph_iters=2)
    world = World.alone()
    work = work_of(config, store, world, 0.0)
    found = run_ranks(sent, 3, store, config, domain_size=3)
    assert {exchanges for exchanges, _, _ in found} == {work.exchanges}
    ghosts = sum(count for _, _, count in found)
    assert sum(num_bytes for _, num_bytes, _ in found) == pytest.approx(work.bytes_of_ghost * ghosts)
    assert set(work.ways) == ({None} if model == "interaction" else {None, 1})
    assert all(way.seconds.of_edge > 0 for way in work.ways.values())
    assert work.bare > 1e6
