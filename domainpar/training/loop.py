"""The training step: collective, every figure a sum over ranks divided once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from domainpar import faults
from domainpar.nn.adapt.gradient_sums import StepBuffers
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.noise import key_of
from domainpar.parallel.world import World
from domainpar.training.loss import edge_loss
from domainpar.training.metrics import metrics_of
from domainpar.training.monitor.failure import Now, memory_explained
from domainpar.training.monitor.non_finite import Suspect, check_parameters, is_finite, look_again, stop_all
from domainpar.training.monitor.ranks import Stragglers, as_records, check_replicas
from domainpar.training.parts import LabelledPart, PartLoader, Totals
from domainpar.training.record import Tally
from domainpar.training.sampler import Sample, deal


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each step.

    Attributes:
        lr: Peak learning rate.
        shape: After the warm-up: `constant`; `trapezoid`, constant and in the last fifth of the steps linearly to 0;
            `cosine`, down to 0 after the last step; `step`, times 0.9 each 10 epochs.
        warmup: Steps in which the rate rises linearly from 0 to `lr`.
        total_steps: Steps of the whole run, as its epochs plan them.
        steps_per_epoch: Steps of one epoch.
    """

    lr: float
    shape: Literal["constant", "trapezoid", "cosine", "step"]
    warmup: int
    total_steps: int
    steps_per_epoch: int

    def at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.total_steps - self.warmup))
        if self.shape == "trapezoid":
            return self.lr * min(1.0, 5 * (1.0 - progress))
        if self.shape == "cosine":
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
        if self.shape == "step":
            return self.lr * 0.9 ** (step // max(1, self.steps_per_epoch) // 10)
        return self.lr


@dataclass
class Trainer:
    """A model with all that changes it: one optimiser step, or one evaluation, at a time.

    Attributes:
        model: The network; the same parameters on every rank.
        optimizer: Steps on gradients that are the same bits on every rank.
        loader: Parts of samples.
        world: The ranks.
        schedule: Learning rate of each step.
        clip: Largest norm of the gradient, or None.
        seed: Of all that is dropped at random.
        offload: Keep saved activations in host memory; on a GPU.
        check_replicas_every: Steps between two checks that all ranks hold the same; 0: never.
        exchanges: Exchanges of rows on the way forward and on the way back of the last sample.
        squashed: Whether all logits of the last step, or of the last evaluation, lay between 0 and 1.
    """

    model: EdgeClassifier
    optimizer: torch.optim.Optimizer
    loader: PartLoader
    world: World
    schedule: Schedule
    clip: float | None = None
    offload: bool = False
    seed: int = 0
    check_replicas_every: int = 0
    exchanges: tuple[int, int] | None = field(default=None, init=False)
    squashed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._gradients = self.model.gradients()
        self._now, self._stragglers = Now(self.world), Stragglers()
        self._first = next(parameter for parameter in self.model.parameters() if parameter.requires_grad)

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
        tally = Tally(self.world)
        with memory_explained(self._now, self.model):
            ours = deal(samples, self.world.num_data_groups)[self.world.data_group]
            parts = list(self._load(ours, step))
            totals = self.loader.total([part.kind_counts for part in parts], len(ours))
            weight = self.loader.edge_weights.total(totals.kinds) or 1.0  # where nothing weighs, the loss is 0 / 1
            self.optimizer.zero_grad()
            buffers = StepBuffers(self.model)
            suspects: list[Suspect] = []
            for part in parts:
                with buffers.sample(counts=self.world.domain.rank == 0):
                    suspects += self._forward_and_back(part, step, weight, tally)
            self._now.begin("reduce", step)
            faults.reach("reduce")
            tally.loss.reduce(self.world.transport)
            # Partials that are not finite were counted, not added; the count is the same on every rank by now.
            if self._gradients.reduce(self.world.transport) + tally.loss.rejected:
                logits = partial(self._logits, step=step)
                stop_all(look_again(parts, self.model, self._now, step, logits, weight), suspects, self.world)
            buffers.end(self.world.transport, max(1, totals.loaded))
            grad_norm, rate = self._clip(), self.schedule.at(step)
            if totals.loaded:  # else there is nothing to learn from: the optimiser would still decay weights
                # The same arithmetic on the same bits on every rank.
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self._now.begin("optimizer", step)
                faults.reach("optimizer", self._first.grad)
                self.optimizer.step()
                faults.reach("stepped", self._first)
                check_parameters(self.model.layers, rate)
            loss = float(tally.loss.total()) if totals.loaded else None
            record = self._record({"loss": loss, "lr": rate, "grad_norm": grad_norm}, samples, totals, tally)
        if self.check_replicas_every and (step + 1) % self.check_replicas_every == 0:
            self.check_replicas()
        if slow := self._stragglers.look(record["seconds_compute"], record["local_edges"]):
            record["straggler"] = as_records(slow, self.world)
        return record

    def evaluate(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """Loss and metrics over some samples, as one set; returns their record. *Collective*.

        Args:
            samples: The samples, the same list on every rank.
            step: Optimiser steps done before.

        Returns:
            The fields of a training record. `lr` is that of the last step, `grad_norm` None, and the loss None if it is
            not finite.
        """
        tally = Tally(self.world)
        kind_counts = []
        ours = deal(samples, self.world.num_data_groups)[self.world.data_group]
        with memory_explained(self._now, self.model), torch.no_grad():
            for part in self._load(ours, step):
                self._now.begin("evaluate", step, part=part)
                faults.reach("evaluate")
                logits = self.model(part.graph, part.halo)
                edge_loss(logits, part.graph, part.weights, 1.0, tally.loss)
                tally.add(part, logits)
                kind_counts.append(part.kind_counts)
        tally.loss.reduce(self.world.transport)
        totals = self.loader.total(kind_counts, len(ours))
        loss = float(tally.loss.total()) / (self.loader.edge_weights.total(totals.kinds) or 1.0)
        figures = {
            "loss": None if tally.loss.rejected or not totals.loaded else loss,
            "lr": self.schedule.at(max(step - 1, 0)),
            "grad_norm": None,
        }
        return self._record(figures, samples, totals, tally)

    def check_replicas(self) -> None:
        """Compare the parameters and the optimiser's state of all ranks, unless that is switched off. *Collective*.

        Raises:
            StepFailed: If they are not the same bits; RanksFailed on ranks that others speak for.
        """
        if self.check_replicas_every:
            check_replicas(self.model.layers, self.optimizer, self.world)

    def _load(self, samples: Sequence[Sample], step: int) -> Iterator[LabelledPart]:
        """Parts of samples, one after the other, but for those that are left out."""
        for sample in samples:
            self._now.begin("load", step, sample.name)
            if (part := self.loader.load(sample)) is not None:
                yield part

    def _forward_and_back(self, part: LabelledPart, step: int, weight: float, tally: Tally) -> list[Suspect]:
        """Both passes over a part, which is returned if its loss or gradients were not finite on this rank."""
        rejected, transport = (tally.loss.rejected, self._gradients.rejected), part.halo.transport
        began = transport.num_exchanges
        self._now.begin("forward", step, part=part)
        faults.reach("forward")
        logits = self._logits(part, step)
        faults.reach("loss", logits)
        gradient = edge_loss(logits, part.graph, part.weights, weight, tally.loss)
        self._now.begin("backward", step, part=part)
        faults.reach("backward")
        between = transport.num_exchanges
        logits.backward(gradient)
        self.exchanges = between - began, transport.num_exchanges - between
        tally.add(part, torch.atleast_2d(logits)[-1])  # scores are those of the last readout
        # Both count on this rank only until they are reduced: the part at hand has added to them.
        if (tally.loss.rejected, self._gradients.rejected) != rejected:
            return [Suspect(part.name, in_logits=not is_finite(logits))]
        return []

    def _logits(self, part: LabelledPart, step: int) -> Tensor:
        """Logits of a part in training, of all readouts; with the same random numbers whenever a step asks again."""
        with save_on_cpu(pin_memory=True) if self.offload else nullcontext():
            logits: Tensor = self.model(part.graph, part.halo, key_of(self.seed, step, part.name))
            return logits

    def _clip(self) -> float:
        """Norm of the gradient before clipping; the same arithmetic on the same bits on every rank."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return float(norm)

    def _record(
        self, figures: dict[str, Any], samples: Sequence[Sample], totals: Totals, tally: Tally
    ) -> dict[str, Any]:
        """The record of a step or an evaluation. *Collective*."""
        counts = tally.metrics.count(self.world.transport)
        self.squashed = counts.in_unit == counts.edges > 0
        metrics = metrics_of(counts, in_sectors=any(sample.sector is not None for sample in samples))
        skipped = {"skipped_events": totals.skipped} if totals.skipped else {}
        return {**figures, **metrics, **skipped, **tally.shared()}
