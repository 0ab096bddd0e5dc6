"""`python -m domainpar.import_acorn`: a checkpoint of acorn becomes a run with its logits, or is refused."""

from __future__ import annotations

import json
import shlex
import sys
import types
import warnings

import acorn_files
import acorn_networks
import numpy as np
import pytest
import torch
from acorn_networks import ONE, TWO
from test_infer import opened

from domainpar import import_acorn, prepare
from domainpar.common.agreement import Refused
from domainpar.common.problems import Problem
from domainpar.infer import infer
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.tracking.config import InferConfig, TrainConfig
from domainpar.tracking.events import pyg
from domainpar.tracking.events.sources import InputFiles
from domainpar.train import train

NETWORKS = {"acorn": ONE, "acorn2": TWO}


def prepared(tmp_path, columns, flags):
    """A store of one event of acorn, by the flags that the import prints."""
    acorn_files.save(tmp_path / "graphs", "event000000001.pyg", data=False, **columns)
    store = tmp_path / "store"
    words = [word.replace("DIRECTORY", str(tmp_path / "graphs")).replace("STORE", str(store)) for word in flags]
    assert prepare.main([*words, "--tiles", "4"]) == 0
    return store


@pytest.mark.parametrize("name", NETWORKS)
def test_its_run_has_the_logits_of_the_published_definition_on_any_number_of_ranks(tmp_path, capsys, name):
    told = NETWORKS[name]
    module, columns = acorn_networks.trained(told), acorn_networks.drawn_columns(0)
    path = acorn_networks.save(tmp_path / "gnn.ckpt", told, module)
    run = tmp_path / "run"
    assert import_acorn.main([str(path), "--out", str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"network : {name}, hidden 32, 3 iterations; sha256 " in printed
    assert f"imported: {path}, step 1200, is {run}" in printed
    command = next(line for line in printed.splitlines() if line.startswith("events  : "))
    store = prepared(tmp_path, columns, shlex.split(command)[5:])
    x, edge_attr = acorn_networks.inputs_of(columns, told)
    with torch.no_grad():
        expected = module.double()(x, columns["edge_index"], edge_attr).numpy()
    found = {}
    for ranks in (1, 3):
        out = tmp_path / f"scores{ranks}"
        run_ranks(lambda world, out=out: infer(InferConfig(run=str(run), store=str(store), out=str(out)), world), ranks)
        scores = opened(out / "event000000001.scores.zarr.zip")
        assert np.array_equal(scores["edge_index"][...], columns["edge_index"].numpy())
        found[ranks] = scores["edge_logit"][...]
        assert np.abs(found[ranks] - expected).max() <= 1e-5 * (1 + np.abs(expected).max())
    assert np.ptp(expected) > 0.1, "else nothing would be compared"
    assert name == "acorn2" or np.array_equal(found[1], found[3])


def test_hyper_parameters_may_lie_in_the_mapping_of_an_older_lightning(tmp_path):
    place = types.ModuleType("pytorch_lightning.utilities.parsing")
    attributes = type("AttributeDict", (dict,), {"__module__": place.__name__})
    place.AttributeDict = attributes
    names = ["pytorch_lightning", "pytorch_lightning.utilities", place.__name__]
    try:
        sys.modules.update(
            {names[0]: types.ModuleType(names[0]), names[1]: types.ModuleType(names[1]), names[2]: place}
        )
        told = attributes(ONE)
        path = acorn_networks.save(tmp_path / "a.ckpt", ONE, acorn_networks.trained(ONE), hyper_parameters=told)
    finally:
        for name in names:
            sys.modules.pop(name)
    assert import_acorn.main([str(path), "--out", str(tmp_path / "run")]) == 0


def test_the_numbers_of_features_are_those_it_was_trained_on_and_so_must_be_their_scales(tmp_path, capsys):
    path = acorn_networks.save(tmp_path / "gnn.ckpt", ONE, acorn_networks.trained(ONE))
    assert import_acorn.main([str(path), "--out", str(tmp_path / "run")]) == 0
    flags = ["--source", "acorn", "--input", "DIRECTORY", "--store", "STORE", "--edge-features", "none"]
    store = prepared(tmp_path, acorn_networks.drawn_columns(0), flags)
    capsys.readouterr()
    config = InferConfig(run=str(tmp_path / "run"), store=str(store))
    with pytest.raises(Refused) as refused:
        run_ranks(lambda world: infer(config, world), 2)
    said = str(refused.value)
    assert "node_scales [1000.0, 3.14, 1000.0]" in said
    assert "--node-scales '1000.0, 3.14, 1000.0'" in said


class Evil:
    """Asks to be run when it is unpickled."""

    def __reduce__(self):
        return (print, ("run",))


def with_weight(module, name, value):
    return {**module.state_dict(), name: value}


def but(told, *without, **changes):
    """Hyperparameters with something changed or left out."""
    return {"hyper_parameters": {key: of for key, of in (told | changes).items() if key not in without}}


# What is changed of a checkpoint, or a weight of it, and the values that its refusal names.
REFUSED = {
    "not a checkpoint": ({"state_dict": None}, "state_dict: callbacks, epoch"),
    "a list of numbers": ({"hyper_parameters": [1]}, "hyper_parameters: list"),
    "asks to be run": ({"callbacks": Evil()}, "nothing of it was run builtins.print"),
    "another network": (but(ONE, model="Filter"), "'Filter' acorn"),
    "other options": (
        but(ONE, aggregation=["sum", "std"], undirected=True),
        "InteractionGNN undirected: True; aggregation: ['sum', 'std']",
    ),
    "an option that is a tensor": (but(ONE, layernorm=torch.tensor([True, True])), "layernorm: [True, True]"),
    "an option left out": (but(ONE, "output_activation"), "InteractionGNN output_activation"),
    "no scales": (but(ONE, "node_scales"), "hyper_parameters node_features node_scales"),
    "too few scales": (but(ONE, node_scales=[1.0]), "node_scales hyper_parameters [1.0],"),
    "a scale of 0": (but(ONE, node_scales=[1.0, 0, 1.0]), "node_scales finite other than 0 3"),
    "a scale that is none": (but(ONE, node_scales=[1.0, None, 1.0]), "node_scales finite other than 0"),
    "a huge scale": (but(ONE, node_scales=[1.0, 10**400, 1.0]), "node_scales finite other than 0"),
    "scales in words": (but(ONE, node_scales="123"), "node_scales hyper_parameters '123'"),
    "no list of features": (but(ONE, node_features="rpz"), "node_features hyper_parameters 'rpz'"),
    "features of odd names": (but(ONE, node_features=["r, x", "phi", "z"]), "node_features list of names"),
    "a feature twice": (but(ONE, node_features=["r", "r", "z"]), "node_features list of names"),
    "no width": (but(ONE, hidden="wide"), "hidden hyper_parameters 'wide', whole number"),
    "another width": (but(ONE, hidden=48), "0.weight [32, 3], hyper_parameters hidden: 48"),
    "other iterations": (but(TWO, n_graph_iters=2), "state_dict 3 edge hyper_parameters"),
    "a great many iterations": (but(ONE, n_graph_iters=10**9), "n_graph_iters whole number 1,000"),
    "steps that are none": ({"global_step": torch.tensor([1, 2])}, "global_step [1, 2],"),
    "half precision": (("node_encoder.0.bias", torch.zeros(32).half()), "node_encoder.0.bias torch.float16"),
    "not finite": (("node_encoder.0.bias", torch.full((32,), torch.nan)), "node_encoder.0.bias not finite"),
    "a number alone": (("node_encoder.0.weight", torch.tensor(1.0)), "0.weight [], hyper_parameters hidden"),
    "a sparse weight": (("node_encoder.0.bias", torch.zeros(32).to_sparse()), "bias torch.sparse_coo cpu"),
    "no weight": (("node_encoder.0.bias", "none"), "node_encoder.0.bias state_dict str"),
    "a weight more": (("loss.weight", torch.zeros(1)), "loss.weight (1,),"),
    "a weight twice": (("edge_networks.0.0.weight", torch.zeros(32, 96)), "edge_networks.0.0.weight two names"),
    "more than it holds": (("x", torch.zeros(1).expand(10**12)), "x 1,000,000,000,000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_network_is_refused_in_a_line_and_leaves_no_run(tmp_path, capsys, name):
    change, error = REFUSED[name]
    told = TWO if name == "other iterations" else ONE
    module = acorn_networks.trained(told)
    if isinstance(change, tuple):
        change = {"state_dict": with_weight(module, *change)}
    path = acorn_networks.save(tmp_path / "gnn.ckpt", told, module, **change)
    assert import_acorn.main([str(path), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert all(value in said for value in error.split())
    assert said.count("error: ") == 1
    assert not (tmp_path / "run").exists()


def test_a_prefix_of_all_weights_is_named(tmp_path, capsys):
    module = acorn_networks.trained(ONE)
    state = {f"module.{name}": value for name, value in module.state_dict().items()}
    path = acorn_networks.save(tmp_path / "gnn.ckpt", ONE, module, state_dict=state)
    assert import_acorn.main([str(path)]) == 2
    assert "module.node_encoder.0.weight" in capsys.readouterr().err


def test_numbers_of_numpy_and_torch_are_numbers_and_a_scale_of_phi_that_is_not_pi_is_said(tmp_path, capsys):
    told = TWO | {"hidden": np.int64(32), "node_scales": np.array([1000, 3.14, 1000, 1] * 3)}
    told |= {"node_features": tuple(TWO["node_features"]), "concat": torch.tensor(True)}
    path = acorn_networks.save(tmp_path / "gnn.ckpt", told, acorn_networks.trained(TWO))
    assert import_acorn.main([str(path), "--out", str(tmp_path / "run")]) == 0
    assert " phi after its scale, 3.14," in capsys.readouterr().out


def test_without_a_store_its_run_asks_for_one(tmp_path):
    path = acorn_networks.save(tmp_path / "gnn.ckpt", ONE, acorn_networks.trained(ONE))
    assert import_acorn.main([str(path), "--out", str(tmp_path / "run")]) == 0
    with pytest.raises(Refused, match="of which store"):
        run_ranks(lambda world: infer(InferConfig(run=str(tmp_path / "run")), world), 2)


class ModelCheckpoint:
    """Stands for Lightning's, which older versions of it keep the state of under the class itself."""


def test_what_a_checkpoint_of_lightning_or_a_script_is_stands_in_its_error(tmp_path, capsys, monkeypatch):
    module = types.ModuleType("pytorch_lightning.callbacks.model_checkpoint")
    for name in ("pytorch_lightning", "pytorch_lightning.callbacks", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(module, "ModelCheckpoint", ModelCheckpoint, raising=False)
    monkeypatch.setattr(ModelCheckpoint, "__module__", module.__name__)
    trained = acorn_networks.trained(ONE)
    acorn_networks.save(tmp_path / "callbacks.ckpt", ONE, trained, callbacks={ModelCheckpoint: {"best": "a.ckpt"}})
    acorn_networks.save(tmp_path / "another.ckpt", {"lr": 0.1}, trained)
    torch.save({"state_dict": trained.state_dict(), "epoch": 3}, tmp_path / "untold.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, which names its successor
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "script.pt")
    said = {
        "callbacks.ckpt": ("Lightning, nothing run: ModelCheckpoint", "plain.ckpt')"),
        "another.ckpt": ("hyper_parameters model, acorn lr", "no other checkpoints"),
        "untold.ckpt": ("hyper_parameters: epoch, state_dict", "which have it"),
        "script.pt": ("TorchScript program", "the checkpoint that Lightning wrote"),
    }
    for name, (error, hint) in said.items():
        assert import_acorn.main([str(tmp_path / name)]) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert all(value in first for value in error.split())
        assert second.startswith("hint: ")
        assert hint in second
        assert "weights_only" not in first + second
        with pytest.raises(Problem) as refused:
            pyg.SOURCE.read(InputFiles(name, tmp_path, tmp_path / name))
        as_graph = "as a dict" if name == "script.pt" else "a checkpoint, not a graph"
        assert as_graph in refused.value.hint


def test_a_file_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04 and no more")
    for name, error in {"no.ckpt": "no such file", "cut.ckpt": "cannot be read"}.items():
        assert import_acorn.main([str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert error in said
        assert f"file {tmp_path / name}" in said
    assert import_acorn.main([]) == 2
    assert "no checkpoint is named" in capsys.readouterr().err


def test_a_directory_that_holds_something_is_left(tmp_path, capsys):
    path = acorn_networks.save(tmp_path / "gnn.ckpt", ONE, acorn_networks.trained(ONE))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    assert import_acorn.main([str(path), "--out", str(tmp_path / "run")]) == 2
    assert "holds other files" in capsys.readouterr().err


def test_runs_of_ours_keep_the_scales_of_their_features(tmp_path):
    columns = acorn_networks.drawn_columns(0)
    flags = ["--source", "acorn", "--input", "DIRECTORY", "--store", "STORE", "--node-features", "r, phi, z"]
    store = prepared(tmp_path, columns, [*flags, "--node-scales", "900, 3, 900", "--val-split", "0"])
    train(TrainConfig(store=str(store), out=str(tmp_path / "run"), max_steps=1), store, World.alone())
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["store"]["scales"]
    assert kept == {"node_scales": [900.0, 3.0, 900.0], "edge_scales": [1.0] * 6}
