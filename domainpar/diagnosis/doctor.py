"""All checks in their order, on the ranks that were started: what `python -m domainpar.doctor` does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from domainpar import timeouts
from domainpar.agreement import agree
from domainpar.config import DoctorConfig
from domainpar.diagnosis import beside, layout, machine, selftests
from domainpar.diagnosis.files import check_run, check_store
from domainpar.diagnosis.launchers import check_launcher, check_mpi, check_open_mpi, mpiexec_for
from domainpar.diagnosis.probing import probe_gloo, probe_mpi
from domainpar.diagnosis.table import as_record, show, write_json
from domainpar.diagnosis.transports import check_transport
from domainpar.diagnosis.verdicts import Finding, exit_code, failed, gathered
from domainpar.parallel.allocator import set_up_allocator
from domainpar.parallel.failure import guard
from domainpar.parallel.launch import World
from domainpar.parallel.launcher import Launcher, detect, started_as_root
from domainpar.parallel.meeting import NobodyServes
from domainpar.parallel.thread_ranks import run_threads
from domainpar.problems import Problem, told

THREAD_RANKS = 3
CERTIFICATE = "certificate.json"


def diagnose(config: DoctorConfig) -> int:
    """Look at everything, print the table on rank 0, and say whether anything failed. *Collective*.

    Returns:
        The exit code: 0 when nothing failed, 1 otherwise.

    Raises:
        SystemExit: With code 2 if a file cannot be written where it is asked for.
    """
    allocator = set_up_allocator()
    try:
        launcher = detect()
        world = World.launch(config.transport, config.device, timeout=_deadline(config), join_seconds=timeouts.DOCTOR)
    except ValueError as refused:
        return _without_world(config, refused, allocator)
    with guard(world.presence):
        agree(world.transport, _cannot_write(config) if world.is_root else None)
        findings = _looked(config, launcher, world, allocator)
        if world.is_root:
            _tell(config, findings)
        if config.certify:
            findings += _certify(config, launcher, world, findings)
        world.close()
    return exit_code(findings)


def _deadline(config: DoctorConfig) -> float:
    """Longest wait for another rank: with a certificate, rank 0 computes alone for a while."""
    return timeouts.DOCTOR + (60.0 * config.minutes if config.certify else 0.0)


def _cannot_write(config: DoctorConfig) -> Problem | None:
    """Found before anything takes time."""
    for name, file in (("--json", config.json), ("--out", config.out)):
        if file is not None and (Path(file).is_dir() or not Path(file).resolve().parent.is_dir()):
            return Problem(f"{name} {file}: no file can be written there", "make its directory, or name another file")
    return None


def _without_world(config: DoctorConfig, refused: ValueError, allocator: str) -> int:
    """The ranks cannot meet: say so, with what one process can find out alone."""
    if not started_as_root() and not isinstance(refused, NobodyServes):
        time.sleep(timeouts.DOCTOR_REPORT)  # launchers end all ranks when the first is gone: that must be rank 0
        return 1
    reason = told(refused)
    advice = reason["hint"] or "nothing that needs several ranks works until this is mended"
    of_mpi = machine.attempted("MPI", lambda: check_mpi(Launcher("none", "")))  # by a process of its own: safely
    own = _of_this_process(1, allocator, started=True)
    _tell(config, [failed("ranks", reason["what"], advice), of_mpi, *own])
    return 1


def _looked(config: DoctorConfig, launcher: Launcher, world: World, allocator: str) -> list[Finding]:
    """All findings; if a check ends with an error, rank 0 shows those before it. *Collective*."""
    findings: list[Finding] = []
    try:
        for finding in _look(config, launcher, world, allocator):
            findings.append(finding)
    except Exception as error:
        if world.is_root:
            show([*findings, failed("doctor", f"{type(error).__name__}: {error}", "put all of this into an issue")])
        raise
    return findings


def _look(config: DoctorConfig, launcher: Launcher, world: World, allocator: str) -> Iterator[Finding]:
    """Every check, the same findings on every rank. *Collective*."""
    places = layout.places_of(world)
    here = layout.local_ranks(places, world.rank)
    started = launcher.kind != "none"
    own = [check_launcher(launcher, world.size), *_of_mpi(launcher), *_of_this_process(here, allocator, started)]
    yield from gathered(own, world)
    yield layout.check_ranks(places, world.transport.name)
    yield layout.alone_or(world, layout.check_same_versions(places))
    yield layout.check_clocks(places)
    for finding in _of_transports(config, launcher, world, here):
        yield from gathered([finding], world)
    yield from gathered(_selftests(config, world), world)
    yield from _of_files(config, world)
    if not started and config.probe:
        yield from _probes(config, next(finding for finding in own if finding.check == "MPI"))


def _of_this_process(local_ranks: int, allocator: str, started: bool) -> list[Finding]:
    """What a rank finds out by itself."""
    attempted = machine.attempted
    return [
        attempted("versions", machine.check_versions),
        attempted("cores", lambda: machine.check_processor(local_ranks)),
        attempted("memory", lambda: machine.check_memory(local_ranks)),
        attempted("allocator", lambda: machine.check_allocator(allocator)),
        attempted("disk", machine.check_disk),
        attempted("kernel cache", machine.check_numba_cache),
        attempted("numbers", machine.check_numbers),
        attempted("GPUs", lambda: machine.check_gpus(local_ranks)),
        attempted("slurm", lambda: machine.check_slurm(started)),
    ]


def _of_mpi(launcher: Launcher) -> list[Finding]:
    """mpi4py, its library and what that library asks for; under other launchers nothing, they start no MPI."""
    if launcher.kind != "none" and not launcher.has_pmi:
        return []
    of_mpi = machine.attempted("MPI", lambda: check_mpi(launcher))
    library = str(of_mpi.figures.get("library", ""))
    return [of_mpi, machine.attempted("Open MPI", lambda: check_open_mpi(library, machine.cores_here()))]


def _of_transports(config: DoctorConfig, launcher: Launcher, world: World, local_ranks: int) -> Iterator[Finding]:
    """The transport of this world, then others between the same ranks. *Collective*."""
    if world.size == 1:
        return
    yield check_transport(world.transport, config.seconds, world.device)
    for name in beside.CLUSTER_TRANSPORTS:
        if name == world.transport.name:
            continue
        if why := beside.missing(name, world, launcher, local_ranks):
            yield beside.not_measured(name, why)
            continue
        second = beside.form(name, world, launcher)
        if isinstance(second, str):
            yield beside.not_formed(name, second)
            continue
        yield check_transport(second.transport, config.seconds, second.device)
        second.close(world)


def _selftests(config: DoctorConfig, world: World) -> list[Finding]:
    """The halo and a network on it; on ranks that are threads where there is one process only. *Collective*."""
    if world.size == 1:
        found: list[list[Finding]] = run_threads(_on_threads, THREAD_RANKS, config.seconds, timeout=timeouts.DOCTOR)
        return [*found[0], selftests.check_rows(world)]
    return [*selftests.check_halo(world), selftests.check_split(world), selftests.check_rows(world)]


def _on_threads(world: World, seconds: float) -> list[Finding]:
    found = [check_transport(world.transport, seconds), *selftests.check_halo(world), selftests.check_split(world)]
    return gathered(found, world)


def _of_files(config: DoctorConfig, world: World) -> Iterator[Finding]:
    if config.verify is not None:
        yield check_store(Path(config.verify), world)
    if config.run is not None:
        yield check_run(Path(config.run), world)


def _probes(config: DoctorConfig, of_mpi: Finding) -> list[Finding]:
    return [
        machine.attempted("MPI, 2 ranks", lambda: probe_mpi(mpiexec_for(of_mpi), config.seconds)),
        machine.attempted("gloo, 2 ranks", lambda: probe_gloo(config.seconds)),
    ]


def _tell(config: DoctorConfig, findings: list[Finding]) -> None:
    show(findings)
    if config.json is not None:
        _write(Path(config.json), as_record(findings) | {"argv": sys.argv[1:], "machine": machine.describe()})


def _certify(config: DoctorConfig, launcher: Launcher, world: World, findings: list[Finding]) -> list[Finding]:
    """Write the certificate and say where it lies; returns its own findings. *Collective*."""
    from domainpar.diagnosis.certificate import certify

    content, own = certify(config, launcher, world, findings)
    if world.is_root:
        show(own)
        path = Path(config.out or CERTIFICATE)
        _write(path, content)
        print(f"certificate: {path} ({path.stat().st_size / 1e3:.0f} kB); attach it to an issue", flush=True)
    return own


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        write_json(path, content)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; all else is done, see the table") from error
