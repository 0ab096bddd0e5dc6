"""`python -m domainpar.import_acorn`: a checkpoint of acorn becomes a run with its logits, or is refused."""

from __future__ import annotations

import json
import shlex
import sys
import types

import acorn_files
import acorn_networks
import numpy as np
import pytest
import torch
from acorn_networks import ONE, TWO
from test_infer import opened

from domainpar import import_acorn, prepare
from domainpar.agreement import Refused
from domainpar.config import InferConfig, TrainConfig
from domainpar.infer import infer
from domainpar.parallel.world import World
from domainpar.testing import run_ranks
from domainpar.training.run import train

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
    assert "was trained on features with node_scales [1000.0, 3.14, 1000.0] but those of" in said
    assert "prepare them with --node-scales '1000.0, 3.14, 1000.0'" in said


class Evil:
    """Asks to be run when it is unpickled."""

    def __reduce__(self):
        return (print, ("run",))


def with_weight(module, name, value):
    return {**module.state_dict(), name: value}


# What is changed of a checkpoint, or a weight of it, and what is said.
REFUSED = {
    "not a checkpoint": ({"state_dict": None}, "no state_dict and hyper_parameters: it has callbacks, epoch"),
    "asks to be run": ({"callbacks": Evil()}, "refused, nothing of it was run: it asks for builtins.print"),
    "another network": ({"hyper_parameters": ONE | {"model": "Filter"}}, "model 'Filter' of acorn has no equal here"),
    "other options": (
        {"hyper_parameters": ONE | {"aggregation": ["sum", "std"], "undirected": True}},
        "InteractionGNN with undirected: True; aggregation: ['sum', 'std'] is not acorn",
    ),
    "an option left out": (
        {"hyper_parameters": {key: of for key, of in ONE.items() if key != "output_activation"}},
        "InteractionGNN with no output_activation is not acorn",
    ),
    "no scales": (
        {"hyper_parameters": {key: of for key, of in ONE.items() if key != "node_scales"}},
        "hyper_parameters do not tell node_features and node_scales",
    ),
    "too few scales": ({"hyper_parameters": ONE | {"node_scales": [1.0]}}, "node_scales of hyper_parameters is [1.0]"),
    "no list of features": ({"hyper_parameters": ONE | {"node_features": 3}}, "node_features of hyper_parameters is 3"),
    "no width": ({"hyper_parameters": ONE | {"hidden": "wide"}}, "hidden of hyper_parameters is 'wide'"),
    "another width": ({"hyper_parameters": ONE | {"hidden": 48}}, "0.weight is 32 wide, hyper_parameters say"),
    "other iterations": ({"hyper_parameters": TWO | {"n_graph_iters": 2}}, "edge_networks.2.0.bias is (32,)"),
    "half precision": (("node_encoder.0.bias", torch.zeros(32).half()), "bias of state_dict is torch.float16"),
    "not finite": (("node_encoder.0.bias", torch.full((32,), torch.nan)), "node_encoder.0.bias is not finite"),
    "a weight more": (("loss.weight", torch.zeros(1)), "loss.weight is (1,), of acorn it is not there"),
    "more than it holds": (("x", torch.zeros(1).expand(10**12)), "x claims 1,000,000,000,000 values, more than"),
}  # fmt: skip


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
    assert error in said
    assert said.count("error: ") == 1
    assert not (tmp_path / "run").exists()


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
