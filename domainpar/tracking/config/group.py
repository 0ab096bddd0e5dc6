"""The frame of all configurations: groups of fields, the error that refuses, and the file that repeats a command."""

from __future__ import annotations

import difflib
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, ValidationError, convert

from domainpar.common.problems import Problem

_ALIKE = 0.75  # of 1: above that two words are one, misspelt
LARGEST = 2**63 - 1

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Score = Annotated[float, Meta(gt=0, lt=1)]
Grid = Annotated[
    str,
    Meta(pattern=r"^0*[1-9]\d*x0*[1-9]\d*$", description="a grid, wedges in phi x slices in eta", examples=["8x2"]),
]
Sectors = Count | Grid
"""Numbers with bounds, and the sectors of an event: a number of them, or a grid."""

CODE = {"model": "network", "optimizer": "optimiser"}
"""Fields that may name code of the user's own, and what it makes, in words."""

OWN_CODE = "own"
"""Stands in a run's `config.yaml` in place of such code: a file is data and never names code."""

SHIPPED = "pretrained:"
"""What the name of a network that is shipped begins with."""


def preset_of(network: str) -> str:
    """The preset of the events of a shipped network: the first word of its name, `full` of `pretrained:full-hllhc`."""
    return network.removeprefix(SHIPPED).split("-")[0]


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
    """

    flags: str  # flags that must not be given in vain
    without: str = ""  # flags of which one gives `flags` a meaning
    beside: str = ""  # flags of which each takes the meaning away
    hint: str = ""  # the reason, or the remedy; default: to add or to omit a flag
    spares_presets: bool = False  # a value that a preset sets may have no meaning

    def check(self, config: Group) -> None:
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

    def _refuse(self, config: Group, name: str, why: str, hint: str) -> NoReturn:
        raise ConfigError(f"{config.spelt(name)}{config.of_preset(name)} means nothing {why}", self.hint or hint)


class NameOrCode(Text):
    """A name that is known, or code of the user's own, `package.module:factory`."""

    KNOWN: ClassVar[Sequence[str]]
    MOVED: ClassVar[Mapping[str, str]]
    """The code that other names, which were built in, are now."""
    FIELD: ClassVar[str]
    FORM: ClassVar[str] = "package.module:factory"

    @cached_property
    def value(self) -> str:
        if self == OWN_CODE:
            what = f"the {CODE[self.FIELD]} of this run is code of your own, which no file names"
            raise ConfigError(what, f"repeat {flag(self.FIELD)} {self.FORM}; run.json says what it was")
        if self in self.MOVED:
            what = "it is no longer built in, but plain code of the examples"
            where = "with examples/ of the repository, or a copy of it, on the Python path"
            raise ConfigError(what, f"use {flag(self.FIELD)} {self.MOVED[self]}, {where}")
        if self not in self.KNOWN and not is_code(self):
            close = difflib.get_close_matches(self, self.KNOWN, n=1)
            raise ConfigError(
                f"expected one of {', '.join(self.KNOWN)}, or {self.FORM}",
                f"did you mean {close[0]}?" if close else "python -m domainpar.train --help explains it",
            )
        return str(self)


def rules(*each: MeansNothing) -> tuple[MeansNothing, ...]:
    """The rules of a group, in a type that leaves their number open: a subclass has others."""
    return each


@dataclass(frozen=True, kw_only=True)
class Group:
    """Fields that belong together: one heading of `--help`."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    """The flags that each preset sets."""

    WORDS: ClassVar[tuple[str, ...]] = ()
    """Fields whose values may stand on the command line without their flags, in this order."""

    RULES: ClassVar[tuple[MeansNothing, ...]] = ()
    """What its fields, and those that it shares a configuration with, must fulfil; what is no rule is in `check`."""

    HELP: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The help of fields that comes from a table, in place of their docstrings."""

    def __post_init__(self) -> None:
        for name, field in fields_of(type(self)).items():
            object.__setattr__(self, name, field.checked(getattr(self, name)))
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


class Flag:
    """A field of a configuration: what its annotation takes.

    Attributes:
        choices: The words that it takes.
        kinds: The types of other values that it takes.
        limits: Bounds of the values of a type.
        spellings: Its flag, or for a switch those for on and off.
    """

    def __init__(self, name: str, kind: Any) -> None:
        parts = [kind] if get_origin(kind) in (Literal, Annotated) else [*(get_args(kind) or [kind])]
        self.name, self.kind = name, kind
        self.choices = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
        self.limits: dict[type[Any], Meta] = {
            part.__origin__: part.__metadata__[0] for part in parts if get_origin(part) is Annotated
        }
        self.kinds: list[type[Any]] = [part for part in parts if isinstance(part, type)] + [*self.limits]
        self.is_switch = kind is bool
        self.spellings = [flag(name), *([f"--no{flag(name)[1:]}"] if self.is_switch else [])]
        self._has_meaning = any(issubclass(part, Text) for part in self.kinds)
        plain = [str if issubclass(part, Text) else part for part in self.kinds]
        self._type = Union[*plain, *(part for part in parts if get_origin(part) is Literal)]  # without bounds

    def read(self, given: Any, spelt: str = "") -> Any:
        """The value that a word on the command line, or a value in a file, stands for.

        Raises:
            ConfigError: If it is none; `spelt` is the field as the user knows it.
        """
        values = [given]
        if isinstance(given, str):  # to YAML, 1e-3 is a text
            values = [*_meanings(given), given]
        value = next(filter(self._is_of_type, values), given)
        # The meaning of a text is looked at when all are known: a file may say `own` where a flag names code.
        return value if isinstance(value, str) and self._has_meaning else self.checked(value, spelt)

    def checked(self, value: Any, spelt: str = "") -> Any:
        """A value of the field's type, and within its bounds.

        Raises:
            ConfigError: Naming the flag, the value, and what it must be.
        """
        spelt, value = spelt or flag(self.name), str(value) if isinstance(value, Text) else value
        if not self._is_of_type(value):
            raise self._of_another_type(value, spelt)
        try:
            made = convert(value, self.kind, dec_hook=_made)
            if not isinstance(made, float) or math.isfinite(made):
                return made
        except ValidationError as error:
            if isinstance(cause := error.__cause__, ConfigError):
                raise ConfigError(f"{flag(self.name)} {value!r}: {cause.what}", cause.hint) from cause
        bounds = ", or ".join(_in_words(kind, limits) for kind, limits in self.limits.items()) or "a finite number"
        examples = [f"{spelt} {example}" for limits in self.limits.values() for example in limits.examples or ()]
        hint = f"write {' or '.join(examples)}" if examples else f"omit {flag(self.name)} to have its default"
        shown = float(value) if float in self.kinds else value
        raise ConfigError(f"{flag(self.name)} is {shown}; it must be {bounds}", hint)

    def _is_of_type(self, value: Any) -> bool:
        try:
            convert(value, self._type)
        except ValidationError:
            return False
        return True

    def _of_another_type(self, value: Any, spelt: str) -> ConfigError:
        shown, hint = repr(value), nearest(str(value), self.choices, "--help explains it")
        if value is None:
            shown, hint = "null", "omit it to have the default"
        elif self.expected == "text":
            hint = f"quote it: {self.name}: '...'"
        return ConfigError(f"{spelt} is {shown}; expected {self.expected}", hint)

    @property
    def expected(self) -> str:
        """The values that it takes, in words."""
        names = {int: "a whole number", float: "a number", bool: "true or false"}
        kinds = [names.get(kind, "text") for kind in self.kinds if kind is not NoneType]
        choices = ", ".join(self.choices)
        return ", or ".join([*kinds, choices] if choices else kinds) if kinds else f"one of {choices}"


_WORDS = {"null": None, "~": None, **dict.fromkeys(("true", "yes", "on"), True)}
_WORDS |= dict.fromkeys(("false", "no", "off"), False)
"""Words that YAML takes for something else."""


def _meanings(word: str) -> Iterator[Any]:
    """What a word may stand for besides itself."""
    if word.lower() in _WORDS:
        yield _WORDS[word.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            yield kind(word)


def _made(kind: type[Text], text: str) -> Text:
    """A text with a meaning, which is looked at."""
    made = kind(text)
    _ = made.value
    return made


def _in_words(kind: type[Any], limits: Meta) -> str:
    """The bounds of a number, or the form of a text."""
    if limits.description is not None:
        return limits.description
    finite = "a finite number of " if kind is float else ""
    bound = "a finite number above 0" if limits.gt == 0 else f"{finite}at least {limits.ge:g}"
    if limits.le is not None and limits.le < LARGEST:
        return f"{bound} and at most {limits.le:,}"
    return bound if limits.lt is None else f"{bound} and below {limits.lt:g}"


def json_schema(config_class: type[Group], texts: Mapping[str, str]) -> dict[str, Any]:
    """The JSON schema of a command's YAML files, for editors; `texts` explain the fields by name."""
    properties: dict[str, Any] = {}
    for name, field in fields_of(config_class).items():
        default = getattr(config_class, name)
        takes = msgspec.json.schema(field.kind, schema_hook=lambda kind: {"type": "string"})
        properties[name] = {**takes, "description": " ".join(texts[name].split()), "default": default}
    schema = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": schema, "type": "object", "additionalProperties": False, "properties": properties}


_FIELDS: dict[type[Group], Mapping[str, Flag]] = {}


def fields_of(config_class: type[Group]) -> Mapping[str, Flag]:
    """The fields of a configuration by name, in the order of its groups."""
    if config_class not in _FIELDS:
        hints = get_type_hints(config_class, include_extras=True)
        names = [name for group in groups(config_class) for name in group.__annotations__]
        _FIELDS[config_class] = {name: Flag(name, hints[name]) for name in names}
    return _FIELDS[config_class]


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """A hint that names what was meant, where one is so near that it is a slip; dashes make nothing alike."""
    by_letters = {_letters(each): each for each in known}
    close = difflib.get_close_matches(_letters(word), list(by_letters), n=1, cutoff=_ALIKE)
    return f"did you mean {by_letters[close[0]]}?" if close else otherwise


def _letters(word: str) -> str:
    return word.lstrip("-").replace("_", "-")


def groups(config_class: type[Group]) -> tuple[type[Group], ...]:
    """The groups a configuration is made of, in the order of its `--help`: classes with fields of their own."""
    groups = (base for base in config_class.__mro__ if issubclass(base, Group))
    return tuple(group for group in groups if any(field.name in group.__annotations__ for field in fields(group)))


def title(group: type[Group]) -> str:
    """The heading of a group: its docstring."""
    return (group.__doc__ or group.__name__).strip()
