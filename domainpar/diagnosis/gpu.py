"""The same step on the processor and on the GPU of each rank: to rounding, not to the bit."""

from __future__ import annotations

import torch

from domainpar.diagnosis.budget import Budget
from domainpar.diagnosis.toy import ring_event, toy_store
from domainpar.diagnosis.training import Way, make_trainer
from domainpar.diagnosis.verdicts import Finding, failed, gathered, passed, skipped
from domainpar.events.store import EventStore
from domainpar.parallel.launcher import Launcher
from domainpar.parallel.world import World
from domainpar.training.sampler import samples_of

TRACKS = 60
BOUNDS = {"float32": 1e-4, "float64": 1e-11}


def check_gpu(world: World, launcher: Launcher, budget: Budget) -> list[Finding]:
    """Gradients of a training step by both, on every rank that has a GPU. *Collective*."""
    if not budget.allows("GPU against CPU"):
        return [skipped("GPU = CPU", "no time left", "give it more: --minutes")]
    return gathered([compared(precision, launcher.local_rank) for precision in BOUNDS], world)


def compared(precision: str, local_rank: int) -> Finding:
    """Compare the gradients of this rank's GPU with those of its processor."""
    check = f"GPU = CPU, {precision}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return skipped(check, "no GPU here")
    device = torch.device("cuda", local_rank % count)
    with toy_store(ring_event(TRACKS)) as store:
        on_cpu, on_gpu = (gradients(precision, store, torch.device(kind)) for kind in ("cpu", device))
    worst, name = max(
        (float((on_gpu[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)), name)
        for name, value in on_cpu.items()
    )
    told = f"{torch.cuda.get_device_name(device)}: gradients differ by at most {worst:.1e} of the largest ({name})"
    if worst > BOUNDS[precision]:
        return failed(check, f"{told}; {BOUNDS[precision]:.0e} is rounding", "put this into an issue", difference=worst)
    return passed(check, told, difference=worst)


def gradients(precision: str, store: EventStore, device: torch.device) -> dict[str, torch.Tensor]:
    """Gradients of one step on a whole event, on the host, by parameter."""
    trainer = make_trainer(Way(precision), store, World.alone(device))
    trainer.step(samples_of(store.events(), None), 0)
    named = trainer.model.named_parameters()
    return {name: value.grad.detach().cpu().double() for name, value in named if value.grad is not None}
