"""Ranks and what becomes of bad events: asked of every command that runs a network."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from domainpar.common import timeouts
from domainpar.tracking.config.group import Bounded, Group, MeansNothing, flag, rules
from domainpar.tracking.config.texts import check_sectors

GroupingName = Literal["contiguous", "metis", "random"]
"""What `partitioners.GROUPINGS` names."""

NCCL_ON_CPU = MeansNothing(
    "transport nccl", beside="device cpu", hint="it moves GPU memory: add --device cuda or drop it"
)


@dataclass(frozen=True, kw_only=True)
class RankFlags(Group):
    """Ranks and how an event is split over them"""

    mode: Literal["halo", "naive"] = "halo"
    """halo: the result of one rank, exactly. naive: independent sectors, cut edges dropped (approximate). infer scores
    as it is told here, however the run was trained."""

    sectors: int | str | None = None
    """Sectors of an event in naive mode, each a sample of its own; independent of the number of ranks. 8: ranges of
    tiles. 8x2: wedges in phi times slices in eta."""

    grouping: Literal[GroupingName, "auto"] = "contiguous"
    """How tiles are gathered into parts. The result does not depend on it, only the speed. auto: as estimate predicts
    the shortest step; in train."""

    domain_size: int | Literal["auto"] | None = None
    """Ranks that share one event; the others take other events. Default: the largest divisor of all, up to 8. auto: as
    estimate predicts the shortest step; in train."""

    transport: Literal["auto", "mpi", "gloo", "nccl"] = "auto"
    """Carrier of rows between ranks. auto: NCCL on GPU, MPI under an MPI launcher, gloo under torchrun."""

    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where a rank computes. cuda: a GPU for each rank. auto: that if there are as many, else cpu; the first lines say
    which."""

    threads: int | None = None
    """Threads of a rank on cpu. The result does not depend on it. Default: an equal share of the cores."""

    allocator: Literal["auto", "keep", "lean", "system"] = "auto"
    """keep: memory that is freed stays with its process for the next step (glibc). lean: it is given back at once: less
    memory, more time. system: as the C library does. auto: lean for networks on torch's kernels with --recompute-every,
    else keep."""

    RULES = rules(
        Bounded("threads, domain_size", least=1),
        MeansNothing(
            "domain_size auto, grouping auto",
            beside="mode naive",
            hint="auto is about whole events, which naive mode cuts: say which; --domain-size 1 is usual",
        ),
        MeansNothing("mode naive", without="sectors", hint="say how many to cut an event into: --sectors 8"),
        MeansNothing("sectors", without="mode naive"),
        NCCL_ON_CPU,
    )

    def check(self) -> None:
        """Refuse what the ranks cannot do."""
        check_sectors("--sectors", self.sectors)


@dataclass(frozen=True, kw_only=True)
class MeetingFlags(Group):
    """How ranks meet, and how long they wait for each other"""

    ranks: int | None = None
    """Number of ranks there must be; any other is refused. Default: as many as are started."""

    join_timeout: float = timeouts.JOIN
    """Seconds in which all ranks must have come."""

    first_timeout: float = timeouts.FIRST_STEP
    """Seconds a rank waits for the others up to the end of the first step (in infer: event); no less than --timeout."""

    timeout: float = timeouts.STEP
    """Seconds a rank waits for the others after that; then all end, and the one that did not come is named."""

    share_gpu: bool = False
    """Let several ranks of a machine use one GPU (with --transport mpi or gloo)."""

    RULES = rules(
        Bounded("ranks", least=1),
        Bounded("join_timeout, first_timeout, timeout", positive=True),
    )


@dataclass(frozen=True, kw_only=True)
class BadEventFlags(Group):
    """Events that are damaged, without truth, or too small for the ranks"""

    on_bad_event: Literal["fail", "skip"] = "fail"
    """An event that cannot be read, or has no truth to train on. fail: the command ends. skip: it is left out, said."""

    strict: bool = False
    """Refuse events of which a rank would own nothing, such as those with fewer tiles than ranks."""


def fixed_domain_size(config: RankFlags) -> int | None:
    """Ranks that share one event, as far as they are told before the ranks have met."""
    return None if config.domain_size == "auto" else config.domain_size


def session_arguments(config: Any) -> dict[str, Any]:
    """Arguments of `World.session`, from a configuration that has the groups `RankFlags` and `MeetingFlags`."""
    # All flags must be the same on every rank but one.
    values = {flag(field.name): str(getattr(config, field.name)) for field in fields(config)}
    return {
        "transport": config.transport,
        "device": config.device,
        # Sectors are samples of their own: unless told otherwise, each rank takes others.
        "domain_size": 1 if config.mode == "naive" and config.domain_size is None else fixed_domain_size(config),
        "timeout": max(config.first_timeout, config.timeout),
        "join_seconds": config.join_timeout,
        "share_gpu": config.share_gpu,
        "num_ranks": config.ranks,
        "same": {name: value for name, value in values.items() if name != "--threads"},
    }
