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

from domainpar.agreement import gather
from domainpar.config import DoctorConfig
from domainpar.diagnosis import layout, machine
from domainpar.diagnosis.budget import Budget
from domainpar.diagnosis.gpu import check_gpu
from domainpar.diagnosis.invariance import check_invariance
from domainpar.diagnosis.scaling import check_scaling
from domainpar.diagnosis.verdicts import Finding, exit_code, gathered
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.world import World

CERTIFICATE_VERSION = 1


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
    # Memory first: what later work leaves behind in a process would be counted.
    of_scaling, scaling = check_scaling(world, budget)
    of_bits, cases = check_invariance(world, budget)
    own = gathered([*of_bits, *of_scaling], world) + check_gpu(world, launcher, budget)
    places = layout.places_of(world)
    content = {
        "certificate_version": CERTIFICATE_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv[1:],
        "launcher": asdict(launcher),
        "machines": _machines(world),
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


def _machines(world: World) -> dict[str, Any]:
    """What each host is, once each. *Collective*."""
    found = gather(world.transport, machine.describe())
    return {told["host"]: told for told in reversed(found)}


def _names(places: Sequence[layout.Place]) -> dict[str, str]:
    """What tells who and where, and what stands for it; longer names first."""
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
