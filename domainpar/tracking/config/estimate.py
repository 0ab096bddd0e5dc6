"""The flags of `estimate`."""

from dataclasses import dataclass
from typing import get_args

from domainpar.tracking.config.group import Bounded, ConfigError, Group, rules
from domainpar.tracking.config.ranks import GroupingName
from domainpar.tracking.config.texts import NameList
from domainpar.tracking.config.train import LearningFlags, NetworkFlags


@dataclass(frozen=True, kw_only=True)
class QuestionFlags(Group):
    """Events and output"""

    store: str | None = None
    """Store of the events. Default: built-in simulated events, as for train."""

    most_ranks: int = 64
    """Largest number of ranks to predict; this machine's cores are the limit, too."""

    groupings: NameList = NameList("contiguous, metis")
    """Ways to gather tiles into parts, to compare."""

    seed: int = 0
    """Seed of the order of events."""

    json: str | None = None
    """File for all predictions, as JSON."""

    png: str | None = None
    """File for a picture of time and memory against the number of ranks."""

    RULES = rules(
        Bounded("most_ranks", least=1),
        Bounded("seed", below=2**63),
    )

    def check(self) -> None:
        """Refuse groupings that are unknown."""
        known = get_args(GroupingName)
        if unknown := [name for name in self.groupings.value if name not in known]:
            raise ConfigError(f"--groupings has {unknown[0]!r}", f"choose of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(QuestionFlags, NetworkFlags, LearningFlags):
    """All flags of `estimate`."""
