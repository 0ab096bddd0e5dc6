"""From the words on a command line to a configuration: flags, a YAML file, help, and errors that are printed once.

Imports neither torch nor MPI, so that help and mistakes cost a fraction of a second and no rank waits for another.
"""

import argparse
import difflib
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml

from domainpar.common.problems import NotWritten, Problem, Where, error_text, expected, nobody_reads, told
from domainpar.common.words import VOICE, some_of
from domainpar.parallel.launcher import started_as_root
from domainpar.tracking.config import (
    SHIPPED,
    ConfigError,
    Group,
    InferConfig,
    Network,
    PrepareConfig,
    TrainConfig,
    flag,
    groups,
    title,
)
from domainpar.tracking.config.acorn import converted
from domainpar.tracking.config.texts import loaded_yaml

Config = TypeVar("Config", bound=Group)

_COMMANDS = (PrepareConfig, TrainConfig, InferConfig)
_DRIVERS = Path("/dev")
_ALIKE = 0.75  # of 1: above that two words are one, misspelt
_DIRECTORIES = ("store", "out", "input", "run", "beside", "naive", "scores", "png", "verify")

# How ranks are laid out on a machine: a run that is resumed may find another one.
_OF_THE_MACHINE = ("ranks", "domain_size", "transport", "device", "share_gpu", "threads", "offload", "scratch",
                   "join_timeout", "first_timeout", "timeout")  # fmt: skip


def run_command(
    config_class: type[Config], work: Callable[[Config], int], text: str | None, argv: Sequence[str] | None = None
) -> int:
    """Read the command line and do the work: the frame of every command.

    Args:
        config_class: What the command can be asked to do.
        work: The one call that does it; returns the exit code.
        text: The command's module docstring, which becomes its help: the purpose first, `Examples:` last.
        argv: The words after the command. Default: those of this process.

    Returns:
        The exit code: that of the work; 2 when it was refused before it began, and rank 0 has printed why; 1 after
        another expected error outside a session of ranks (`problems.expected`), and where nobody reads on.

    Raises:
        SystemExit: With code 0 after `--help`.
    """
    _print_by_lines()
    try:
        config = parse(config_class, text or "", sys.argv[1:] if argv is None else argv)
        # Keep torch's pages of C++ frames about ranks that have gone from burying the one line that says why.
        # What NCCL has to say about a GPU stays.
        on_gpu = _may_be_on_gpu(getattr(config, "device", "cpu"))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if on_gpu else "FATAL")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler tells that it begins and ends
        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", config_class.__name__.removesuffix("Config")).lower()
        with VOICE.heard(name) if started_as_root() else nullcontext():
            code = work(config)
        _flush()
        return code
    except BrokenPipeError as error:
        if not nobody_reads(error):
            raise
        with open(os.devnull, "wb") as nowhere:  # where what is still to be printed goes
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    except ConfigError as error:
        if started_as_root():
            _print_error(error)
        return 2
    except (ValueError, OSError) as error:
        if (problem := expected(error)) is None:
            raise
        _print_error(problem)
        return 1


def named(argv: Sequence[str], *flags: str) -> list[str]:
    """The words of a command line with a flag of its own before each word that may stand without, in their order.

    Every other flag of such a command takes one value, so a word that follows none is such a one.

    Args:
        argv: The words.
        flags: The flags of these words. Default: `--run` alone.
    """
    words = list(argv)
    place = 0
    for own in flags or ("--run",):
        if any(word.split("=")[0] == own for word in words):
            continue
        while place < len(words) and words[place].startswith("-"):
            place += 1 if "=" in words[place] else 2
        if place < len(words):
            words.insert(place, own)
    return words


@contextmanager
def refused_as_asked(command: str) -> Iterator[None]:
    """Around the work of a command that writes one file: what will not do is refused, as flags are."""
    try:
        yield
    except NotWritten:
        raise
    except ValueError as error:
        about = told(error)
        hint = about.pop("hint") or f"python -m domainpar.{command} --help explains the flags"
        raise ConfigError(hint=hint, **about) from error


def _may_be_on_gpu(device: str) -> bool:
    """Whether ranks may compute on a GPU: asked before torch is imported, so of a driver's files."""
    there = any(found for name in ("nvidia[0-9]*", "kfd", "dxg") for found in _DRIVERS.glob(name))
    return device == "cuda" or (device == "auto" and there)


def _print_by_lines() -> None:
    """Write each line of standard output when it is complete, also into a pipe or a file.

    Under a launcher Python would keep 8 KiB, the lines of minutes, and a process that is killed would lose them.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a notebook's or a test's own
        sys.stdout.reconfigure(line_buffering=True)


def _flush() -> None:
    if sys.stdout is not None:  # it may have been closed
        sys.stdout.flush()


def _print_error(problem: Problem) -> None:
    sys.stderr.write(error_text(problem.what, Where(event=problem.event, file=problem.file), problem.hint))
    sys.stderr.flush()


def parse(config_class: type[Config], text: str, argv: Sequence[str]) -> Config:
    """Read flags, and below them the YAML file that `--config` names: a flag wins over the file, wherever it stands.

    The flags that `--preset` sets lie below both.

    With `--resume` the run's own `config.yaml` lies below both: a run goes on as it began, unless told otherwise.

    Raises:
        ConfigError: If a flag, a key or a value is unknown or impossible, or there is no run to resume.
        SystemExit: With code 0 after `--help`, which only the first rank prints.
    """
    command = _Command(config_class, text)
    if "-h" in argv or "--help" in argv:
        if started_as_root():
            command.parser_with_help().print_help()
            _flush()
        raise SystemExit(0)
    # Before the parser is built, which takes a while.
    command.refuse_unknown_flags(argv)
    values = command.read_flags(argv)
    from_file: dict[str, Any] = {}
    if values["config"] is not None:
        own_model = any(word.split("=")[0] == "--model" for word in argv)
        from_file = command.read_file(Path(values["config"]), own_model)
        # Read once more, so that a flag wins over the file.
        command.parser.set_defaults(from_file)
        values = command.read_flags(argv)
    _refuse_shipped(values)
    preset = (values.get("run") or "").removeprefix(SHIPPED)
    if preset != values.get("run") and values.get("preset", "") is None and preset in config_class.PRESETS:
        values["preset"] = preset
        command.parser.set_defaults({"preset": values["preset"]})
    if values.get("preset") is not None:
        command.parser.set_defaults(config_class.PRESETS[values["preset"]] | from_file)
        values = command.read_flags(argv)
    if values.get("init") is not None:
        from domainpar.tracking.training.pretrained import source

        network = config_of_run(source(values["init"]))
        command.parser.set_defaults({name: getattr(network, name) for name in Network.__annotations__} | from_file)
        values = command.read_flags(argv)
    if values.get("resume") and values["out"] is not None and not values["overwrite"]:
        from domainpar.runs.directory import can_go_on

        run = Path(values["out"])
        if values["resume"] != "auto" or can_go_on(run):
            own = command.read_run(run)
            # This may be another machine, and the store is found by `run.json`, which knows what has to be in it.
            own = {name: value for name, value in own.items() if name not in (*_OF_THE_MACHINE, "store")}
            command.parser.set_defaults(own | from_file)
            values = command.read_flags(argv)
    del values["config"]
    return config_class(**values)


def _refuse_shipped(values: Mapping[str, Any]) -> None:
    """Refuse a network that is shipped where a directory is asked for, which would be made under its name."""
    for name, value in values.items():
        of_run = name in ("run", "beside", "init", "module_map")
        if not of_run and isinstance(value, str) and value.startswith(SHIPPED):
            what = f"{flag(name)} is {value!r}: a network that is shipped, and no directory"
            copy = f"runs/{value.replace(':', '-')}"
            raise ConfigError(what, f"name a directory; infer, report and export keep a copy as {copy}")


def config_of_run(run: Path, model: str | None = None) -> TrainConfig:
    """The configuration that a run began with, by its `config.yaml`; `model` names a network of the user's own.

    Raises:
        ConfigError: If there is no run, or its file cannot be read.
    """
    command = _Command(TrainConfig)
    command.parser.set_defaults(command.read_run(run, model is not None))
    values = command.read_flags([] if model is None else ["--model", model])
    del values["config"]
    return TrainConfig(**values)


class _Command:
    """The flags of one command: how they are listed, and read from words and from files.

    Args:
        config_class: What the command can be asked to do.
        text: Its help: the purpose first, `Examples:` last.

    Attributes:
        fields: The type of each field, by name.
    """

    def __init__(self, config_class: type[Group], text: str = "") -> None:
        self._config_class, self._text = config_class, text
        words = config_class.__name__.removesuffix("Config")
        self.name = re.sub(r"(?<!^)(?=[A-Z])", "_", words).lower()
        self._help = f"python -m domainpar.{self.name} --help"
        hints = get_type_hints(config_class)
        self.fields = {name: hints[name] for group in groups(config_class) for name in group.__annotations__}

    @property
    def spellings(self) -> list[str]:
        """The spellings of all flags."""
        return [spelling for name, hint in self.fields.items() for spelling in _flags(name, hint)]

    @cached_property
    def parser(self) -> Any:
        """The parser of all flags."""
        return self._parser(lambda group: {})

    def parser_with_help(self) -> Any:
        """The parser of all flags that explains them: their texts take longer to find than all else."""
        import docstring_parser

        def described(group: type[Group]) -> dict[str, str]:
            return {each.arg_name: each.description or "" for each in docstring_parser.parse_from_object(group).params}

        return self._parser(described)

    def _parser(self, described: Callable[[type[Group]], Mapping[str, str]]) -> Any:
        from jsonargparse import ArgumentParser

        purpose, _, examples = self._text.partition("Examples:")
        parser = ArgumentParser(
            usage=f"python -m domainpar.{self.name} [flags]",
            description=purpose.strip(),
            epilog="Examples:" + examples.rstrip() if examples else None,
            formatter_class=_Help,
            exit_on_error=False,
        )
        about_file = "YAML file of flags; a flag given here wins."
        parser.add_argument("--config", type=str | None, metavar="FILE", help=about_file)
        for group in groups(self._config_class):
            heading = parser.add_argument_group(title(group))
            texts = described(group)
            for name in group.__annotations__:
                text, hint = texts.get(name, ""), self.fields[name]
                reading = _reading(name, hint, text)
                default = getattr(self._config_class, name)
                heading.add_argument(*_flags(name, hint)[:1], help=text, default=default, **reading)
        return parser

    def refuse_unknown_flags(self, argv: Sequence[str]) -> None:
        """Refuse a word that looks like a flag and is none."""
        known = ["--config", *self.spellings]
        for word in argv:
            spelling = word.split("=")[0]
            if re.match(r"-+[a-zA-Z]", spelling) and spelling not in known:
                lists_them = f"{self._help} lists the flags"
                of = [other.name for other in map(_Command, _COMMANDS) if spelling in other.spellings]
                whose = f": it is one of {' and '.join(of)}, not of {self.name}" if of else ""
                hint = lists_them if of else _nearest(spelling, known, lists_them)
                raise ConfigError(f"unknown flag {spelling}{whose}", hint)

    def read_flags(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values of all flags, those of the words and else the parser's defaults."""
        try:
            values: dict[str, Any] = self.parser.parse_args(list(argv)).as_dict()
        except argparse.ArgumentError as error:
            # Say in one line, with the flag's own name, what the parser says in many.
            text = str(error)
            key, value = re.search(r'Parser key "(\w+)"', text), re.findall(r"(?:Got|Given) value: (.*)", text)
            if key and value:
                self._refuse_value(key[1], value[-1], where="--")
            what = text.replace("unrecognized arguments:", "words that belong to no flag:").removeprefix("argument ")
            hint = f"{self._help} lists the flags; each takes one value, quoted if it has spaces"
            raise ConfigError(what, hint) from None
        return values

    def read_file(self, path: Path, own_model: bool = False, hint: str = "") -> dict[str, Any]:
        """The values of a YAML file, each of its field's type. What was translated from acorn's keys is printed.

        `hint` is the remedy for a file that is spoilt.

        Raises:
            ConfigError: If the file cannot be read, is empty or no mapping, or a key or value is not possible.
        """
        values: dict[str, Any] = {}
        keys = self._converted(path, _load_mapping(path, hint), own_model)
        if unknown := [str(key) for key in keys if key not in self.fields]:
            self._refuse_unknown_keys(path, unknown)
        for key, value in keys.items():
            if key == "model" and ":" in str(value):
                what = f"{path}: model is {value!r}: a file is data and never names code"
                raise ConfigError(what, f"give it as a flag: --model {value}")
            # The parser takes a missing value for any type.
            if value is None and NoneType not in get_args(self.fields[key]):
                what = f"{path}: {key} is null; expected {_expected(self.fields[key])}"
                raise ConfigError(what, "omit it to have the default")
            try:
                values[key] = self.parser.parse_object({key: value}, defaults=False)[key]
            except argparse.ArgumentError:
                self._refuse_value(key, value, where=f"{path}: ")
        return values

    def read_run(self, run: Path, own_model: bool = False) -> dict[str, Any]:
        """The values that a run began with."""
        return self.read_file(_settings_of_run(run), own_model, _COPY_BACK)

    def _refuse_unknown_keys(self, path: Path, unknown: Sequence[str]) -> NoReturn:
        lists_them = f"{self._help} lists those of {self.name}"
        for other in map(_Command, _COMMANDS):
            if other.fields.keys() >= set(unknown):
                which = f"{some_of(unknown, 3)} {'is a flag' if len(unknown) == 1 else 'are flags'}"
                raise ConfigError(f"{path}: {which} of {other.name}, not of {self.name}", lists_them)
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}", _nearest(unknown[0], self.fields, lists_them))

    def _converted(self, path: Path, keys: Mapping[str, Any], own_model: bool) -> Mapping[str, Any]:
        """The keys of a file in our own; a file with acorn's is converted, and the result printed."""
        everything = [name for command in _COMMANDS for name in _Command(command).fields]
        try:
            conversion = converted(keys, self.name, self.fields, everything, own_model)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.what}", error.hint) from error
        if conversion is None:
            return keys
        text, said = conversion
        if started_as_root():
            print(f"{path}: from acorn's keys, in our own:\n" + textwrap.indent(text, "  "), end="")
            print(*(f"{path}: {line}" for line in said), sep="\n", flush=True)
        values: Mapping[str, Any] = loaded_yaml(text)  # what was printed is what is read
        return values

    def _refuse_value(self, key: str, value: Any, where: str) -> NoReturn:
        """Refuse a value of the wrong type, given by a flag (`where` is `--`) or in a file (`where` names it)."""
        name, hint = flag(key) if where == "--" else f"{where}{key}", self.fields[key]
        if key == "target" and where != "--":
            raise ConfigError(f"{name} is not text", "quote it: target: 'pt: [1, .inf]'")
        advice = _nearest(str(value), map(str, _choices(hint)), f"{self._help} explains it")
        raise ConfigError(f"{name} is {value!r}; expected {_expected(hint)}", advice)


def _flags(name: str, hint: Any) -> list[str]:
    """The spellings of one field's flag: one, or for a switch on and off."""
    if hint is not bool:
        return [flag(name)]
    return [flag(name), "--separate-weights" if name == "shared_weights" else f"--no{flag(name)[1:]}"]


def _reading(name: str, hint: Any, description: str) -> dict[str, Any]:
    """How the parser reads one field: a pair of switches, or a value of the field's type."""
    from jsonargparse import ActionYesNo

    if hint is bool:
        on, off = ("shared-", "separate-") if name == "shared_weights" else ("", "no-")
        return {"action": ActionYesNo(yes_prefix=on, no_prefix=off)}
    if get_origin(hint) is Literal:
        return {"type": hint}
    if words := _words(hint):
        return {"type": hint, "nargs": "?", "const": True, "metavar": "|".join(words)}
    if choices := _choices(hint):
        return {"type": hint, "metavar": "{" + ",".join(choices) + "}"}
    is_file = description.startswith("File")
    if {int, str} <= set(get_args(hint)):  # a number of them, or a grid
        return {"type": _number_or_text, "metavar": "N|NxN"}
    text = "FILE" if is_file else "DIR" if name in _DIRECTORIES else name.split("_")[-1].upper()
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(_plain(hint), text)}


def _number_or_text(given: Any) -> int | str | None:
    """A number of things, or a grid of them as it is typed: to YAML, 0x2 is a number."""
    return int(given) if isinstance(given, str) and given.isdecimal() else given


class _Help(argparse.RawDescriptionHelpFormatter):
    """Short lines: the flag, what it does, and its default where that says something."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=34, width=118, **kwargs)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default is None or action.default is False or action.default == argparse.SUPPRESS:
            return text
        value = f"{action.default:g}" if isinstance(action.default, float) else action.default
        return f"{text} (default: {value})"


_COPY_BACK = "copy it back, or name another run; run.json has the command of its last start, argv"


def _settings_of_run(run: Path) -> Path:
    """The file that says what a run was asked to do.

    Raises:
        ConfigError: If there is no run, or it has lost this file.
    """
    path = run / "config.yaml"
    if not path.is_file() and (run / "run.json").is_file():
        raise ConfigError(f"{run} holds a run without its {path.name}", _COPY_BACK)
    if not path.is_file():
        raise ConfigError(f"{run} holds no run to resume", "name the directory of a run, or drop --resume to start one")
    return path


def _load_mapping(path: Path, hint: str = "") -> Mapping[Any, Any]:
    try:
        loaded = loaded_yaml(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.what}", hint or error.hint) from error
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}", "give the path of a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # The mark is where the reader gave up; a file that is not text has none.
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or "not text in UTF-8"
        raise ConfigError(f"{path}{place}: not YAML: {what}", hint or "write one 'key: value' on a line") from error
    if loaded is None:
        raise ConfigError(f"config is empty: {path}", hint or "write one 'key: value' on a line, or omit --config")
    if not isinstance(loaded, dict):
        what = f"{path} holds a {type(loaded).__name__}, not keys with values"
        raise ConfigError(what, hint or "write one 'key: value' on a line", file=path)
    return loaded


def _expected(hint: Any) -> str:
    if choices := _choices(hint):
        return "one of " + ", ".join(choices)
    if words := _words(hint):
        return "true or false, or " + ", ".join(words)
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(_plain(hint), "text")


def _plain(hint: Any) -> Any:
    """The type of a value that is given: int of `int | None`."""
    parts = [] if get_origin(hint) is Literal else [part for part in get_args(hint) if part is not NoneType]
    return parts[0] if parts else hint


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values to choose from, of a `Literal` or an optional one; none for other types."""
    return get_args(_plain(hint)) if get_origin(_plain(hint)) is Literal else ()


def _words(hint: Any) -> list[str]:
    """The words that may follow a flag which may also stand alone; none for other types."""
    parts = get_args(hint) if bool in get_args(hint) else ()
    return [str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]


def _nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """A hint that names what was meant, where one is so near that it is a slip; dashes make nothing alike."""
    by_letters = {_letters(each): each for each in known}
    close = difflib.get_close_matches(_letters(word), list(by_letters), n=1, cutoff=_ALIKE)
    return f"did you mean {by_letters[close[0]]}?" if close else otherwise


def _letters(word: str) -> str:
    return word.lstrip("-").replace("_", "-")
