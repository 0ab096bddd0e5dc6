"""All checks in their order, on the ranks that were started: what `python -m domainpar.doctor` does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from domainpar.common import timeouts
from domainpar.common.agreement import agree
from domainpar.common.problems import Problem, problem_record
from domainpar.diagnosis import machine_checks as machine
from domainpar.diagnosis.finding import (
    Finding,
    as_record,
    attempted,
    exit_code,
    failed,
    gathered,
    show,
    works,
    write_json,
)
from domainpar.diagnosis.launcher_checks import check_launcher, check_mpi, probe_gloo, probe_mpi
from domainpar.diagnosis.transport_checks import ADVICE, check_halo, check_rows, check_transport, check_transports
from domainpar.parallel.allocator import set_up_allocator
from domainpar.parallel.gpus import VisibleGpus, seen_by
from domainpar.parallel.launcher import Launcher, detect
from domainpar.parallel.meeting import tells
from domainpar.parallel.rank_status import guard
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.tracking.config import DoctorConfig
from domainpar.tracking.diagnosis.files import check_run, check_store
from domainpar.tracking.diagnosis.layouts import SMALL, distinct_hashes
from domainpar.tracking.diagnosis.toy import ring_event, toy_store

THREAD_RANKS = 3
TOY_TRACKS = 60


@dataclass
class Subject:
    """Everything that checks look at, as one rank sees it."""

    config: DoctorConfig  # the command line
    launcher: Launcher  # who started the ranks
    started: bool  # whether a launcher has started this process
    world: World  # the ranks
    places: Sequence[machine.RankPlace]  # where they are
    seen: Sequence[VisibleGpus]  # GPUs that each of them sees

    @property
    def local_ranks(self) -> int:
        """Ranks on this machine."""
        return machine.local_ranks(self.places, self.world.rank)

    @cached_property
    def mpi(self) -> Finding | None:
        """mpi4py and its library; None under launchers that start no MPI."""
        if self.launcher.kind != "none" and not self.launcher.has_pmi:
            return None
        return attempted("MPI", lambda: check_mpi(self.launcher))[0]

    def own_findings(self, checks: Mapping[str, Callable[[Subject], Finding | None]]) -> list[Finding]:
        """The findings of checks that a rank makes by itself; if one ends with an error, that is its finding."""
        return [finding for name, check in checks.items() for finding in attempted(name, partial(check, self))]


def _halo(subject: Subject) -> list[Finding]:
    """The halo and a network on it; on ranks that are threads where there is one process only. *Collective*."""
    if subject.world.size > 1:
        return [*check_halo(subject.world), check_split(subject.world)]

    def on_threads(world: World) -> list[Finding]:
        transport = check_transport(world.transport, subject.config.seconds)
        return gathered([transport, *check_halo(world), check_split(world)], world)

    # Time to compile in, too: where kernels cannot be kept, and the first time.
    of_threads: list[list[Finding]] = run_threads(on_threads, THREAD_RANKS, timeout=timeouts.FIRST_STEP)
    return of_threads[0]


def check_split(world: World) -> Finding:
    """Two training steps on all ranks, and on each rank alone with the whole event: one hash. *Collective*."""
    # A toy event of which every rank can own a part.
    with toy_store(ring_event(max(TOY_TRACKS, world.size)), num_ranks=world.size) as store:
        splits = distinct_hashes(SMALL, store, world, World.over(world.transport, domain_size=world.size))
        wholes = distinct_hashes(SMALL, store, world, World.alone())
    text = f"forward, backward and step on {world.size} parts: {splits[0][:12]}; whole, on one rank: {wholes[0][:12]}"
    if len({*splits, *wholes}) == 1:
        return works("split = whole", f"{text}, to the last bit", sha256=splits[0])
    if len(wholes) > 1:
        text += "; ranks alone do not agree with each other: their processors or libraries compute differently"
    return failed("split = whole", text, ADVICE, split=splits, whole=wholes)


def _files(subject: Subject) -> Iterator[Finding]:
    if subject.config.verify is not None:
        yield check_store(Path(subject.config.verify), subject.world)
    if subject.config.run is not None:
        yield check_run(subject.config.run, subject.world)


def _probes(subject: Subject) -> Iterator[Finding]:
    """Ranks that are started here; nothing where a launcher has started some."""
    if not subject.started and subject.mpi is not None:
        mpiexecs, seconds = subject.mpi.figures.get("mpiexecs", []), subject.config.seconds
        yield from attempted("MPI, 2 ranks", lambda: probe_mpi(mpiexecs, seconds))
        yield from attempted("gloo, 2 ranks", lambda: probe_gloo(seconds))


OF_THE_LAUNCHER: dict[str, Callable[[Subject], Finding | None]] = {
    "launcher": lambda subject: check_launcher(subject.launcher, subject.world.size),
    "MPI": lambda subject: subject.mpi,
}
OF_THE_MACHINE: dict[str, Callable[[Subject], Finding | None]] = {
    "versions": lambda subject: machine.check_versions(),
    "cores": lambda subject: machine.check_processor(subject.local_ranks),
    "memory": lambda subject: machine.check_memory(subject.local_ranks),
    "shared memory": lambda subject: machine.check_shared_memory(subject.local_ranks),
    "disk": lambda subject: machine.check_disk(),
    "kernel cache": lambda subject: machine.check_numba_cache(),
    "numbers": lambda subject: machine.check_numbers(),
    "GPUs": lambda subject: machine.check_gpus(subject.local_ranks, subject.seen),
}
"""Checks that each rank makes by itself, by name."""

OF_ALL_RANKS: Sequence[Callable[[Subject], Iterable[Finding]]] = (
    lambda subject: [machine.check_ranks(subject.places, subject.world.transport.name)],
    lambda subject: [machine.check_same_versions(subject.world)],
    lambda subject: check_transports(subject.world, subject.launcher, subject.seen, subject.config.seconds),
    _halo,
    lambda subject: [check_rows(subject.world)],
    _files,
    _probes,
)
"""Checks that all ranks make together, *collective*; an error of one ends all."""


def diagnose(config: DoctorConfig) -> int:
    """Look at everything, print the table on rank 0, and say whether anything failed. *Collective*.

    Returns:
        The exit code: 0 when nothing failed, 1 otherwise.

    Raises:
        SystemExit: With code 2 if a file cannot be written where it is to lie.
    """
    set_up_allocator()
    try:
        launcher = detect()
        world = World.launch(config.transport, config.device, timeout=timeouts.DOCTOR, join_seconds=timeouts.DOCTOR)
    except ValueError as refused:
        return _without_world(config, refused)
    with guard(world.rank_status):
        problem, file = None, config.json  # refused before anything takes time
        if world.is_root and file is not None and (Path(file).is_dir() or not Path(file).resolve().parent.is_dir()):
            what = f"--json {file}: no file can be written there"
            problem = Problem(what, "make its directory, or name another file")
        agree(world.transport, problem)
        places, seen = machine.places_of(world), seen_by(world.transport)
        subject = Subject(config, launcher, launcher.kind != "none", world, places, seen)
        findings = _all_findings(subject)
        if world.is_root:
            _show_and_write(config, findings)
        world.close()
    return exit_code(findings)


def _all_findings(subject: Subject) -> list[Finding]:
    """The findings of all checks; if one ends with an error, rank 0 shows those before it. *Collective*."""
    findings = gathered(subject.own_findings({**OF_THE_LAUNCHER, **OF_THE_MACHINE}), subject.world)
    # As commands that compute do, once it is seen what torch would take: more threads could change bits.
    torch.set_num_threads(1)
    try:
        for check_together in OF_ALL_RANKS:
            # Gathered one by one: a generator's next finding may need the ranks to be free again.
            for finding in check_together(subject):
                findings += gathered([finding], subject.world)
    except Exception as error:
        if subject.world.is_root:
            show([*findings, failed("doctor", f"{type(error).__name__}: {error}", "put all of this into an issue")])
        raise
    return findings


def _without_world(config: DoctorConfig, refused: ValueError) -> int:
    """The ranks cannot meet: say so, with what one process can find out alone."""
    if not tells(refused):
        time.sleep(timeouts.DOCTOR_REPORT)  # launchers end all ranks when the first is gone: that must be rank 0
        return 1
    reason = problem_record(refused)
    advice = reason["hint"] or "nothing that needs several ranks works until this is mended"
    alone = World.alone()
    # No launcher: MPI is then looked at in a process of its own, safely.
    places, seen = machine.places_of(alone), [VisibleGpus.here()]
    subject = Subject(config, Launcher("none", ""), True, alone, places, seen)
    findings = subject.own_findings({"MPI": OF_THE_LAUNCHER["MPI"], **OF_THE_MACHINE})
    _show_and_write(config, [failed("ranks", reason["what"], advice), *findings])
    return 1


def _show_and_write(config: DoctorConfig, findings: list[Finding]) -> None:
    show(findings)
    if config.json is not None:
        write_json(Path(config.json), as_record(findings) | {"argv": sys.argv[1:], "machine": machine.describe()})
