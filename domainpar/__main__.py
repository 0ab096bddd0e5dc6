"""domainpar COMMAND [flags]: the same as python -m domainpar.COMMAND [flags], alone or after a launcher."""

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "prepare": "from files of events to a store of graphs, cut into tiles",
    "train": "from a store to a run in runs/0001, ...",
    "infer": "from a run and a store to scores of every edge, and to tracks, in the order of your files",
    "evaluate": "from tracks of any finder and a store to efficiency, fake rate and duplicates",
    "report": "from a run to one HTML page, or pictures",
    "export": "from a run to an ONNX file as ACTS reads it, or to a program of torch.export",
    "import_acorn": "from a checkpoint of acorn to a run",
    "estimate": "from a store and a network to seconds and memory on each number of this machine's cores",
    "doctor": "a table of what works on this machine, with this launcher",
}
"""The commands, and what each does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that is named first; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        from domainpar import __version__

        print(f"domainpar {__version__}")
        return 0
    if words[:1] in ([], ["--help"], ["-h"]):
        print(_help())
        return 0
    if words[0] == "--completion":
        return _print_completion(words[1] if len(words) > 1 else "")
    if words[0] not in COMMANDS:
        print(
            f"domainpar: error: there is no command {words[0]!r}\nhint: {', '.join(COMMANDS)}; domainpar --help says "
            "what each does",
            file=sys.stderr,
        )
        return 2
    # Programs that this one starts, and files it writes, name the module.
    module = import_module(f"domainpar.{words[0]}")
    sys.argv = [str(module.__file__), *words[1:]]
    code: int = module.main(words[1:])
    return code


def _help() -> str:
    lines = [f"  {name:<12} {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "usage: domainpar COMMAND [flags]",
            "",
            *lines,
            "",
            "Each command explains its flags: domainpar train --help",
            "On several ranks: mpiexec -n 8 domainpar train",
            "Completion of commands and flags in bash (or zsh, fish, tcsh, powershell):",
            '  eval "$(domainpar --completion bash)"',
        ]
    )


def _print_completion(shell: str) -> int:
    from domainpar.tracking import config
    from domainpar.tracking.command_line import completion

    classes = {name: getattr(config, f"{name.title().replace('_', '')}Config") for name in COMMANDS}
    try:
        print(completion(shell, {name: (classes[name], purpose) for name, purpose in COMMANDS.items()}))
    except config.ConfigError as error:
        print(f"domainpar: error: {error.what}\nhint: {error.hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
