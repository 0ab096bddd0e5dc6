"""`--domain-size auto` and `--grouping auto`: one choice on all ranks, which changes no bit of a training."""

import pytest
from random_store import write_random_store
from some_work import ways, work

from domainpar.runs.checkpoint import parameters_sha256
from domainpar.testing import run_ranks
from domainpar.tracking.config import ConfigError, InferConfig, TrainConfig
from domainpar.tracking.cost.pieces import Line
from domainpar.tracking.training import arrange
from domainpar.tracking.training.run import train

FLAGS = {"hidden": 16, "graph_iters": 2, "epochs": 1, "events_per_step": 3}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("arrange") / "store")


def trained(world, store, out, **flags):
    """The grid of a training, and all that came of it."""
    config = TrainConfig(**FLAGS, **flags, out=str(out))
    config, world = arrange.arranged(config, store, world)
    run = train(config, store, world)
    return (world.domain.size, world.data_group, world.num_data_groups, config.grouping), parameters_sha256(
        run.trainer.model
    )


def test_nothing_is_measured_where_nothing_was_left_open(store, monkeypatch):
    monkeypatch.setattr(arrange, "transport_rates", None)
    config = TrainConfig(**FLAGS, domain_size=2)

    def as_they_were(world):
        return arrange.arranged(config, store, world) == (config, world)

    assert run_ranks(as_they_were, 2) == [True, True]


@pytest.mark.parametrize(
    ("of_edge", "latency", "rate", "domain_size"),
    [
        (1e-2, 0.0, 1e9, 4),  # one large event of a step: all share it
        (1e-9, 10.0, 1e9, 1),  # messages that take forever
        (1e-3, 0.0, 1e3, 1),  # slow ones: a rate in bits would make it 4
    ],
)
def test_all_ranks_take_the_grid_that_is_best_and_end_with_the_same_bits(
    store, tmp_path, monkeypatch, of_edge, latency, rate, domain_size
):
    known = work(ways=ways(Line(0.0, of_edge)))
    monkeypatch.setattr(arrange, "work_of", lambda *_: known)
    rates = {"latency_seconds": latency, "bytes_per_second_1_MiB": rate}
    monkeypatch.setattr(arrange, "transport_rates", lambda *_: rates)
    usual = run_ranks(trained, 4, store, tmp_path / "usual", timeout=120, domain_size=2)
    assert [grid for grid, _ in usual] == [(2, rank // 2, 2, "contiguous") for rank in range(4)]
    auto = run_ranks(_auto, 4, store, tmp_path / "auto", timeout=120)
    assert [grid[:3] for grid, _ in auto] == [(domain_size, rank // domain_size, 4 // domain_size) for rank in range(4)]
    assert len({str(bits) for _, bits in [*usual, *auto]}) == 1


def _auto(world, store, out):
    return trained(world, store, out, domain_size="auto", grouping="auto")


def test_it_is_measured_on_real_ranks_as_well(store, tmp_path, capsys):
    found = run_ranks(_auto, 2, store, tmp_path / "run", timeout=120)
    assert len({str(grid[0]) for grid, _ in found}) == 1
    assert len({str(bits) for _, bits in found}) == 1
    assert "predicted (auto)" in capsys.readouterr().out


def test_auto_is_of_training_on_whole_events():
    with pytest.raises(ConfigError, match="auto is about whole events"):
        TrainConfig(mode="naive", sectors=4, domain_size="auto")
    for flags in ({"domain_size": "auto"}, {"grouping": "auto"}):
        with pytest.raises(ConfigError, match="is of train"):
            InferConfig(**flags)
