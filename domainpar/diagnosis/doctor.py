"""All checks in their order, on the ranks that were started: what `python -m domainpar.doctor` does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from domainpar import timeouts
from domainpar.agreement import agree
from domainpar.config import DoctorConfig
from domainpar.diagnosis import machine, ranks, selftest
from domainpar.diagnosis.certificate import certify
from domainpar.diagnosis.files import check_run, check_store
from domainpar.diagnosis.finding import Finding, as_record, attempted, exit_code, failed, gathered, show, write_json
from domainpar.diagnosis.launcher import check_launcher, check_mpi, check_open_mpi, mpiexec_for
from domainpar.diagnosis.probe import probe_gloo, probe_mpi
from domainpar.diagnosis.transport import check_transport, check_transports
from domainpar.parallel.allocator import set_up_allocator
from domainpar.parallel.launcher import Launcher, detect, started_as_root
from domainpar.parallel.meeting import NobodyServes
from domainpar.parallel.presence import guard
from domainpar.parallel.thread_ranks import run_threads
from domainpar.parallel.world import World
from domainpar.problems import Problem, told

THREAD_RANKS = 3
CERTIFICATE = "certificate.json"


@dataclass
class Subject:
    """Everything that checks look at, as one rank sees it.

    Attributes:
        config: The command line.
        launcher: Who started the ranks.
        started: Whether a launcher has started this process.
        allocator: The C library's way with freed memory, in words.
        world: The ranks.
        places: Where they are.
    """

    config: DoctorConfig
    launcher: Launcher
    started: bool
    allocator: str
    world: World
    places: Sequence[ranks.Place]

    @property
    def local_ranks(self) -> int:
        """Ranks on this machine."""
        return ranks.local_ranks(self.places, self.world.rank)

    @cached_property
    def mpi(self) -> Finding | None:
        """mpi4py and its library; None under launchers that start no MPI."""
        if self.launcher.kind != "none" and not self.launcher.has_pmi:
            return None
        return attempted("MPI", lambda: check_mpi(self.launcher))[0]


def _open_mpi(subject: Subject) -> Finding | None:
    """The flags that the library of `Subject.mpi` asks for."""
    if subject.mpi is None:
        return None
    return check_open_mpi(str(subject.mpi.figures.get("library", "")), machine.cores_here())


def _transports(subject: Subject) -> Iterable[Finding]:
    world, seconds = subject.world, subject.config.seconds
    return check_transports(world, subject.launcher, subject.local_ranks, seconds) if world.size > 1 else []


def _halo(subject: Subject) -> list[Finding]:
    """The halo and a network on it; on ranks that are threads where there is one process only. *Collective*."""
    if subject.world.size > 1:
        return [*selftest.check_halo(subject.world), selftest.check_split(subject.world)]
    of_threads: list[list[Finding]] = run_threads(
        _on_threads, THREAD_RANKS, subject.config.seconds, timeout=timeouts.DOCTOR
    )
    return of_threads[0]


def _on_threads(world: World, seconds: float) -> list[Finding]:
    findings = [check_transport(world.transport, seconds), *selftest.check_halo(world), selftest.check_split(world)]
    return gathered(findings, world)


def _files(subject: Subject) -> Iterator[Finding]:
    if subject.config.verify is not None:
        yield check_store(Path(subject.config.verify), subject.world)
    if subject.config.run is not None:
        yield check_run(Path(subject.config.run), subject.world)


def _probes(subject: Subject) -> Iterator[Finding]:
    """Ranks that are started here; nothing where a launcher has started some."""
    if not subject.started and subject.config.probe and subject.mpi is not None:
        mpiexec, seconds = mpiexec_for(subject.mpi), subject.config.seconds
        yield from attempted("MPI, 2 ranks", lambda: probe_mpi(mpiexec, seconds))
        yield from attempted("gloo, 2 ranks", lambda: probe_gloo(seconds))


OF_THE_LAUNCHER: dict[str, Callable[[Subject], Finding | None]] = {
    "launcher": lambda subject: check_launcher(subject.launcher, subject.world.size),
    "MPI": lambda subject: subject.mpi,
    "Open MPI": _open_mpi,
}
OF_THE_MACHINE: dict[str, Callable[[Subject], Finding | None]] = {
    "versions": lambda subject: machine.check_versions(),
    "cores": lambda subject: machine.check_processor(subject.local_ranks),
    "memory": lambda subject: machine.check_memory(subject.local_ranks),
    "allocator": lambda subject: machine.check_allocator(subject.allocator),
    "disk": lambda subject: machine.check_disk(),
    "kernel cache": lambda subject: machine.check_numba_cache(),
    "numbers": lambda subject: machine.check_numbers(),
    "GPUs": lambda subject: machine.check_gpus(subject.local_ranks),
    "slurm": lambda subject: machine.check_slurm(subject.started),
}
"""Checks that each rank makes by itself, by name; if one ends with an error, that is its finding."""

OF_ALL_RANKS: dict[str, Callable[[Subject], Iterable[Finding]]] = {
    "ranks": lambda subject: [ranks.check_ranks(subject.places, subject.world.transport.name)],
    "same software": lambda subject: [ranks.check_same_versions(subject.places)],
    "clock": lambda subject: [ranks.check_clocks(subject.places)],
    "transports": _transports,
    "halo": _halo,
    "rows": lambda subject: [selftest.check_rows(subject.world)],
    "files": _files,
    "probes": _probes,
}
"""Checks that all ranks make together, *collective*; an error of one ends all."""


def diagnose(config: DoctorConfig) -> int:
    """Look at everything, print the table on rank 0, and say whether anything failed. *Collective*.

    Returns:
        The exit code: 0 when nothing failed, 1 otherwise.

    Raises:
        SystemExit: With code 2 if a file cannot be written where it is asked for.
    """
    allocator = set_up_allocator()
    # With a certificate, rank 0 computes alone for a while, and the others wait for it.
    deadline = timeouts.DOCTOR + (60.0 * config.minutes if config.certify else 0.0)
    try:
        launcher = detect()
        world = World.launch(config.transport, config.device, timeout=deadline, join_seconds=timeouts.DOCTOR)
    except ValueError as refused:
        return _without_world(config, refused, allocator)
    with guard(world.presence):
        agree(world.transport, _cannot_write(config) if world.is_root else None)
        subject = Subject(config, launcher, launcher.kind != "none", allocator, world, ranks.places_of(world))
        findings = _all_findings(subject)
        if world.is_root:
            _show_and_write(config, findings)
        if config.certify:
            content, own = certify(config, launcher, world, findings)
            findings += own
            if world.is_root:
                show(own)
                path = Path(config.out or CERTIFICATE)
                write_json(path, content)
                print(f"certificate: {path} ({path.stat().st_size / 1e3:.0f} kB); attach it to an issue", flush=True)
        world.close()
    return exit_code(findings)


def _cannot_write(config: DoctorConfig) -> Problem | None:
    """Refused before anything takes time."""
    for name, file in (("--json", config.json), ("--out", config.out)):
        if file is not None and (Path(file).is_dir() or not Path(file).resolve().parent.is_dir()):
            return Problem(f"{name} {file}: no file can be written there", "make its directory, or name another file")
    return None


def _all_findings(subject: Subject) -> list[Finding]:
    """The findings of all checks; if one ends with an error, rank 0 shows those before it. *Collective*."""
    checks = {**OF_THE_LAUNCHER, **OF_THE_MACHINE}
    own = [finding for name, check in checks.items() for finding in attempted(name, partial(check, subject))]
    findings = gathered(own, subject.world)
    try:
        for check_together in OF_ALL_RANKS.values():
            for finding in check_together(subject):
                findings += gathered([finding], subject.world)
    except Exception as error:
        if subject.world.is_root:
            show([*findings, failed("doctor", f"{type(error).__name__}: {error}", "put all of this into an issue")])
        raise
    return findings


def _without_world(config: DoctorConfig, refused: ValueError, allocator: str) -> int:
    """The ranks cannot meet: say so, with what one process can find out alone."""
    if not started_as_root() and not isinstance(refused, NobodyServes):
        time.sleep(timeouts.DOCTOR_REPORT)  # launchers end all ranks when the first is gone: that must be rank 0
        return 1
    reason = told(refused)
    advice = reason["hint"] or "nothing that needs several ranks works until this is mended"
    alone = World.alone()
    # No launcher: MPI is then looked at in a process of its own, safely.
    subject = Subject(config, Launcher("none", ""), True, allocator, alone, ranks.places_of(alone))
    checks = {"MPI": OF_THE_LAUNCHER["MPI"], **OF_THE_MACHINE}
    own = [finding for name, check in checks.items() for finding in attempted(name, partial(check, subject))]
    _show_and_write(config, [failed("ranks", reason["what"], advice), *own])
    return 1


def _show_and_write(config: DoctorConfig, findings: list[Finding]) -> None:
    show(findings)
    if config.json is not None:
        write_json(Path(config.json), as_record(findings) | {"argv": sys.argv[1:], "machine": machine.describe()})
