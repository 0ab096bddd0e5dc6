"""What each command can be asked to do, as frozen dataclasses: one field, one flag, one key of a YAML file.

The docstring under a field is its line in `--help`. Fields are gathered in small groups, shared between commands.
What is wrong in a group, or between groups, is found when the object is made, before anything else is imported.
Only commands and the rooms' entry points read these objects; everything below takes plain arguments.
"""

from domainpar.config.bad_events import BadEvents
from domainpar.config.errors import ConfigError
from domainpar.config.group import Group, flag, groups, resolved_yaml, title
from domainpar.config.inference import InferConfig, Scoring
from domainpar.config.launching import Launch, session_arguments
from domainpar.config.preparing import AcornFiles, CandidateEdges, PrepareConfig, Source, Storage, Tiles
from domainpar.config.ranks import Ranks
from domainpar.config.reporting import ReportConfig, Showing
from domainpar.config.texts import (
    OWN_MODEL,
    LayerPair,
    WeightRules,
    conditions_of,
    is_code,
    parse_layer_pairs,
    parse_names,
    parse_numbers,
    parse_weighting,
    target_conditions,
)
from domainpar.config.training import (
    COLUMN_BLOCK,
    MODELS,
    ON_STAGES,
    Learning,
    Loss,
    Memory,
    Network,
    Record,
    Run,
    TrainConfig,
)

__all__ = [
    "COLUMN_BLOCK",
    "MODELS",
    "ON_STAGES",
    "OWN_MODEL",
    "AcornFiles",
    "BadEvents",
    "CandidateEdges",
    "ConfigError",
    "Group",
    "InferConfig",
    "Launch",
    "LayerPair",
    "Learning",
    "Loss",
    "Memory",
    "Network",
    "PrepareConfig",
    "Ranks",
    "Record",
    "ReportConfig",
    "Run",
    "Scoring",
    "Showing",
    "Source",
    "Storage",
    "Tiles",
    "TrainConfig",
    "WeightRules",
    "conditions_of",
    "flag",
    "groups",
    "is_code",
    "parse_layer_pairs",
    "parse_names",
    "parse_numbers",
    "parse_weighting",
    "resolved_yaml",
    "session_arguments",
    "target_conditions",
    "title",
]
