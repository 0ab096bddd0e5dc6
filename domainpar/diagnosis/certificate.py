"""One file that says what a machine and a launcher do: so this project learns about those that it does not have."""

from __future__ import annotations

import getpass
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from domainpar.config import DoctorConfig
from domainpar.diagnosis import machine, speed
from domainpar.diagnosis.finding import Finding, exit_code, failed, gathered, of_all_ranks, passed, skipped
from domainpar.diagnosis.ranks import Place, places_of
from domainpar.measure.layouts import layouts, names_by_hash
from domainpar.measure.steps import PRECISIONS
from domainpar.measure.toy import ring_event, toy_store
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.world import World
from domainpar.words import several

CERTIFICATE_VERSION = 1
TRACKS = {"small": 500, "large": 8000}
TRACKS_OF_LAYOUTS = (60, 43)
FIRST_GUESS = 5.0  # seconds of the steps on the small event
OF_TRAINING = ("precision", "grouping", "threads", "recompute_every", "hidden", "graph_iters")


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
    """Train on every layout, measure, and put everything together. *Collective*.

    Args:
        config: How long, and whether to leave names out.
        launcher: Who started the ranks.
        world: The ranks.
        findings: Those of the checks before.

    Returns:
        The certificate as plain values, and its own findings; the same on every rank.
    """
    budget = Budget(world, 60.0 * config.minutes)
    # Memory first: later work leaves memory behind in a process, which would be counted.
    of_scaling, scaling = check_scaling(world, budget)
    of_bits, cases = check_layouts(world, budget)
    own = gathered([*of_bits, *of_scaling, *_check_gpus(launcher, budget)], world)
    places = places_of(world)
    content = {
        "certificate_version": CERTIFICATE_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv[1:],
        "launcher": asdict(launcher),
        "machines": {values["host"]: values for values in reversed(of_all_ranks(machine.describe(), world))},
        "layout": [asdict(place) for place in places],
        "transports": {
            finding.check.removeprefix("transport "): dict(finding.figures)
            for finding in findings
            if finding.check.startswith("transport ") and finding.figures
        },
        "invariance": {"overlap": "always on", "cases": cases},
        "scaling": scaling,
        "left_out": budget.left_out,
        "checks": [asdict(finding) for finding in [*findings, *own]],
        "exit_code": exit_code([*findings, *own]),
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
            findings.append(skipped(f"scaling, {name}", "no time left", "give it more: --minutes"))
            continue
        of_event, figures[name], seconds = speed.measure_steps(world, name, tracks)
        findings += of_event
        guess, before = 1.5 * speed.NUM_STEPS * seconds, tracks
    return findings, figures


def check_layouts(world: World, budget: Budget) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Train on all layouts that there is time for, and compare: a finding a precision, and all cases. *Collective*."""
    cases: list[dict[str, Any]] = []
    events = [ring_event(max(tracks, world.size), seed) for seed, tracks in enumerate(TRACKS_OF_LAYOUTS)]
    with toy_store(*events, num_ranks=world.size) as store:
        for layout in layouts(world):
            if budget.allows(f"{layout.training.precision} {layout.name}"):
                settings = {name: getattr(layout.training, name) for name in OF_TRAINING}
                cases.append({"how": layout.name, **settings, "sha256": layout.hashes(store, world)})
    return [judge_layouts(name, [case for case in cases if case["precision"] == name]) for name in PRECISIONS], cases


def judge_layouts(precision: str, cases: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether all layouts of one precision gave the same bits; cases hold `how` and `sha256`."""
    check = f"same bits, {precision}"
    if len(cases) < 2:
        return skipped(check, "no time to compare two layouts", "give it more: --minutes")
    by_hash = names_by_hash([(case["how"], case["sha256"]) for case in cases])
    figures = {sha256[:12]: names for sha256, names in by_hash.items()}
    groups = [f"{sha256}: {', '.join(names)}" for sha256, names in figures.items()]
    if len(by_hash) == 1:
        return passed(check, f"{several(len(cases), 'layout')} give {groups[0]}", **figures)
    advice = "put this certificate into an issue: results are right to rounding, but not to the bit here"
    return failed(check, f"layouts do not agree: {'; '.join(groups)}", advice, **figures)


def _check_gpus(launcher: Launcher, budget: Budget) -> list[Finding]:
    """Gradients of a training step by both, on every rank that has a GPU. *Collective*."""
    if not budget.allows("GPU against CPU"):
        return [skipped("GPU = CPU", "no time left", "give it more: --minutes")]
    return [speed.check_gpu(precision, launcher.local_rank) for precision in speed.GPU_BOUNDS]


def _names(places: Sequence[Place]) -> dict[str, str]:
    """Names of people and places, and the words that stand for them; longer names first."""
    hosts = list(dict.fromkeys(place.host for place in places))
    short = {name.split(".")[0]: f"host{number}" for number, name in enumerate(hosts)}
    of_hosts = {name: f"host{number}" for number, name in enumerate(hosts)} | short
    folders = {str(Path.cwd()): "<here>", sys.prefix: "<python>", str(Path.home()): "~"}
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
