"""The training loop: every step is collective, every figure a sum over ranks divided once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from domainpar.nn.adapt.on_events import OnEvents
from domainpar.nn.adapt.step_buffers import StepBuffers
from domainpar.nn.gradients import GradientSink
from domainpar.nn.noise import key_of
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.transport import RanksFailed
from domainpar.parallel.world import World
from domainpar.training.loss import edge_loss
from domainpar.training.metrics import EdgeCounts, EdgeMetrics
from domainpar.training.parts import LabelledPart, PartLoader, total_counts
from domainpar.training.record import Stopwatch, metrics_of
from domainpar.training.sampler import Sample, deal
from domainpar.training.schedule import Schedule
from domainpar.training.targets import EdgeWeights


@dataclass
class Trainer:
    """One model on its way through the events.

    Attributes:
        model: Built from stages, or `OnEvents`; the same parameters on every rank.
        optimizer: Steps on gradients that are the same bits on every rank.
        loader: Parts of samples.
        world: The ranks.
        edge_weights: Weights of edges.
        schedule: Learning rate of each step.
        clip: Largest norm of the gradient, or None.
        seed: Of all that is dropped at random.
        offload: Keep what waits for the backward pass in the host's memory; on a GPU.
        exchanges: How often rows were exchanged on the way forward and on the way back of the last sample.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: PartLoader
    world: World
    edge_weights: EdgeWeights
    schedule: Schedule
    clip: float | None = None
    offload: bool = False
    seed: int = 0
    exchanges: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._sink = self.model.gradient_sums() if isinstance(self.model, OnEvents) else GradientSink(self.model)

    def step(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """One optimiser step on some samples; returns its record. *Collective*.

        Args:
            samples: The samples of the whole step, the same list on every rank.
            step: Number of the step, from 0.

        Raises:
            RuntimeError: If a loss or gradient is not finite, on all ranks alike and before any parameter changes.
        """
        watch = Stopwatch(self.world)
        self.world.mark("load", step)
        ours = deal(samples, self.world.num_data_groups)[self.world.data_group]
        parts = [self.loader.load(sample) for sample in ours]
        self.optimizer.zero_grad()
        step_weight = self.edge_weights.total(total_counts(parts, self.world, self.edge_weights.num_kinds)) or 1.0
        loss_sum, metrics = IntegerSums(1, self.world.device), EdgeMetrics()
        buffers = StepBuffers(self.model)
        suspects = []
        for part in parts:
            with buffers.sample(counts=self.world.domain.rank == 0):
                if self._back_and_forth(part, step, step_weight, loss_sum, metrics):
                    suspects.append(part.name)
        self.world.mark("reduce", step)
        loss_sum.reduce(self.world.transport)
        if self._sink.reduce(self.world.transport) + loss_sum.rejected:
            self._stop_on_non_finite(suspects, step)
        buffers.end(self.world.transport, len(samples))
        grad_norm, rate = self._clip(), self.schedule.at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        counts = metrics.count(self.world.transport)
        figures = {"loss": float(loss_sum.total()), "lr": rate, "grad_norm": grad_norm}
        return {**figures, **_metrics_of(counts, samples), **watch.share(*_held(parts))}

    def evaluate(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """Loss and metrics over some samples, as one set; returns their record. *Collective*.

        Args:
            samples: The samples, the same list on every rank.
            step: Optimiser steps done before.

        Returns:
            The fields of a training record. `lr` is that of the last step, `grad_norm` None, and the loss None if it is
            not finite.
        """
        watch = Stopwatch(self.world)
        loss_sum, metrics = IntegerSums(1, self.world.device), EdgeMetrics()
        counts, held = np.zeros(self.edge_weights.num_kinds, np.int64), np.zeros(2, np.int64)
        for sample in deal(samples, self.world.num_data_groups)[self.world.data_group]:
            self.world.mark("evaluate", step)
            part = self.loader.load(sample)
            with torch.no_grad():
                logits = self.model(part.part.graph, part.part.halo)
                edge_loss(logits, part.part.graph, part.weights, 1.0, loss_sum)
            _collect(metrics, part, logits)
            counts += part.kind_counts
            held += _held([part])
        loss_sum.reduce(self.world.transport)
        total = torch.from_numpy(counts)
        self.world.transport.all_reduce(total)
        loss = float(loss_sum.total()) / (self.edge_weights.total(total.numpy()) or 1.0)
        figures = {
            "loss": None if loss_sum.rejected else loss,
            "lr": self.schedule.at(max(step - 1, 0)),
            "grad_norm": None,
        }
        counted = metrics.count(self.world.transport)
        return {**figures, **_metrics_of(counted, samples), **watch.share(*held.tolist())}

    def _back_and_forth(
        self, part: LabelledPart, step: int, step_weight: float, loss_sum: IntegerSums, metrics: EdgeMetrics
    ) -> bool:
        """Forward and backward on one part; returns whether its loss or gradients were not finite on this rank."""
        rejected_before = loss_sum.rejected + self._sink.rejected
        self.world.mark(f"forward {part.name}", step)
        transport = part.part.halo.transport
        began = transport.num_exchanges
        with save_on_cpu(pin_memory=True) if self.offload else nullcontext():
            logits = self.model(part.part.graph, part.part.halo, key_of(self.seed, step, part.name))
        gradient = edge_loss(logits, part.part.graph, part.weights, step_weight, loss_sum)
        self.world.mark(f"backward {part.name}", step)
        between = transport.num_exchanges
        logits.backward(gradient)
        self.exchanges = between - began, transport.num_exchanges - between
        _collect(metrics, part, logits)
        return loss_sum.rejected + self._sink.rejected > rejected_before

    def _clip(self) -> float:
        """Norm of the gradient before clipping; the same arithmetic on the same bits on every rank."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return float(norm)

    def _stop_on_non_finite(self, suspects: list[str], step: int) -> None:
        """Stop all ranks alike; rank 0 says where it was seen. *Collective*."""
        found = self.world.transport.all_gather(", ".join(suspects).encode())
        seen = "; ".join(f"rank {rank}: {names.decode()}" for rank, names in enumerate(found) if names)
        text = (
            f"step {step}: the loss or a gradient is not finite (or above 2^26) in {seen or 'some rank'}. "
            "No parameter was changed; resume from the last checkpoint with a smaller --lr or with --clip."
        )
        raise RuntimeError(text) if self.world.is_root else RanksFailed(text)


def _held(parts: Sequence[LabelledPart]) -> tuple[int, int]:
    """Owned nodes and ghosts of some parts."""
    plans = [part.part.graph.plan for part in parts]
    return sum(plan.num_owned for plan in plans), sum(plan.num_ghosts for plan in plans)


def _collect(metrics: EdgeMetrics, part: LabelledPart, logits: torch.Tensor) -> None:
    owned = part.part.graph.plan.edge_owned
    metrics.add(logits.detach().cpu().numpy()[owned], part.classes[owned], part.num_not_scored)


def _metrics_of(counts: EdgeCounts, samples: Sequence[Sample]) -> dict[str, Any]:
    return metrics_of(counts, in_sectors=any(sample.sector is not None for sample in samples))
