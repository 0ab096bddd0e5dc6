"""The flags of `estimate`."""

from dataclasses import dataclass
from typing import get_args

from domainpar.tracking.config.group import Bounded, ConfigError, Group, MeansNothing, rules
from domainpar.tracking.config.prepare import PartitionerName
from domainpar.tracking.config.ranks import GroupingName
from domainpar.tracking.config.texts import NameList
from domainpar.tracking.config.train import LearningFlags, NetworkFlags

CHOICES = {"groupings": get_args(GroupingName), "partitioners": get_args(PartitionerName)}


@dataclass(frozen=True, kw_only=True)
class QuestionFlags(Group):
    """Events, machine and output"""

    store: str | None = None
    """Store of the events. Default: built-in simulated events, as for train."""

    machine: str | None = None
    """File (YAML) that describes another machine; --write-machine writes one to edit. Default: this machine."""

    nodes: int | None = None
    """Number of such machines. Default: as the description says, else 1."""

    most_ranks: int = 64
    """Largest number of ranks to predict."""

    groupings: NameList = NameList("contiguous, metis")
    """Ways to gather tiles into parts, to compare."""

    partitioners: NameList = NameList("phi-eta, metis")
    """Ways to cut events into tiles, to compare with the tiles of the store; '': none. See prepare."""

    seed: int = 0
    """Seed of the order of events."""

    write_machine: str | None = None
    """File for the description of this machine, as measured."""

    json: str | None = None
    """File for all predictions, as JSON."""

    png: str | None = None
    """File for a picture of time and memory against the number of ranks."""

    RULES = rules(
        Bounded("nodes, most_ranks", least=1),
        Bounded("seed", below=2**63),
        MeansNothing("write_machine", beside="machine", hint="it writes what was measured: keep one"),
    )

    def check(self) -> None:
        """Refuse numbers that are none, and groupings that are unknown."""
        for flag, known in CHOICES.items():
            if unknown := [name for name in getattr(self, flag).value if name not in known]:
                raise ConfigError(f"--{flag} has {unknown[0]!r}", f"choose of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(QuestionFlags, NetworkFlags, LearningFlags):
    """All flags of `estimate`."""
