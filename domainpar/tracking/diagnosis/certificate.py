"""One file that says what a machine and a launcher do: so this project learns about those that it does not have.

Bits on every layout of the ranks; seconds and memory of a training step; its gradients on a GPU.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from domainpar.common.agreement import gather
from domainpar.common.words import several
from domainpar.diagnosis import machine
from domainpar.diagnosis.finding import Finding, as_record, failed, gathered, skipped, works
from domainpar.measure.ring import NUM_LAYERS, REACH
from domainpar.parallel.gpus import dealt, seen_by
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.world import World
from domainpar.tracking.config import DoctorConfig, TrainConfig
from domainpar.tracking.cost.memory import MemoryMeter
from domainpar.tracking.diagnosis.layouts import PRECISIONS, SMALL, layouts, trained
from domainpar.tracking.diagnosis.toy import ring_event, toy_store
from domainpar.tracking.events.store import EventStore
from domainpar.tracking.training.forecast import weight_of
from domainpar.tracking.training.sampler import samples_of

CERTIFICATE_VERSION = 1
NO_TIME = ("no time left", "give it more: --minutes")
TRACKS = {"small": 500, "large": 8000}
TRACKS_OF_LAYOUTS = (60, 43)
FIRST_GUESS = 5.0  # seconds of the steps on the small event
TRAINING = replace(SMALL, hidden=64, graph_iters=4)
NUM_STEPS = 3
GOOD_EFFICIENCY = 0.5
MOST_OVER_EXPECTED = 1.3
GPU_TRACKS = 60
GPU_BOUNDS = {"float32": 1e-4, "float64": 1e-11}
KEPT = ("seconds", "seconds_compute", "seconds_exchange", "seconds_wait", "owned_nodes", "ghost_nodes", "halo_bytes")
OF_TRAINING = ("grouping", "recompute_every", "hidden", "graph_iters")


class Budget:
    """Time for a certificate, by rank 0's clock, so that all ranks agree.

    Args:
        world: The ranks.
        seconds: From now on.
        talks: Whether rank 0 prints a line of progress for each thing begun.

    Attributes:
        left_out: Names of the things that there was no time for.
    """

    def __init__(self, world: World, seconds: float, talks: bool = True) -> None:
        self._world, self._talks = world, talks
        self._began = time.monotonic()
        self._end = self._began + seconds
        self.left_out: list[str] = []

    def allows(self, name: str, seconds: float = 0.0) -> bool:
        """Whether there is time for something that takes about some seconds; says so on rank 0. *Collective*."""
        enough = self._world.transport.broadcast(b"yes" if time.monotonic() + seconds < self._end else b"no") == b"yes"
        if not enough:
            self.left_out.append(name)
        if self._world.is_root and self._talks:
            how = "" if enough else " left out: no time"
            print(f"certify {time.monotonic() - self._began:5.1f} s: {name}{how}", flush=True)
        return enough


def certify(
    config: DoctorConfig, launcher: Launcher, world: World, findings: Sequence[Finding]
) -> tuple[dict[str, Any], list[Finding]]:
    """Train on every layout, measure, and put everything together, the `findings` of the checks before too.

    *Collective*. Returns the certificate as plain values, and its own findings; the same on every rank.
    """
    budget = Budget(world, 60.0 * config.minutes)
    # Memory first: later work leaves memory behind in a process, which would be counted.
    of_scaling, scaling = check_scaling(world, budget)
    of_bits, cases = check_layouts(world, budget)
    if budget.allows("GPU against CPU"):
        gpu = dealt(seen_by(world.transport))[world.rank] or 0
        of_gpus = [check_gpu(precision, gpu) for precision in GPU_BOUNDS]
    else:
        of_gpus = [skipped("GPU = CPU", *NO_TIME)]
    own = gathered([*of_bits, *of_scaling, *of_gpus], world)
    places = machine.places_of(world)
    content = {
        "certificate_version": CERTIFICATE_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv[1:],
        "launcher": asdict(launcher),
        "machines": {values["host"]: values for values in reversed(gather(world.transport, machine.describe()))},
        "layout": [asdict(place) for place in places],
        "transports": {
            finding.check.removeprefix("transport "): dict(finding.figures)
            for finding in findings
            if finding.check.startswith("transport ") and finding.figures
        },
        "invariance": {"overlap": "always on", "cases": cases},
        "scaling": scaling,
        "left_out": budget.left_out,
        **as_record([*findings, *own]),
    }
    return (without_names(content, _names(places)) if config.anonymous else content), own


def check_scaling(world: World, budget: Budget) -> tuple[list[Finding], dict[str, Any]]:
    """Steps on events of two sizes, the larger one if there is time; findings and figures. *Collective*."""
    findings: list[Finding] = []
    figures: dict[str, Any] = {}
    guess, before = FIRST_GUESS, TRACKS["small"]
    for name, tracks in TRACKS.items():
        # Twice: the layouts that come after matter more.
        if not budget.allows(f"scaling and memory, {name} event", 2 * guess * tracks / before):
            findings.append(skipped(f"scaling, {name}", *NO_TIME))
            continue
        of_event, figures[name], seconds = measure_steps(world, name, tracks)
        findings += of_event
        guess, before = 1.5 * NUM_STEPS * seconds, tracks
    return findings, figures


def check_layouts(world: World, budget: Budget) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Train on all layouts that there is time for, and compare: a finding a precision, and all cases. *Collective*."""
    if world.device.type != "cpu":
        return [skipped("same bits", "GPUs promise results up to rounding only", "--device cpu tries CPUs")], []
    cases: list[dict[str, Any]] = []
    events = [ring_event(max(tracks, world.size), seed) for seed, tracks in enumerate(TRACKS_OF_LAYOUTS)]
    with toy_store(*events, num_ranks=world.size) as store:
        for layout in layouts(world):
            precision = layout.training.precision_in_words
            if budget.allows(f"{precision} {layout.name}"):
                settings = {"precision": precision, "threads": layout.training.threads or 1}
                settings |= {name: getattr(layout.training, name) for name in OF_TRAINING}
                cases.append({"how": layout.name, **settings, "sha256": layout.hashes(store, world)})
    return [judge_layouts(name, [case for case in cases if case["precision"] == name]) for name in PRECISIONS], cases


def judge_layouts(precision: str, cases: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether all layouts of one precision gave the same bits; cases hold `how` and `sha256`."""
    check = f"same bits, {precision}"
    if len(cases) < 2:
        return skipped(check, "no time to compare two layouts", NO_TIME[1])
    figures: dict[str, list[str]] = {}
    for sha256, how in [(sha256, case["how"]) for case in cases for sha256 in case["sha256"]]:
        figures.setdefault(sha256[:12], []).append(how)
    groups = [f"{sha256}: {', '.join(names)}" for sha256, names in figures.items()]
    if len(figures) == 1:
        return works(check, f"{several(len(cases), 'layout')} give {groups[0]}", **figures)
    advice = "put this certificate into an issue: results are right to rounding, but not to the bit here"
    return failed(check, f"layouts do not agree: {'; '.join(groups)}", advice, **figures)


# --- steps on rank 0 alone and on all ranks, and on a GPU -------------------------------------------------------------


def measure_steps(world: World, name: str, tracks: int) -> tuple[list[Finding], dict[str, Any], float]:
    """Steps on a toy event of that name and so many tracks, on all ranks and on rank 0 alone. *Collective*.

    Returns findings about time and memory, the figures, and seconds of both steps; the same on every rank.
    """
    config = replace(TRAINING, threads=world.cores_for_each())
    with toy_store(ring_event(tracks), num_ranks=world.size) as store:
        together, alone = fastest_step(config, store, world), None
        if world.is_root:
            # Tables that ranks keep are still held, so only time is measured, and memory computed.
            alone = fastest_step(config, store, World.alone(world.device))
    alone = gather(world.transport, alone)[0]
    figures = {
        "nodes": NUM_LAYERS * tracks,
        "edges": (NUM_LAYERS - 1) * tracks * (2 * REACH + 1) + 2,
        "hidden": TRAINING.hidden,
        "graph_iters": TRAINING.graph_iters,
        "threads_of_a_rank": config.threads,
        "seconds_alone": alone["seconds"],
        "ranks": {kept: together[kept] for kept in KEPT},
        "memory": {
            "taken_bytes": together["taken_bytes"],
            "expected_bytes": together["expected_bytes"],
            "expected_bytes_alone": alone["expected_bytes"][0],
        },
    }
    findings = [judge_time(name, world.size, together, alone), judge_memory(name, together, alone)]
    return findings, figures, together["seconds"] + alone["seconds"]


def fastest_step(config: TrainConfig, store: EventStore, world: World) -> dict[str, Any]:
    """The fastest of some steps on the one event of a store, shared by all ranks. *Collective*.

    Returns:
        Its record, as `train` writes it: lists hold one value a rank. Besides `expected_bytes` and `taken_bytes` at the
        peak of each rank, above its bare process; None of those where that could not be told.
    """
    one_domain = World.over(world.transport, world.device, domain_size=world.size)
    memory = MemoryMeter(world.device)
    trainer, records = trained(config, store, one_domain, NUM_STEPS)
    taken = memory.taken(one_domain)
    sample = samples_of(store.events(), None)[0]
    part = trainer.loader.load(sample)
    assert part is not None, "nothing is left out here"
    weight = weight_of(config, trainer.model, store, sample.record, one_domain)
    expected = memory.expect(weight, part.name, part.graph, one_domain)
    fastest = min(records, key=lambda record: float(record["seconds"]))
    return {**fastest, "expected_bytes": [share.expected for share in expected.shares], "taken_bytes": taken}


def judge_time(name: str, num_ranks: int, together: Mapping[str, Any], alone: Mapping[str, Any]) -> Finding:
    """Seconds of a step on all ranks against those on one."""
    check = f"scaling, {name}"
    if num_ranks == 1:
        return works(check, f"a step takes {together['seconds']:.3g} s on one rank", seconds=together["seconds"])
    speedup = alone["seconds"] / together["seconds"]
    text = (
        f"a step takes {alone['seconds']:.3g} s on one rank and {together['seconds']:.3g} s on {num_ranks}: "
        f"{speedup:.2f} times as fast, {100 * speedup / num_ranks:.0f} % of ideal"
    )
    slow = "see 'cores' and 'transport': ranks that share cores, or a slow network; small events gain little anyway"
    return works(check, text, slow if speedup / num_ranks < GOOD_EFFICIENCY else "", speedup=speedup)


def judge_memory(name: str, together: Mapping[str, Any], alone: Mapping[str, Any]) -> Finding:
    """Memory that ranks took against what was expected of them."""
    check = f"memory, {name}"
    of_ranks = zip(together["taken_bytes"], together["expected_bytes"])
    ratios = [(taken / share, taken, share) for taken, share in of_ranks if taken is not None]
    if not ratios:
        return skipped(check, "this system does not tell peaks: processes held more before")
    ratio, taken, share = max(ratios)
    at_peak, by_share, by_all = (f"{size / 2**20:,.0f} MiB" for size in (taken, share, alone["expected_bytes"][0]))
    text = (
        f"the rank that took most for its share took {at_peak} at its peak, expected {by_share}; "
        f"the whole event on one rank: {by_all} expected"
    )
    hungry = "more than computed: tell us, this machine allocates differently" if ratio > MOST_OVER_EXPECTED else ""
    return works(check, text, hungry, ratio=ratio)


def check_gpu(precision: str, index: int) -> Finding:
    """Compare gradients of this rank's GPU with those of its processor: the same to rounding, not to the bit."""
    check = f"GPU = CPU, {precision}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return skipped(check, "no GPU here")
    device = torch.device("cuda", index)
    with toy_store(ring_event(GPU_TRACKS)) as store:
        on_cpu, on_gpu = (gradients(precision, store, torch.device(kind)) for kind in ("cpu", device))
    worst, name = max(
        (float((on_gpu[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)), name)
        for name, value in on_cpu.items()
    )
    text = f"{torch.cuda.get_device_name(device)}: gradients differ by at most {worst:.1e} of the largest ({name})"
    if worst > GPU_BOUNDS[precision]:
        text += f"; {GPU_BOUNDS[precision]:.0e} is rounding"
        return failed(check, text, "put this into an issue", difference=worst)
    return works(check, text, difference=worst)


def gradients(precision: str, store: EventStore, device: torch.device) -> dict[str, torch.Tensor]:
    """Gradients of one step on a whole event, on the host, by parameter."""
    trainer, _ = trained(replace(SMALL, **PRECISIONS[precision]), store, World.alone(device), 1)
    named = trainer.model.named_parameters()
    return {name: value.grad.detach().cpu().double() for name, value in named if value.grad is not None}


# --- names -----------------------------------------------------------------------------------------------------------


def _names(places: Sequence[machine.RankPlace]) -> dict[str, str]:
    """Names of people and places, and the words that stand for them; longer names first."""
    hosts = list(dict.fromkeys(place.host for place in places))
    short = {name.split(".")[0]: f"host{number}" for number, name in enumerate(hosts)}
    of_hosts = {name: f"host{number}" for number, name in enumerate(hosts)} | short
    folders = {str(Path.cwd()): "<here>", sys.prefix: "<python>", os.path.expanduser("~"): "~"}
    try:
        user = {getpass.getuser(): "<user>"}
    except (KeyError, OSError):  # a user without a name
        user = {}
    names = {name: to for name, to in {**folders, **of_hosts, **user}.items() if name not in ("", "/")}
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


def without_names(content: Any, names: Mapping[str, str]) -> Any:
    """The same plain values with names replaced, also in keys; a part of a longer word is left alone."""
    if isinstance(content, str):
        for name, instead in names.items():
            content = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, content)
        return content
    if isinstance(content, Mapping):
        return {without_names(key, names): without_names(value, names) for key, value in content.items()}
    if isinstance(content, Sequence):
        return [without_names(value, names) for value in content]
    return content
