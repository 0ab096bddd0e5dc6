"""Tables that lie in files: the same bits, what is chosen and told, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from invariance import results
from marks import slow
from random_store import write_random_store

from domainpar.common.agreement import Refused
from domainpar.measure import forecast
from domainpar.nn import operations
from domainpar.nn.program import PASSAGES, Program, set_threads, table, tiles_of
from domainpar.parallel import tables
from domainpar.parallel.tables import empty_table
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.cost import scratch
from domainpar.train import train

SIZES = {"hidden": 16, "graph_iters": 2, "epochs": 1}
NETWORKS = [{}, {"model": "interaction", "precision": "bf16"}, {"model": "acorn", "recompute_every": 2}]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), 2, 1, 800, 1600)


@pytest.fixture(autouse=True)
def in_memory_again():
    yield
    tables.lie_in_files(None)


@pytest.fixture
def every_table(monkeypatch):
    """Small tables lie in files, too, and are counted."""
    monkeypatch.setattr(tables, "SMALLEST_KEPT", 1)
    monkeypatch.setattr(tables, "_kept", tables.BlockPool())

    class Counted(tables.Files):
        made = 0

        def new_block(self, size):
            self.made += 1
            return super().new_block(size)

    monkeypatch.setattr(tables, "Files", Counted)


def little_memory(monkeypatch, free):
    monkeypatch.setattr(forecast, "free_memory", lambda device: (scratch.os.uname().nodename, free))


def expected_bytes(store, tmp_path, **flags):
    config = TrainConfig(out=str(tmp_path / "measured"), **SIZES | flags)
    run_ranks(lambda world: train(config, store, world), 1)
    return json.loads((tmp_path / "measured" / "run.json").read_text())["memory"]["expected_bytes"][0]


@pytest.mark.parametrize("numbers", [(3,), slow((1, 2, 8))], ids=str)
@pytest.mark.parametrize("network", NETWORKS, ids=["default", "bf16", "acorn"])
def test_the_bits_are_those_of_memory_on_any_number_of_ranks(
    store, tmp_path, every_table, network, numbers, monkeypatch
):
    monkeypatch.setattr(
        "domainpar.tracking.training.run.lie_in_files", lambda folder: None
    )  # scores are made after the run

    def trained(world, out):
        found = results(world, store, out, network)
        return {name: found[name] for name in ("steps", "parameters", "scores")}

    expected = run_ranks(trained, 1, tmp_path / "memory")[0]
    for num_ranks in numbers:
        tables.lie_in_files(tmp_path)
        assert run_ranks(trained, num_ranks, tmp_path / str(num_ranks)) == [expected] * num_ranks
        assert tables._files.made > 4
        tables.lie_in_files(None)
    assert all(entry.is_dir() for entry in tmp_path.iterdir()), "files have no name"


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_files_are_taken_where_memory_is_too_small_and_a_scratch_is_given(
    store, tmp_path, monkeypatch, every_table, capsys, num_ranks
):
    in_memory = expected_bytes(store, tmp_path)
    in_files = 3000 * 200 + forecast.OF_PROCESS  # at least
    assert in_files < in_memory
    monkeypatch.setattr(forecast, "OF_PROCESS", 0)
    little_memory(monkeypatch, in_memory - forecast.OF_PROCESS - 2**24 - 1)
    there = tmp_path / "scratch"
    there.mkdir()
    hashes = set()
    for given in (str(there), None):
        config = TrainConfig(out=str(tmp_path / f"run-{given is None}"), scratch=given, **SIZES)
        run_ranks(lambda world, config=config: train(config, store, world), num_ranks)
        about = json.loads((Path(config.out) / "run.json").read_text())
        said = capsys.readouterr().out
        assert (sum(about["memory"]["in_files_bytes"]) > 0) == (given is not None)
        assert ("of tables lie in files of --scratch" in said) == (given is not None)
        assert ("scratch  : a step had" in said) == ("disk_bytes" in about) == (given is not None)
        hashes.add(about["parameters_sha256"])
    assert len(hashes) == 1
    assert not list(there.iterdir())
    assert not tables.in_files()


def test_a_run_that_fits_has_its_tables_in_memory(store, tmp_path, capsys):
    config = TrainConfig(out=str(tmp_path / "run"), scratch=str(tmp_path), memory_limit=100.0, **SIZES)
    run_ranks(lambda world: train(config, store, world), 1)
    assert "of tables lie in files" not in capsys.readouterr().out


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"scratch": "{tmp}/none"}, "none is no folder"),
        ({"scratch": "{tmp}/file"}, "file is no folder"),
        ({"scratch": "{tmp}", "model": "acorn2"}, "serves the networks whose steps are stages"),
        ({"scratch": "{tmp}", "memory_limit": 1e-6}, "--memory-limit 1e-06 GiB"),
    ],
)
def test_what_will_not_do_is_refused_before_a_file_is_touched(store, tmp_path, num_ranks, flags, text):
    (tmp_path / "file").touch()
    flags = {**flags, "scratch": flags["scratch"].format(tmp=tmp_path)}
    config = TrainConfig(out=str(tmp_path / "run"), **SIZES, **flags)
    with pytest.raises(Refused, match=text) as refused:
        run_ranks(lambda world: train(config, store, world), num_ranks)
    assert refused.value.hint
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_itself_memory_is_refused(store, tmp_path, monkeypatch):
    inner = tmp_path / "shm" / "of" / "mine"
    inner.mkdir(parents=True)
    mounted = [SimpleNamespace(mountpoint=str(place), fstype=kind) for place, kind in
               (("/", "ext4"), (tmp_path / "shm", "tmpfs"), (tmp_path / "sh", "xfs"))]  # fmt: skip
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounted)
    config = TrainConfig(out=str(tmp_path / "run"), scratch=str(inner), **SIZES)
    with pytest.raises(Refused, match="mine is a tmpfs"):
        run_ranks(lambda world: train(config, store, world), 2)


def test_a_disk_without_room_is_refused_at_the_start_and_named_if_it_fills_later(
    store, tmp_path, monkeypatch, every_table
):
    monkeypatch.setattr(forecast, "OF_PROCESS", 0)
    little_memory(monkeypatch, expected_bytes(store, tmp_path) - 1)
    config = TrainConfig(out=str(tmp_path / "run"), scratch=str(tmp_path), **SIZES)
    full = SimpleNamespace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "disk_usage", lambda folder: full)
        with pytest.raises(Refused, match=r"has 0 MiB free, and the ranks on .* will want"):
            run_ranks(lambda world: train(config, store, world), 1)

    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables.os, "posix_fallocate", no_room)
    with pytest.raises(ValueError, match="No space left on device") as failed:
        run_ranks(lambda world: train(config, store, world), 1)
    assert "if --scratch names that place, choose another" in str(failed.value)


def test_passages_let_go_between_tiles(store, tmp_path, every_table, monkeypatch):
    calls = []
    set_threads(1)  # another would take an unknown share of the tiles
    tables.lie_in_files(tmp_path)
    monkeypatch.setattr(tables._files, "let_go", lambda: calls.append(1))
    program = Program()
    rows = empty_table(3200, 4, torch.empty(0))
    operations.clear_rows(program, table(rows))
    program.run(tiles_of(np.stack([np.arange(0, 3200, 10), np.arange(10, 3210, 10)], axis=1)))
    assert not rows.any()
    assert len(calls) > PASSAGES // 2


def test_all_ranks_count_a_process_once(monkeypatch):
    counters = SimpleNamespace(read_bytes=5, write_bytes=7)
    monkeypatch.setattr(scratch.psutil.Process, "io_counters", lambda self: counters, raising=False)
    assert run_ranks(scratch.traffic, 3) == [(5, 7)] * 3
    assert scratch.Traffic(5, 7).since(scratch.Traffic(1, 2)) == (4, 5)
