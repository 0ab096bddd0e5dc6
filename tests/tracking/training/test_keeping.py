"""When a run saves and stops, and what becomes of it when it cannot save: nothing lost, nobody misled."""

import errno
import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
from faults.on_purpose import switch
from marks import fault
from random_store import write_random_store

from domainpar import infer, train
from domainpar.common import faults
from domainpar.common.agreement import Refused
from domainpar.common.lock import RUN, Claim
from domainpar.parallel.signals import StopFlag
from domainpar.runs.checkpoint import Checkpoints
from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.training import checkpointer
from domainpar.tracking.training.loop import Trainer
from domainpar.tracking.training.monitor.failure import StepFailed
from domainpar.tracking.training.record import MetricsFile
from domainpar.train import train as train_on_ranks

SMALL = {"hidden": 16, "graph_iters": 1, "epochs": 2, "lr": 1e-2}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_train=3, num_val=0)


def _run(world, store, out, flags, stop):
    config, stop = TrainConfig(**{**SMALL, **flags}, out=str(out)), StopFlag(**stop if world.is_root else {})
    run = train_on_ranks(config, store, world, stop=stop)
    world.transport.barrier()
    return run.exit_code


def run(store, out, num_ranks=2, stop=None, **flags):
    """Exit codes of all ranks; `stop`: how rank 0 was asked to stop from the beginning."""
    return run_ranks(_run, num_ranks, store, out, flags, stop or {})


def run_json(out):
    return json.loads((out / "run.json").read_text())


def saved(out):
    return Checkpoints(out / "checkpoints").names()


@pytest.fixture
def inject(monkeypatch):
    """Make one fault happen in this process, whose ranks are threads."""

    def arm(**what):
        words = ",".join(f"{key}={value}" for key, value in {"rank": 0, **what}.items())
        monkeypatch.setenv("DOMAINPAR_FAULT", switch(words))
        faults.arm(0)

    yield arm
    monkeypatch.delenv("DOMAINPAR_FAULT", raising=False)
    faults.arm(0)


@fault(46)
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(store, tmp_path, capsys, inject):
    inject(at="save:files", do="full", step=4)
    assert run(store, tmp_path / "run", checkpoint_every=2) == [0, 0]
    out, err = capsys.readouterr()
    assert err.count("WARNING") == 1
    assert re.search(r"step 4 .*\[Errno 28\].* step_000003", err)
    assert "WARNING: 1 checkpoint " in out
    content = run_json(tmp_path / "run")
    assert (content["state"], content["failed_saves"]) == ("done", 1)
    assert saved(tmp_path / "run") == ["step_000002", "step_000003", "step_000006"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*")), "the partial one is removed"


def test_old_checkpoints_that_cannot_be_removed_cost_nothing(store, tmp_path, capsys, inject):
    inject(at="save:drop", do="full", step=6)
    assert run(store, tmp_path / "run") == [0, 0]
    assert "step 6 saved, but old ones" in capsys.readouterr().err
    assert "failed_saves" not in run_json(tmp_path / "run")


@fault(46)
def test_a_run_whose_last_checkpoint_could_not_be_saved_has_failed(store, tmp_path, capsys, inject):
    inject(at="save:files", do="full", step=6)
    assert run(store, tmp_path / "run") == [1, 1]
    err = capsys.readouterr().err
    assert re.search(r"error: .* step 6 .*\[Errno 28\].*step 6 phase save\nhint: make room", err)
    content = run_json(tmp_path / "run")
    assert content["state"] == "failed"
    assert " step 6 could not be saved" in content["error"]
    assert saved(tmp_path / "run") == ["step_000003"]
    assert not (tmp_path / "run" / RUN.lock).exists()


@fault(41)
@pytest.mark.parametrize(("by", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 1)])
def test_a_run_that_was_asked_to_stop_and_cannot_save_does_not_call_itself_preempted(
    store, tmp_path, inject, capsys, by, code
):
    inject(at="save:rename", do="full")
    assert run(store, tmp_path / "run", stop={"requested": True, "by": by}) == [code, code]
    assert run_json(tmp_path / "run")["state"] == "failed"
    assert "no checkpoint was ever saved: " in (err := capsys.readouterr().err)
    assert "--resume" not in err.splitlines()[-1]


@fault(41)
def test_a_second_start_beside_a_run_at_work_names_its_process(store, tmp_path):
    run(store, tmp_path / "run", 1)
    claim = Claim.take(tmp_path / "run", RUN)
    for flags in ({}, {"overwrite": True}):
        with pytest.raises(Refused, match=f"another run is at work in .*: process {os.getpid()} on host"):
            run(store, tmp_path / "run", 1, **flags)
    claim.release()
    with pytest.raises(Refused, match="holds another run"):
        run(store, tmp_path / "run", 1)


def spoil_after_step(monkeypatch, number, rank):
    """Let a rank hold a NaN in its optimiser's state after a step."""

    def step(self, samples, step, following=(), plain=Trainer.step):
        record = plain(self, samples, step, following)
        if step + 1 == number and self.world.rank == rank:
            next(iter(self.optimizer.state.values()))["exp_avg"].view(-1)[0] = float("nan")
        return record

    monkeypatch.setattr(Trainer, "step", step)


@fault(38)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_finite_is_never_saved_and_the_rank_that_has_it_is_named(store, tmp_path, monkeypatch, rank):
    spoil_after_step(monkeypatch, 6, rank)
    with pytest.raises(StepFailed, match="exp_avg is not finite .*step 6; nothing"):
        run(store, tmp_path / "run")
    content = run_json(tmp_path / "run")
    assert content["state"] == "failed"
    assert content["error"].startswith(f"rank {rank}: StepFailed: ")
    assert saved(tmp_path / "run") == ["step_000003"]
    monkeypatch.undo()
    assert run(store, tmp_path / "run", resume=True) == [0, 0]


def test_time_alone_makes_a_run_save_and_none_makes_it_save_at_the_end_of_epochs_only(store, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(
        Checkpoints,
        "save",
        lambda self, *given, plain=Checkpoints.save: (steps.append(given[2].step), plain(self, *given)),
    )
    run(store, tmp_path / "often", save_every_minutes=1e-9)
    assert saved(tmp_path / "often") == ["step_000004", "step_000005", "step_000006"]
    assert steps == [1, 2, 3, 4, 5, 6]  # each once
    for name, minutes in (("never", 0.0), ("none", None), ("rarely", 15.0)):
        run(store, tmp_path / name, 1, save_every_minutes=minutes)
        assert saved(tmp_path / name) == ["step_000003", "step_000006"]


def test_the_time_until_the_next_save_begins_with_the_last_one(store, tmp_path, monkeypatch):
    seconds = [0.0]

    def step(self, samples, step, following=(), plain=Trainer.step):
        seconds[0] += 30.0
        return plain(self, samples, step, following)

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(checkpointer, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    run(store, tmp_path / "run", 1, save_every_minutes=1.0)
    assert sorted(run_json(tmp_path / "run")["saved"]) == ["2", "3", "5", "6"], "3 and 6 end epochs"


@fault(46)
def test_lines_of_metrics_that_a_full_disk_does_not_take_are_counted_and_training_goes_on(
    store, tmp_path, monkeypatch, capsys
):
    def add(self, record, plain=MetricsFile.add):
        if record["step"] in (2, 3):
            self.lost += 1
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(self, record)

    monkeypatch.setattr(MetricsFile, "add", add)
    assert run(store, tmp_path / "run") == [0, 0]
    out, err = capsys.readouterr()
    assert err.count("metrics.jsonl cannot be written: [Errno 28]") == 1
    assert "WARNING: 2 lines of metrics.jsonl" in out
    assert run_json(tmp_path / "run")["lost_records"] == 2
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 4, 5, 6]


def test_a_run_holds_its_directory_while_it_lasts_and_gives_it_back_however_it_ends(store, tmp_path, monkeypatch):
    seen = []

    def step(self, samples, step, following=(), plain=Trainer.step):
        seen.append((tmp_path / "run" / RUN.lock).exists())
        if step == 4:
            raise KeyError("no luck")
        return plain(self, samples, step, following)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(KeyError):
        run(store, tmp_path / "run")
    assert seen[:9] == [True] * 9, "the rank that fails gives it back before the other one comes there"
    assert not (tmp_path / "run" / RUN.lock).exists()
    monkeypatch.undo()
    run(store, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / RUN.lock).exists()


COMMAND = "--hidden 16 --graph-iters 1 --lr 0.01".split()


def contents(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--resume", "auto"], ["--overwrite"]])
def test_a_second_run_in_the_same_directory_is_refused_before_anything_is_touched(store, tmp_path, capfd, flags):
    out = tmp_path / "run"
    run(store, out, 1, epochs=1, max_steps=1)
    if not flags:  # another one has begun and has not written anything yet
        shutil.rmtree(out)
        out.mkdir()
    Claim.take(out, RUN)
    before = contents(tmp_path)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        train.main(["--store", str(store), "--out", str(out), *COMMAND, *flags])
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert f"process {os.getpid()} on host {os.uname().nodename}" in err
    assert err.count("domainpar: error: ") == 1
    assert contents(tmp_path) == before


def test_a_run_that_is_refused_when_it_would_go_on_gives_its_directory_back(store, tmp_path, capfd):
    run(store, tmp_path / "run", 1, epochs=1, max_steps=1)
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            train.main(["--out", str(tmp_path / "run"), "--store", str(store), "--resume", *COMMAND, "--hidden", "32"])
        assert ended.value.code == 2
        assert "belongs to another network" in capfd.readouterr().err
        assert contents(tmp_path) == before


def damage(out, step):
    path = out / "checkpoints" / f"step_{step:06d}" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[500] ^= 4
    path.write_bytes(content)


@fault(44)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_to_the_same_bits(store, tmp_path, capfd):
    flags = ["--store", str(store), *COMMAND]
    assert train.main([*flags, "--epochs", "3", "--out", str(tmp_path / "whole")]) == 0
    assert train.main([*flags, "--epochs", "2", "--out", str(tmp_path / "run")]) == 0
    damage(tmp_path / "run", 6)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        train.main(["--out", str(tmp_path / "run"), "--resume", "--strict-resume", "--epochs", "3"])
    assert ended.value.code == 2
    assert "step_000006: model.safetensors has sha256" in capfd.readouterr().err
    assert train.main(["--out", str(tmp_path / "run"), "--resume", "--epochs", "3"]) == 0
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1
    assert "step_000006: model.safetensors has sha256" in err
    assert "going on from step_000003" in err
    content = run_json(tmp_path / "run")
    assert content["began_at_step"] == 3
    assert content["parameters_sha256"] == run_json(tmp_path / "whole")["parameters_sha256"]


def test_resume_auto_is_one_command_for_the_first_time_and_for_all_others(store, tmp_path, capsys):
    again = ["--store", str(store), "--out", str(tmp_path / "run"), "--resume", "auto", *COMMAND]
    assert train.main([*again, "--epochs", "1"]) == 0
    again += ["--epochs", "2"]
    assert train.main(again) == 0
    assert "steps 4 to 6" in capsys.readouterr().out
    assert train.main(again) == 0
    assert "all 6 steps are done" in capsys.readouterr().out
    assert train.main(["--store", str(store), "--out", str(tmp_path / "whole"), "--epochs", "2", *COMMAND]) == 0
    assert run_json(tmp_path / "run")["parameters_sha256"] == run_json(tmp_path / "whole")["parameters_sha256"]


def test_infer_takes_the_checkpoint_before_a_damaged_last_one_but_never_another_best_one(store, tmp_path, capfd):
    out = tmp_path / "run"
    run(store, out)
    damage(out, 6)
    capfd.readouterr()
    assert infer.main(["--run", str(out), "--checkpoint", "last"]) == 0
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1
    assert "going on from step_000003" in err
    assert json.loads((out / "scores" / "scores.json").read_text())["step"] == 3
    with pytest.raises(SystemExit) as ended:
        infer.main(["--run", str(out), "--overwrite"])
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert "step_000006: model.safetensors has sha256" in err
    assert "take the newest with --checkpoint last" in err
