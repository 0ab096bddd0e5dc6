"""`python -m domainpar.estimate`: predictions as a table, JSON and a picture; what cannot be asked is refused."""

import json

import pytest
from random_store import write_random_store

from domainpar import estimate
from domainpar.common import limits
from domainpar.measure import rates


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("estimate") / "store")


@pytest.fixture
def no_crowd(monkeypatch):
    """Processes of ranks take seconds to start; neither what they say of each other nor a rate is looked at here."""
    monkeypatch.setattr(rates, "MOST_REPEATS", 3)
    monkeypatch.setattr(estimate, "_of_all_cores", lambda *_: {"latency": 1e-5, "rate": 1e9, "busy": 1.1})


FLAGS = ["--hidden", "16", "--graph-iters", "1"]


@pytest.mark.usefixtures("no_crowd")
def test_this_machine_is_looked_at_up_to_all_of_its_cores(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(limits, "cores_here", lambda: [*range(4)])
    files = [*("--json", str(tmp_path / "e.json")), *("--png", str(tmp_path / "e.png"))]
    assert estimate.main(["--store", str(store), *FLAGS, "--events-per-step", "3", *files]) == 0
    out = capsys.readouterr().out
    assert "4 cores" in out
    found = json.loads((tmp_path / "e.json").read_text())
    assert (found["machine"]["ranks"], found["machine"]["latency"]) == (4, 1e-5)
    grids = {(grid["ranks"], grid["domain_size"]) for grid in found["grids"]}
    assert grids == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)}
    assert "choice :" in out
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ranks_of_this_machine_tell_what_they_feel_of_each_other(store, monkeypatch):
    monkeypatch.setattr(limits, "cores_here", lambda: [0, 1])
    config = estimate.training_asked(estimate.EstimateConfig(hidden=16, graph_iters=1))
    found = estimate._of_all_cores(config, store)
    assert found["busy"] >= 1
    assert 0 < found["latency"] < 1
    assert found["rate"] > 1e6


@pytest.mark.usefixtures("no_crowd")
def test_where_nothing_fits_the_exit_code_says_so(store, monkeypatch, capsys):
    monkeypatch.setattr(limits, "memory", lambda: limits.Memory(10**6, 10**6))
    assert estimate.main(["--store", str(store), *FLAGS]) == 1
    assert "1 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--groupings", "best"], "--groupings has 'best'"),
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
