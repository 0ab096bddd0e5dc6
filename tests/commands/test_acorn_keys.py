"""acorn's keys in files given to --config: the same meaning, or said not to be used, or refused with what to do."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from domainpar.tracking.command_line import parse
from domainpar.tracking.config import (
    Conditions,
    ConfigError,
    InferConfig,
    PrepareConfig,
    TrainConfig,
    resolved_yaml,
)
from domainpar.tracking.config.acorn_keys import KNOWN, NETWORKS, NOT_USED, ONLY, TRANSLATIONS
from domainpar.tracking.config.texts import Weighting

INF = math.inf

TRAIN = """
stage: edge_classifier
model: InteractionGNN
input_dir: data/module_map/
stage_dir: data/gnn/
project: example
accelerator: gpu
devices: 1
data_split: [80, 10, 10]
weighting:
  - weight: 2.
    conditions: {y: True, pt: [1000, .inf], nhits: [3, .inf]}
hard_cuts: {pt: [1000, .inf]}
edge_cut: 0.5
undirected: False
node_features: [r, phi, z]
node_scales: [1000, 3.14, 1000]
edge_features: [dr, dphi]
hidden: 48
n_graph_iters: 6
nb_node_layer: 2
nb_edge_layer: 2
layernorm: True
batchnorm: False
aggregation: [sum]
hidden_activation: SiLU
output_activation: Tanh
warmup: 5
lr: 0.0005
factor: 0.9
patience: 10
max_epochs: 100
"""

TRACKS = """
stage: track_building
model: CCandWalk
input_dir: data/gnn/
stage_dir: data/tracks/
score_cut_cc: 0.02
score_cut_walk: {min: 0.15, add: 0.7}
target_tracks: {pt: [500, .inf], nhits: 3, eta_particle: [-4, 4]}
matching_fraction: 0.6
matching_style: two_way
min_track_length: 4
max_workers: 8
"""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def read(tmp_path):
    """The configuration of a command from the text of a file and flags."""

    def read(config_class, text, *argv):
        path = tmp_path / "acorn.yaml"
        path.write_text(text)
        return parse(config_class, "", ["--config", str(path), *argv])

    return read


def changed(config) -> dict[str, object]:
    """The fields that differ from their defaults."""
    default = type(config)()
    return {name: value for name, value in vars(config).items() if value != getattr(default, name)}


def test_train_takes_network_schedule_weights_and_places(read):
    config = read(TrainConfig, TRAIN)
    weighting, target = config.weighting, config.target
    assert changed(config) == {
        "store": "stores/acorn-module_map", "out": "data/gnn/", "model": "acorn", "hidden": 48, "graph_iters": 6,
        "warmup_epochs": 5, "lr": 0.0005, "lr_schedule": "step", "epochs": 100,
        "weighting": weighting, "target": target,
    }  # fmt: skip
    assert Weighting(weighting).value == [(2.0, {"y": True, "pt": [1.0, INF], "nhits": [3, INF]})]
    assert Conditions(target).value == {"pt": [1.0, INF], "nhits": [3, INF]}


def test_prepare_takes_files_features_and_cuts(read):
    config = read(PrepareConfig, TRAIN)
    cuts = config.hard_cuts
    assert changed(config) == {
        "source": "acorn", "input": "data/module_map/", "node_features": "r, phi, z", "node_scales": "1000, 3.14, 1000",
        "edge_features": "dr, dphi", "hard_cuts": cuts,
    }  # fmt: skip
    assert Conditions(cuts).value == {"pt": [1.0, INF]}


def test_infer_takes_tracks_cuts_and_matching(read):
    config = read(InferConfig, TRACKS)
    target = config.track_target
    assert changed(config) == {
        "run": "data/gnn/", "out": "data/tracks/", "tracks": "greedy", "score_cut": 0.02,
        "matching_fraction": 0.6, "matching_style": "two_way", "min_track_length": 4,
        "track_target": target,
    }  # fmt: skip
    assert Conditions(target).value == {"pt": [0.5, INF], "nhits": [3, INF], "eta": [-4, 4]}


def test_a_plain_number_of_target_tracks_means_at_least_and_a_truth_value_itself(read):
    text = "stage: track_building\ntarget_tracks: {nhits: 3, primary: True, pdgId: [not_in, [11]], pt: 1000}\n"
    target = Conditions(read(InferConfig, text).track_target).value
    assert target == {"nhits": [3, INF], "primary": True, "pdgId": ["not_in", [11]], "pt": [1.0, INF]}
    assert target["primary"] is True


@pytest.mark.parametrize(
    ("text", "tracks", "style", "said"),
    [
        ("model: ConnectedComponents\nmatching_style: ATLAS", "cc", "atlas", 0),
        ("model: CCandJunctionRemoval\nmatching_style: one_way", "greedy", "one_way", 1),
        ("model: CCandWalk\nscore_cut_walk: {min: 0.1, add: 0.6}\ntracks: cc", "cc", "atlas", 0),
    ],
)
def test_track_builders_are_ours_and_it_is_said_where_they_find_other_tracks(read, capsys, text, tracks, style, said):
    config = read(InferConfig, f"stage: track_building\nscore_cut: 0.8\n{text}")
    assert (config.tracks, config.score_cut, config.matching_style) == (tracks, 0.8, style)
    printed = capsys.readouterr().out
    assert printed.count("# CCandJunctionRemoval is not built in; greedy") == printed.count("not built in") == said
    assert ("score_cut_walk" in printed.split("not used: ")[1]) == ("score_cut_walk" in text)


def test_a_network_of_the_edge_classifier_is_scored_where_it_was_trained(read):
    config = read(InferConfig, "stage: edge_classifier\nmodel: InteractionGNN2\ninput_dir: a\nstage_dir: b\n")
    assert changed(config) == {"run": "b"}


def test_what_is_translated_and_what_is_not_used_is_said_once_each(read, capsys):
    read(TrainConfig, TRAIN)
    *ours, holding, unused = capsys.readouterr().out.splitlines()
    assert "acorn.yaml: from acorn's keys, in our own:" in ours[0]
    assert "  graph_iters: 6  # n_graph_iters" in ours
    assert "  warmup_epochs: 5  # warmup" in ours
    assert "  lr_schedule: step  # factor, patience" in ours
    names = unused.split("not used: ")[1].split(", ")
    assert {"stage", "project", "accelerator", "devices", "data_split", "hard_cuts", "node_features"} <= set(names)
    assert not {"hidden", "lr", "weighting", "n_graph_iters", "factor"} & set(names)
    names += holding.split("so here anyway: ")[1].split(", ")
    assert {"layernorm", "edge_cut", "undirected"} <= set(names)
    origins = [origin for line in ours[1:] if "  # " in line for origin in line.split("  # ")[1].split(", ")]
    assert {*names, *origins} == set(yaml.safe_load(TRAIN)) - {"hidden", "lr"}, "those two are keys of ours as well"


@pytest.mark.parametrize(
    ("config_class", "text"), [(TrainConfig, TRAIN), (PrepareConfig, TRAIN), (InferConfig, TRACKS)]
)
def test_what_is_printed_is_a_file_of_ours_that_asks_for_the_same(read, capsys, config_class, text):
    config = read(config_class, text)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert read(config_class, "\n".join(printed)) == config
    assert capsys.readouterr().out == ""


def test_other_ranks_say_nothing(read, capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "3")
    read(TrainConfig, TRAIN)
    assert capsys.readouterr().out == ""


def test_files_of_our_own_are_read_as_ever_and_nothing_is_said(read, capsys):
    own = TrainConfig(lr=0.1, warmup=7, target="pt: [1, .inf]", weighting="[{weight: 2, conditions: {y: true}}]")
    assert read(TrainConfig, resolved_yaml(own)) == own
    assert read(PrepareConfig, resolved_yaml(PrepareConfig())) == PrepareConfig()
    assert read(InferConfig, resolved_yaml(InferConfig())) == InferConfig()
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="lr is a flag of train, not of prepare"):
        read(PrepareConfig, "lr: 0.1\n")


def test_our_own_keys_and_flags_win(read):
    text = TRAIN + "graph_iters: 3\ntarget: 'pt: [2, .inf]'\nstore: mine\nlr_schedule: constant\n"
    config = read(TrainConfig, text, "--hidden", "96")
    assert (config.graph_iters, config.hidden, config.store) == (3, 96, "mine")
    assert (config.target, config.lr_schedule) == ("pt: [2, .inf]", "constant")


def test_a_network_chosen_by_a_flag_leaves_acorns_options_unused(read, capsys):
    config = read(TrainConfig, TRAIN.replace("undirected: False", "undirected: True"), "--model", "interaction")
    assert config.model == "interaction"
    assert "undirected" in capsys.readouterr().out.split("not used: ")[1]
    assert read(TrainConfig, "model: acorn2\nlayernorm: False\n").model == "acorn2"


LISTS = {
    "edge features that are none": ("edge_features: None", "edge_features", "none"),
    "no edge features": ("edge_features: []", "edge_features", "none"),
    "a list that is text already": ("node_features: 'r, z'\nnode_scales: '1, 2'", "node_features", "r, z"),
    "edge scales": ("edge_features: [dr]\nedge_scales: [2.5]", "edge_scales", "2.5"),
}


@pytest.mark.parametrize(("text", "field", "value"), LISTS.values(), ids=LISTS)
def test_lists_become_the_text_of_our_flags(read, text, field, value):
    assert getattr(read(PrepareConfig, f"stage: x\ninput_dir: d\n{text}\n"), field) == value


UNITS = {
    "MeV": ("pt: [1000, .inf]", {"pt": [1.0, INF]}),
    "MeV, two bounds": ("pt: [150, 1000]", {"pt": [0.15, 1.0]}),
    "GeV": ("pt: [1., .inf]", {"pt": [1.0, INF]}),
    "either": ("pt: [0, .inf]", {"pt": [0.0, INF]}),
    "with a word": ("pt: [not_within, [0, 2000]]", {"pt": ["not_within", [0.0, 2.0]]}),
    "long names": (
        "track_particle_pt: [1000, .inf]\n  track_particle_pdgId: [not_in, [11, -11]]\n  track_particle_eta: [-4, 4]",
        {"pt": [1.0, INF], "pdgId": ["not_in", [11, -11]], "eta": [-4, 4]},
    ),
}


@pytest.mark.parametrize(("text", "meaning"), UNITS.values(), ids=UNITS)
def test_pt_becomes_gev_and_names_become_ours(read, text, meaning):
    config = read(PrepareConfig, f"input_dir: d\nhard_cuts:\n  {text}\n")
    assert Conditions(config.hard_cuts).value == meaning


TARGETS = {
    "the only rule of true edges": ("[{weight: 2, conditions: {y: true, pt: [1000, .inf]}}]", {"pt": [1.0, INF]}),
    "the last of them": (
        "[{weight: .1, conditions: {y: false}}, {weight: 0, conditions: {y: true}}, "
        "{weight: 1, conditions: {edge_y: true, nhits: [3, .inf]}}]",
        {"nhits": [3, INF]},
    ),
    "all true edges": ("[{weight: 2, conditions: {y: true}}]", None),
    "two rules": (
        "[{weight: 1, conditions: {y: true, pt: [1000, .inf]}}, {weight: 2, conditions: {y: true, nhits: [9, .inf]}}]",
        None,
    ),
    "one that a later one cuts": (
        "[{weight: 1, conditions: {y: true, pt: [1000, .inf]}}, {weight: 0, conditions: {eta: [2, 4]}}]",
        None,
    ),
}


@pytest.mark.parametrize(("text", "target"), TARGETS.values(), ids=TARGETS)
def test_the_target_of_metrics_is_that_of_the_weighting_if_one_rule_tells(read, capsys, text, target):
    config = read(TrainConfig, f"stage: edge_classifier\nweighting: {text}\n")
    assert (None if config.target is None else Conditions(config.target).value) == target
    assert ("metrics take all of them" in capsys.readouterr().out) == (target is None)


REFUSED = {
    "a doubled graph": ("undirected: true", "undirected: True", "model of your own"),
    "another norm": ("layernorm: false", "layernorm: False", "package.module:factory"),
    "more aggregations": ("aggregation: [sum, mean]", "aggregation: ['sum', 'mean']", "model of your own"),
    "another model": ("model: Filter", "'Filter'", "InteractionGNN"),
    "another cut of edges": ("edge_cut: 0.6", "edge_cut: 0.6", "above 0.5"),
    "another schedule": ("patience: 15", "patience 15", "lr_schedule"),
    "a floor": ("min_lr: 0.000005", "min_lr: 5e-06", "no floor"),
    "scores of before": ("input_cut: 0.05", "input_cut: 0.05", "drop them"),
    "a unit that may be either": ("hard_cuts: {pt: [30, .inf]}\ntarget_tracks: {pt: [30, .inf]}", "MeV or GeV", "MeV"),
    "what stores do not keep": (
        "weighting: [{weight: 1, conditions: {y: true, redundant_split_edges: false}}]",
        "redundant_split_edges", "remove the line",
    ),
    "weights without a list": ("weighting: {weight: 1}", "weights and conditions", "as acorn does"),
    "a key that nobody knows": ("n_graph_itres: 3", "n_graph_itres", "graph_iters"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "error", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_equal_is_refused_with_the_file_and_what_to_do(read, tmp_path, text, error, hint):
    with pytest.raises(ConfigError) as refused:
        read(TrainConfig, f"stage: edge_classifier\nproject: x\n{text}\n")
    assert str(refused.value).startswith(str(tmp_path / "acorn.yaml"))
    assert error in str(refused.value)
    assert hint in refused.value.hint


def test_all_that_has_no_equal_is_refused_together(read):
    with pytest.raises(ConfigError) as refused:
        read(TrainConfig, "stage: x\nundirected: true\nmin_lr: 1.0e-6\npatience: 3\n")
    assert all(word in str(refused.value) for word in ("undirected", "min_lr", "patience 3"))


def test_tracks_that_have_no_equal_are_refused(read):
    with pytest.raises(ConfigError) as refused:
        read(InferConfig, "stage: track_building\non_true_graph: True\n")
    assert "not by truth" in refused.value.hint
    with pytest.raises(ConfigError, match="atlas, one_way, two_way"):
        read(InferConfig, "stage: track_building\nmatching_style: loose\n")


def test_every_key_is_in_one_table_and_networks_have_our_names():
    tables = [set(NOT_USED), set(ONLY), set(TRANSLATIONS), {key for _, options in NETWORKS.values() for key in options}]
    assert sum(map(len, tables)) == len(KNOWN)
    assert {TrainConfig(model=name).model for name, _ in NETWORKS.values()} == {"acorn", "acorn2"}


def test_a_configuration_that_names_its_options_gets_the_network_that_it_describes():
    from domainpar.nn.published import OF_THE_FIELD

    for ours, options in NETWORKS.values():
        network = OF_THE_FIELD[ours](3, hidden=4, graph_iters=2)
        (batchnorm,), (layernorm,) = options["batchnorm"], options["layernorm"]
        between = ["LayerNorm"] * layernorm + ["BatchNorm1d"] * batchnorm + list(options["hidden_activation"])
        for of in ("node", "edge"):
            (layers,) = options.get(f"nb_{of}_layer") or options[f"n_{of}_net_layers"]
            (recurrent,) = options[f"{of}_net_recurrent"]
            nets = getattr(network, f"{of}_networks")
            assert len(nets) == (1 if recurrent else 2)
            assert [type(module).__name__ for module in nets[0]] == [
                *(layers - 1) * ["Linear", *between], "Linear", *options["output_activation"]
            ]  # fmt: skip
        assert [type(module).__name__ for module in network.node_encoder] == [type(m).__name__ for m in nets[0]]
    assert [type(module).__name__ for module in network.edge_decoder].count("Linear") == options[
        "n_edge_decoder_layers"
    ][0]
    assert network.edge_networks[0][0].in_features == 6 * 4, "concat"
    assert network.node_networks[0][0].in_features == 4 * 4, "in_out_diff_agg and one aggregation"


# --- from files of acorn to a trained network ------------------------------------------------------------------------

WHOLE = """
stage: edge_classifier
model: InteractionGNN
input_dir: {files}
stage_dir: {run}
weighting:
  - {{weight: 0.5, conditions: {{y: False}}}}
  - {{weight: 2., conditions: {{y: True, pt: [1000, .inf]}}}}
hidden: 16
n_graph_iters: 1
warmup: 1
lr: 0.003
factor: 0.9
patience: 10
max_epochs: 2
"""


def test_files_of_acorn_are_prepared_and_trained_on_with_its_own_configuration(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch_geometric")
    from acorn_files import save

    from domainpar import prepare, train

    monkeypatch.chdir(tmp_path)
    for folder, names in (("trainset", "123"), ("valset", "4")):
        for name in names:
            save(tmp_path / "graphs" / folder, f"event{name}.pyg")
    path = tmp_path / "gnn_train.yaml"
    path.write_text(WHOLE.format(files=tmp_path / "graphs", run=tmp_path / "gnn"))
    assert prepare.main(["--config", str(path)]) == 0
    assert "MeV; stores hold GeV" in capsys.readouterr().out
    assert train.main(["--config", str(path), "--threads", "1"]) == 0
    records = [json.loads(line) for line in (tmp_path / "gnn" / "metrics.jsonl").read_text().splitlines()]
    rates = [record["lr"] for record in records if record["split"] == "train"]
    assert rates == pytest.approx([0.001, 0.002, 0.003, 0.003, 0.003, 0.003])
    assert {record["split"] for record in records} == {"train", "val"}
    kept = yaml.safe_load((tmp_path / "gnn" / "config.yaml").read_text())
    assert (kept["model"], kept["warmup_epochs"]) == ("acorn", 1)
    assert Weighting(kept["weighting"]).value[1] == (2.0, {"y": True, "pt": [1.0, INF]})


def test_a_cut_by_truth_is_said_aloud_where_a_store_is_prepared(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch_geometric")
    from acorn_files import save

    from domainpar import prepare

    monkeypatch.chdir(tmp_path)
    save(tmp_path / "graphs", "event1.pyg")
    cut = ["--source", "acorn", "--input", "graphs", "--hard-cuts", "pt: [1, .inf]", "--pt-unit", "MeV"]
    assert prepare.main(cut) == 0
    said = capsys.readouterr().out
    assert "HARD CUTS BY TRUTH: {'pt': [1, inf]}" in said
    assert "does not hold for real data" in said
    assert "kept 2 of 6 candidate edges" in said
    assert prepare.main([*cut, "--pt-unit", "GeV", "--overwrite"]) == 0
    assert "kept 5 of 6 candidate edges" in capsys.readouterr().out
    assert prepare.main(["--source", "acorn", "--input", "graphs", "--store", "whole"]) == 0
    assert "HARD CUTS" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"source": "pyg", "input": ".", "hard_cuts": "pt: [1, .inf]"}, "--hard-cuts .*with --source"),
        ({"volumes": "7"}, "--volumes 7 .*with --source acorn"),
        ({"source": "simulate", "input": None, "volumes": "7, a"}, "--volumes '7, a': 'a'"),
        ({"input": None}, "--source acorn .*without --input"),
        ({"node_features": "r, z"}, "no scales"),
        ({"node_features": "r, z", "node_scales": "1"}, "each of 2 node features"),
        ({"node_features": "none", "node_scales": "1"}, "each of 0"),
        ({"node_scales": "1, 2, 0"}, "--node-scales '1, 2, 0': '0'"),
        ({"edge_scales": "1"}, "each of 0 edge features"),
        ({"hard_cuts": "pt"}, "--hard-cuts 'pt'"),
    ],
)
def test_prepare_refuses_what_cannot_be_read(given, error):
    with pytest.raises(ConfigError, match=error) as refused:
        PrepareConfig(**{"source": "acorn", "input": "d", **given})
    assert refused.value.hint


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{weight: 1}", "list of rules"),
        ("[]", "list of rules"),
        ("[1", "not YAML"),
        ("[{weight: 1}]", "a rule is"),
        ("[{weight: yes, conditions: {y: true}}]", "a weight is True"),
        ("[{weight: .nan, conditions: {y: true}}]", "a weight is nan"),
        ("[{weight: 1, conditions: {}}]", "conditions {}: not a mapping"),
    ],
)
def test_weights_that_are_no_rules_are_refused(text, error):
    with pytest.raises(ConfigError, match=error) as refused:
        TrainConfig(weighting=text)
    assert "write it as '[{weight: 2" in refused.value.hint


def test_rules_and_the_weight_of_true_edges_exclude_each_other():
    with pytest.raises(ConfigError, match="--true-weight .*with --weighting"):
        TrainConfig(weighting="[{weight: 2, conditions: {y: true}}]", true_weight=0.5)
