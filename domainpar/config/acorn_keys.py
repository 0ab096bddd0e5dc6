"""Keys of the acorn framework's configurations in files given to `--config`: translated, left unused, or refused.

What a key means here is looked up in the tables below. A key that alters what is computed and has no equal here is
refused with what to do, all of them together; one that alters nothing here is said not to be used. Keys of our own win.

A file counts as acorn's if it has a key that only acorn knows, such as `stage`. Only there is `warmup` in epochs.
Names and meanings are those of GNN4ITkTeam/CommonFramework, `examples/` and `acorn/stages/`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domainpar.config.acorn_conditions import at_least_text, conditions_text, target_of_weighting, weighting_text
from domainpar.config.errors import ConfigError
from domainpar.config.training import MODELS

Values = dict[str, Any]

NOT_USED = (
    "stage", "project", "accelerator", "devices", "gpus", "nodes", "num_workers", "max_workers", "log_level", "debug",
    "dataset_class", "data_split", "variable_with_prefix", "add_variable_name_prefix", "checkpointing",
    "max_training_graph_size", "plots", "dataset", "min_particle_length", "saveMatchingDF", "reprocess_classifier",
    "n_node_encoder_layers", "n_edge_encoder_layers", "n_node_decoder_layers", "skip_existing", "compressed",
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
    "score_guided_walk": ((False,), "tracks: walk is not guided by scores"),
    "on_true_graph": ((False,), "tracks are found by scores, not by truth"),
    "on_true_graph_edges": ((False,), "tracks are found by scores, not by truth"),
    "on_truth_particle_edges": ((False,), "tracks are found by scores, not by truth"),
}
"""Keys with one possible meaning here: the values that have it, and why no other."""
_OF_FILES = ("input_cut", "transform")

_OWN_NETWORK = "give acorn's network as a model of your own: --model package.module:factory"
_NEVER = ("output_layer_norm", "output_batch_norm", "bn_track_running_stats", "edge_output_transform_final_layer_norm",
          "edge_output_transform_final_batch_norm")  # fmt: skip
_OF_BOTH = {
    **dict.fromkeys(_NEVER, (False,)),
    "edge_output_transform_final_activation": (None,),
    "undirected": (False,),
    "emb_channels": (0,),
    "aggregation": ("sum", ["sum"]),
    "aggr": ("add", "sum"),
}
NETWORKS: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "InteractionGNN": (
        "acorn",
        {
            **_OF_BOTH,
            "nb_node_layer": (2,), "nb_edge_layer": (2,), "layernorm": (True,), "batchnorm": (False,),
            "hidden_activation": ("SiLU",), "output_activation": ("Tanh",),
            "node_net_recurrent": (True,), "edge_net_recurrent": (True,),
        },
    ),
    "InteractionGNN2": (
        "acorn2",
        {
            **_OF_BOTH,
            "n_node_net_layers": (3,), "n_edge_net_layers": (3,), "n_edge_decoder_layers": (3,),
            "layernorm": (False,), "batchnorm": (True,), "hidden_activation": ("ReLU",),
            "output_activation": ("ReLU",), "concat": (True,), "in_out_diff_agg": (True,),
            "node_net_recurrent": (False,), "edge_net_recurrent": (False,),
        },
    ),
}  # fmt: skip
"""Our name of each network of acorn, and the options it has under it."""
_NETWORK_KEYS = {key for _, options in NETWORKS.values() for key in options}

TRACK_BUILDERS = {"ConnectedComponents": "cc", "CCandWalk": "walk", "CCandJunctionRemoval": "junction"}


def default_store(source: str, directory: str) -> Path:
    """Where `prepare` puts the events of a directory if nothing is said."""
    return Path("stores") / f"{source}-{Path(directory).resolve().name}"


@dataclass(frozen=True)
class _File:
    """What a translation may look at besides the value."""

    command: str
    keys: Mapping[str, Any]

    @property
    def builds_tracks(self) -> bool:
        return self.keys.get("stage") == "track_building"


_Translation = Callable[[Any, _File], Values]


def _renamed(field: str) -> _Translation:
    return lambda value, _: {field: value}


def _listed(field: str) -> _Translation:
    def translated(value: Any, _: _File) -> Values:
        if value in (None, [], "None"):
            return {field: "none"}
        return {field: ", ".join(str(one) for one in value) if isinstance(value, list) else value}

    return translated


def _as_text(field: str, text_of: Callable[[str, Any], str]) -> _Translation:
    def translated(value: Any, file: _File) -> Values:
        return {field: value if isinstance(value, str) else text_of(field, value)}

    return translated


def _target_tracks(value: Any, file: _File) -> Values:
    text = value if isinstance(value, str) else at_least_text("target_tracks", value)
    return {"track_target" if file.command == "infer" else "target": text}


def _model(value: Any, file: _File) -> Values:
    value = str(value)
    if file.command == "train" and value in NETWORKS:
        return {"model": NETWORKS[value][0]}
    if file.builds_tracks and value in TRACK_BUILDERS:
        # acorn gives a hit to no track but those that were built of it.
        return {"tracks": TRACK_BUILDERS[value], "double_hits": False}
    if file.command == "prepare" or (file.command == "infer" and not file.builds_tracks):
        return {}  # which was trained is known from the run
    raise ConfigError(
        f"model {value!r} of acorn has no equal here",
        f"take one of {', '.join((*NETWORKS, *TRACK_BUILDERS))}, or one of our own with --model",
    )


def _weighting(value: Any, _: _File) -> Values:
    if isinstance(value, str):
        return {"weighting": value}
    target = target_of_weighting("weighting", value)
    return {"weighting": weighting_text("weighting", value), **({} if target is None else {"target": target})}


def _input_dir(value: Any, file: _File) -> Values:
    if file.command == "prepare":
        return {"source": "acorn", "input": value}
    if file.command == "train":
        return {"store": str(default_store("acorn", str(value)))}
    # acorn's tracks are built from what its network has left where our run is.
    return {"run": value} if file.builds_tracks else {}


def _stage_dir(value: Any, file: _File) -> Values:
    if file.command == "infer":
        return {"out" if file.builds_tracks else "run": value}
    return {"out": value} if file.command == "train" else {}


def _schedule(_: Any, file: _File) -> Values:
    if (file.keys.get("factor", 0.9), file.keys.get("patience", 10)) != (0.9, 10):
        raise ConfigError(
            f"factor {file.keys.get('factor')} and patience {file.keys.get('patience')} have no equal here",
            "leave both away and choose lr_schedule: step is times 0.9 every 10 epochs",
        )
    return {"lr_schedule": "step"}


def _walk(value: Any, _: _File) -> Values:
    if not isinstance(value, dict) or set(value) != {"min", "add"}:
        raise ConfigError(f"score_cut_walk is {value!r}, not min and add", "write min: 0.1 and add: 0.6 under it")
    return {"walk_min": value["min"], "walk_add": value["add"]}


def _score_cut(value: Any, file: _File) -> Values:
    if file.keys.get("stage") == "edge_classifier" and value != 0.5:
        raise ConfigError(f"score_cut {value} of the edge classifier has no equal here", ONLY["edge_cut"][1])
    return {} if file.keys.get("stage") == "edge_classifier" else {"score_cut": value}


TRANSLATIONS: dict[str, _Translation] = {
    **{name: _renamed(name) for name in ("hidden", "lr", "seed", "matching_fraction", "min_track_length")},
    "n_graph_iters": _renamed("graph_iters"),
    "max_epochs": _renamed("epochs"),
    "warmup": _renamed("warmup_epochs"),
    "score_cut_cc": _renamed("score_cut"),
    "matching_style": lambda value, _: {"matching_style": str(value).lower()},
    **{name: _listed(name) for name in ("node_features", "node_scales", "edge_features", "edge_scales")},
    "hard_cuts": _as_text("hard_cuts", conditions_text),
    "target_tracks": _target_tracks,
    "weighting": _weighting,
    "model": _model,
    "input_dir": _input_dir,
    "stage_dir": _stage_dir,
    "factor": _schedule,
    "patience": _schedule,
    "score_cut": _score_cut,
    "score_cut_walk": _walk,
}
"""Keys with an equal here: from the value to values of our own fields."""

# Text here, lists and mappings in acorn.
_STRUCTURED = ("node_features", "node_scales", "edge_features", "edge_scales", "hard_cuts", "weighting")

KNOWN = {*NOT_USED, *ONLY, *_NETWORK_KEYS, *TRANSLATIONS}


@dataclass(frozen=True)
class Translated:
    """A file in our own keys.

    Attributes:
        values: All values for the command, by our keys.
        said: What was translated, what is so here in any case, and what is not used: lines to print. None for a file
            without acorn's keys.
    """

    values: Values
    said: tuple[str, ...] = ()


def translate(
    keys: Mapping[str, Any], command: str, fields: Iterable[str], known: Iterable[str], own_model: bool = False
) -> Translated:
    """Translate what a file has of acorn's keys.

    Args:
        keys: The file.
        command: `prepare`, `train` or `infer`.
        fields: Keys of this command.
        known: Keys of all commands.
        own_model: The network was chosen by a flag, so what the file says of acorn's is not used.

    Raises:
        ConfigError: If some of them have no equal here, naming all of those.
    """
    fields, known = set(fields), set(known)
    if not any(key in KNOWN and (key not in known or _is_structured(key, of)) for key, of in keys.items()):
        return Translated(dict(keys))
    own = {key: value for key, value in keys.items() if _is_ours(key, value, fields)}
    # What nobody knows is passed on, to be refused like any such key.
    others = {key: value for key, value in keys.items() if key not in own and key in KNOWN}
    strangers = {key: value for key, value in keys.items() if key not in own and key not in KNOWN}
    own_model = own_model or keys.get("model", "InteractionGNN") in MODELS
    reading = _Reading(_File(command, keys), own_model, fields)
    for key, value in others.items():
        reading.take(key, value)
    if reading.refused:
        hints = dict.fromkeys(error.hint for error in reading.refused)
        raise ConfigError("; ".join(map(str, reading.refused)), "; ".join(hints))
    return Translated({**reading.given, **own, **strangers}, reading.said(own))


class _Reading:
    """acorn's keys of one file, one after the other."""

    def __init__(self, file: _File, own_model: bool, fields: set[str]) -> None:
        self._file, self._own_model, self._fields = file, own_model, fields
        self.given: Values = {}
        self.refused: list[ConfigError] = []
        self._changed: list[tuple[str, str, Any]] = []
        self._holding: list[str] = []
        self._unused: list[str] = []

    def take(self, key: str, value: Any) -> None:
        """Translate one key, or note why not."""
        try:
            every = _translated(key, value, self._file, self._own_model)
        except ConfigError as error:
            self.refused.append(error)
            return
        found = {name: of for name, of in every.items() if name in self._fields}
        if not found:
            (self._holding if _was_looked_at(key, self._file, self._own_model) else self._unused).append(key)
        # A target that is written down wins over the one that the weights imply.
        self.given |= {name: of for name, of in found.items() if name not in self.given or key == "target_tracks"}
        self._changed += [(key, name, of) for name, of in found.items()]

    def said(self, own: Mapping[str, Any]) -> tuple[str, ...]:
        """What became of the keys, in a line each; those that keys of our own replace are left out."""
        changed = [f"{key} -> {name}: {of}" for key, name, of in self._changed if name not in own]
        if "weighting" in self.given and "target" not in self.given and "target" not in own:
            changed.append("no single rule gives weight to true edges, so metrics take all of them for targets")
        lines = {
            "from acorn": "; ".join(changed),
            "so here anyway": ", ".join(self._holding),
            "not used": ", ".join(self._unused),
        }
        return tuple(f"{about}: {text}" for about, text in lines.items() if text)


def _is_ours(key: str, value: Any, fields: set[str]) -> bool:
    """Whether a key that both know means what it means here: a list or mapping is acorn's way to write it."""
    if key not in KNOWN:
        return key in fields
    if key == "warmup" or (key == "model" and str(value) not in MODELS and ":" not in str(value)):
        return False
    return key in fields and not _is_structured(key, value) and key not in ("matching_style", "score_cut")


def _is_structured(key: str, value: Any) -> bool:
    return key in _STRUCTURED and (isinstance(value, list | dict) or value == "None")


def _translated(key: str, value: Any, file: _File, own_model: bool) -> Values:
    if key in TRANSLATIONS:
        return {} if key == "model" and own_model else TRANSLATIONS[key](value, file)
    if not _was_looked_at(key, file, own_model):
        return {}
    if key in ONLY:
        allowed, why = ONLY[key]
        if value not in allowed:
            raise ConfigError(f"{key}: {value} has no equal here", f"{key}: {why}")
    elif value not in _options(file)[key]:
        raise ConfigError(f"{key}: {value} is not an option of --model", _OWN_NETWORK)
    return {}


def _was_looked_at(key: str, file: _File, own_model: bool) -> bool:
    """Whether a key alters what this command computes, so that only values that change nothing here may pass."""
    if key in ONLY:
        return file.command != "prepare" or key in _OF_FILES
    return file.command == "train" and not own_model and key in _options(file)


def _options(file: _File) -> dict[str, tuple[Any, ...]]:
    return NETWORKS.get(str(file.keys.get("model")), NETWORKS["InteractionGNN"])[1]
