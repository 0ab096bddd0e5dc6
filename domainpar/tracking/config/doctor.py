"""The flags of `doctor`."""

from dataclasses import dataclass
from typing import Literal

from domainpar.tracking.config.group import ConfigError, Group


@dataclass(frozen=True, kw_only=True)
class Looking(Group):
    """What to look at"""

    verify: str | None = None
    """A store: hash every event against the manifest and read all its arrays, shared among the ranks."""

    run: str | None = None
    """A training run, or pretrained:NAME: check every checkpoint against its hashes."""

    transport: Literal["auto", "mpi", "gloo", "nccl"] = "auto"
    """Transport between the ranks. Others that can be had between the same ranks are measured too."""

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where ranks compute: not on GPUs by themselves, as of train, since what is wrong there is to be told. NCCL and
    GPUs are looked at in any case, where each rank has a GPU of its own."""

    probe: bool = True
    """Without a launcher: start two ranks by mpiexec and two by gloo, to see that both work."""

    seconds: float = 2.0
    """Time to measure one transport in, about."""

    json: str | None = None
    """File for the same as JSON."""

    def check(self) -> None:
        """Refuse no time at all, and NCCL without a GPU."""
        self._bounded("seconds", positive=True)
        if self.transport == "nccl" and self.device == "cpu":
            raise ConfigError("--transport nccl moves GPU memory, but --device is cpu", "add --device cuda or drop it")


@dataclass(frozen=True, kw_only=True)
class Certifying(Group):
    """Abilities of this machine and this launcher, in one file to send back"""

    certify: bool = False
    """Besides: same bits on any layout of these ranks, transports, scaling, memory."""

    out: str | None = None
    """File of the certificate. Default: certificate.json."""

    minutes: float = 5.0
    """Time for the certificate, about: what no longer fits is left out and said to be."""

    anonymous: bool = False
    """Leave names of hosts, users and directories out of it."""

    def check(self) -> None:
        """Refuse no time at all, and where to write what is not asked for."""
        self._bounded("minutes", positive=True)
        if self.out is not None and not self.certify:
            raise ConfigError(
                "--out is the file of a certificate, but none is asked for",
                "add --certify, or name a file for the table: --json FILE",
            )


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Looking, Certifying):
    """All flags of `doctor`."""
