"""The training step: collective, every figure a sum over ranks divided once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from domainpar.common import faults
from domainpar.common.agreement import gather
from domainpar.common.compiling import clock
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.heads import Readings
from domainpar.nn.noise import key_of
from domainpar.nn.uncompiled import pass_back
from domainpar.parallel.world import World
from domainpar.placed.replicas import StepBuffers
from domainpar.tracking.training.edge_classes import NOT_KNOWN
from domainpar.tracking.training.label_loss import FAR, label_loss
from domainpar.tracking.training.loss import edge_loss
from domainpar.tracking.training.metrics import EdgeCounts, label_metrics, metrics_of
from domainpar.tracking.training.monitor.failure import Now, memory_explained
from domainpar.tracking.training.monitor.non_finite import Pass, check_parameters, look_again, stop_all
from domainpar.tracking.training.monitor.rank_differences import Stragglers, check_replicas
from domainpar.tracking.training.monitor.sizes import layer_norms, layer_sizes
from domainpar.tracking.training.monitor.spikes import Spikes
from domainpar.tracking.training.parts import Counted, LabelledPart, PartLoader, StepCounts
from domainpar.tracking.training.record import StepTotals
from domainpar.tracking.training.sampler import Sample, deal
from domainpar.tracking.training.tasks import Task


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each step."""

    lr: float  # peak learning rate
    # after the warm-up: `constant`; `trapezoid`, constant and in the last fifth of the steps linearly to 0; `cosine`,
    # down to 0 after the last step; `step`, times 0.9 each 10 epochs
    shape: Literal["constant", "trapezoid", "cosine", "step"]
    warmup: int  # steps in which the rate rises linearly from 0 to `lr`
    total_steps: int  # steps of the whole run, as its epochs plan them
    steps_per_epoch: int  # steps of one epoch

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


class Shares(NamedTuple):
    """What the losses of a step are divided by."""

    edges: float  # the weight of all edges, over that of their loss
    labels: tuple[float, ...]  # of each task the labels that are known, over its weight


@dataclass
class Trainer:
    """A model with all that changes it: one optimiser step, or one evaluation, at a time."""

    model: EdgeClassifier  # the network; the same parameters on every rank
    optimizer: torch.optim.Optimizer  # steps on gradients that are the same bits on every rank
    loader: PartLoader  # parts of samples
    world: World  # the ranks
    schedule: Schedule  # learning rate of each step
    clip: float | None = None  # largest norm of the gradient, or None
    seed: int = 0  # of all that is dropped at random
    check_replicas_every: int = 0  # steps between two checks that all ranks hold the same; 0: never
    # steps between two records of the sizes of all layers, their gradients and their changes; 0: none
    sizes_every: int = 0
    # exchanges of rows on the way forward and on the way back of the last sample
    exchanges: tuple[int, int] | None = field(default=None, init=False)
    now: Now = field(init=False)  # the phase of the step at hand
    # whether all logits of the last step, or of the last evaluation, lay between 0 and 1
    squashed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._gradients = self.model.gradients(self.world.size > 1)
        self.now, self._stragglers, self._spikes = Now(self.world), Stragglers(), Spikes()
        self._sound = torch.ones((), dtype=torch.bool, device=self.world.device)
        self._layer_of = {it: name.rpartition(".")[0] or name for name, it in self.model.layers.named_parameters()}
        self._first = next(parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def step(self, samples: Sequence[Sample], step: int, following: Sequence[Sample] = ()) -> dict[str, Any]:
        """One optimiser step on some samples; returns its record. *Collective*.

        Args:
            samples: The samples of the whole step, the same list on every rank.
            step: Number of the step, from 0.
            following: The samples of the next step, to be loaded meanwhile.

        Raises:
            StepFailed: On the rank that it happened on (RanksFailed on others), if a loss or gradient is not finite,
                before any parameter changes; if a parameter is not finite afterwards; if ranks no longer hold the same;
                or if this rank runs out of memory.
        """
        step_totals = StepTotals(self.world, self.tasks)
        with memory_explained(self.now, self.model):
            ours = deal(samples, self.world.num_data_groups)[self.world.data_group]
            parts = list(self._load(ours, step, step_totals))
            self.loader.prefetch(deal(following, self.world.num_data_groups)[self.world.data_group])
            totals = self.loader.total([part.counted for part in parts], len(ours))
            shares = self._shares(totals)
            self.optimizer.zero_grad()
            buffers = StepBuffers(self.model.changing)
            passes: list[Pass] = []
            for part in parts:
                if part is parts[-1]:
                    self._gradients.expect_last_pass(self.world.transport)
                with buffers.sample(counts=self.world.domain.rank == 0):
                    passes.append(self._forward_and_back(part, step, shares, step_totals))
            self.now.begin("reduce", step)
            faults.reach("reduce")
            rejected = self._gradients.reduce(self.world.transport)
            step_totals.reduce()
            (norm, norms), rate = self._norms(), self.schedule.at(step)
            # All that the host must know of this step, and of the optimiser's last one: it waits for a GPU here, and
            # once more in steps that note sizes.
            spoilt, losses, figures, counts = step_totals.read(rejected, [norm, self._sound, norms])
            grad_norm, sound, *each = figures
            loss = sum(losses)
            if not sound:
                check_parameters(self.model.layers, self.schedule.at(step - 1))
            # Partials that are not finite were counted, not added; the count is the same on every rank by now.
            if spoilt:

                def losses_again(part: LabelledPart, readings: Readings) -> tuple[list[Tensor], Tensor]:
                    step_totals = StepTotals(self.world, self.tasks)
                    return self._gradients_of(shares, part, readings, step_totals), step_totals.rejected_now()

                forward = partial(self._readings, step=step)
                stop_all(look_again(parts, self.model, self.now, step, forward, losses_again), passes, self.world)
            buffers.end(self.world.transport, max(1, totals.loaded))
            sizes, gradients = {}, layer_norms([self._layer_of[it] for it in self._with_gradient()], each)
            if totals.loaded:  # else there is nothing to learn from: the optimiser would still decay weights
                looks = self.sizes_every > 0 and (step == 0 or (step + 1) % self.sizes_every == 0)
                before = [parameter.detach().clone() for parameter in self._layer_of] if looks else []
                self._optimise(step, rate, norm)
                sizes = {"layers": layer_sizes(self._layer_of, before, gradients)} if looks else {}
                del before  # a copy of all parameters
            record = self._record(
                {"loss": loss if totals.loaded else None, "lr": rate, "grad_norm": grad_norm},
                samples, totals, step_totals, counts, losses,
            ) | sizes  # fmt: skip
            if totals.loaded and (spike := self._spikes.look(loss, gradients, [sample.name for sample in samples])):
                record["spike"] = spike
        if self.check_replicas_every and (step + 1) % self.check_replicas_every == 0:
            self.check_replicas()
        if slow := self._stragglers.look(record["seconds_compute"], record["local_edges"]):
            hosts = gather(self.world.transport, self.world.host)
            record["straggler"] = [{**straggler, "host": hosts[straggler["rank"]]} for straggler in slow]
        return record

    def evaluate(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """Loss and metrics over some samples, as one set; returns their record. *Collective*.

        Args:
            step: Optimiser steps done before.

        Returns:
            The fields of a training record. `lr` is that of the last step, `grad_norm` None, and the loss None if it is
            not finite.
        """
        step_totals = StepTotals(self.world, self.tasks)
        counted: list[Counted] = []
        ones = Shares(1.0, (1 / FAR,) * len(self.tasks))  # not divided yet
        ours = deal(samples, self.world.num_data_groups)[self.world.data_group]
        with memory_explained(self.now, self.model), torch.no_grad():
            for part in self._load(ours, step, step_totals):
                self.now.begin("evaluate", step, part=part)
                faults.reach("evaluate")
                readings = self.model.read(part.graph, part.halo)
                self._gradients_of(ones, part, readings, step_totals)
                step_totals.add(part, readings)
                counted.append(part.counted)
        step_totals.reduce()
        spoilt, losses, _, counts = step_totals.read()
        totals = self.loader.total(counted, len(ours))
        shares = self._shares(totals)
        losses = [losses[0] / shares.edges, *(loss / FAR / share for loss, share in zip(losses[1:], shares.labels))]
        nothing = not totals.loaded or not (self.loader.tasks.edge_weight or any(totals.known))
        figures = {
            "loss": None if spoilt or nothing else sum(losses),
            "lr": self.schedule.at(max(step - 1, 0)),
            "grad_norm": None,
        }
        return self._record(figures, samples, totals, step_totals, counts, losses)

    def check_replicas(self) -> None:
        """Compare the parameters and the optimiser's state of all ranks, unless that is switched off. *Collective*.

        Raises:
            StepFailed: If they are not the same bits; RanksFailed on ranks that others speak for.
        """
        if self.check_replicas_every:
            check_replicas(self.model.layers, self.optimizer, self.world)

    def _load(self, samples: Sequence[Sample], step: int, step_totals: StepTotals) -> Iterator[LabelledPart]:
        """Parts of samples, one after the other, but for those that are left out."""
        for sample in samples:
            self.now.begin("load", step, sample.name)
            began = clock()
            part = self.loader.load(sample)
            step_totals.seconds_load += clock() - began
            if part is not None:
                yield part

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Labels that are trained on."""
        return self.loader.tasks.labels

    def _shares(self, totals: StepCounts) -> Shares:
        """What losses of a step are divided by; where nothing weighs, a loss is 0 / 1."""
        edge_weight = self.loader.tasks.edge_weight or 1.0
        of_edges = (self.loader.edge_weights.total(totals.kinds) or 1.0) / edge_weight
        return Shares(of_edges, tuple((known or 1) / task.weight for known, task in zip(totals.known, self.tasks)))

    def _gradients_of(
        self, shares: Shares, part: LabelledPart, readings: Readings, step_totals: StepTotals
    ) -> list[Tensor]:
        """Add the losses of a part to a step_totals; returns their gradients, one for each tensor of the readings."""
        gradients = []
        if readings.edges is not None:
            gradients.append(edge_loss(readings.edges, part.graph, part.weights, shares.edges, step_totals.loss))
        for at, (task, share) in enumerate(zip(self.tasks, shares.labels)):
            output, labels = readings.others[task.name], part.labels[task.name]
            counts = task.label.of == "node" or part.halo.transport.rank == 0
            gradients.append(label_loss(output, labels, task, share, counts, step_totals.label_losses, at))
        return gradients

    def _forward_and_back(self, part: LabelledPart, step: int, shares: Shares, step_totals: StepTotals) -> Pass:
        """Both passes over a part, and what is needed to say whether it made something that is not finite."""
        transport, before = part.halo.transport, self._rejected(step_totals)
        began = transport.num_exchanges
        self.now.begin("forward", step, part=part)
        faults.reach("forward")
        readings = self._readings(part, step)
        faults.reach("loss", readings.tensors[0])
        gradients = self._gradients_of(shares, part, readings, step_totals)
        self.now.begin("backward", step, part=part)
        faults.reach("backward")
        between = transport.num_exchanges
        pass_back(readings.tensors, gradients)
        self.exchanges = between - began, transport.num_exchanges - between
        step_totals.add(part, readings)
        # On this rank only until they are reduced: the part at hand has added to them.
        return Pass(part.name, before, self._rejected(step_totals), [tensor.detach() for tensor in readings.tensors])

    def _rejected(self, step_totals: StepTotals) -> tuple[Tensor, Tensor]:
        return step_totals.rejected_now(), self._gradients.rejected_now()

    def _readings(self, part: LabelledPart, step: int) -> Readings:
        """Outputs of the network for a part in training; a second call in a step has the same random numbers."""
        return self.model.read(part.graph, part.halo, key_of(self.seed, step, part.name))

    def _norms(self) -> tuple[Tensor, Tensor]:
        """Norm of the gradient, and of each parameter's; the same arithmetic on the same bits on every rank."""
        gradients = [it.grad for it in self._with_gradient() if it.grad is not None]
        each = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0, device=self.world.device)
        return torch.linalg.vector_norm(each), each

    def _with_gradient(self) -> list[nn.Parameter]:
        # Sparse ones are left of a step that is not finite, and not summed.
        return [it for it in self.model.parameters() if it.grad is not None and not it.grad.is_sparse]

    def _optimise(self, step: int, rate: float, norm: Tensor) -> None:
        """A step of the optimiser: the same arithmetic on the same bits on every rank."""
        if self.clip is not None:
            parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.now.begin("optimizer", step)
        faults.reach("optimizer", self._first.grad)
        self.optimizer.step()
        # Under a mode, such as that which counts operations, torch does not count calls of many tensors as changes, and
        # ranks that count compare their parameters by what they were before.
        increment_version([parameter for group in self.optimizer.param_groups for parameter in group["params"]])
        faults.reach("stepped", self._first)
        if self.world.device.type == "cpu":
            check_parameters(self.model.layers, rate)
        else:  # read with the next step, or looked at before a checkpoint is saved
            everything = [parameter.detach() for parameter in self.model.layers.parameters()]
            self._sound = torch.nn.utils.get_total_norm(everything).isfinite()

    def _record(
        self,
        figures: dict[str, Any],
        samples: Sequence[Sample],
        totals: StepCounts,
        step_totals: StepTotals,
        counts: EdgeCounts,
        losses: Sequence[float],
    ) -> dict[str, Any]:
        """The record of a step or an evaluation. *Collective*."""
        self.squashed = counts.in_unit == counts.edges > 0
        metrics = metrics_of(counts, in_sectors=any(sample.sector is not None for sample in samples))
        if self.tasks:
            metrics["loss_of_edges"] = losses[0] if self.loader.tasks.edge_weight else None
            metrics["labels"] = {
                name: {"loss": loss if math.isfinite(loss) else None, **label_metrics(of_label.task, of_label.counts)}
                for loss, (name, of_label) in zip(losses[1:], step_totals.labels.items())
            }
        more = {"skipped_events": totals.skipped, "edges_unknown": int(totals.kinds[NOT_KNOWN])}
        counted = {name: count for name, count in more.items() if count}
        return {**figures, **metrics, **counted, **step_totals.shared()}
