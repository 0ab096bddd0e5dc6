"""The flags of each command, as frozen dataclasses: one field, one flag, one key of a YAML file.

The docstring under a field is its line in `--help`. Fields are gathered in small groups, shared between commands.
A mistake in a group, or between groups, is refused when the object is made, before anything else is imported.
A command alone sees all of its flags. What it calls takes the group that it reads, or a small base of some groups.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below, for type checkers
    from domainpar.tracking.config.doctor import DoctorConfig
    from domainpar.tracking.config.estimate import EstimateConfig
    from domainpar.tracking.config.evaluate import EvaluateConfig
    from domainpar.tracking.config.export import ExportConfig
    from domainpar.tracking.config.group import CODE, SHIPPED, ConfigError, flag, is_code, preset_of
    from domainpar.tracking.config.import_acorn import ImportAcornConfig
    from domainpar.tracking.config.infer import InferConfig
    from domainpar.tracking.config.prepare import PrepareConfig
    from domainpar.tracking.config.rank_flags import session_arguments
    from domainpar.tracking.config.report import ReportConfig
    from domainpar.tracking.config.texts import Conditions
    from domainpar.tracking.config.train import BITWISE, MODELS, NetworkFlags, TrainConfig, TrainedFlags, TrainingFlags
    from domainpar.tracking.config.yaml_text import resolved_yaml

__all__ = [
    "BITWISE", "CODE", "MODELS", "SHIPPED", "Conditions", "ConfigError", "DoctorConfig", "EstimateConfig",
    "EvaluateConfig", "ExportConfig", "ImportAcornConfig", "InferConfig", "NetworkFlags", "PrepareConfig",
    "ReportConfig", "TrainConfig", "TrainedFlags", "TrainingFlags", "flag", "is_code", "preset_of", "resolved_yaml",
    "session_arguments",
]  # fmt: skip

_MODULES = {
    "doctor": "DoctorConfig",
    "estimate": "EstimateConfig",
    "evaluate": "EvaluateConfig",
    "export": "ExportConfig",
    "group": "CODE SHIPPED ConfigError flag is_code preset_of",
    "import_acorn": "ImportAcornConfig",
    "infer": "InferConfig",
    "prepare": "PrepareConfig",
    "rank_flags": "session_arguments",
    "report": "ReportConfig",
    "texts": "Conditions",
    "train": "BITWISE MODELS NetworkFlags TrainConfig TrainedFlags TrainingFlags",
    "yaml_text": "resolved_yaml",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A name of a module here, which is loaded when it is used: `--help` needs the flags of one command."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
