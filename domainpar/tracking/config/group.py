"""The frame of all configurations: groups of fields, the error that refuses, and the file that repeats a command."""

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from domainpar.common.problems import Problem

OWN_MODEL = "own"
"""Stands in a run's `config.yaml` in place of a user's own network: a file is data and never names code."""

# How a command was started, not what it computes: left out of a run's `config.yaml`.
_NOT_KEPT = ("out", "resume", "overwrite", "report", "verify")


WHOLE = "--- # whole if it ends in a line of three dots"
"""First line of a run's `config.yaml`: half of one is YAML too, and would stand for defaults."""


class ConfigError(Problem):
    """A request that cannot be met, seen before work begins: commands print it once and end with exit code 2.

    Every rank raises it together, or none: rank 0 alone prints.
    """


def flag(name: str) -> str:
    """The command-line flag of a field: `--events-per-step` of `events_per_step`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Fields that belong together: one heading of `--help`."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}

    def __post_init__(self) -> None:
        # `vars`, not `getattr`: an inherited check would run once more for every class below it.
        for group in type(self).__mro__:
            if check := vars(group).get("check"):
                check(self)

    def _bounded(
        self, *names: str, least: float = 0, below: float = math.inf, most: int | None = None, positive: bool = False
    ) -> None:
        for name in names:
            value = getattr(self, name)
            # None is the default of a field; NaN is in no bounds, since it compares as false.
            enough = value is None or (value > 0 if positive else value >= least)
            if enough and (value is None or (value < below and (most is None or value <= most))):
                continue
            bound = f"a finite number of at least {least:g}" if isinstance(value, float) else f"at least {least:g}"
            bound = "a finite number above 0" if positive else bound
            if most is not None:
                bound += f" and at most {most:,}"
            elif below < math.inf:
                bound += f" and below {below:g}"
            hint = f"omit {flag(name)} to have its default"
            raise ConfigError(f"{flag(name)} is {value}; it must be {bound}", hint)


def is_code(model: str) -> bool:
    """Whether the name of a model is that of a user's own, `package.module:factory`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", model) is not None


def groups(config_class: type[Group]) -> tuple[type[Group], ...]:
    """The groups a configuration is made of, in the order of its `--help`."""
    return tuple(base for base in config_class.__bases__ if issubclass(base, Group))


def title(group: type[Group]) -> str:
    """The heading of a group: its docstring."""
    return (group.__doc__ or group.__name__).strip()


def resolved_yaml(config: Group) -> str:
    """The whole configuration as YAML, defaults included, to be given to `--config` for another run.

    The output directory and `--resume`, `--overwrite`, `--report` are left out: they say how a command was started.
    """
    sections = []
    for group in groups(type(config)):
        kept = {name: getattr(config, name) for name in group.__annotations__ if name not in _NOT_KEPT}
        if is_code(str(kept.get("model"))):
            kept["model"] = OWN_MODEL
        sections.append(f"# {title(group)}\n" + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))
    return whole("\n".join(sections))


def whole(text: str) -> str:
    """YAML of which `loaded_yaml` sees whether it is all there."""
    return f"{WHOLE}\n{text}...\n"
