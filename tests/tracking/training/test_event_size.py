"""Events of other sizes than asked for are left out of a training, counted, and said."""

from pathlib import Path

import invariance
import pytest
from random_store import write_random_store
from refused import refused_alike

from domainpar.testing import run_ranks
from domainpar.tracking.config import ConfigError, TrainConfig
from domainpar.tracking.training.run import train


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Events of 150, 160 and 170 nodes to train on, and of 180 and 190 to validate with."""
    return write_random_store(tmp_path_factory.mktemp("store"), num_val=2)


def _trained(world, store, out, flags):
    run = train(TrainConfig(**invariance.SMALL, out=str(out), **flags), Path(store), world)
    return run.state.step, sorted(sample.record.num_nodes for sample in run.trainer.loader._kept)


@pytest.mark.parametrize(("mode", "samples"), [({}, 1), ({"mode": "naive", "sectors": 2}, 2)])
def test_only_events_of_the_size_are_used(store, tmp_path, capsys, mode, samples):
    (found,) = run_ranks(_trained, 1, store, tmp_path / "run", {"event_size": "155, 180", **mode})
    assert found == (2 * 2 * samples, [size for size in (160, 170, 180) for _ in range(samples)])
    assert "1 training event and 1 validation event left out" in capsys.readouterr().out


def test_where_none_is_left_that_is_refused_on_all_ranks(store, tmp_path):
    with refused_alike(" 1 to 9 hits; .* 150 to 170"):
        run_ranks(_trained, 2, store, tmp_path / "run", {"event_size": "1, 9"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["7", "a, b", "9, 1", "1, 2, 3", "-1, 5"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match="--event-size"):
        TrainConfig(event_size=text)
