"""`python -m domainpar.estimate`: predictions as a table, JSON and a picture; what cannot be asked is refused."""

import json

import pytest
from random_store import write_random_store

from domainpar import estimate
from domainpar.measure import rates
from domainpar.tracking.cost.machine import Machine


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
def test_a_described_machine_is_looked_at_up_to_all_of_its_ranks(store, tmp_path, capsys):
    Machine("farm", ranks=4, operations=1e12, memory=1e12, latency=1e-6, rate=1e10).write(tmp_path / "m.yaml")
    files = [*("--json", str(tmp_path / "e.json")), *("--png", str(tmp_path / "e.png"))]
    asked = ["--machine", str(tmp_path / "m.yaml"), "--nodes", "2", "--events-per-step", "3"]
    assert estimate.main(["--store", str(store), *FLAGS, *asked, *files]) == 0
    out = capsys.readouterr().out
    assert "2 machines of 4 cores" in out
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["machine"]["nodes"] == 2
    assert {grid["ranks"] for grid in found["grids"]} == {1, 2, 3, 4, 8}
    assert {(grid["ranks"], grid["domain_size"]) for grid in found["grids"] if grid["ranks"] == 8} == {
        (8, size) for size in (1, 2, 4, 8)
    }
    assert "choice :" in out
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("no_crowd")
def test_this_machine_can_be_written_and_described_again(store, tmp_path, capsys):
    written = tmp_path / "here.yaml"
    assert estimate.main(["--store", str(store), *FLAGS, "--write-machine", str(written)]) == 0
    assert f"machine written into {written}" in capsys.readouterr().out
    assert Machine.read(written).latency == 1e-5


@pytest.mark.slow
def test_ranks_of_this_machine_tell_what_they_feel_of_each_other(store, monkeypatch):
    from domainpar.common import limits

    monkeypatch.setattr(limits, "cores_here", lambda: [0, 1])
    config = estimate.training_asked(estimate.EstimateConfig(hidden=16, graph_iters=1))
    found = estimate._of_all_cores(config, store)
    assert found["busy"] >= 1
    assert 0 < found["latency"] < 1
    assert found["rate"] > 1e6


@pytest.mark.usefixtures("no_crowd")
def test_where_nothing_fits_the_exit_code_says_so(store, tmp_path, capsys):
    Machine("small", ranks=2, operations=1e12, memory=1e6, latency=1e-6, rate=1e10).write(tmp_path / "m.yaml")
    assert estimate.main(["--store", str(store), *FLAGS, "--machine", str(tmp_path / "m.yaml")]) == 1
    assert "1 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--groupings", "best"], "--groupings has 'best'"),
        (["--machine", "a", "--write-machine", "b"], "--write-machine b means nothing with --machine a"),
        (["--most-ranks", "0"], "--most-ranks is 0"),
        (["--machine", "not-there.yaml"], "--machine not-there.yaml cannot be read"),
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
