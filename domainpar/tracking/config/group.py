"""The frame of all configurations: groups of fields, the error that refuses, and the file that repeats a command."""

import difflib
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn, get_args, get_type_hints

import yaml

from domainpar.common.problems import Problem

CODE = {"model": "network", "optimizer": "optimiser"}
"""Fields that may name code of the user's own, and what it makes, in words."""

OWN_CODE = "own"
"""Stands in a run's `config.yaml` in place of such code: a file is data and never names code."""

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


class Text(str):
    """The text of a flag that means more: still the text, as files keep it, with its value read once.

    A field of such a type may be given plain text; the configuration makes it one of the type.
    """

    @cached_property
    def value(self) -> Any:
        """The meaning of the text.

        Raises:
            ConfigError: If it has none; the configuration names the flag and the text.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class MeansNothing:
    """A rule: some flags are of no effect without, or beside, some others.

    Flags are fields with commas between them. A field alone is given if it has another value than its default; a field
    with a value, `tracks cc`, if it has that one.

    Attributes:
        flags: What must not be given in vain.
        without: Flags of which one gives `flags` a meaning.
        beside: Flags of which each takes the meaning away.
        hint: The reason, or the remedy. Default: to add or to omit a flag.
        spares_presets: A value that a preset sets may have no meaning.
    """

    flags: str
    without: str = ""
    beside: str = ""
    hint: str = ""
    spares_presets: bool = False

    def check(self, config: "Group") -> None:
        """Refuse a flag that is given in vain.

        Raises:
            ConfigError: Naming it, and what is missing or in its way.
        """
        flags, without, beside = (
            terms.split(", ") if terms else [] for terms in (self.flags, self.without, self.beside)
        )
        given = [name for name in flags if config.has(name) and not (self.spares_presets and config.of_preset(name))]
        if given and without and not any(map(config.has, without)):
            *others, last = map(flag, without)
            wanted = f"{', '.join(others)} or {last}" if others else last
            # Where one flag decides, its value is what is wrong, if it has one.
            deciding = {term.split()[0] for term in without}
            decided = [name for name in deciding if len(deciding) == 1 and getattr(config, name)]
            lacks = f"with {config.spelt(decided[0])}" if decided else f"without {wanted}"
            self._refuse(config, given[0], lacks, f"add {wanted}, or omit the flag")
        if given and (in_the_way := list(filter(config.has, beside))):
            self._refuse(config, given[0], f"with {config.spelt(in_the_way[0])}", "keep one of the two")

    def _refuse(self, config: "Group", name: str, why: str, hint: str) -> NoReturn:
        raise ConfigError(f"{config.spelt(name)}{config.of_preset(name)} means nothing {why}", self.hint or hint)


@dataclass(frozen=True)
class Bounded:
    """A rule: some numbers lie within bounds. What is not given, and a word in place of a number, is in all bounds.

    Attributes:
        fields: The fields, commas between them.
        least: The least that they may be.
        below: They must be less than that.
        most: The most that they may be.
        positive: They must be above 0, in place of `least`.
    """

    fields: str
    least: float = 0
    below: float = math.inf
    most: int | None = None
    positive: bool = False

    def check(self, config: "Group") -> None:
        """Refuse a number out of bounds.

        Raises:
            ConfigError: Naming the flag, the number and the bounds.
        """
        for name in self.fields.split(", "):
            value = getattr(config, name)
            if value is None or isinstance(value, str):
                continue
            enough = value > 0 if self.positive else value >= self.least  # NaN is in no bounds: it compares as false
            if enough and value < self.below and (self.most is None or value <= self.most):
                continue
            finite = "a finite number of " if isinstance(value, float) else ""
            bound = "a finite number above 0" if self.positive else f"{finite}at least {self.least:g}"
            if self.most is not None:
                bound += f" and at most {self.most:,}"
            elif self.below < math.inf:
                bound += f" and below {self.below:g}"
            hint = f"omit {flag(name)} to have its default"
            raise ConfigError(f"{flag(name)} is {value}; it must be {bound}", hint)


@dataclass(frozen=True)
class NameOrCode:
    """A rule: a field has a name that is known, or names code of the user's own.

    Attributes:
        field: The field, one of `CODE`.
        known: The names.
        moved: The code that other names, which were built in, are now.
        form: How code is named.
    """

    field: str
    known: Sequence[str]
    moved: Mapping[str, str]
    form: str

    def check(self, config: "Group") -> None:
        """Refuse a name that is none.

        Raises:
            ConfigError: Naming the flag, and what to write.
        """
        spelt, name = flag(self.field), getattr(config, self.field)
        if name == OWN_CODE:
            what = f"the {CODE[self.field]} of this run is code of your own, which no file names"
            raise ConfigError(what, f"repeat {spelt} {self.form}; run.json says what it was")
        if name in self.moved:
            what = f"{spelt} is {name!r}, which is no longer built in: it is plain code of the examples"
            where = "with examples/ of the repository, or a copy of it, on the Python path"
            raise ConfigError(what, f"use {spelt} {self.moved[name]}, {where}")
        if name not in self.known and not is_code(name):
            close = difflib.get_close_matches(name, self.known, n=1)
            raise ConfigError(
                f"{spelt} is {name!r}; expected one of {', '.join(self.known)}, or {self.form}",
                f"did you mean {close[0]}?" if close else "python -m domainpar.train --help explains it",
            )


Rule = Bounded | MeansNothing | NameOrCode


def rules(*each: Rule) -> tuple[Rule, ...]:
    """The rules of a group."""
    return each


@dataclass(frozen=True, kw_only=True)
class Group:
    """Fields that belong together: one heading of `--help`."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    """The flags that each preset sets."""

    WORDS: ClassVar[tuple[str, ...]] = ()
    """Fields whose values may stand on the command line without their flags, in this order."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    """What its fields, and those that it shares a configuration with, must fulfil; what is no rule is in `check`."""

    HELP: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The help of fields that comes from a table, in place of their docstrings."""

    def __post_init__(self) -> None:
        for name, kind in _texts(type(self)).items():
            if (given := getattr(self, name)) is not None:
                text = given if isinstance(given, kind) else kind(given)
                object.__setattr__(self, name, text)
                try:
                    _ = text.value
                except ConfigError as error:
                    raise ConfigError(f"{flag(name)} {str(text)!r}: {error.what}", error.hint) from error
        # `vars`, not `getattr`: an inherited check would run once more for every class below it.
        for group in type(self).__mro__:
            for rule in vars(group).get("RULES", ()):
                rule.check(self)
            if check := vars(group).get("check"):
                check(self)

    def has(self, term: str) -> bool:
        """Whether a field has this value, `tracks cc`; of a field alone: another value than its default."""
        name, _, value = term.partition(" ")
        own = getattr(self, name)
        return str(own) == value if value else own != getattr(type(self), name)

    def spelt(self, term: str) -> str:
        """A flag with its value, as one types it."""
        name, _, _ = term.partition(" ")
        value = getattr(self, name)
        return flag(name) if value is True else f"{flag(name)} {shlex.quote(str(value))}"

    def of_preset(self, name: str) -> str:
        """` (of --preset pixel)` if a flag has the value that the preset sets, else nothing."""
        name, _, _ = name.partition(" ")
        preset = getattr(self, "preset", None)
        set_by = self.PRESETS.get(preset or "", {})
        return f" (of --preset {preset})" if name in set_by and getattr(self, name) == set_by[name] else ""


def is_code(name: str) -> bool:
    """Whether a name is that of code of the user's own, `package.module:factory`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def _texts(config_class: type[Group]) -> dict[str, type[Text]]:
    """The fields of texts that mean more, and their types."""
    kinds = {
        name: [part for part in (hint, *get_args(hint)) if isinstance(part, type) and issubclass(part, Text)]
        for name, hint in get_type_hints(config_class).items()
    }
    return {name: found[0] for name, found in kinds.items() if found}


def groups(config_class: type[Group]) -> tuple[type[Group], ...]:
    """The groups a configuration is made of, in the order of its `--help`; itself, if it is one of fields."""
    return tuple(base for base in config_class.__bases__ if base is not Group) or (config_class,)


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
        kept |= {name: str(value) for name, value in kept.items() if isinstance(value, Text)}
        kept |= {name: OWN_CODE for name in CODE if is_code(str(kept.get(name)))}
        sections.append(f"# {title(group)}\n" + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))
    return whole("\n".join(sections))


def whole(text: str) -> str:
    """YAML of which `loaded_yaml` sees whether it is all there."""
    return f"{WHOLE}\n{text}...\n"
