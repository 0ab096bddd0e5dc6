"""Ranks on pretended GPUs over the mocked NCCL: launchers, commands, groups, faults, and mistakes on purpose."""

import functools
import json
import re
from pathlib import Path

import card
import numpy as np
import pytest
from faults.on_purpose import switch
from marks import fault, slow
from on_gpus import WARM, run
from random_store import write_random_store

PROGRAM = str(Path(__file__).with_name("program.py"))
SIZES = "--hidden 16 --graph-iters 2 --epochs 2 --lr 1e-2 --log-every 1 --check-replicas-every 1".split()


@pytest.fixture(scope="module", autouse=True)
def _can_be_built():
    try:
        card.library()
    except card.Missing as why:
        pytest.skip(str(why))
    yield
    WARM.end()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"))


def losses(directory):
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def of_one_cpu(store, tmp_path_factory):
    """Losses of one rank on a CPU, for a model."""
    from domainpar.parallel.world import World
    from domainpar.tracking.config import TrainConfig
    from domainpar.train import train

    @functools.cache
    def on_cpu(model):
        out = tmp_path_factory.mktemp(model.split(":")[0]) / "run"
        flags = {"hidden": 16, "graph_iters": 2, "epochs": 2, "lr": 1e-2, "events_per_step": 2, "model": model}
        train(TrainConfig(**flags, out=str(out)), store, World.alone())
        return losses(out)

    return on_cpu


@pytest.mark.parametrize(
    ("launcher", "ranks", "model", "more"),
    [
        slow("mpiexec", 4, "interaction", ["--domain-size", "2"]),
        ("mpiexec", 2, "interaction", []),
        slow("torchrun", 3, "own_models:evolving", []),
    ],
)
def test_ranks_learn_what_one_cpu_learns(store, of_one_cpu, tmp_path, launcher, ranks, model, more):
    """On GPUs, as there is one for each rank and nothing else is said."""
    words = ["train", "--store", store, "--out", tmp_path / "run", *SIZES, "--model", model, "--events-per-step", "2"]
    tests = str(Path(__file__).resolve().parents[1])
    environment = {"PYTHONPATH": f"{card.environment()['PYTHONPATH']}:{tests}"}
    done = run(tmp_path / "log", *words, *more, ranks=ranks, launcher=launcher, **environment)
    assert done.code == 0, done.text
    assert re.search(rf"^domainpar: {ranks} ranks over nccl, . per event, pretended GPU each$", done.text, re.M)
    assert done.problems() == []
    ratios = np.array(losses(tmp_path / "run")) / np.array(of_one_cpu(model))
    assert np.abs(ratios - 1).max() <= 2e-3


@pytest.mark.slow
def test_scores_and_tracks_of_two_ranks_are_those_of_one(store, tmp_path):
    trained = run(tmp_path / "train", "train", "--store", store, "--out", tmp_path / "run", *SIZES, "--device", "cuda")
    assert trained.code == 0, trained.text
    tables = []
    for ranks in (1, 2):
        words = ["infer", "--run", tmp_path / "run", "--split", "val", "--device", "cuda", "--tracks", "greedy"]
        done = run(tmp_path / f"infer{ranks}", *words, "--out", tmp_path / f"scores{ranks}", ranks=ranks)
        assert done.code == 0, done.text
        assert ranks == 1 or done.problems() == []
        import zarr

        (path,) = (tmp_path / f"scores{ranks}").glob("*.zarr.zip")
        with zarr.storage.ZipStore(path, mode="r") as file:
            tables.append(zarr.open(file, mode="r")["edge_logit"][:])
    assert np.abs(tables[0] - tables[1]).max() <= 1e-4


@pytest.mark.parametrize(
    ("launcher", "visible", "found"),
    [
        slow("mpiexec", {"gpus": 2}, ["cuda:0 = pretended-0-0", "cuda:1 = pretended-0-1"]),  # all see all
        ("each", {"gpus": 1, "PRETENDED_FIRST": "{rank}"}, ["cuda:0 = pretended-0-0", "cuda:0 = pretended-1-0"]),
    ],
)
def test_each_rank_finds_its_gpu_whatever_the_launcher_shows(tmp_path, launcher, visible, found):
    done = run(tmp_path, "met", program=[PROGRAM], ranks=2, launcher=launcher, **visible)
    assert done.code == 0, done.text
    assert [line for line in done.text.splitlines() if line.startswith("rank")] == [
        f"rank {rank} over nccl on {device}" for rank, device in enumerate(found)
    ]
    assert done.problems() == []


@fault(10)
@pytest.mark.parametrize("launcher", [slow("mpiexec"), "each"])
def test_ranks_that_would_share_a_gpu_are_refused(tmp_path, launcher):
    done = run(tmp_path, "met", program=[PROGRAM], ranks=2, gpus=1, launcher=launcher)
    assert done.code == 2
    assert done.text.count("error: --device cuda but rank 1") == 1
    assert "Traceback" not in done.text
    auto = run(tmp_path / "auto", "met", program=[PROGRAM], ranks=2, gpus=1, launcher=launcher, DEVICE="auto")
    assert auto.code == 0, auto.text
    assert "on cpu" in auto.text
    assert auto.text.count("note: computing on CPUs: rank 1 ") == 1


@pytest.mark.slow
def test_ranks_that_may_share_a_gpu_meet_over_gloo(store, of_one_cpu, tmp_path):
    words = ["train", "--store", store, "--out", tmp_path / "run", *SIZES, "--events-per-step", "2"]
    how = ["--device", "cuda", "--share-gpu", "--transport", "gloo"]
    done = run(tmp_path / "log", *words, *how, ranks=2, gpus=1, launcher="each")
    assert done.code == 0, done.text
    assert "2 ranks over gloo, 2 per event, pretended GPU each" in done.text
    assert not list((tmp_path / "log").glob("nccl.*.json"))
    ratios = np.array(losses(tmp_path / "run")) / np.array(of_one_cpu("interaction"))
    assert np.abs(ratios - 1).max() <= 2e-3


def test_what_nccl_refuses_is_one_line_with_a_hint(tmp_path):
    """The cards have different numbers here; NCCL sees one, as it does of a card cut in two."""
    done = run(tmp_path, "met", program=[PROGRAM], ranks=2, gpus=2, launcher="each", PRETENDED_DUPLICATE="1")
    assert done.code == 2
    (line,) = [line for line in done.text.splitlines() if line.startswith("domainpar: error: ")]
    assert "Duplicate GPU detected : rank 0 and rank 1" in line
    assert "hint: NCCL takes one rank on a GPU" in done.text
    assert "Traceback" not in done.text


@pytest.mark.parametrize("backend", ["", slow("cpu:gloo,cuda:nccl"), slow("nccl")])
def test_groups_of_a_program_serve_whatever_backends_they_have(tmp_path, backend):
    done = run(tmp_path, "own_group", program=[PROGRAM], ranks=2, launcher="each", BACKEND=backend)
    assert done.code == 0, done.text
    lines = sorted(line for line in done.text.splitlines() if line.startswith("nccl"))
    end = "[2, 2199023255552] [1]"
    assert lines == [f"nccl [{1.0 - rank}] {end} [[{1 - rank}]] [b'', b'x'] b'root'" for rank in (1, 0)]
    assert done.problems() == []


@pytest.mark.slow
def test_a_part_of_a_programs_processes_can_be_split_without_the_others(tmp_path):
    done = run(tmp_path, "part_of_a_group", program=[PROGRAM], ranks=3, launcher="each", timeout=40)
    assert done.code == 0, done.text
    lines = sorted(line for line in done.text.splitlines() if line.startswith("rows"))
    assert lines == ["rows [0.0] 1 2", "rows [1.0] 1 0"]
    assert "PROBLEM" not in done.text


@pytest.mark.parametrize(
    ("mistake", "seen"),
    [
        ("WithoutWait", "nobody waited for"),
        slow("HalfABatch", "sends 0 messages, 0 receives 1 of them"),
        slow("FromTheHost", "No backend type associated with device type cpu"),
    ],
)
def test_mistakes_on_purpose_are_seen(tmp_path, mistake, seen):
    done = run(tmp_path, "mistaken", program=[PROGRAM], ranks=2, launcher="each", MISTAKE=mistake)
    assert seen in done.text + "\n".join(done.problems() if mistake != "FromTheHost" else [])


@fault(33)
def test_a_rank_that_keeps_a_gpu_waiting_is_named_within_the_deadline(tmp_path):
    done = run(tmp_path, "silent", program=[PROGRAM], ranks=2, launcher="each", timeout=40)
    assert done.code == 1
    assert "rank 1 did not come: rank 0 has waited 3 s for an exchange (nccl)" in done.text
    assert "step 7, forward" in done.text


@pytest.mark.slow
@pytest.mark.parametrize("do", ["kill", "raise", "freeze", "nan", "oom"])
def test_a_fault_on_one_rank_ends_all(store, tmp_path, do):
    at = {"nan": "loss", "oom": "forward"}.get(do, "halo_bwd:0")
    words = ["train", "--store", store, "--out", tmp_path / "run", *SIZES, "--device", "cuda", "--timeout", "5"]
    # mpiexec ends all ranks itself when one is killed, and says so in its own words.
    # The first edge that rank 1 computes is counted by rank 0: nobody looks at its logit there.
    rank = 0 if do == "nan" else 1
    launcher, fault_of_one = "each" if do == "kill" else "mpiexec", f"rank={rank},at={at},step=1,do={do}"
    done = run(tmp_path / "log", *words, ranks=2, timeout=60, launcher=launcher, DOMAINPAR_FAULT=switch(fault_of_one))
    assert done.code != 0
    (line,) = [line for line in done.text.splitlines() if line.startswith("domainpar: error: ")]
    expected = {
        "kill": "rank 1 did not come",
        "freeze": "rank 1 did not come",
        "raise": "fault on purpose",
        "nan": "not finite, first in the logits on rank 0",
        "oom": "out of memory",
    }[do]
    assert expected in line
