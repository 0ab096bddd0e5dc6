"""`python -m domainpar.estimate`: predictions as a table and JSON; what cannot be asked is refused."""

import json

import pytest
from random_store import write_random_store

from domainpar import estimate
from domainpar.common import limits
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training import work


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("estimate") / "store")


@pytest.fixture
def no_crowd(monkeypatch):
    """Processes of ranks take seconds to start; what they measure is not looked at here."""
    monkeypatch.setattr(estimate, "_lines_of", lambda config, store, ranks, size: [[0.1, 1e-5]])


FLAGS = ["--hidden", "16", "--graph-iters", "1"]


@pytest.mark.usefixtures("no_crowd")
def test_this_machine_is_looked_at_up_to_all_of_its_cores(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(limits, "cores_here", lambda: [*range(6)])
    file = tmp_path / "e.json"
    assert estimate.main(["--store", str(store), *FLAGS, "--events-per-step", "3", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    grids = [(one["ranks"], one["domain_size"]) for one in found]
    assert grids == [(1, 1), (2, 2), (2, 1), (4, 4), (4, 1), (6, 6), (6, 1)]
    assert "fastest: mpiexec -n 4, --domain-size 1" in out or "fastest: mpiexec -n 6, --domain-size 1" in out


@pytest.mark.usefixtures("no_crowd")
def test_seconds_are_those_of_the_fullest_part_and_of_the_busiest_group(store, monkeypatch):
    """A step of three events: on one rank one after the other, on two each event by both, or two events and one."""
    monkeypatch.setattr(limits, "cores_here", lambda: [0, 1])
    config = estimate.EstimateConfig(store=str(store), hidden=16, graph_iters=1, events_per_step=3)
    alone, shared, dealt = estimate.estimated(config)
    records = EventStore(store).events("train")
    edges = sorted(record.num_edges for record in records)
    assert alone.seconds == pytest.approx(3 * 0.1 + 1e-5 * sum(edges))
    assert dealt.seconds == pytest.approx(2 * 0.1 + 1e-5 * sum(edges[:2]))
    assert 3 * 0.1 + 1e-5 * sum(edges) / 2 < shared.seconds < alone.seconds
    assert shared.bytes_of_rank < dealt.bytes_of_rank == alone.bytes_of_rank


@pytest.mark.slow
def test_ranks_of_this_machine_take_the_steps(store):
    for ranks, size in ((1, 1), (2, 2), (2, 1)):
        lines = estimate._lines_of(TrainConfig(model="acorn2", hidden=16, graph_iters=2), store, ranks, size)
        assert len(lines) == 2, "all kept, and all computed again"
        assert all(fixed >= 0 and of_edge > 0 for fixed, of_edge in lines)


@pytest.mark.usefixtures("no_crowd")
def test_where_nothing_fits_the_exit_code_says_so(store, monkeypatch, capsys):
    monkeypatch.setattr(work, "memory", lambda: limits.Memory(10**6, 10**6))
    assert estimate.main(["--store", str(store), *FLAGS]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "none of them fits" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--grouping", "best"], "--grouping"),
        (["--most-ranks", "0"], "--most-ranks is 0"),
        (["--store", "not-there"], "not-there"),
        (["--hidden", "17"], "--hidden is 17"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    assert estimate.main(flags) == 2
    assert said in capsys.readouterr().err


def test_after_a_launcher_it_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert estimate.main([]) == 2
    assert "a launcher has started it" in capsys.readouterr().err
