"""From the words on a command line to a configuration: flags, a YAML file, help, and errors that are printed once.

Imports neither torch nor MPI, so that help and mistakes cost a fraction of a second and no rank waits for another.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from domainpar.common.problems import NotWritten, Where, as_problem, error_text, nobody_reads, problem_record
from domainpar.common.words import PROGRESS_LOG, some_of
from domainpar.parallel.launcher import started_as_root
from domainpar.tracking import config
from domainpar.tracking.config.group import (
    CODE,
    SHIPPED,
    ConfigError,
    Flag,
    Group,
    fields_of,
    flag,
    groups,
    json_schema,
    nearest,
    preset_of,
    title,
)

Config = TypeVar("Config", bound=Group)


def _commands() -> tuple[type[Group], ...]:
    """The commands whose flags a file may have; loaded when something is wrong, or acorn's."""
    return config.PrepareConfig, config.TrainConfig, config.InferConfig


_DRIVERS = Path("/dev")
_DIRECTORIES = ("store", "out", "input", "run", "beside", "naive", "scores", "png", "verify")

# How ranks are laid out on a machine: a run that is resumed may find another one.
_OF_THE_MACHINE = ("ranks", "domain_size", "transport", "device", "share_gpu", "threads", "scratch",
                   "join_timeout", "timeout")  # fmt: skip


def run_command(
    config_class: type[Config], work: Callable[[Config], int], text: str | None, argv: Sequence[str] | None = None
) -> int:
    """Read the command line and do the work: the frame of every command.

    Args:
        config_class: The flags of the command.
        work: The one call that does it; returns the exit code.
        text: The command's module docstring, which becomes its help: the purpose first, `Examples:` last.
        argv: The words after the command. Default: those of this process.

    Returns:
        The exit code: that of the work; 2 when it was refused before it began, and rank 0 has printed why; 1 after
        another expected error outside a session of ranks (`problems.as_problem`), and where nobody reads on.

    Raises:
        SystemExit: With code 0 after `--help`.
    """
    # Each line is written when it is complete, also into a pipe or a file: under a launcher Python would keep 8 KiB,
    # the lines of minutes, and a process that is killed would lose them.
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a notebook's or a test's own
        sys.stdout.reconfigure(line_buffering=True)
    try:
        chosen = parse(config_class, text or "", sys.argv[1:] if argv is None else argv)
        # Keep torch's pages of C++ frames about ranks that have gone from burying the one line that says why.
        # What NCCL has to say about a GPU stays. Torch is not imported yet: a driver's files say whether there is one.
        device = getattr(chosen, "device", "cpu")
        has_gpu = any(found for name in ("nvidia[0-9]*", "kfd", "dxg") for found in _DRIVERS.glob(name))
        on_gpu = device == "cuda" or (device == "auto" and has_gpu)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if on_gpu else "FATAL")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler tells that it begins and ends
        name = _Command(config_class).name
        with PROGRESS_LOG.heard(name) if started_as_root() else nullcontext():
            code = work(chosen)
        _flush()
        return code
    except BrokenPipeError as error:
        if not nobody_reads(error):
            raise
        with open(os.devnull, "wb") as nowhere:  # where what is still to be printed goes
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        if (problem := as_problem(error)) is None:
            raise
        refused = isinstance(error, ConfigError)  # by all ranks alike
        if started_as_root() or not refused:
            sys.stderr.write(error_text(problem.what, Where(event=problem.event, file=problem.file), problem.hint))
            sys.stderr.flush()
        return 2 if refused else 1


@contextmanager
def refuse_like_flags(command: str) -> Iterator[None]:
    """Around the work of a command that writes one file: what will not do is refused, as flags are."""
    try:
        yield
    except NotWritten:
        raise
    except ValueError as error:
        about = problem_record(error)
        hint = about.pop("hint") or f"python -m domainpar.{command} --help explains the flags"
        raise ConfigError(hint=hint, **about) from error


def _flush() -> None:
    if sys.stdout is not None:  # it may have been closed
        sys.stdout.flush()


def parse(config_class: type[Config], text: str, argv: Sequence[str]) -> Config:
    """Read flags, and below them the YAML file that `--config` names: a flag wins over the file, wherever it stands.

    Below both lie, the last one on top, the flags that `--preset` sets, those of the network of `--init`, and, with
    `--resume`, the run's own `config.yaml`: a run goes on as it began, but for flags that are given.

    Raises:
        ConfigError: If a flag, a key or a value is unknown or impossible, or there is no run to resume.
        SystemExit: With code 0 after `--help` or `--schema`, which only the first rank prints.
    """
    command = _Command(config_class)
    if "--schema" in argv:
        if started_as_root():
            texts = {name: it for group in groups(config_class) for name, it in _docstrings(group).items()}
            print(json.dumps(json_schema(config_class, texts), indent=1))
        raise SystemExit(0)
    if "-h" in argv or "--help" in argv:
        if started_as_root():
            purpose, _, examples = text.partition("Examples:")
            epilog = "Examples:" + examples.rstrip() if examples else None
            command.parser(_docstrings, description=purpose.strip(), epilog=epilog).print_help()
            _flush()
        raise SystemExit(0)
    path, given = command.read_words(argv)
    chosen = ({} if path is None else command.read_file(Path(path), "model" in given)) | given
    return config_class(**_beneath(command, chosen) | chosen)


def _beneath(command: _Command, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The values that hold where neither the file nor a flag says otherwise, by the values that these give."""
    for name, value in chosen.items():  # a directory would be made under the name of a network that is shipped
        may_be_shipped = name in ("run", "then", "beside", "init", "module_map")
        if not may_be_shipped and isinstance(value, str) and value.startswith(SHIPPED):
            what = f"{flag(name)} is {value!r}: a network that is shipped, and no directory"
            copy = f"runs/{value.replace(':', '-')}"
            raise ConfigError(what, f"name a directory; infer, report and export keep a copy as {copy}")
    values: dict[str, Any] = {}
    presets, run = command.config_class.PRESETS, chosen.get("then") or chosen.get("run") or ""
    of_run = preset_of(run) if run.startswith(SHIPPED) else None
    preset = chosen.get("preset", of_run)  # null is none, also of a network that is shipped
    if preset in presets:
        values = {"preset": preset} | presets[preset]
    if chosen.get("init") is not None:
        from domainpar.tracking.training.pretrained import source

        network = config_of_run(source(chosen["init"]))
        values |= {name: getattr(network, name) for name in config.NetworkFlags.__annotations__}
    if chosen.get("resume") and chosen.get("out") is not None and not chosen.get("overwrite"):
        from domainpar.runs.directory import can_go_on

        run = Path(chosen["out"])
        if chosen["resume"] != "auto" or can_go_on(run):
            own = command.read_run(run)
            # This may be another machine, and the store is found by `run.json`, which knows what has to be in it.
            values |= {name: value for name, value in own.items() if name not in (*_OF_THE_MACHINE, "store")}
    return values


def config_of_run(run: Path, model: str | None = None) -> config.TrainedFlags:
    """What its network depends on of the configuration of a run; `model` names a network of the user's own.

    Raises:
        ConfigError: If there is no run, or its file cannot be read.
    """
    kind = config.TrainedFlags
    values = _Command(config.TrainConfig).read_run(run, model is not None)
    own = {} if model is None else {"model": model}
    return kind(**{name: value for name, value in values.items() if name in fields_of(kind)} | own)


def _arguments(field: Flag, text: str, default: Any) -> dict[str, Any]:
    """How argparse reads a field, and what it shows of it: `text` explains it, `default` is the value without it."""
    if default is not None and default is not False:
        text = f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"
    if field.is_switch:
        return {"help": text, "action": argparse.BooleanOptionalAction}
    words = ",".join(field.choices)
    if bool in field.kinds:
        return {"help": text, "metavar": words, "nargs": "?", "const": True}
    if int in field.kinds:
        metavar = "N|NxN" if str in field.kinds else "N"
    elif field.choices:
        metavar = "{" + words + "}"
    elif float in field.kinds:
        metavar = "X"
    elif text.startswith("File"):
        metavar = "FILE"
    else:
        metavar = "DIR" if field.name in _DIRECTORIES else field.name.split("_")[-1].upper()
    return {"help": text, "metavar": metavar}


class _Command:
    """The flags of one command: how they are listed, and read from words and from files.

    Args:
        config_class: The flags of the command.

    Attributes:
        flags: Each field as a flag, by name.
        spellings: What may be typed.
    """

    def __init__(self, config_class: type[Group]) -> None:
        self.config_class = config_class
        self.name = re.sub(r"(?<!^)(?=[A-Z])", "_", config_class.__name__.removesuffix("Config")).lower()
        self._help = f"python -m domainpar.{self.name} --help"
        self.flags = fields_of(config_class)
        self.spellings = ["--config", *(word for each in self.flags.values() for word in each.spellings)]

    def parser(self, texts: Callable[[type[Group]], Mapping[str, str]], **about: Any) -> argparse.ArgumentParser:
        """The parser of all flags: of their words as they are typed, and of none for a flag that is not given.

        `texts` explain the fields of a group; `about` are the texts above and below.
        """
        parser = argparse.ArgumentParser(
            usage=f"python -m domainpar.{self.name} [flags]",
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=118),
            argument_default=argparse.SUPPRESS,
            add_help=bool(about),
            allow_abbrev=False,
            exit_on_error=False,
            **about,
        )
        parser.add_argument("--config", metavar="FILE", help="YAML file of flags; a flag given here wins.")
        if about:
            parser.add_argument("--schema", action="store_true", help="Print a JSON schema of such files, for editors.")
        for group in groups(self.config_class):
            heading, described = parser.add_argument_group(title(group)), texts(group)
            for name in group.__annotations__:
                own, default = self.flags[name], getattr(self.config_class, name)
                heading.add_argument(flag(name), **_arguments(own, described.get(name, ""), default))
        return parser

    def read_words(self, argv: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
        """The file that `--config` names, and the values of the flags that are given.

        Raises:
            ConfigError: If a flag is unknown, lacks its value or has one of another type, or a word belongs to none.
        """
        if "--" in argv:  # after which the parser would take flags for other words
            self._refuse_words("words that belong to no flag: --")
        try:
            # The texts are left out: they take longer to find than all else.
            found, others = self.parser(lambda group: {}).parse_known_args(_joined(argv))
        except argparse.ArgumentError as error:
            self._refuse_words(f"{error.argument_name}: {error.message}")
        if unknown := [word.split("=")[0] for word in others if re.match(r"-+[a-zA-Z]", word)]:
            self._refuse_unknown(unknown[:1], lambda command: command.spellings, "unknown flag")
        words = vars(found)
        path = words.pop("config", None)
        for name in self.config_class.WORDS:
            if others and name not in words and not others[0].startswith("-"):
                words[name] = others.pop(0)
        if others:
            self._refuse_words(f"words that belong to no flag: {' '.join(others)}")
        return path, {name: self.flags[name].read(word) for name, word in words.items()}

    def _refuse_words(self, what: str) -> NoReturn:
        raise ConfigError(what, f"{self._help} lists the flags; each takes one value, quoted if it has spaces")

    def _refuse_unknown(
        self, words: Sequence[str], known: Callable[[_Command], Iterable[str]], unknown: str, where: str = ""
    ) -> NoReturn:
        """Refuse flags, or keys of a file, of which one at least is none; `known` lists those of a command."""
        lists_them = f"{self._help} lists those of {self.name}"
        others = (_Command(command) for command in _commands() if command is not self.config_class)
        of = [other.name for other in others if set(words) <= set(known(other))]
        if of:
            which = f"{some_of(words, 3)} {'is a flag' if len(words) == 1 else 'are flags'}"
            raise ConfigError(f"{where}{which} of {' and '.join(of)}, not of {self.name}", lists_them)
        raise ConfigError(f"{where}{unknown} {words[0]}", nearest(words[0], known(self), lists_them))

    def read_file(
        self, path: Path, own_model: bool = False, hint: str = "", left: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The values of a YAML file, each of its field's type. What was translated from acorn's keys is printed.

        `hint` is the remedy for a file that is spoilt; keys, or keys with a value, that are `left` are passed over.

        Raises:
            ConfigError: If the file cannot be read, is empty or no mapping, or a key or value is not possible.
        """
        import yaml  # takes as long as all flags of a command, and only a file needs it

        from domainpar.tracking.config.acorn_keys import converted
        from domainpar.tracking.config.yaml_text import loaded_yaml

        one_line = hint or "write one 'key: value' on a line"
        try:
            loaded = loaded_yaml(path.read_text(encoding="utf-8"))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.what}", hint or error.hint) from error
        except OSError as error:
            what = f"cannot read --config {path}: {error.strerror}"
            raise ConfigError(what, "give the path of a YAML file") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            # The mark is where the reader gave up; a file that is not text has none.
            mark = getattr(error, "problem_mark", None)
            place = f" line {mark.line + 1}" if mark else ""
            what = getattr(error, "problem", None) or "not text in UTF-8"
            raise ConfigError(f"{path}{place}: not YAML: {what}", one_line) from error
        if loaded is None:
            raise ConfigError(f"config is empty: {path}", hint or f"{one_line}, or omit --config")
        if not isinstance(loaded, dict):
            what = f"{path} holds a {type(loaded).__name__}, not keys with values"
            raise ConfigError(what, one_line, file=path)
        keys = {key: value for key, value in loaded.items() if key not in left and f"{key}: {value}" not in left}
        everything = [name for command in _commands() for name in _Command(command).flags]
        try:
            conversion = converted(keys, self.name, self.flags, everything, own_model)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.what}", error.hint) from error
        if conversion is not None:
            text, notes = conversion
            if started_as_root():
                print(f"{path}: from acorn's keys, in our own:\n" + textwrap.indent(text, "  "), end="")
                print(*(f"{path}: {line}" for line in notes), sep="\n", flush=True)
            keys = loaded_yaml(text)  # what was printed is what is read
        if unknown := [str(key) for key in keys if key not in self.flags]:
            self._refuse_unknown(unknown, lambda command: command.flags, "unknown key", f"{path}: ")
        if code := [name for name in CODE if ":" in str(keys.get(name))]:
            what = f"{path}: {code[0]} is {keys[code[0]]!r}: a file is data and never names code"
            raise ConfigError(what, f"give it as a flag: {flag(code[0])} {keys[code[0]]}")
        return {key: self.flags[key].read(value, f"{path}: {key}") for key, value in keys.items()}

    def read_run(self, run: Path, own_model: bool = False) -> dict[str, Any]:
        """The values that a run began with.

        Raises:
            ConfigError: If there is no run, its file cannot be read, or does not say which formulas its network has.
        """
        path = run / "config.yaml"
        if not path.is_file() and (run / "run.json").is_file():
            raise ConfigError(f"{run} holds a run without its {path.name}", _COPY_BACK)
        if not path.is_file():
            hint = "name the directory of a run, or drop --resume to start one"
            raise ConfigError(f"{run} holds no run to resume", hint)
        values = self.read_file(path, own_model, _COPY_BACK, _LEFT)
        if lacks := [name for name in _FORMULAS if name in self.flags and name not in values]:
            raise ConfigError(f"{path} does not say {lacks[0]} of the network", _COPY_BACK)
        return values


def completion(shell: str, commands: Mapping[str, tuple[type[Group], str]]) -> str:
    """The completion of the program `domainpar` in a shell: its commands, their flags, words and files.

    Args:
        shell: `bash`, `zsh`, `fish`, `tcsh` or `powershell`.
        commands: The flags of each command, and its purpose.
    """
    import shtab

    if shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(f"there is no completion for {shell!r}", f"name one of {', '.join(shtab.SUPPORTED_SHELLS)}")
    program = argparse.ArgumentParser("domainpar", add_help=False)
    parsers = program.add_subparsers()
    for name, (config_class, purpose) in commands.items():
        parser = parsers.add_parser(name, help=purpose, add_help=False)
        parser.add_argument("--config").complete = shtab.FILE  # type: ignore[attr-defined]
        for field in fields_of(config_class).values():
            words = _arguments(field, "", None) | ({"choices": field.choices} if field.choices else {})
            action = parser.add_argument(flag(field.name), **words)
            if words.get("metavar") in ("DIR", "FILE"):
                action.complete = shtab.DIRECTORY if words["metavar"] == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(program, shell))


def _joined(argv: Sequence[str]) -> list[str]:
    """Words, those that begin with - and a digit joined to their flag: argparse takes -1e-3 and -4,55 for flags."""
    words: list[str] = []
    for word in argv:
        if re.match(r"-\.?\d", word) and words and re.match("--[^=]+$", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _docstrings(group: type[Group]) -> dict[str, str]:
    """The docstring under each field of a group."""
    (made,) = ast.parse(inspect.getsource(group)).body
    assert isinstance(made, ast.ClassDef)
    written = {
        field.target.id: str(text.value.value)
        for field, text in pairwise(made.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    return written | dict(group.HELP)


_FORMULAS = ("residual", "aggregate", "standardise")
"""Flags that change what a network computes and none of its weights: a default would be taken for them in silence."""

_LEFT = (
    "watts", "dollars_per_hour", "offload", "log: wandb", "log: mlflow", "first_timeout", "betas: 0.9,0.999",
    "momentum: 0.9", "event_size: None", "lr_factors: None", "false_weight: 1.0", "other_weight: 0.0",
)  # fmt: skip
"""What runs of earlier versions name, and what decides nothing of their results."""

_COPY_BACK = "copy it back, or name another run; run.json has the command of its last start, argv"
