"""How ranks meet and how long they wait for each other: asked of every command that starts a network on ranks."""

from dataclasses import dataclass, fields
from typing import Any

from domainpar import timeouts
from domainpar.config.group import Group, flag

_MAY_DIFFER = ("threads",)
"""What need not be the same on every rank."""


@dataclass(frozen=True, kw_only=True)
class Launch(Group):
    """How ranks meet, and how long they wait for each other"""

    ranks: int | None = None
    """How many ranks there must be; any other number is refused. Default: as many as are started."""

    join_timeout: float = timeouts.JOIN
    """Seconds in which all ranks must have come."""

    first_timeout: float = timeouts.FIRST_STEP
    """Seconds a rank waits for the others up to the end of the first step (in infer: event)."""

    timeout: float = timeouts.STEP
    """Seconds a rank waits for the others after that; then all end, and the one that did not come is named."""

    share_gpu: bool = False
    """Let several ranks of a machine use one GPU (with --transport mpi or gloo)."""

    def check(self) -> None:
        """Refuse times and numbers that are none."""
        self._bounded("ranks", least=1)
        self._above_zero("join_timeout")
        self._above_zero("first_timeout")
        self._above_zero("timeout")


def session_arguments(config: Any) -> dict[str, Any]:
    """What `World.session` takes of a configuration that has the groups `Ranks` and `Launch`."""
    given = {flag(field.name): str(getattr(config, field.name)) for field in fields(config)}
    return {
        "transport": config.transport,
        "device": config.device,
        # Sectors are samples of their own: unless told otherwise, each rank takes others.
        "domain_size": 1 if config.mode == "naive" and config.domain_size is None else config.domain_size,
        "timeout": config.first_timeout,
        "join_seconds": config.join_timeout,
        "share_gpu": config.share_gpu,
        "num_ranks": config.ranks,
        "same": {name: value for name, value in given.items() if name[2:] not in _MAY_DIFFER},
    }
