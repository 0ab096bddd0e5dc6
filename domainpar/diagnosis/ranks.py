"""The places of all ranks: hosts, clocks, and whether all run the same software."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from domainpar.diagnosis.finding import Finding, failed, of_all_ranks, passed, skipped, warned
from domainpar.diagnosis.machine import OPTIONAL, cores_here, cpu_model, installed, needed_versions
from domainpar.parallel.digests import about_this_program
from domainpar.parallel.world import World
from domainpar.words import between, several

LARGEST_CLOCK_SPREAD = 2.0


@dataclass(frozen=True)
class Place:
    """The place of one rank.

    Attributes:
        rank: The rank.
        host: Its machine.
        cpu: Model of the processor.
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
    """The place of every rank, the same list on every rank. *Collective*."""
    names = (*needed_versions(), *OPTIONAL)
    versions = {name: version for name in names if (version := installed(name))} | about_this_program()
    world.transport.barrier()
    gpus = torch.cuda.device_count()
    own = Place(
        rank=world.rank,
        host=platform.node(),
        cpu=cpu_model(),
        cores=cores_here(),
        gpus=gpus,
        clock=time.time(),
        versions=versions,
    )
    return [Place(**values) for values in of_all_ranks(asdict(own), world)]


def local_ranks(places: Sequence[Place], rank: int) -> int:
    """Ranks on the machine of one of them."""
    return sum(place.host == places[rank].host for place in places)


def check_ranks(places: Sequence[Place], transport: str) -> Finding:
    """Ranks and hosts, in one line."""
    hosts = Counter(place.host for place in places)
    text = f"{several(len(places), 'rank')} on {several(len(hosts), 'host')} met by {transport}"
    if len(places) > 1:
        text += f"; {between(list(hosts.values()), 'rank')} a host"
    cpus = sorted({place.cpu for place in places})
    figures: dict[str, Any] = {"ranks": len(places), "hosts": dict(hosts), "cpus": cpus}
    if len(cpus) > 1:
        return warned("ranks", f"{text}; processors differ: {', '.join(cpus)}", "'rows' says if bits do", **figures)
    return passed("ranks", text, **figures)


def check_same_versions(places: Sequence[Place]) -> Finding:
    """Whether all ranks run the same software: else they compute different things in silence."""
    if len(places) == 1:
        return skipped("same software", "one rank alone")
    first = places[0]
    for place in places[1:]:
        for name in sorted(first.versions.keys() | place.versions.keys()):
            here, there = first.versions.get(name, "missing"), place.versions.get(name, "missing")
            if here != there:
                return failed(
                    "same software",
                    f"{name} is {here} on rank 0 ({first.host}) and {there} on rank {place.rank} ({place.host})",
                    "start all ranks from one environment, on a file system that all hosts see",
                )
    return passed("same software", f"the same versions on {several(len(places), 'rank')}")


def check_clocks(places: Sequence[Place]) -> Finding:
    """Whether clocks of hosts agree: logs and file times of ranks are compared by them."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(places[0].clock))
    if len({place.host for place in places}) == 1:
        return passed("clock", now)
    spread = max(place.clock for place in places) - min(place.clock for place in places)
    text = f"{now}; hosts differ by at most {spread:.2f} s"
    if spread > LARGEST_CLOCK_SPREAD:
        return warned("clock", text, "set the clocks (NTP): times in logs do not compare", spread=spread)
    return passed("clock", text, spread=spread)
