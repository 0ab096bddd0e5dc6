"""The flags of `estimate`."""

from dataclasses import dataclass

from domainpar.tracking.config.group import Bounded, Group, rules
from domainpar.tracking.config.ranks import GroupingName
from domainpar.tracking.config.train import LearningFlags, NetworkFlags


@dataclass(frozen=True, kw_only=True)
class QuestionFlags(Group):
    """Events and output"""

    store: str | None = None
    """Store of the events. Default: built-in simulated events, as for train."""

    most_ranks: int = 64
    """Largest number of ranks to predict; this machine's cores are the limit, too."""

    grouping: GroupingName = "contiguous"
    """How tiles are gathered into parts, one for each rank, as for train."""

    seed: int = 0
    """Seed of the order of events."""

    json: str | None = None
    """File for all predictions, as JSON."""

    RULES = rules(
        Bounded("most_ranks", least=1),
        Bounded("seed", below=2**63),
    )


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(QuestionFlags, NetworkFlags, LearningFlags):
    """All flags of `estimate`."""
