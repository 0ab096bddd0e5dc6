"""A configuration of the acorn framework converted, once, into a file of our own.

A file given to `--config` counts as acorn's if it has a key that only acorn knows, such as `stage`. The tables below
say what each key means here. A key that alters what is computed and has no equal here is refused with what to do, all
of them together; one that alters nothing here is listed as not used. Keys of our own in the same file win.

Names and meanings are those of GNN4ITkTeam/CommonFramework, `examples/` and `acorn/stages/`. There `warmup` is in
epochs, and pt in MeV.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from domainpar.tracking.config.group import ConfigError
from domainpar.tracking.config.prepare import default_store
from domainpar.tracking.config.train import MODELS

Values = dict[str, Any]

NOT_USED = (
    "stage", "project", "accelerator", "devices", "gpus", "nodes", "num_workers", "max_workers", "log_level", "debug",
    "dataset_class", "data_split", "variable_with_prefix", "add_variable_name_prefix", "checkpointing",
    "max_training_graph_size", "plots", "dataset", "min_particle_length", "saveMatchingDF", "reprocess_classifier",
    "n_node_encoder_layers", "n_edge_encoder_layers", "n_node_decoder_layers", "skip_existing", "compressed",
    "score_cut_walk", "score_guided_walk",
)  # fmt: skip
"""Nothing that is computed here depends on these, or acorn itself reads them nowhere."""

ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "edge_cut": ((0.5,), "edges pass above 0.5 here"),
    "input_cut": ((0, None), "edges are not dropped by the scores of an earlier stage; drop them in the files"),
    "min_lr": ((0, None), "the learning rate has no floor here"),
    "scheduler": (("StepLR", None), "the schedules are those of --lr-schedule"),
    "batch_size": ((1,), "say how many events of all ranks make a step with events_per_step"),
    "transform": ((None, []), "features cannot be transformed by code that a file names"),
    "cc_only": ((False,), "take the tracks with tracks: cc"),
    "on_true_graph": ((False,), "tracks are found by scores, not by truth"),
    "on_true_graph_edges": ((False,), "tracks are found by scores, not by truth"),
    "on_truth_particle_edges": ((False,), "tracks are found by scores, not by truth"),
}
"""Keys with one possible meaning here: the values that have it, and why no other."""

_OF_BOTH: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("output_layer_norm", "output_batch_norm"), (False,)),
    **dict.fromkeys(("bn_track_running_stats", "track_running_stats"), (False,)),
    "edge_output_transform_final_layer_norm": (False,), "edge_output_transform_final_batch_norm": (False,),
    "edge_output_transform_final_activation": (None,),
    "undirected": (False,), "emb_channels": (0,), "aggregation": ("sum", ["sum"]), "aggr": ("add", "sum"),
}  # fmt: skip
NETWORKS: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "InteractionGNN": ("acorn", {
        **_OF_BOTH, "nb_node_layer": (2,), "nb_edge_layer": (2,), "layernorm": (True,), "batchnorm": (False,),
        "hidden_activation": ("SiLU",), "output_activation": ("Tanh",),
        "node_net_recurrent": (True,), "edge_net_recurrent": (True,),
    }),
    "InteractionGNN2": ("acorn2", {
        **_OF_BOTH, "n_node_net_layers": (3,), "n_edge_net_layers": (3,), "n_edge_decoder_layers": (3,),
        "layernorm": (False,), "batchnorm": (True,), "hidden_activation": ("ReLU",), "output_activation": ("ReLU",),
        "concat": (True,), "in_out_diff_agg": (True,), "node_net_recurrent": (False,), "edge_net_recurrent": (False,),
    }),
}  # fmt: skip
"""Our name of each network of acorn, and the options it has under it."""

# Options that a checkpoint may leave out, since what acorn takes then is what our network has.
_MAY_BE_ABSENT = {
    "InteractionGNN": {*_OF_BOTH, "batchnorm", "node_net_recurrent", "edge_net_recurrent"},
    "InteractionGNN2": {*_OF_BOTH},
}

TRACK_BUILDERS = {"ConnectedComponents": "cc", "CCandWalk": "greedy", "CCandJunctionRemoval": "greedy"}
"""Ours of each of acorn's; greedy is the nearest to those that take components with branches apart."""


@dataclass(frozen=True)
class _File:
    """The context of a key, on which its meaning may depend."""

    command: str
    keys: Mapping[str, Any]
    own_model: bool

    @property
    def builds_tracks(self) -> bool:
        return self.keys.get("stage") == "track_building"

    def allowed(self, key: str) -> tuple[tuple[Any, ...], str, str] | None:
        """The values of a key that change nothing here, the refusal of others, and a hint; None: any value may be."""
        if key in ONLY and (self.command != "prepare" or key in ("input_cut", "transform")):
            return ONLY[key][0], "has no equal here", f"{key}: {ONLY[key][1]}"
        _, options = NETWORKS.get(str(self.keys.get("model")), NETWORKS["InteractionGNN"])
        if self.command == "train" and not self.own_model and key in options:
            hint = "give acorn's network as a model of your own: --model package.module:factory"
            return options[key], "is not an option of --model", hint
        return None


# --- what keys become ------------------------------------------------------------------------------------------------

_Translation = str | Callable[[Any, _File], Values]
"""Our field of the same value, or a function from the value to values of our fields."""


def _listed(field: str) -> Callable[[Any, _File], Values]:
    def translated(value: Any, _: _File) -> Values:
        if value in (None, [], "None"):  # YAML takes Python's None for a word
            return {field: "none"}
        return {field: ", ".join(map(str, value)) if isinstance(value, list) else value}

    return translated


def _model(value: Any, file: _File) -> Values:
    value = str(value)
    if file.own_model:
        return {}
    if file.command == "train" and value in NETWORKS:
        return {"model": NETWORKS[value][0]}
    if file.builds_tracks and value in TRACK_BUILDERS:
        return {"tracks": TRACK_BUILDERS[value]}
    if file.command == "prepare" or (file.command == "infer" and not file.builds_tracks):
        return {}  # which was trained is known from the run
    raise ConfigError(
        f"model '{value}' of acorn has no equal here",
        f"take one of {', '.join((*NETWORKS, *TRACK_BUILDERS))}, or one of our own with --model",
    )


def _input_dir(value: Any, file: _File) -> Values:
    if file.command == "prepare":
        return {"source": "acorn", "input": value}
    if file.command == "train":
        return {"store": str(default_store("acorn", str(value)))}
    # acorn's tracks are built from what its network has left where our run is.
    return {"run": value} if file.builds_tracks else {}


def _schedule(_: Any, file: _File) -> Values:
    if (file.keys.get("factor", 0.9), file.keys.get("patience", 10)) != (0.9, 10):
        raise ConfigError(
            f"factor {file.keys.get('factor')} and patience {file.keys.get('patience')} have no equal here",
            "omit both and choose lr_schedule: step is times 0.9 every 10 epochs",
        )
    return {"lr_schedule": "step"}


def _score_cut(value: Any, file: _File) -> Values:
    if file.keys.get("stage") != "edge_classifier":
        return {"score_cut": value}
    if value != 0.5:
        raise ConfigError(f"score_cut {value} of the edge classifier has no equal here", ONLY["edge_cut"][1])
    return {}


def _target_tracks(value: Any, file: _File) -> Values:
    if not isinstance(value, str):
        value = _bare({
            # A plain number means at least so much, but for a truth value.
            name: [of, float("inf")] if isinstance(of, int | float) and not isinstance(of, bool) else of
            for name, of in _in_our_words("target_tracks", value).items()
        })  # fmt: skip
    return {"track_target" if file.command == "infer" else "target": value}


def _weighting(value: Any, _: _File) -> Values:
    """Rules and, if they tell it, the target: acorn counts true edges of positive weight as found or missed."""
    if isinstance(value, str):
        return {"weighting": value}
    if not isinstance(value, list) or not all(isinstance(rule, dict) and "weight" in rule for rule in value):
        raise ConfigError(f"weighting is {value!r}, not a list of weights and conditions", "write it as acorn does")
    rules = [
        {"weight": rule["weight"], "conditions": _in_our_words("weighting", rule.get("conditions"))} for rule in value
    ]
    if any("redundant_split_edges" in rule["conditions"] for rule in rules):
        raise ConfigError(
            "weighting has a condition on redundant_split_edges, which stores do not keep",
            "remove the line: such edges then have the weight of their particle's others",
        )
    of_true_edges = [rule for rule in rules if rule["conditions"].get("y", True) not in (False, 0)]
    target = {}
    # With several rules of positive weight, or a later one of none, no conditions describe the target.
    if [rule["weight"] > 0 for rule in of_true_edges] == [False] * (len(of_true_edges) - 1) + [True]:
        target = {name: of for name, of in of_true_edges[-1]["conditions"].items() if name != "y"}
    return {"weighting": _flow(rules), **({"target": _bare(target)} if target else {})}


TRANSLATIONS: dict[str, _Translation] = {
    **{name: name for name in ("hidden", "lr", "seed", "matching_fraction", "min_track_length")},
    "n_graph_iters": "graph_iters",
    "max_epochs": "epochs",
    "warmup": "warmup_epochs",
    "score_cut_cc": "score_cut",
    "matching_style": lambda value, _: {"matching_style": str(value).lower()},
    **{name: _listed(name) for name in ("node_features", "node_scales", "edge_features", "edge_scales")},
    "hard_cuts": lambda value, _: {
        "hard_cuts": value if isinstance(value, str) else _bare(_in_our_words("hard_cuts", value))
    },
    "target_tracks": _target_tracks,
    "weighting": _weighting,
    "model": _model,
    "input_dir": _input_dir,
    "stage_dir": lambda value, file: {"run" if file.command == "infer" and not file.builds_tracks else "out": value},
    "factor": _schedule,
    "patience": _schedule,
    "score_cut": _score_cut,
}
"""Keys with an equal here: from the value to values of our own fields."""

KNOWN = {*NOT_USED, *ONLY, *TRANSLATIONS, *(key for _, options in NETWORKS.values() for key in options)}


# --- conditions: one grammar here and there (`events.targets`), but for names and the unit of pt ---------------------

# Names in files and with `variable_with_prefix`; what has the same name here is not listed.
_OUR_NAME = {
    "edge_y": "y",
    "eta_particle": "eta",
    "track_particle_eta": "eta",
    "track_particle_id": "particle_id",
    **{f"track_particle_{name}": name for name in ("pt", "nhits", "radius", "primary", "pdgId")},
    "track_redundant_split_edges": "redundant_split_edges",
}


def _in_our_words(key: str, conditions: Any) -> Values:
    """Conditions with our names, pt in GeV.

    Raises:
        ConfigError: If they are no mapping, or pt may be in MeV or in GeV.
    """
    if not isinstance(conditions, dict) or not conditions:
        raise ConfigError(
            f"{key} has conditions {conditions!r}, not a mapping from quantities", "write 'pt: [1000, .inf]'"
        )
    ours: Values = {str(_OUR_NAME.get(name, name)): of for name, of in conditions.items()}
    if "pt" in ours:
        sizes = [abs(number) for number in _numbers(ours["pt"]) if number not in (0, float("inf"), float("-inf"))]
        # Above 50 only MeV make sense, below 20 only GeV.
        if not all(size >= 50 for size in sizes) and not all(size <= 20 for size in sizes):
            raise ConfigError(f"{key} has pt: {ours['pt']!r}; is that MeV or GeV?", "write it in MeV, as acorn does")
        ours["pt"] = _scaled(ours["pt"], 1e-3 if all(size >= 50 for size in sizes) else 1.0)
    return ours


def _numbers(condition: Any) -> Iterator[float]:
    if isinstance(condition, list):
        for part in condition:
            yield from _numbers(part)
    elif isinstance(condition, int | float):
        yield condition


def _scaled(condition: Any, factor: float) -> Any:
    if isinstance(condition, list):
        return [_scaled(part, factor) for part in condition]
    return condition * factor if isinstance(condition, int | float) else condition


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()


def _bare(conditions: Values) -> str:
    return _flow(conditions).removeprefix("{").removesuffix("}")


def network_of(hyperparameters: Mapping[str, Any]) -> str:
    """Our name of the network that an acorn checkpoint's hyperparameters describe.

    Raises:
        ConfigError: If there is none, naming every option that it lacks or that is another one.
    """
    if hyperparameters.get("model") is None:
        named = ", ".join(sorted(map(str, hyperparameters))) or "nothing"
        raise ConfigError(
            f"hyper_parameters name no model, as those of acorn do; they have {named}",
            f"read are {' and '.join(NETWORKS)} of acorn, and no other checkpoints of Lightning",
        )
    theirs = str(hyperparameters["model"])
    if theirs not in NETWORKS:
        raise ConfigError(f"model '{theirs}' of acorn has no equal here", f"there are {' and '.join(NETWORKS)}")
    ours, options = NETWORKS[theirs]
    present = {name: hyperparameters[name] for name in options if name in hyperparameters}
    others = [f"{name}: {value}" for name, value in present.items() if value not in options[name]]
    absent = sorted(name for name in options.keys() - _MAY_BE_ABSENT[theirs] if name not in hyperparameters)
    if others or absent:
        what = "; ".join([*others, *(f"no {name}" for name in absent)])
        expected = ", ".join(f"{name}: {of[0]}" for name, of in options.items() if name not in _OF_BOTH)
        raise ConfigError(f"{theirs} with {what} is not {ours}", f"{ours} is acorn's with {expected}")
    return ours


# --- the conversion --------------------------------------------------------------------------------------------------


def converted(
    keys: Mapping[str, Any], command: str, fields: Iterable[str], all_fields: Iterable[str], own_model: bool = False
) -> tuple[str, list[str]] | None:
    """Convert a file of acorn for a command; None for a file without acorn's keys.

    Args:
        keys: The file.
        command: `prepare`, `train` or `infer`.
        fields: Keys of this command.
        all_fields: Keys of all commands.
        own_model: The network was chosen by a flag, so what the file says of acorn's is not used.

    Returns:
        The same as the text of a YAML file of ours, with the keys that each line came from; and lines to print: keys
        that are so here in any case, and keys that are not used.

    Raises:
        ConfigError: If some of the keys have no equal here, naming all of those.
    """
    fields, all_fields = set(fields), set(all_fields)
    if not any(key in KNOWN and (key not in all_fields or _is_structured(key, of)) for key, of in keys.items()):
        return None
    file = _File(command, keys, own_model or keys.get("model", "InteractionGNN") in MODELS)
    # What nobody knows is passed on, to be refused like any such key.
    own = {key: value for key, value in keys.items() if key not in KNOWN or _is_ours(key, value, fields)}
    values: Values = {}
    origins: dict[str, list[str]] = {}
    about: dict[str, list[str]] = {"so here anyway": [], "not used": []}
    refused: list[ConfigError] = []
    for key in (key for key in keys if key not in own):
        try:
            translated = {name: of for name, of in _translated(key, file).items() if name in fields}
        except ConfigError as error:
            refused.append(error)
            continue
        if not translated:
            about["so here anyway" if file.allowed(key) else "not used"].append(key)
        # A target that is written down wins over the one that the weights imply.
        values |= {name: of for name, of in translated.items() if name not in values or key == "target_tracks"}
        for name in translated:
            origins.setdefault(name, []).append(key)
    if refused:
        hints = dict.fromkeys(error.hint for error in refused)
        raise ConfigError("; ".join(map(str, refused)), "; ".join(hints))
    lines = [_line(name, of, origins[name]) for name, of in values.items() if name not in own]
    lines += [_line(name, of, []) for name, of in own.items()]
    if "weighting" in values and "target" not in {*values, *own}:
        lines.append("# no single rule gives weight to true edges, so metrics take all of them for targets\n")
    if values.get("tracks") == "greedy" and "tracks" not in own:
        lines.append(f"# {keys['model']} is not built in; greedy, the nearest to it, finds other tracks\n")
    return "".join(lines), [f"{what}: {', '.join(names)}" for what, names in about.items() if names]


def _is_ours(key: str, value: Any, fields: set[str]) -> bool:
    """Whether a key that both know means what it means here."""
    # acorn's warm-up counts epochs, ours steps.
    if key == "warmup" or (key == "model" and str(value) not in MODELS and ":" not in str(value)):
        return False
    return key in fields and not _is_structured(key, value) and key not in ("matching_style", "score_cut")


def _is_structured(key: str, value: Any) -> bool:
    """Whether a value is a list or mapping, acorn's way to write what is text here."""
    texts = ("node_features", "node_scales", "edge_features", "edge_scales", "hard_cuts", "weighting")
    return key in texts and (isinstance(value, list | dict) or value == "None")


def _translated(key: str, file: _File) -> Values:
    value, translation = file.keys[key], TRANSLATIONS.get(key)
    if translation is not None:
        return {translation: value} if isinstance(translation, str) else translation(value, file)
    if allowed := file.allowed(key):
        values, refusal, hint = allowed
        if value not in values:
            raise ConfigError(f"{key}: {value} {refusal}", hint)
    return {}


def _line(name: str, value: Any, origins: Iterable[str]) -> str:
    line = yaml.safe_dump({name: value}, width=10**6, sort_keys=False, allow_unicode=True)
    return line if not origins else f"{line.rstrip()}  # {', '.join(origins)}\n"
