"""`--model`: networks of the field and a user's own, trained on any ranks; what is tried, kept, refused and said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import own_models
import pytest
import torch
import yaml
import zarr
from marks import slow
from random_events import random_event
from random_store import write_graph
from safetensors.torch import load_file

from domainpar import infer, train
from domainpar.common.agreement import Refused
from domainpar.placed.ranks import NotExact
from domainpar.testing import find_mpiexec, run_command, run_ranks
from domainpar.tracking.command_line import parse
from domainpar.tracking.config import BITWISE, InferConfig, TrainConfig
from domainpar.tracking.config.train import IN_EXAMPLES as EXAMPLES
from domainpar.tracking.events.store import write_manifest
from domainpar.tracking.networks.catalogue import OF_THE_FIELD
from domainpar.train import train as train_on_ranks

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
ROUNDING = 1e-10
BASE = {"hidden": 8, "graph_iters": 1, "epochs": 3, "max_steps": 8, "lr": 1e-2, "dtype": "float64", "warmup": 2}
EVOLVING = {"model": "own_models:evolving", "dropout": 0.2}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Three events to train on and one to validate with, in three tiles: of four ranks one owns nothing."""
    directory = tmp_path_factory.mktemp("store")
    records = []
    for seed in range(4):
        event = random_event(seed, 60 + 7 * seed, 240 + 11 * seed)
        tiles = (np.arange(event.num_nodes) * 3 // event.num_nodes).astype(np.int32)
        records.append(write_graph(directory, event, tiles, 3, "train" if seed < 3 else "val"))
    write_manifest(directory, records, {})
    return directory


class Trained:
    """What a run left: lines of its metrics, and on each rank parameters and buffers by name."""

    def __init__(self, out, states):
        self.out, self.states = out, states
        self.lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def losses(self, split=None):
        return np.array([line["loss"] for line in self.lines if split in (None, line["split"])])


def _run(world, store, out, flags):
    run = train_on_ranks(TrainConfig(**{**BASE, "verify": False, **flags}, out=str(out)), store, world)
    world.transport.barrier()
    return {name: value.clone() for name, value in run.trainer.model.state_dict().items()}


def trained(store, out, num_ranks=1, domain_size=None, **flags):
    return Trained(out, run_ranks(_run, num_ranks, store, out, flags, domain_size=domain_size, timeout=60))


def difference(one, other):
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-300))


def assert_same(found, expected, split=None, but=lambda name: False):
    """Losses to rounding; parameters and buffers too, and the same bits on all ranks. Of some, `but`, six digits."""
    assert len(found.losses(split)) == len(expected.losses(split)) > 0
    assert difference(found.losses(split), expected.losses(split)) < ROUNDING
    assert found.states[0].keys() == expected.states[0].keys()
    for name in expected.states[0]:
        assert all(torch.equal(state[name], found.states[0][name]) for state in found.states), name
        assert difference(found.states[0][name], expected.states[0][name]) < (1e-6 if but(name) else ROUNDING), name


@pytest.fixture(scope="module")
def on_one_rank(store, tmp_path_factory):
    """Runs on one rank, each made once."""
    known = {}

    def run(**flags):
        key = json.dumps(flags, sort_keys=True)
        if key not in known:
            known[key] = trained(store, tmp_path_factory.mktemp("one") / "run", **flags)
        return known[key]

    return run


# The same on any ranks


@pytest.mark.parametrize("num_ranks", [slow(2), 4])
def test_a_users_network_learns_the_same_on_any_number_of_ranks(store, tmp_path, on_one_rank, num_ranks):
    found = trained(store, tmp_path / "run", num_ranks, **EVOLVING)
    owned = [line["owned_nodes"] for line in found.lines]
    assert all((num_ranks == 4) == (0 in nodes) for nodes in owned)
    assert_same(found, on_one_rank(**EVOLVING))
    losses = found.losses("train")
    assert len(losses) == 8
    assert losses[-1] < losses[0]


FEW = {**EVOLVING, "max_steps": 5, "events_per_step": 2}
NAIVE = {**FEW, "mode": "naive", "sectors": 3}


@pytest.mark.parametrize(
    ("flags", "num_ranks", "domain_size"),
    [
        pytest.param(FEW, 4, 2, id="events"),
        slow(NAIVE, 2, 1, id="sectors on two groups of one"),
        pytest.param(NAIVE, 4, 2, id="sectors on two groups of two"),
    ],
)
def test_on_any_grid_a_users_network_learns_the_same_from_events_and_sectors(
    store, tmp_path, on_one_rank, flags, num_ranks, domain_size
):
    """Running statistics too, whichever group of ranks saw an event."""
    expected = on_one_rank(**flags)
    assert_same(trained(store, tmp_path / "run", num_ranks, domain_size, **flags), expected)
    assert abs(expected.losses("train")[1] - on_one_rank(**EVOLVING).losses("train")[1]) > 1e-3


def test_running_statistics_of_a_step_of_several_events_are_the_mean_of_what_each_would_leave(store, tmp_path):
    found = trained(store, tmp_path / "run", 2, 1, **EVOLVING | {"max_steps": 1, "events_per_step": 3})
    first = own_models.evolving(3, 6, 8, 1, 0.0).of_nodes[0].double()
    events = [torch.from_numpy(random_event(seed, 60 + 7 * seed, 240 + 11 * seed).features) for seed in range(3)]
    means = [first(features.double()).mean(0).detach() for features in events]
    assert difference(found.states[0]["module.of_nodes.1.running_mean"], 0.1 * sum(means) / 3) < ROUNDING
    assert found.states[0]["module.of_nodes.1.num_batches_tracked"] == 3


ALWAYS = ("acorn", "acorn2", EXAMPLES["gcn"])  # on stages; with norms; with sums divided by roots of degrees


@pytest.mark.parametrize("num_ranks", [slow(2), 4])
@pytest.mark.parametrize("name", [it if it in ALWAYS else slow(it) for it in (*OF_THE_FIELD, *EXAMPLES.values())])
def test_networks_of_the_field_learn_the_same_on_any_number_of_ranks(store, tmp_path, on_one_rank, name, num_ranks):
    """But for biases that a norm behind them takes away: their gradient is rounding, of which AdamW makes steps."""
    flags = {"model": name, "graph_iters": 2, "max_steps": 2, "hidden": 16 if name in BITWISE else BASE["hidden"]}
    found = trained(store, tmp_path / "run", num_ranks, **flags)
    assert_same(found, on_one_rank(**flags), but=lambda parameter: name == "acorn2" and parameter.endswith(".bias"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_networks_that_were_built_in_are_trained_from_the_examples_which_their_old_names_say(
    store, tmp_path, capfd, name
):
    said = refused(capfd, train, words(store, tmp_path / "run", "--model", name))
    assert f"hint: use --model {EXAMPLES[name]}, with examples/" in said
    assert not (tmp_path / "run").exists()
    assert train.main(words(store, tmp_path / "run", "--model", EXAMPLES[name])) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model_code"] == EXAMPLES[name]


def test_a_run_of_a_network_that_was_built_in_is_scored_by_that_of_the_examples(store, tmp_path, capfd):
    run = tmp_path / "run"
    assert train.main(words(store, run, "--model", EXAMPLES["agnn"])) == 0
    written = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(written.replace("model: own\n", "model: agnn\n"))
    assert f"hint: use --model {EXAMPLES['agnn']}, " in refused(capfd, infer, ["--run", run])
    assert infer.main(["--run", str(run), "--checkpoint", "last", "--model", EXAMPLES["agnn"]]) == 0


@pytest.mark.parametrize("name", [EXAMPLES["gcn"], "acorn2"])
def test_networks_of_the_field_are_trained_in_naive_mode(store, tmp_path, name):
    found = trained(store, tmp_path / "run", 2, model=name, max_steps=2, mode="naive", sectors=2, events_per_step=2)
    assert np.isfinite(found.losses("train")).all()


def test_a_run_goes_on_on_other_ranks_as_if_it_had_not_been_stopped(store, tmp_path, on_one_rank):
    trained(store, tmp_path / "run", 3, **EVOLVING | {"max_steps": 7})
    found = trained(store, tmp_path / "run", 2, **EVOLVING, resume=True)
    expected = on_one_rank(**EVOLVING)
    assert_same(found, expected, split="train")


def test_weights_that_no_seed_decides_are_those_of_rank_0_everywhere(store, tmp_path):
    found = trained(store, tmp_path / "run", 3, model="own_models:never_the_same", max_steps=1)
    assert all(torch.equal(state[name], value) for state in found.states for name, value in found.states[0].items())


# What a run leaves


def test_a_checkpoint_holds_parameters_and_running_statistics_by_the_users_names(store, tmp_path):
    found = trained(store, tmp_path / "run", 2, **EVOLVING | {"max_steps": 3})
    last = tmp_path / "run" / "checkpoints" / (tmp_path / "run" / "checkpoints" / "last").read_text().strip()
    saved = load_file(last / "model.safetensors")
    assert b"module.edge_steps.0.1.running_mean" in (last / "model.safetensors").read_bytes()
    expected = {f"module.{name}" for name in own_models.evolving(3, 6, 8, 1, 0.2).state_dict()}
    assert saved.keys() == found.states[0].keys() == expected
    assert all(torch.equal(saved[name], value) for state in found.states for name, value in state.items())
    assert saved["module.of_nodes.1.num_batches_tracked"] == 3
    assert saved["module.of_nodes.1.running_mean"].abs().max() > 0


@pytest.mark.parametrize("name", ["masked", "with_nan"])
def test_a_constant_buffer_that_is_not_finite_does_not_keep_running_statistics_from_running(store, tmp_path, name):
    runs = [trained(store, tmp_path / f"{ranks}", ranks, model=f"own_models:{name}", max_steps=2) for ranks in (1, 2)]
    assert not any(torch.isfinite(run.states[0].pop("module.constant")).any() for run in runs)
    assert all(run.states[0]["module.norm.num_batches_tracked"] == 2 for run in runs)
    assert runs[0].states[0]["module.norm.running_mean"].abs().max() > 0
    assert difference(runs[1].losses(), runs[0].losses()) < ROUNDING
    for key, value in runs[0].states[0].items():
        assert difference(runs[1].states[0][key], value) < ROUNDING


def test_a_state_that_no_checkpoint_would_hold_is_refused(store, tmp_path):
    with pytest.raises(Refused, match="the model keeps extra state"):
        trained(store, tmp_path / "run", 2, model="own_models:with_more", max_steps=1)
    assert not (tmp_path / "run").exists()


def test_a_parameter_that_nobody_uses_is_not_decayed_and_a_frozen_one_stays(store, tmp_path):
    first = {f"module.{name}": value.double() for name, value in own_models.with_spare().state_dict().items()}
    flags = {"model": "own_models:with_spare", "weight_decay": 0.5, "max_steps": 3}
    runs = [trained(store, tmp_path / f"run-{ranks}", ranks, **flags) for ranks in (1, 3)]
    assert_same(*runs)
    for run in runs:
        kept = {name for name, value in run.states[0].items() if torch.equal(value, first[name])}
        assert kept == {f"module.{layer}.{part}" for layer in ("spare", "frozen") for part in ("weight", "bias")}
    last = tmp_path / "run-3" / "checkpoints" / (tmp_path / "run-3" / "checkpoints" / "last").read_text().strip()
    stepped = {name.split(":")[0] for name in load_file(last / "optimizer.safetensors")}
    assert stepped == {f"module.{layer}.{part}" for layer in ("lin", "head") for part in ("weight", "bias")}


def words(store, out, *more):
    return ["--store", str(store), "--out", str(out), "--max-steps", "2", "--hidden", "8", *more]


def own(name):
    return "--model", f"own_models:{name}"


def refused(capfd, command, argv):
    """What is printed where a command ends with exit code 2, without a traceback."""
    try:
        code = command.main([str(word) for word in argv])
    except SystemExit as ended:
        code = ended.code
    out, err = capfd.readouterr()
    assert code == 2, err
    assert "Traceback" not in out + err
    assert err.startswith(("error: ", "domainpar: error: "))
    return err


@pytest.fixture(scope="module")
def own_run(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("own") / "run"
    assert train.main(words(store, out, *own("small"))) == 0
    return out


def test_a_file_never_names_code_and_run_json_says_what_it_was(own_run):
    written = (own_run / "config.yaml").read_text()
    assert yaml.safe_load(written)["model"] == "own"
    assert "own_models" not in written
    about = json.loads((own_run / "run.json").read_text())
    assert (about["state"], about["model_code"]) == ("done", "own_models:small")


def test_run_json_of_a_network_that_is_built_in_names_no_code(store, tmp_path):
    trained(store, tmp_path / "run", model="acorn2", max_steps=1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model_code"] is None
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"] == "acorn2"


HINT = "repeat --model package.module:factory"


def test_going_on_and_scoring_need_the_network_again(own_run, tmp_path, capfd):
    before = {path: path.read_bytes() for path in own_run.rglob("*") if path.is_file()}
    for command, argv in (
        (train, ["--out", own_run, "--resume", "--max-steps", "3"]),
        (train, ["--config", own_run / "config.yaml", "--out", tmp_path / "new"]),
        (infer, ["--run", own_run]),
    ):
        said = refused(capfd, command, argv)
        assert HINT in said
    for command, argv in (
        (train, ["--out", own_run, "--resume", "--max-steps", "3", "--model", "acorn2"]),
        (infer, ["--run", own_run, "--model", "acorn2"]),
    ):
        assert "another network" in refused(capfd, command, argv)
    assert "acorn?" in refused(capfd, infer, ["--run", own_run, "--model", "acron"])
    assert {path: path.read_bytes() for path in own_run.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("command", "config_class"), [(train, TrainConfig), (infer, InferConfig)])
def test_neither_command_takes_code_from_a_file(tmp_path, capfd, command, config_class):
    (tmp_path / "file.yaml").write_text("model: own_models:small\n")
    said = refused(capfd, command, ["--config", tmp_path / "file.yaml"])
    assert f"{tmp_path / 'file.yaml'}: model is 'own_models:small'" in said
    assert "as a flag: --model own_models:small" in said
    (tmp_path / "file.yaml").write_text("threads: 2\n")
    given = parse(config_class, "", ["--config", str(tmp_path / "file.yaml"), *own("small")])
    assert (given.model, given.threads) == ("own_models:small", 2)


def test_a_run_says_what_it_tried_and_how_to_score(store, tmp_path, capsys):
    assert train.main(words(store, tmp_path / "run", *own("small"))) == 0
    printed = capsys.readouterr().out.splitlines()
    tried = next(number for number, line in enumerate(printed) if line.startswith("verify   : "))
    assert "--no-verify" in printed[tried]
    assert printed[tried + 1].strip().startswith("exact on 4 ranks")
    assert next(number for number, line in enumerate(printed) if line.startswith("split=train")) < 13
    assert any(line.startswith("exactness: the same result on any number of ranks up to rounding") for line in printed)
    assert any(line.startswith("network  : own_models:small, ") for line in printed)
    assert printed[-1].endswith(f"-m domainpar.infer --run {tmp_path / 'run'} --model own_models:small --tracks greedy")
    assert train.main(words(store, tmp_path / "run", *own("small"), "--overwrite", "--no-verify")) == 0
    assert "verify" not in capsys.readouterr().out


def _infer(world, config):
    infer.infer(config, world)


def scores(run, out, num_ranks):
    config = InferConfig(run=str(run), out=str(out), model="own_models:evolving")
    run_ranks(_infer, num_ranks, config)
    files = sorted(out.glob("*.zip"))
    found = [zarr.open(zarr.storage.ZipStore(path), mode="r") for path in files]
    assert all(one["edge_scored"][...].all() for one in found)
    return np.concatenate([one["edge_logit"][...] for one in found])


def test_scores_of_a_users_network_are_the_same_on_any_number_of_ranks(store, tmp_path):
    run = trained(store, tmp_path / "run", 2, **EVOLVING | {"max_steps": 3})
    expected = scores(run.out, tmp_path / "one", 1)
    assert len(expected) == sum(240 + 11 * seed for seed in range(4))
    assert expected.std() > 1e-3
    assert difference(scores(run.out, tmp_path / "4", 4), expected) < 1e-6, "kept in float32"
    listed = json.loads((tmp_path / "4" / "scores.json").read_text())
    assert "stages" in listed["bitwise_problem"]
    validated = [line for line in run.lines if line["split"] == "val"]
    assert listed["step"] in {line["step"] for line in validated}
    line = next(line for line in validated if line["step"] == listed["step"])
    assert listed["metrics"]["val"]["edge_auc_mean"] == pytest.approx(line["edge_auc_pooled"], abs=1e-6)


# What is tried before anything is trained


def started(store, out, name, num_ranks=3, **flags):
    return trained(store, out, num_ranks, model=f"own_models:{name}", **{"verify": True, "max_steps": 1} | flags)


def _refused_on(world, store, out, flags):
    try:
        _run(world, store, out, flags)
    except Refused as error:
        return str(error)
    return None


def refused_on_all(store, out, name, num_ranks=3, **flags):
    """The words of the refusal, which are the same on all ranks but for who says them."""
    flags = {"model": f"own_models:{name}", "verify": True, **flags}
    found = run_ranks(_refused_on, num_ranks, store, out, flags)
    assert None not in found
    assert len(set(found)) == 1
    return found[0]


def test_a_network_without_an_exact_form_is_refused_on_all_ranks(store, tmp_path):
    said = refused_on_all(store, tmp_path / "run", "RunningTotal")
    assert re.search(r"RunningTotal.*own_models.py:\d+: torch.cumsum", said)


def test_a_network_that_is_silently_wrong_is_refused_by_the_name_of_its_layer(store, tmp_path):
    said = refused_on_all(store, tmp_path / "run", "Silent")
    assert "<- first difference" in said
    assert "is in counts (Counts)" in said


def test_without_verification_what_is_silent_goes_through_and_what_is_refused_still_stops(store, tmp_path):
    started(store, tmp_path / "silent", "Silent", verify=False)
    with pytest.raises(NotExact, match="torch.cumsum"):
        started(store, tmp_path / "run", "RunningTotal", verify=False)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["state"] == "failed"
    assert "torch.cumsum" in about["error"]


def test_verification_leaves_the_network_and_the_run_as_they_are(store, tmp_path):
    runs = [
        started(store, tmp_path / str(verify), "evolving", 2, verify=verify, dropout=0.2) for verify in (False, True)
    ]
    for name, value in runs[0].states[0].items():
        assert torch.equal(runs[1].states[0][name], value), name
    assert runs[0].losses().tolist() == runs[1].losses().tolist()


def test_networks_that_are_built_in_are_not_tried(store, tmp_path, monkeypatch):
    def verify_network(*_):
        raise AssertionError

    monkeypatch.setattr("domainpar.tracking.training.run.verify_network", verify_network)
    trained(store, tmp_path / "run", model="acorn2", max_steps=1, verify=True)
    with pytest.raises(AssertionError):
        started(store, tmp_path / "own", "small")


def test_a_refused_network_leaves_no_run_and_takes_none_away(store, tmp_path):
    refused_on_all(store, tmp_path / "new", "RunningTotal")
    assert not (tmp_path / "new").exists()
    started(store, tmp_path / "run", "small")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused_on_all(store, tmp_path / "run", "RunningTotal", overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


FAILING = {
    "nodes for edges": ("OfNodes", "one logit for each edge"),
    "two logits for each edge": ("TwoColumns", "one logit for each edge"),
    "a pair": ("APair", "returned a tuple"),
    "a layer of the wrong width": ("WrongWidth", "mat1 and mat2"),
    "nothing to train": ("frozen", "no parameter"),
}


@pytest.mark.parametrize(("name", "error"), FAILING.values(), ids=FAILING)
def test_what_could_not_be_trained_is_refused_before_it_is(store, tmp_path, name, error):
    assert error in refused_on_all(store, tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["OfNodes", "TwoColumns", "APair"])
def test_without_verification_a_result_of_the_wrong_shape_still_stops(store, tmp_path, name):
    with pytest.raises(ValueError, match="one logit for each edge"):
        started(store, tmp_path / "run", name, verify=False)


@pytest.mark.parametrize(("name", "num_ranks", "times"), [("Squashed", 3, 2), ("Squashed", 1, 2), ("small", 1, 0)])
def test_a_network_that_ends_in_a_sigmoid_is_told_once_and_in_the_end_to_return_logits(
    store, tmp_path, capsys, name, num_ranks, times
):
    started(store, tmp_path / "run", name, num_ranks, verify=False, max_steps=8, epochs=2)
    out = capsys.readouterr().out
    assert (len(re.findall("WARNING: .*0..1.*sigmoid", out)), out.count("split=val")) == (times, 2)


def test_the_header_shows_the_sizes_that_a_network_takes_and_others_that_were_given_are_named(store, tmp_path, capsys):
    started(store, tmp_path / "small", "small", 1, verify=False, dropout=0.5)
    out = capsys.readouterr().out
    assert "network  : own_models:small, 25 parameters, float64" in out
    assert json.loads((tmp_path / "small" / "run.json").read_text())["model_options"] == []
    assert "own_models:small does not take --hidden 8, --graph-iters 1, --dropout 0.5" in out
    started(store, tmp_path / "plain", "small", 1, verify=False, hidden=64, graph_iters=3)
    assert "does not take" not in capsys.readouterr().out
    started(store, tmp_path / "evolving", "evolving", 1, verify=False)
    out = capsys.readouterr().out
    assert "network  : own_models:evolving, hidden 8, 1 iteration, " in out
    assert "does not take" not in out


@pytest.mark.parametrize("name", ["small", "with_spare", "WithBatch", "OfData"])
def test_good_networks_pass(store, tmp_path, name):
    if name == "OfData":
        pytest.importorskip("torch_geometric")
    tried, alone = (
        started(store, tmp_path / str(ranks), name, ranks, max_steps=2, verify=ranks > 1) for ranks in (3, 1)
    )
    assert_same(tried, alone)


# Input that cannot be used


def test_layers_without_a_size_are_refused(store, tmp_path, capfd):
    assert "size" in refused(capfd, train, words(store, tmp_path / "run", *own("Lazy")))
    assert not (tmp_path / "run").exists()


def test_a_network_that_cannot_be_made_is_refused_before_a_file_is_touched(store, own_run, tmp_path, capfd):
    for command, argv in (
        (train, words(store, tmp_path / "run")),
        (infer, ["--run", own_run, "--out", tmp_path / "scores"]),
    ):
        said = refused(capfd, command, [*argv, "--model", "own_models:nothing"])
        assert "'own_models:nothing'" in said
        assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--shared-weights", "--dropout 0.1", "--readouts all"])
def test_flags_that_a_network_of_the_field_does_not_have_are_refused_by_their_names(store, tmp_path, capfd, flag):
    said = refused(capfd, train, words(store, tmp_path / "run", "--model", "acorn2", *flag.split()))
    assert f"--model acorn2 has no {flag.rstrip(' .0123456789')}; interaction and " in said
    assert not (tmp_path / "run").exists()


def test_widths_of_other_networks_are_no_multiple_of_16(store, tmp_path, capfd):
    assert TrainConfig(model="acorn2", hidden=7).hidden == 7
    assert TrainConfig(model="own_models:small", hidden=7).hidden == 7
    for name in ("interaction", "acorn"):
        assert "not a multiple of 16" in refused(capfd, train, words(store, tmp_path / "run", "--model", name))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=needs_mpi)])
def test_processes_find_a_network_in_the_directory_they_are_started_in(store, tmp_path, on_one_rank, processes):
    """And try it, train it, and leave what one rank leaves."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "net.py").write_text(Path(own_models.__file__).read_text())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**BASE, "dropout": 0.2, "max_steps": 3}.items()]
    flags += ["--model", "mine.net:evolving", "--store", str(store), "--out", "run"]
    launch = (
        [find_mpiexec(), "-n", str(processes), "-wdir", str(tmp_path)] if processes > 1 else ["env", "-C", tmp_path]
    )
    code, output = run_command([*map(str, launch), sys.executable, "-m", "domainpar.train", *flags], 60.0)
    assert code == 0, output
    assert output.count("exact on 4 ranks") == 1
    last = tmp_path / "run" / "checkpoints" / (tmp_path / "run" / "checkpoints" / "last").read_text().strip()
    expected = on_one_rank(**EVOLVING | {"max_steps": 3})
    assert_same(Trained(tmp_path / "run", [load_file(last / "model.safetensors")]), expected)
