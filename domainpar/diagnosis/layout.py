"""Where the ranks are: hosts, local ranks, clocks, and whether all of them run the same software."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from domainpar.agreement import gather
from domainpar.diagnosis.machine import OPTIONAL, cores_here, cpu_model, installed, needed_versions
from domainpar.diagnosis.verdicts import Finding, failed, passed, skipped, warned
from domainpar.parallel.digests import about_this_program
from domainpar.parallel.world import World
from domainpar.words import between, several

LARGEST_CLOCK_SPREAD = 2.0


@dataclass(frozen=True)
class Place:
    """Where one rank is.

    Attributes:
        rank: The rank.
        host: Its machine.
        cpu: What the processor calls itself.
        cores: Cores that the rank may use.
        gpus: GPUs that it sees.
        clock: Seconds since 1970, read when all ranks had met.
        versions: Of packages, and of the code itself.
    """

    rank: int
    host: str
    cpu: str
    cores: int
    gpus: int
    clock: float
    versions: dict[str, str]


def places_of(world: World) -> list[Place]:
    """Where every rank is, the same list on every rank. *Collective*."""
    names = (*needed_versions(), *OPTIONAL)
    versions = {name: version for name in names if (version := installed(name))} | about_this_program()
    world.transport.barrier()
    gpus = torch.cuda.device_count()
    own = Place(world.rank, platform.node(), cpu_model(), cores_here(), gpus, time.time(), versions)
    return [Place(**place) for place in gather(world.transport, asdict(own))]


def local_ranks(places: Sequence[Place], rank: int) -> int:
    """Ranks on the machine of one of them."""
    return sum(place.host == places[rank].host for place in places)


def check_ranks(places: Sequence[Place], transport: str) -> Finding:
    """Ranks and hosts, in one line."""
    hosts = Counter(place.host for place in places)
    told = f"{several(len(places), 'rank')} on {several(len(hosts), 'host')} met by {transport}"
    if len(places) > 1:
        told += f"; {between(list(hosts.values()), 'rank')} a host"
    cpus = sorted({place.cpu for place in places})
    figures: dict[str, Any] = {"ranks": len(places), "hosts": dict(hosts), "cpus": cpus}
    if len(cpus) > 1:
        return warned("ranks", f"{told}; processors differ: {', '.join(cpus)}", "'rows' says if bits do", **figures)
    return passed("ranks", told, **figures)


def check_same_versions(places: Sequence[Place]) -> Finding:
    """Whether all ranks run the same software: else they compute different things in silence."""
    first = places[0]
    for place in places[1:]:
        for name in sorted(first.versions.keys() | place.versions.keys()):
            here, there = first.versions.get(name), place.versions.get(name)
            if here != there:
                return failed(
                    "same software",
                    f"{name} is {here or 'missing'} on rank 0 ({first.host}) and {there or 'missing'} on rank "
                    f"{place.rank} ({place.host})",
                    "start all ranks from one environment, on a file system that all hosts see",
                )
    return passed("same software", f"the same versions on {several(len(places), 'rank')}")


def check_clocks(places: Sequence[Place]) -> Finding:
    """Whether clocks of hosts agree: logs and file times of ranks are compared by them."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(places[0].clock))
    if len({place.host for place in places}) == 1:
        return passed("clock", now)
    spread = max(place.clock for place in places) - min(place.clock for place in places)
    told = f"{now}; hosts differ by at most {spread:.2f} s"
    if spread > LARGEST_CLOCK_SPREAD:
        return warned("clock", told, "set the clocks (NTP): times in logs do not compare", spread=spread)
    return passed("clock", told, spread=spread)


def alone_or(world: World, finding: Finding) -> Finding:
    """A finding about several ranks; of one rank there is nothing to say."""
    return finding if world.size > 1 else skipped(finding.check, "one rank alone")
