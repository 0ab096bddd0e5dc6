"""A machine in a few numbers: read from a description, or measured here."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from domainpar.common import limits
from domainpar.common.atomic_files import write_whole
from domainpar.common.problems import Problem

SQUARE = 768
"""Rows and columns of the product that measures a core: 7 MB, as the tiles of a wide network."""


@dataclass(frozen=True)
class Machine:
    """One kind of machine, and how many there are.

    Attributes:
        name: In words.
        nodes: Machines.
        ranks: Ranks of a machine: its cores.
        operations: Floating-point operations a second of one rank, two for each product of a matrix product.
        busy: How much longer a step takes while all ranks of a machine compute.
        memory: Bytes of a machine.
        latency: Seconds of a message inside a machine.
        rate: Bytes a second of messages inside a machine.
        latency_between: The same between machines.
        rate_between: The same between machines.
    """

    name: str
    ranks: int
    operations: float
    memory: float
    latency: float
    rate: float
    nodes: int = 1
    busy: float = 1.0
    latency_between: float | None = None
    rate_between: float | None = None

    def link(self, ranks: int) -> tuple[float, float]:
        """Latency in seconds and bytes a second of the slowest messages of so many ranks."""
        if ranks <= self.ranks:
            return self.latency, self.rate
        return self.latency_between or self.latency, self.rate_between or self.rate

    def numbers_of_ranks(self, most: int) -> list[int]:
        """Ranks to look at: those that fit one machine, and whole machines."""
        inside = [
            ranks for ranks in range(1, self.ranks + 1) if ranks <= 4 or self.ranks % ranks == 0 or ranks % 4 == 0
        ]
        return [ranks for ranks in [*inside, *(n * self.ranks for n in range(2, self.nodes + 1))] if ranks <= most]

    def write(self, path: Path) -> None:
        """Write it as YAML."""
        lines = [f"# {line.strip()}" for line in (Machine.__doc__ or "").partition("Attributes:")[2].split("\n")]
        numbers = yaml.safe_dump(asdict(self), sort_keys=False)
        text = "\n".join(line.rstrip() for line in lines if line != "# ") + "\n" + numbers
        write_whole(path, text.encode())

    @classmethod
    def read(cls, path: Path) -> Machine:
        """Read a description.

        Raises:
            Problem: Naming the file: if it is no mapping, a key is unknown or missing, or a value is no such number.
        """
        try:
            values = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            what = f"--machine {path} cannot be read: {error}"
            raise Problem(what, "--write-machine FILE writes one", file=path) from error
        if not isinstance(values, Mapping):
            raise Problem(f"--machine {path} holds no keys with values", "--write-machine FILE writes one", file=path)
        known = {field.name: field for field in fields(cls)}
        needed = {name for name, field in known.items() if field.default is field.default_factory}
        if unknown := sorted(set(map(str, values)) - set(known)):
            raise Problem(f"--machine {path}: unknown key {unknown[0]}", f"known are {', '.join(known)}")
        if missing := sorted(needed - set(values)):
            raise Problem(f"--machine {path}: {', '.join(missing)} missing", "--write-machine FILE writes all of them")
        return cls(**{name: _checked(path, name, known[name].type, value) for name, value in values.items()})


def _checked(path: Path, name: str, kind: Any, value: Any) -> Any:
    """A value of a description as its field has it: YAML takes 1e9 for a text."""
    if kind == "str":
        return str(value)
    if value is None and "None" in str(kind):
        return None
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    whole = str(kind) == "int"
    zero_is_fine = name in ("latency", "latency_between")
    if not (0 < number < float("inf") or (zero_is_fine and number == 0)) or (whole and number != int(number)):
        what = "a whole number of at least 1" if whole else "a finite number above 0"
        raise Problem(f"--machine {path}: {name} is {value!r}, not {what}", "units are seconds, bytes and operations")
    return int(number) if whole else number


def this_machine(**measured: float) -> Machine:
    """This machine, measured in a second; `measured` are figures that take several ranks."""
    return Machine(
        name=platform.node(),
        ranks=len(limits.cores_here()),
        operations=operations_of_core(),
        memory=float(min(psutil.virtual_memory().total, limits.memory().limit)),
        **{"latency": 1e-6, "rate": 5e9, **measured},  # type: ignore[arg-type]
    )


def operations_of_core() -> float:
    """Operations a second of a product of matrices in float32, on one thread: the best of some."""
    left, right = torch.ones(SQUARE, SQUARE), torch.ones(SQUARE, SQUARE)
    return 2 * SQUARE**3 / _fastest(lambda: torch.mm(left, right))


def _fastest(call: Any, times: int = 8) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
