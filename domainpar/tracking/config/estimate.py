"""The flags of `estimate`."""

from dataclasses import dataclass

from domainpar.tracking.config.group import Count, Group, Seed
from domainpar.tracking.config.rank_flags import GroupingName
from domainpar.tracking.config.train import LearningFlags, NetworkFlags


@dataclass(frozen=True, kw_only=True)
class QuestionFlags(Group):
    """Events and output"""

    store: str | None = None
    """Store of the events. Default: built-in simulated events, as for train."""

    most_ranks: Count = 64
    """Largest number of ranks to predict; this machine's cores are the limit, too."""

    grouping: GroupingName = "contiguous"
    """How tiles are gathered into parts, one for each rank, as for train."""

    seed: Seed = 0
    """Seed of the order of events."""

    json: str | None = None
    """File for all predictions, as JSON."""


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(QuestionFlags, NetworkFlags, LearningFlags):
    """All flags of `estimate`."""
