"""The flags of `doctor`."""

from dataclasses import dataclass
from typing import Literal

from domainpar.tracking.config.group import Group, Positive, rules
from domainpar.tracking.config.rank_flags import NCCL_ON_CPU


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Group):
    """What to look at"""

    verify: str | None = None
    """A store: hash every event against the manifest and read all its arrays, shared among the ranks."""

    run: str | None = None
    """A training run, or pretrained:NAME: check every checkpoint against its hashes."""

    transport: Literal["auto", "mpi", "gloo", "nccl"] = "auto"
    """Transport between the ranks. Others that work between the same ranks are measured, too."""

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where ranks compute. On cpu by default, so that the command can report what is wrong with GPUs. NCCL and GPUs are
    checked in any case if each rank has a GPU of its own."""

    seconds: Positive = 2.0
    """Approximate time of the measurement of one transport."""

    json: str | None = None
    """File for the same as JSON."""

    RULES = rules(NCCL_ON_CPU)
