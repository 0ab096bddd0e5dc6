"""The flags of `doctor`."""

from dataclasses import dataclass
from typing import Literal

from domainpar.tracking.config.group import Bounded, Group, MeansNothing, rules
from domainpar.tracking.config.ranks import NCCL_ON_CPU


@dataclass(frozen=True, kw_only=True)
class CheckFlags(Group):
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

    RULES = rules(Bounded("seconds", positive=True), NCCL_ON_CPU)


@dataclass(frozen=True, kw_only=True)
class CertificateFlags(Group):
    """Abilities of this machine and this launcher, in one file to send back"""

    certify: bool = False
    """Besides: same bits on any layout of these ranks, transports, scaling, memory."""

    out: str | None = None
    """File of the certificate. Default: certificate.json."""

    minutes: float = 5.0
    """Time for the certificate, about: what no longer fits is left out and said to be."""

    anonymous: bool = False
    """Leave names of hosts, users and directories out of it."""

    RULES = rules(
        Bounded("minutes", positive=True),
        MeansNothing("out", without="certify", hint="add it, or name a file for the table: --json FILE"),
    )


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(CheckFlags, CertificateFlags):
    """All flags of `doctor`."""
