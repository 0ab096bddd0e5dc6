"""The training loop: every step is collective, every figure a sum over ranks divided once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from domainpar import faults
from domainpar.nn.adapt.gradient_sums import StepBuffers
from domainpar.nn.adapt.on_events import OnEvents
from domainpar.nn.gradients import GradientSink
from domainpar.nn.noise import key_of
from domainpar.parallel.integer_sums import IntegerSums
from domainpar.parallel.world import World
from domainpar.training.loss import edge_loss
from domainpar.training.metrics import EdgeCounts, EdgeMetrics
from domainpar.training.parts import LabelledPart, PartLoader, Totals
from domainpar.training.record import Stopwatch, metrics_of
from domainpar.training.sampler import Sample, deal
from domainpar.training.schedule import Schedule
from domainpar.training.targets import EdgeWeights
from domainpar.training.watching import not_finite
from domainpar.training.watching.layers import is_finite
from domainpar.training.watching.not_finite import SecondPass, Suspect
from domainpar.training.watching.now import Now
from domainpar.training.watching.out_of_memory import memory_explained
from domainpar.training.watching.parameters import check_parameters
from domainpar.training.watching.replicas import check_replicas
from domainpar.training.watching.stragglers import Stragglers, as_records


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
        check_replicas_every: Steps between two checks that all ranks hold the same; 0: never.
        exchanges: How often rows were exchanged on the way forward and on the way back of the last sample.
        squashed: Whether all logits of the last step, or of the last evaluation, lay between 0 and 1.
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
    check_replicas_every: int = 0
    exchanges: tuple[int, int] | None = field(default=None, init=False)
    squashed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._sink = self.model.gradient_sums() if isinstance(self.model, OnEvents) else GradientSink(self.model)
        self._now, self._stragglers = Now(self.world), Stragglers()
        self._first = next(one for one in self.model.parameters() if one.requires_grad)

    def step(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """One optimiser step on some samples; returns its record. *Collective*.

        Args:
            samples: The samples of the whole step, the same list on every rank.
            step: Number of the step, from 0.

        Raises:
            StepFailed: On the rank that it happened on (RanksFailed on others), if a loss or gradient is not finite,
                before any parameter changes; if a parameter is not finite afterwards; if ranks no longer hold the same;
                or if this rank runs out of memory.
        """
        with memory_explained(self._now, self.model):
            record = self._step(samples, step)
        if self.check_replicas_every and (step + 1) % self.check_replicas_every == 0:
            self.check_replicas()
        if slow := self._stragglers.look(record["seconds_compute"], record["local_edges"]):
            record["straggler"] = as_records(slow, self.world)
        return record

    def check_replicas(self) -> None:
        """Compare the parameters and the optimiser's state of all ranks, unless that is switched off. *Collective*.

        Raises:
            StepFailed: If they are not the same bits; RanksFailed on ranks that others speak for.
        """
        if self.check_replicas_every:
            check_replicas(self.model, self.optimizer, self.world)

    def _step(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        watch = Stopwatch(self.world)
        ours = deal(samples, self.world.num_data_groups)[self.world.data_group]
        parts = [part for sample in ours if (part := self._load(sample, step)) is not None]
        totals = self.loader.total([part.kind_counts for part in parts], len(ours))
        self.optimizer.zero_grad()
        step_weight = self.edge_weights.total(totals.kinds) or 1.0
        loss_sum, metrics = IntegerSums(1, self.world.device), EdgeMetrics()
        buffers = StepBuffers(self.model)
        suspects = []
        for part in parts:
            with buffers.sample(counts=self.world.domain.rank == 0):
                suspects += self._back_and_forth(part, step, step_weight, loss_sum, metrics)
        self._now.begin("reduce", step)
        faults.reach("reduce")
        loss_sum.reduce(self.world.transport)
        if self._sink.reduce(self.world.transport) + loss_sum.rejected:
            self._stop_on_non_finite(parts, suspects, step, step_weight)
        buffers.end(self.world.transport, max(1, totals.loaded))
        grad_norm, rate = self._clip(), self.schedule.at(step)
        if totals.loaded:  # else there is nothing to learn from: the optimiser would still decay weights
            self._optimise(rate, step)
        counts = self._counted(metrics)
        figures = {"loss": float(loss_sum.total()) if totals.loaded else None, "lr": rate, "grad_norm": grad_norm}
        return {**figures, **_metrics_of(counts, samples), **_left_out(totals), **watch.share(*_held(parts))}

    def _load(self, sample: Sample, step: int) -> LabelledPart | None:
        self._now.begin("load", step, sample.name)
        return self.loader.load(sample)

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
        kind_counts, held = [], np.zeros(3, np.int64)
        ours = deal(samples, self.world.num_data_groups)[self.world.data_group]
        for sample in ours:
            with memory_explained(self._now, self.model):
                part = self._load(sample, step)
                if part is None:
                    continue
                logits = self._look_at(part, step, loss_sum)
            _collect(metrics, part, logits)
            kind_counts.append(part.kind_counts)
            held += _held([part])
        loss_sum.reduce(self.world.transport)
        totals = self.loader.total(kind_counts, len(ours))
        loss = float(loss_sum.total()) / (self.edge_weights.total(totals.kinds) or 1.0)
        figures = {
            "loss": None if loss_sum.rejected or not totals.loaded else loss,
            "lr": self.schedule.at(max(step - 1, 0)),
            "grad_norm": None,
        }
        return {
            **figures,
            **_metrics_of(self._counted(metrics), samples),
            **_left_out(totals),
            **watch.share(*held.tolist()),
        }

    def _counted(self, metrics: EdgeMetrics) -> EdgeCounts:
        counts = metrics.count(self.world.transport)
        self.squashed = counts.in_unit == counts.edges > 0
        return counts

    @torch.no_grad()
    def _look_at(self, part: LabelledPart, step: int, loss_sum: IntegerSums) -> Tensor:
        """Logits of a part for validation, and its loss."""
        self._now.begin("evaluate", step, part=part)
        faults.reach("evaluate")
        logits: Tensor = self.model(part.part.graph, part.part.halo)
        edge_loss(logits, part.part.graph, part.weights, 1.0, loss_sum)
        return logits

    def _back_and_forth(
        self, part: LabelledPart, step: int, step_weight: float, loss_sum: IntegerSums, metrics: EdgeMetrics
    ) -> list[Suspect]:
        """Forward and backward on one part; returns it if its loss or gradients were not finite on this rank."""
        of_loss, of_gradients = loss_sum.rejected, self._sink.rejected
        self._now.begin("forward", step, part=part)
        faults.reach("forward")
        transport = part.part.halo.transport
        began = transport.num_exchanges
        logits = faults.reach("loss", self._forward(part, step))
        gradient = edge_loss(logits, part.part.graph, part.weights, step_weight, loss_sum)
        self._now.begin("backward", step, part=part)
        faults.reach("backward")
        between = transport.num_exchanges
        logits.backward(gradient)
        self.exchanges = between - began, transport.num_exchanges - between
        _collect(metrics, part, logits)
        if loss_sum.rejected > of_loss or self._sink.rejected > of_gradients:
            return [Suspect(part.name, in_logits=not is_finite(logits))]
        return []

    def _forward(self, part: LabelledPart, step: int) -> Tensor:
        with save_on_cpu(pin_memory=True) if self.offload else nullcontext():
            logits: Tensor = self.model(part.part.graph, part.part.halo, key_of(self.seed, step, part.name))
            return logits

    def _clip(self) -> float:
        """Norm of the gradient before clipping; the same arithmetic on the same bits on every rank."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return float(norm)

    def _optimise(self, rate: float, step: int) -> None:
        """Change the parameters; the same arithmetic on the same bits on every rank."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._now.begin("optimizer", step)
        faults.reach("optimizer", self._first.grad)
        self.optimizer.step()
        faults.reach("stepped", self._first)
        check_parameters(self.model, rate)

    def _stop_on_non_finite(
        self, parts: Sequence[LabelledPart], suspects: list[Suspect], step: int, step_weight: float
    ) -> NoReturn:
        """Find out where it began, and stop all ranks. *Collective*."""
        again = SecondPass(self.model, self._now, step, lambda part: self._forward(part, step), step_weight)
        not_finite.stop(again.look(parts), suspects, self.world)


def _held(parts: Sequence[LabelledPart]) -> tuple[int, int, int]:
    """Owned nodes, ghosts and local edges of some parts."""
    plans = [part.part.graph.plan for part in parts]
    return (
        sum(plan.num_owned for plan in plans),
        sum(plan.num_ghosts for plan in plans),
        sum(len(plan.edge_ids) for plan in plans),
    )


def _collect(metrics: EdgeMetrics, part: LabelledPart, logits: torch.Tensor) -> None:
    owned = part.part.graph.plan.edge_owned
    metrics.add(logits.detach().cpu().numpy()[owned], part.classes[owned], part.num_not_scored)


def _left_out(totals: Totals) -> dict[str, int]:
    return {"skipped_events": totals.skipped} if totals.skipped else {}


def _metrics_of(counts: EdgeCounts, samples: Sequence[Sample]) -> dict[str, Any]:
    return metrics_of(counts, in_sectors=any(sample.sector is not None for sample in samples))
