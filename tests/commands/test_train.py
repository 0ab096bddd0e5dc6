"""`python -m domainpar.train` as people use it: numbered runs, going on with a run, and being asked to stop."""

import json
import os
import re
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from jobs import MPIEXEC, running
from marks import fault, slow
from random_store import write_random_store

from domainpar import infer, train
from domainpar.common.words import this_python
from domainpar.runs.own_files import strangers_in_run
from domainpar.tracking import config as configs
from domainpar.tracking.command_line import parse
from domainpar.tracking.config import PrepareConfig, TrainConfig, resolved_yaml
from domainpar.tracking.events.store import EventStore

SMALL = "--hidden 16 --graph-iters 1 --lr 0.01".split()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_random_store(tmp_path_factory.mktemp("store"), num_train=2, num_val=1)


def run_json(out):
    return json.loads((Path(out) / "run.json").read_text())


def steps(out):
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["split"] == "train"]


def test_a_run_gets_the_next_number_and_leaves_everything_that_is_promised(store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in ("0001", "0002"):
        assert train.main(["--store", str(store), "--epochs", "1", *SMALL]) == 0
        last_line = capsys.readouterr().out.splitlines()[-1]
        assert last_line.endswith(f"{this_python()} -m domainpar.infer --run runs/{number} --tracks greedy")
    left = {path.name for path in (tmp_path / "runs" / "0001").iterdir()}
    assert left == {"config.yaml", "run.json", "metrics.jsonl", "checkpoints"}
    about = [run_json(tmp_path / "runs" / number) for number in ("0001", "0002")]
    assert about[0]["parameters_sha256"] == about[1]["parameters_sha256"]
    assert {"state": "done", "ranks": 1, "steps": 2, "bitwise_problem": None}.items() <= about[0].items()
    assert about[0]["store"]["absolute"] == str(store)
    assert (tmp_path / "runs" / "0001" / about[0]["store"]["path"]).samefile(store)


def test_a_target_that_no_edge_belongs_to_is_refused_before_anything_is_written(store, tmp_path, capfd):
    with pytest.raises(SystemExit, match="2"):
        train.main(["--store", str(store), "--out", str(tmp_path / "run"), "--target", "pt: [1000, .inf]", *SMALL])
    error = "error: no edge of a target (--target 'pt: [1000, .inf]') in 2 training events of"
    assert error in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


BEGAN_WITH = TrainConfig(
    store="mine", hidden=32, graph_iters=3, shared_weights=True, lr=0.5, max_steps=7, target="pt: [1, .inf]",
    mode="naive", sectors=4, domain_size=2, transport="gloo", log_every=3, precision="bf16", dropout=0.2,
    device="cuda", threads=3, scratch="disk",
)  # fmt: skip
HERE = {"domain_size": None, "transport": "auto", "device": "auto", "threads": None}
HERE |= {"scratch": None, "resume": True}


@pytest.fixture
def old_run(tmp_path):
    """A directory that holds what such a run wrote of its configuration."""
    (tmp_path / "config.yaml").write_text(resolved_yaml(BEGAN_WITH))
    return str(tmp_path)


def resumed_with(run, *argv):
    return parse(TrainConfig, "", ["--out", run, "--resume", *argv])


@fault(45)
def test_a_run_goes_on_as_it_began_but_on_the_ranks_that_there_are(old_run):
    assert resumed_with(old_run) == replace(BEGAN_WITH, **HERE, store=None, out=old_run)
    assert resumed_with(old_run, "--store", "moved").store == "moved"


def test_a_run_goes_on_that_names_what_has_left_and_a_file_that_does_is_refused(old_run, capfd):
    path = Path(old_run) / "config.yaml"
    path.write_text(path.read_text().replace("log: null\n", "log: wandb\nwatts: 200.0\ndollars_per_hour: null\n"))
    assert resumed_with(old_run) == replace(BEGAN_WITH, **HERE, store=None, out=old_run)
    for left, hint in (("log: wandb", "tensorboard"), ("watts: null", "watts")):
        path.write_text(left)
        assert train.main(["--config", str(path)]) == 2
        assert hint in capfd.readouterr().err


def test_flags_win_over_the_file_they_name_and_both_over_what_the_run_began_with(old_run, tmp_path):
    (tmp_path / "more.yaml").write_text("max_steps: 20\nlog_every: 5\nresume: true\n")
    expected = replace(BEGAN_WITH, **HERE | {"domain_size": 1}, store=None, out=old_run, max_steps=30, log_every=5)
    for config in (
        resumed_with(old_run, "--config", str(tmp_path / "more.yaml"), "--max-steps", "30", "--domain-size", "1"),
        parse(
            TrainConfig,
            "",
            ["--max-steps=30", "--domain-size=1", "--out", old_run, "--config", str(tmp_path / "more.yaml")],
        ),
    ):
        assert config == expected


def test_built_in_events_are_cut_as_asked_and_those_of_a_store_are_said_to_be_cut_already(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configs, "PrepareConfig", partial(PrepareConfig, hits=1000, events=3), raising=False)
    for words, name in ((["--partitioner", "eta"], "simulate-1000-eta"), ([], "simulate-1000")):
        assert train.main([*words, "--max-steps", "1", *SMALL]) == 0
        assert EventStore(Path("stores", name)).settings["partitioner"].startswith(words[-1] if words else "phi-eta, ")
    for store, like, other in (("simulate-1000-eta", "eta", "metis"), ("simulate-1000", "phi-eta", "phi")):
        asked = ["--store", f"stores/{store}", "--max-steps", "1", *SMALL, "--partitioner"]
        assert train.main([*asked, like]) == 0
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            train.main([*asked, other])
        told = capfd.readouterr().err
        assert ended.value.code == 2
        assert re.search(f"--partitioner is {other}, .* stores/{store} .* {like}\n", told)
        assert f"python -m domainpar.prepare --partitioner {other} " in told


@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec or no mpi4py")
@pytest.mark.parametrize("ranks", [3, slow(8)])
def test_the_first_command_of_all_as_it_stands_trains_to_the_bits_of_one_rank(tmp_path, monkeypatch, capsys, ranks):
    """Typed in an empty folder, and stopped by Ctrl-C after some steps of its 320, as these take minutes."""
    monkeypatch.chdir(tmp_path)
    run, steps_there = Path("runs/0001"), lambda: (run / "metrics.jsonl").exists() and steps(run)
    path = f"{Path(sys.executable).parent}:{Path(MPIEXEC).parent}:{os.environ['PATH']}"
    # Where there are GPUs, several ranks may well compute on CPUs, and one on a GPU.
    with running(f"mpiexec -n {ranks} python -m domainpar.train".split(), PATH=path, CUDA_VISIBLE_DEVICES="") as job:
        job.wait_until(steps_there, 300)
        job.process.send_signal(signal.SIGINT)
        assert job.wait().code == 0, job.text
    assert f"{ranks} ranks over mpi, {ranks} per event, " in job.text
    assert "(self-test passed)" in job.text
    launched = run_json(run)
    assert launched["state"] == "preempted"
    assert launched["steps"] >= 1
    assert train.main(["--device", "cpu", "--max-steps", str(launched["steps"])]) == 0
    assert run_json("runs/0002")["parameters_sha256"] == launched["parameters_sha256"]


SAVING = "--precision bf16 --dropout 0.1 --recompute-every 2 --threads 3".split()


def test_what_saves_time_and_memory_is_said_kept_and_used_for_scores(store, tmp_path, capsys):
    out = str(tmp_path / "run")
    assert train.main(["--store", str(store), "--max-steps", "2", "--out", out, *SMALL, *SAVING]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(", 3 threads each")
    assert any(line.endswith(" parameters, float32 with edges in bf16") for line in printed)
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    expected = {"precision": "bf16", "dropout": 0.1, "recompute_every": 2, "threads": 3}
    assert {name: kept[name] for name in expected} == expected
    assert run_json(out)["threads"] == 3
    assert infer.main(["--run", out, "--checkpoint", "last", "--threads", "5"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert ", 5 threads each, " in printed[0]
    assert ", float32 with edges in bf16, parameters sha256 " in printed[1]
    scores = json.loads((tmp_path / "run" / "scores" / "scores.json").read_text())
    assert (scores["precision"], scores["step"]) == ("bf16", 2)
    validated = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert scores["metrics"]["val"]["edge_auc_mean"] == validated["edge_auc_pooled"], "other scores than training had"
    assert list(strangers_in_run(tmp_path / "run")) == [], "--overwrite would not know it for a run"


def test_a_run_of_two_parts_ends_with_the_bits_of_one_without_naming_its_flags_again(store, tmp_path):
    flags = ["--store", str(store), "--weight-decay", "0.1", "--clip", "0.5", "--events-per-step", "2", *SMALL]
    assert train.main([*flags, "--epochs", "3", "--out", str(tmp_path / "whole")]) == 0
    assert train.main([*flags, "--epochs", "2", "--out", str(tmp_path / "run")]) == 0
    assert train.main(["--out", str(tmp_path / "run"), "--resume", "--epochs", "3"]) == 0
    assert run_json(tmp_path / "run")["parameters_sha256"] == run_json(tmp_path / "whole")["parameters_sha256"]
    assert (tmp_path / "run" / "config.yaml").read_text() == (tmp_path / "whole" / "config.yaml").read_text()
    assert steps(tmp_path / "run") == steps(tmp_path / "whole") == [1, 2, 3]


@pytest.mark.parametrize(("num_train", "num_val", "told"), [(1, 0, True), (2, 0, False), (1, 1, False)])
def test_one_event_to_train_on_and_none_to_validate_with_is_told(tmp_path, capsys, num_train, num_val, told):
    write_random_store(tmp_path / "store", num_train=num_train, num_val=num_val)
    flags = ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "run"), "--max-steps", "1", *SMALL]
    assert train.main(flags) == 0
    assert ("WARNING: one event to train on, and none to validate with" in capsys.readouterr().out) == told
