"""Ranks and how an event is split over them: asked of every command that runs a network."""

from dataclasses import dataclass
from typing import Literal

from domainpar.config.errors import ConfigError
from domainpar.config.group import Group


@dataclass(frozen=True, kw_only=True)
class Ranks(Group):
    """Ranks and how an event is split over them"""

    mode: Literal["halo", "naive"] = "halo"
    """halo: the answer of one rank, exactly. naive: independent sectors, cut edges dropped (approximate). infer scores
    as it is told here, however the run was trained."""

    sectors: int | None = None
    """Sectors of an event in naive mode, each a sample of its own; independent of the number of ranks."""

    grouping: Literal["contiguous", "metis", "random"] = "contiguous"
    """How tiles are gathered into parts. The answer does not depend on it, only the speed."""

    domain_size: int | None = None
    """Ranks that share one event; the others take other events. Default: the largest divisor of all, up to 8."""

    transport: Literal["auto", "mpi", "gloo", "nccl"] = "auto"
    """What carries rows between ranks. auto: NCCL on GPU, MPI under an MPI launcher, gloo under torchrun."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where a rank computes. cuda: one GPU for each rank of a machine."""

    threads: int | None = None
    """Threads of a rank on cpu. The answer does not depend on it. Default: an equal share of the cores."""

    allocator: Literal["keep", "system"] = "keep"
    """keep: memory that is freed stays with its process for the next step (glibc). system: as the C library does."""

    def check(self) -> None:
        """Refuse what the ranks cannot do."""
        self._bounded("sectors", "domain_size", "threads", least=1)
        if self.mode == "naive" and self.sectors is None:
            raise ConfigError("--mode naive needs --sectors", "say how many sectors to cut an event into: --sectors 8")
        if self.mode == "halo" and self.sectors is not None:
            raise ConfigError(f"--sectors {self.sectors} means nothing with --mode halo", "add --mode naive or drop it")
        if self.transport == "nccl" and self.device == "cpu":
            raise ConfigError("--transport nccl moves GPU memory, but --device is cpu", "add --device cuda or drop it")
