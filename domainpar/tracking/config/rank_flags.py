"""Ranks and what becomes of bad events: flags of every command that runs a network."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from domainpar.common import timeouts
from domainpar.tracking.config.group import Count, Group, MeansNothing, Positive, Sectors, flag, rules

GroupingName = Literal["contiguous", "metis", "random"]
"""What `partitioners.GROUPINGS` names."""

NCCL_ON_CPU = MeansNothing(
    "transport nccl", beside="device cpu", hint="it moves GPU memory: add --device cuda or drop it"
)


@dataclass(frozen=True, kw_only=True)
class RankFlags(Group):
    """Ranks and how an event is split over them"""

    mode: Literal["halo", "naive"] = "halo"
    """halo: whole events, with exactly the result of one rank. naive: independent sectors without the edges between
    them (approximate). infer uses the mode that it is given, however the run was trained."""

    sectors: Sectors | None = None
    """Number of sectors of an event in naive mode. Each is a sample of its own, whatever the number of ranks. 8: ranges
    of tiles. 8x2: wedges in phi times slices in eta."""

    grouping: GroupingName = "contiguous"
    """How tiles are gathered into parts, one for each rank. Only the speed depends on it, not the result."""

    domain_size: Count | None = None
    """Number of ranks that share one event; other groups of ranks take other events. Default: the largest divisor of
    the number of ranks, up to 8."""

    transport: Literal["auto", "mpi", "gloo", "nccl"] = "auto"
    """Library for messages between ranks. auto: NCCL on GPU, MPI under an MPI launcher, gloo under torchrun."""

    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where ranks compute. cuda: on one GPU each. auto: so if there is a GPU for each rank, else on cpu; the first
    lines say which."""

    threads: Count | None = None
    """Number of threads per rank on cpu. The result does not depend on it. Default: an equal fraction of the cores."""

    allocator: Literal["auto", "keep", "lean", "system"] = "auto"
    """What happens to freed memory. keep: it stays with its process for the next step (glibc). lean: it is given back
    at once, which takes less memory and more time: for a network of your own that recomputes. system: the C library
    decides. auto: keep."""

    @property
    def keeps_freed(self) -> bool:
        """Whether memory that is freed stays with its process."""
        return self.allocator in ("auto", "keep")

    RULES = rules(
        MeansNothing("mode naive", without="sectors", hint="say how many to cut an event into: --sectors 8"),
        MeansNothing("sectors", without="mode naive"),
        NCCL_ON_CPU,
    )


@dataclass(frozen=True, kw_only=True)
class MeetingFlags(Group):
    """How ranks meet, and how long they wait for each other"""

    ranks: Count | None = None
    """Number of ranks that is required; any other is refused. Default: as many as are started."""

    join_timeout: Positive = timeouts.JOIN
    """Seconds within which all ranks must have started."""

    timeout: Positive = timeouts.STEP
    """Seconds that a rank waits for the others after the first step (in infer: the first event), for which it waits 300
    at least. Then all ranks end, and the error names the one that did not come."""

    share_gpu: bool = False
    """Let several ranks of a machine use one GPU (with --transport mpi or gloo)."""


@dataclass(frozen=True, kw_only=True)
class BadEventFlags(Group):
    """Events that are damaged, without truth, or too small for the ranks"""

    on_bad_event: Literal["fail", "skip"] = "fail"
    """What to do with an event that cannot be read, or that has no truth to train on. fail: end the command. skip:
    leave it out, with a warning."""

    strict: bool = False
    """Refuse events in which a rank would own nothing, such as those with fewer tiles than ranks."""


def session_arguments(config: Any) -> dict[str, Any]:
    """Arguments of `World.session`, from a configuration that has the groups `RankFlags` and `MeetingFlags`."""
    # All flags must be the same on every rank but one.
    values = {flag(field.name): str(getattr(config, field.name)) for field in fields(config)}
    return {
        "transport": config.transport,
        "device": config.device,
        # Sectors are samples of their own: by default each rank takes others.
        "domain_size": 1 if config.mode == "naive" and config.domain_size is None else config.domain_size,
        "timeout": max(timeouts.FIRST_STEP, config.timeout),
        "join_seconds": config.join_timeout,
        "share_gpu": config.share_gpu,
        "num_ranks": config.ranks,
        "same": {name: value for name, value in values.items() if name != "--threads"},
    }
