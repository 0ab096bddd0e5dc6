"""Networks that are shipped score right after installation, are begun with, and are never resumed."""

from __future__ import annotations

import json
import re
import resource
import shutil
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from marks import slow
from test_infer import write_store

from domainpar import export, prepare, read_scores, report
from domainpar.common.agreement import Refused
from domainpar.common.problems import Problem
from domainpar.infer import _sample_events, infer
from domainpar.nn.standard import Standard
from domainpar.parallel.world import World
from domainpar.prepare import prepare_store
from domainpar.runs.checkpoint import Checkpoints, parameters_sha256
from domainpar.runs.records import run_record
from domainpar.testing import patient, run_ranks
from domainpar.tracking.command_line import parse
from domainpar.tracking.config import DoctorConfig, InferConfig, PrepareConfig, TrainConfig
from domainpar.tracking.diagnosis.files import check_run
from domainpar.tracking.events.construct import Cuts, build_graph
from domainpar.tracking.events.module_map import ModuleMap
from domainpar.tracking.events.simulate import simulate_event
from domainpar.tracking.events.store import MODULE_MAP, EventStore, outside
from domainpar.tracking.networks.catalogue import make_network
from domainpar.tracking.scoring.infer_summary import other_events
from domainpar.tracking.scoring.inference import score_store
from domainpar.tracking.training import pretrained
from domainpar.tracking.training.network import begin_with
from domainpar.tracking.training.pretrained import PLACE, as_run, module_map_of, runs_of, source
from domainpar.train import train

NAMES = sorted(path.parent.name for path in PLACE.glob("*/README.md"))
RUNS = sorted(path.parent.name for path in PLACE.glob("*/run.json"))  # filters, too


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A directory to work in, with a store of two small events."""
    monkeypatch.chdir(tmp_path)
    return write_store(
        tmp_path / "store", [build_graph(simulate_event(seed, 600), Cuts()) for seed in (1, 2)], ["train", "test"]
    )


def path_of(store):
    return store.path if isinstance(store, EventStore) else store


def about(name):
    return json.loads((PLACE / name / "run.json").read_text())


def flags_of(name, *words):
    return parse(TrainConfig, "", ["--init", f"pretrained:{name}", *words])


def network(config, store):
    """The network of a configuration with its first weights, and room for constants."""
    events = EventStore(path_of(store))
    return make_network(config, events, Standard.neutral(len(events.feature_names), len(events.edge_feature_names)))


def test_each_network_is_shipped_in_800_kilobytes_and_its_map_in_three_megabytes():
    assert "quickstart" in NAMES
    files = [path for path in PLACE.rglob("*") if path.is_file()]
    sizes = Counter()
    for path in files:
        sizes[path.relative_to(PLACE).parts[0]] += 0 if path.name == MODULE_MAP else path.stat().st_size
    assert max(sizes.values()) <= 800_000
    assert sum(sizes.values()) <= 5_000_000
    maps = {path.parent.name: path.stat().st_size for path in files if path.name == MODULE_MAP}
    assert sorted(maps) == NAMES
    assert max(maps.values()) <= 3_000_000


@pytest.mark.parametrize("name", RUNS)
def test_the_map_that_comes_with_a_network_is_the_one_that_joined_its_events(name):
    store, shipped = about(name)["store"], ModuleMap.read(module_map_of(f"pretrained:{name}"))
    assert store["joined_by"] == f"pretrained:{name.removesuffix('-filter')}"
    assert store["learned_from"] == shipped.learned_from != {}
    # 122,000 edges of 100,000 hits behind the filter of `full`, 93,000 of 61,000 of `pixel`, 98,000 of 11,500 for
    # `quickstart`.
    low, high = store["surveyed"]["edges_per_hit"]
    assert 0.9 < low < high < 9.5


@pytest.mark.parametrize("name", [name for name in RUNS if not name.endswith("-hllhc")])
def test_what_a_network_was_trained_on_is_the_built_in_simulation_and_others_events_are_told(name):
    trained = run_record(PLACE / name / "run.json").store.surveyed
    assert trained["events"] >= 8
    assert all(4 < width < 7 for width in trained["beam_spot"][1])
    assert sorted(trained["features"]) == sorted([*about(name)["store"]["feature_names"], "deta", "dphi", "dr", "dz",
                                                   "phi_slope", "r_phi_slope"])  # fmt: skip
    assert len(trained["layers"]) == (18 if "pixel" in name else 48)
    # Of ACTS's events with the beam spot of HL-LHC, in 2 T.
    others = trained | {"beam_spot": [[-7.3, 0.0], [52.1, 52.1]], "fields": [["2 T everywhere", [2.0] * 13]]}
    spot, field = outside(trained, others)
    assert re.match(r"beam spot 52.1 .* -7.3 to 0 .*\(4\.", spot)
    assert re.match(r"field 2 T .*\(B_z 0.18 to 2.005 T", field)
    assert outside(trained, trained) == []


@pytest.mark.parametrize("name", ["full", "full-filter", "full-hllhc", "pixel-hllhc"])
def test_the_preset_of_a_shipped_network_is_the_first_word_of_its_name(name):
    assert parse(InferConfig, "", ["--run", f"pretrained:{name}"]).preset == name.split("-")[0]
    assert parse(InferConfig, "", ["--run", f"runs/{name}"]).preset is None


@pytest.mark.parametrize("name", [name for name in RUNS if name.endswith("-hllhc")])
def test_a_network_for_the_hl_lhc_knows_wide_beam_spots_and_three_fields(name):
    trained = run_record(PLACE / name / "run.json").store.surveyed
    assert trained["events"] == (173 if name == "pixel-hllhc" else 141)
    low, high = trained["beam_spot"][1]
    assert low < 6 < 58 < high
    assert [words.split()[0] for words, _ in trained["fields"]] == ["2", "B_z", "B_z"]
    others = trained | {"beam_spot": [[-7.3, 0.0], [52.1, 52.1]], "fields": [["2 T everywhere", [2.0] * 13]]}
    assert outside(trained, others) == []
    assert len(outside(trained, others | {"fields": [["3 T everywhere", [3.0] * 13]]})) == 1


def test_events_of_a_shipped_map_are_scored_by_its_filter_and_its_network():
    assert runs_of("pretrained:full") == ["--run", "pretrained:full-filter", "--then", "pretrained:full"]
    assert runs_of("pretrained:full-hllhc") == ["--run", "pretrained:full-hllhc"]
    assert runs_of("maps/mine/module_map.safetensors") == []
    of_filter = about("pixel")["store"]["filter"]["parameters_sha256"]
    assert runs_of("", of_filter) == ["--run", "pretrained:pixel"]
    assert runs_of("", of_filter[::-1]) == []


def test_events_are_joined_as_for_a_shipped_network_by_one_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--events", "2", "--hits", "20000", "--hard-cuts", "pt: [1, .inf]"]
    assert prepare.main([*flags, "--module-map", "pretrained:quickstart", "--store", "alike"]) == 0
    following = "-m domainpar.infer --run pretrained:quickstart --store alike --tracks greedy --extend --ckf\n"
    assert capsys.readouterr().out.endswith(following)
    kept = Path("alike") / MODULE_MAP
    assert kept.read_bytes() == (PLACE / "quickstart" / MODULE_MAP).read_bytes()
    assert prepare.main([*flags, "--z0", "5", "--store", "by cuts"]) == 0
    config, world = InferConfig(run="pretrained:quickstart", store="by cuts", checkpoint="last"), World.alone()
    capsys.readouterr()
    infer(config, world)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"WARNING: .*candidate edges per hit \(7.58 to 8.99\).*prepare --module-map pretrained:quickstart", said
    )
    assert not (Path("runs/pretrained-quickstart") / MODULE_MAP).exists()  # a copy of it would be of no use
    with pytest.raises(Problem, match="no network 'no' is shipped"):
        module_map_of("pretrained:no")
    monkeypatch.setattr(pretrained, "PLACE", tmp_path)
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "run.json").write_text("{}")
    with pytest.raises(Problem, match="no module map .*pretrained:no"):
        module_map_of("pretrained:no")


def test_a_map_is_named_where_hits_were_joined_otherwise_and_only_there():
    assert other_events([], "pretrained:full") == []
    assert "--module-map" not in other_events(["2 candidate edges per hit (1)"], None)[0]
    assert "--module-map pretrained:full" in other_events(["2 candidate edges per hit (1)"], "pretrained:full")[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_card_tells_the_hash_of_the_weights_that_are_shipped(store, name):
    sha256 = about(name)["parameters_sha256"]
    assert sha256[:16] in (PLACE / name / "README.md").read_text()
    config = flags_of(name)
    events = EventStore(path_of(store))
    model = network(config, store)
    assert parameters_sha256(model) != sha256
    begin_with(source(f"pretrained:{name}"), events, model)
    assert parameters_sha256(model) == sha256


@pytest.mark.parametrize("name", NAMES)
def test_events_are_scored_and_the_copy_in_runs_is_like_any_run(store, name, capsys):
    config = InferConfig(run=f"pretrained:{name}", store=str(path_of(store)), tracks="greedy", out="out")
    run_ranks(lambda world: score_store(config, world, None), 2)
    assert f"parameters sha256 {about(name)['parameters_sha256'][:16]}" in capsys.readouterr().out
    kept = json.loads((PLACE / name / "tracks.json").read_text())["greedy"]["cuts"]
    options = json.loads(Path("out/scores.json").read_text())["tracks"]["options"]
    assert {cut: options[cut] for cut in kept} == kept
    assert as_run(f"pretrained:{name}").as_posix() == f"runs/pretrained-{name}"


@pytest.mark.parametrize("recipe", sorted((PLACE.parents[2] / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_is_what_its_recipe_makes(recipe):
    config = parse(TrainConfig, "", ["--config", str(recipe)])
    shipped = yaml.safe_load((PLACE / recipe.stem / "config.yaml").read_text())
    names = set(shipped) - {"out", "init", "store"}
    assert {name: getattr(config, name) for name in names} == {name: shipped[name] for name in names}
    assert about(recipe.stem)["parameters_sha256"][:16] in recipe.read_text()
    assert about(recipe.stem)["store"]["digest"][:16] in recipe.read_text()


def test_its_name_sets_the_preset_unless_another_is_given():
    assert parse(InferConfig, "", ["--run", "pretrained:quickstart"]).min_track_length == 3
    assert parse(InferConfig, "", ["--run", "pretrained:quickstart", "--preset", "full"]).min_track_length == 5
    assert parse(InferConfig, "", ["--run", "runs/quickstart"]).preset is None


@pytest.mark.slow
def test_without_a_store_it_makes_itself_some_events(tmp_path):
    words = [sys.executable, "-m", "domainpar.infer", "--run", "pretrained:quickstart", "--tracks", "greedy"]
    printed = subprocess.run(
        words, check=True, capture_output=True, text=True, timeout=patient(600), cwd=tmp_path
    ).stdout
    assert "none of these events was trained on" in printed
    scores = json.loads((tmp_path / "runs" / "pretrained-quickstart" / "scores" / "scores.json").read_text())
    assert len(scores["events"]) == 3
    counts = scores["tracks"]["performance"]["train"]["network"]["styles"]["atlas"]
    assert counts["reconstructed"] > 0.97 * counts["targets"]
    assert counts["matched"] > 0.99 * counts["matchable"]


def test_a_network_with_a_filter_gets_events_that_have_gone_through_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "PLACE", tmp_path / "shipped")
    monkeypatch.setitem(PrepareConfig.PRESETS, "tiny", {"hits": 600})
    world = World.alone()
    of_map = {"module_map": "build", "map_events": 60}
    prepare_store(PrepareConfig(hits=600, events=3, **of_map, store="all"), world)
    network = {"hidden": 16, "graph_iters": 1, "epochs": 2}
    train(TrainConfig(**network, store="all", out="shipped/tiny-filter"), Path("all"), world)
    infer(InferConfig(run="shipped/tiny-filter", checkpoint="last"), world)
    cut = float(np.median(read_scores("shipped/tiny-filter", "000000000").edge_score).round(4))
    prepare_store(PrepareConfig(source="scores", input="shipped/tiny-filter", min_score=cut, store="some"), world)
    train(TrainConfig(**network, store="some", out="shipped/tiny"), Path("some"), world)
    shutil.copy(Path("all") / MODULE_MAP, Path("shipped/tiny") / MODULE_MAP)
    config = InferConfig(run="pretrained:tiny", checkpoint="last")
    place = _sample_events(config, world)
    store = EventStore(place)
    assert store.settings["filter"]["min_score"] == cut
    unfiltered = EventStore("stores/tiny-sample-unfiltered")
    assert [record.event for record in store.records] == [record.event for record in unfiltered.records]
    assert 0 < store.records[0].num_edges < unfiltered.records[0].num_edges
    assert EventStore(_sample_events(config, world)).digest == store.digest  # and again: nothing is scored anew
    capsys.readouterr()
    infer(replace(config, store=str(place), out="fits"), world)
    said = capsys.readouterr().out
    assert "note: trained on edges" not in said
    assert run_record(Path("runs/pretrained-tiny/run.json")).store.surveyed == EventStore("some").survey
    prepare_store(PrepareConfig(hits=600, events=2, **of_map, field="1.5", store="weak"), world)
    infer(InferConfig(run="shipped/tiny-filter", store="weak", checkpoint="last", out="in weak"), world)
    assert "field 1.5 T everywhere (B_z 0.18 to 2.005 T, by z)" in capsys.readouterr().out
    assert json.loads(Path("in weak/scores.json").read_text())["outside"][0].startswith("field 1.5 T everywhere")
    infer(replace(config, store="stores/tiny-sample-unfiltered", out="does not"), world)
    filtered = f"that filter {store.settings['filter']['parameters_sha256'][:16]} at {cut:g} left"
    assert f"note: trained on edges {filtered}, " in capsys.readouterr().out
    infer(InferConfig(run="shipped/tiny-filter", store=str(place), checkpoint="last", out="otherwise"), world)
    assert f"of no filter, scored here on those {filtered}" in capsys.readouterr().out
    both = replace(config, run="pretrained:tiny-filter", then="pretrained:tiny")
    assert _sample_events(both, world) == unfiltered.path, "nothing is filtered on disk"
    infer(replace(both, store=str(unfiltered.path), out="in one"), world)
    for record in store.records:
        one, two = read_scores("in one", record.event), read_scores("fits", record.event)
        assert one.edge_logit[one.edge_scored].tobytes() == two.edge_logit.tobytes()


def test_a_name_that_is_not_shipped_is_refused_with_those_that_are():
    with pytest.raises(Problem, match="no network 'no' is shipped") as refused:
        source("pretrained:no")
    assert "pretrained:quickstart" in refused.value.hint


def test_another_run_in_the_place_of_the_copy_is_left_alone(store, tmp_path):
    (tmp_path / "runs" / "pretrained-quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "pretrained-quickstart" / "run.json").write_text("{}")
    with pytest.raises(Problem, match="not the network"):
        as_run("pretrained:quickstart")


def test_a_copy_that_cannot_be_written_is_refused_by_its_place_and_nothing_is_left_of_it(store, tmp_path, capsys):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limit[1]))  # a full disk
    try:
        code = report.main(["pretrained:quickstart"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capsys.readouterr().err
    place = tmp_path / "runs" / "pretrained-quickstart"
    assert (code, said.count("\n")) == (2, 2)
    assert re.search(rf"pretrained:quickstart to {place}: .*\(errno 27\)\nhint: make room", said)
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_copy_of_a_package_whose_folders_are_closed_can_be_written_to(store, tmp_path, monkeypatch):
    shutil.copytree(PLACE / "quickstart", tmp_path / "shipped" / "quickstart")
    for path in (tmp_path / "shipped").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / "shipped" / "quickstart").chmod(0o555)
    monkeypatch.setattr(pretrained, "PLACE", tmp_path / "shipped")
    copy = as_run("pretrained:quickstart")
    assert all(path.stat().st_mode & stat.S_IWUSR for path in (copy, *copy.rglob("*")))  # root may write anywhere


def trained(config, store, ranks=1):
    return run_ranks(lambda world: train(config, path_of(store), world).trainer.model, ranks)[0]


def test_training_begins_with_its_weights_and_flags_on_any_ranks(store):
    config = flags_of("quickstart", "--max-steps", "1", "--lr", "1e-12", "--weight-decay", "0", "--out", "runs/tuned")
    assert (config.hidden, config.graph_iters) == (64, 5)
    model, shipped = trained(config, store), network(config, store)
    begin_with(source("pretrained:quickstart"), EventStore(path_of(store)), shipped)
    for name, value in model.state_dict().items():
        assert (value - shipped.state_dict()[name]).abs().max() < 1e-6, name
    config = flags_of("quickstart", "--max-steps", "2", "--out", "runs/one")
    one = parameters_sha256(trained(config, store))
    config = flags_of("quickstart", "--max-steps", "2", "--out", "runs/two")
    assert parameters_sha256(trained(config, store, 2)) == one


def test_flags_that_make_another_network_are_refused_before_a_file_is_touched(store, tmp_path):
    config = flags_of("quickstart", "--hidden", "32", "--out", "runs/other")
    with pytest.raises(Refused, match="belongs to another network"):
        trained(config, store)
    assert not (tmp_path / "runs" / "other").exists()


def test_a_shipped_network_is_not_resumed(store):
    model = network(flags_of("quickstart"), store)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(Problem, match="holds weights alone") as refused:
        Checkpoints(PLACE / "quickstart" / "checkpoints").load("best", model, optimizer)
    assert "--init" in refused.value.hint


@pytest.mark.parametrize("words", [["train", "--out"], ["infer", "--store"], ["report", "--store"], ["export", "--out"],
                                   ["prepare", "--input"], ["doctor", "--verify"]])  # fmt: skip
def test_it_is_refused_where_a_directory_is_asked_for(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    command = import_module(f"domainpar.{words[0]}")
    assert command.main([*words[1:], "pretrained:quickstart"]) == 2
    said = capsys.readouterr().err
    assert f"{words[1]} is 'pretrained:quickstart'" in said
    assert "runs/pretrained-quickstart" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name if name == "quickstart" else slow(name) for name in NAMES])
def test_every_command_that_takes_a_run_takes_it_by_name(store, name):
    assert export.main([f"pretrained:{name}", "--store", str(path_of(store)), "--format", "pt2"]) == 0
    assert Path(f"runs/pretrained-{name}/model.pt2").is_file()
    assert report.main(["--run", f"pretrained:{name}"]) == 0
    assert Path(f"runs/pretrained-{name}/report.html").is_file()
    asked = parse(DoctorConfig, "", ["--run", f"pretrained:{name}"])  # its other checks look at this machine
    assert "1 checkpoint hashed" in check_run(asked.run, World.alone()).found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_is_exported_as_onnx_as_well(store, name):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert export.main([f"pretrained:{name}", "--store", str(path_of(store))]) == 0
    assert Path(f"runs/pretrained-{name}/model.onnx").is_file()


def test_a_report_of_it_says_the_command_that_makes_scores(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert report.main(["pretrained:quickstart"]) == 0
    assert "-m domainpar.infer --run runs/pretrained-quickstart --store STORE" in capsys.readouterr().out


def test_a_check_of_a_name_that_is_not_shipped_fails_with_those_that_are():
    finding = check_run("pretrained:no", World.alone())
    assert finding.verdict == "FAIL"
    assert "no network 'no' is shipped" in finding.found
    assert "pretrained:quickstart" in finding.advice
