"""Each example of each command's help is typed as it stands: it is understood, and runs where a small store will do."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import acorn_networks
import pytest
from test_infer import trained, write_store

from domainpar.__main__ import COMMANDS
from domainpar.tracking.command_line import parse
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.simulate import simulate_event


def examples_of(command):
    """The words of each example of a command's help, without the launcher before and the remark behind."""
    text = importlib.import_module(f"domainpar.{command}").__doc__.partition("Examples:")[2]
    for line in filter(None, map(str.strip, text.splitlines())):
        launcher, named, words = line.partition(f"domainpar.{command}")
        assert named, f"an example of another command: {line}"
        assert launcher.split()[0] in ("python", "mpiexec", "srun", "torchrun"), line
        yield shlex.split(words.partition("    ")[0].partition("  a ")[0].partition("  `")[0])


EXAMPLES = {command: list(examples_of(command)) for command in COMMANDS}

SMALL = {
    "train": ["--hidden", "16", "--graph-iters", "1", "--epochs", "2"],
    "doctor": ["--seconds", "0.05"],
    "prepare": ["--hits", "500", "--events", "2"],
    "infer": ["--overwrite"],  # one example after another
    "export": ["--format", "pt2"],  # in half the time
}
"""Flags behind those of an example, which then takes seconds."""

NOT_RUN = {
    "prepare": ["--source trackml", "acorn", "gnn_train.yaml", "acts"],  # of files: other tests read such
    "export": ["pretrained"],  # larger networks, which test_pretrained exports
    "infer": ["pretrained"],  # and scores events with
    "estimate": [""],  # measures for a minute
}
"""What is in the words of examples that are read alone."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with what examples name: stores, runs, a checkpoint of acorn, a network of one's own."""
    place = tmp_path_factory.mktemp("examples")
    events = [build_graph(replace(simulate_event(seed, 500), event_id=f"{seed:09d}"), Cuts()) for seed in (1, 2, 4, 7)]
    write_store(place / "stores" / "full", events, ["train", "val", "test", "test"])
    for other in ("store", "stores/mine", "stores/trackml"):
        shutil.copytree(place / "stores" / "full", place / other)
    small = {"hidden": 16, "graph_iters": 1, "epochs": 1}
    with contextlib.chdir(place):
        store = Path("stores/full")
        trained(store, "runs/0001", **small)
        trained(store, "runs/0002", mode="naive", sectors=8, **small)
        Path("artifacts").mkdir()
        acorn_networks.save(Path("artifacts/gnn.ckpt"), acorn_networks.ONE, acorn_networks.trained(acorn_networks.ONE))
        shutil.copy(Path(__file__).parents[1] / "own_models.py", "mynet.py")
        with open("mynet.py", "a") as file:
            file.write("\n\nfactory = evolving\n")
    return place


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_is_understood(command, place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "gnn_train.yaml").write_text("input_dir: data/gnn/\n")
    shutil.copytree("runs/0001", "runs/mine")  # to be resumed
    module, asked = importlib.import_module(f"domainpar.{command}"), []

    def read(config_class, work, text, argv=None):
        asked.append(parse(config_class, text, argv))
        return 0

    monkeypatch.setattr(module, "run_command", read)
    assert len(EXAMPLES[command]) >= 1
    for words in EXAMPLES[command]:
        assert module.main(words) == 0, words
    assert len(asked) == len(EXAMPLES[command])
    shutil.rmtree("runs/mine")


@pytest.mark.parametrize("command", ["train", "infer", "report", "export", "import_acorn", "doctor", "prepare"])
def test_examples_run(command, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    module = importlib.import_module(f"domainpar.{command}")
    if command == "report":
        infer = importlib.import_module("domainpar.infer")
        assert infer.main(["--run", "runs/0002", "--mode", "naive", "--sectors", "8", "--overwrite"]) == 0
    typed = {shlex.join(words): words for words in EXAMPLES[command]}  # of two launchers, one is enough
    if command == "doctor":
        del typed[""]  # the others look at the same, and at more
    for words in typed.values():
        if any(part in " ".join(words) for part in NOT_RUN.get(command, ())):
            continue
        if command == "export":
            pytest.importorskip("onnxscript")
        more = [] if command == "export" and "--format" in words else list(SMALL.get(command, ()))
        if command in ("train", "infer") and "--store" not in words:
            more += ["--store", "stores/full"]
        elif command == "prepare":
            more = [] if "--report" in words else [*more, "--store", "stores/made-here"]
        os.utime("runs/0001/run.json")
        assert module.main([*words, *more]) == 0, f"{shlex.join(words)}: {capfd.readouterr().err}"
