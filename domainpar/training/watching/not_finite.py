"""A loss or gradient that is not finite: a second pass over the same samples finds the layer, rank and event.

The keys of random numbers are those of the first pass, so the second one drops the same and meets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from domainpar.agreement import gather
from domainpar.parallel.integer_sums import LARGEST_PARTIAL, IntegerSums
from domainpar.parallel.world import World
from domainpar.training.loss import edge_loss
from domainpar.training.parts import LabelledPart
from domainpar.training.watching.failing import StepFailed, fail_alike
from domainpar.training.watching.layers import LayerWatch, Spoilt, is_finite
from domainpar.training.watching.now import Now

SAFE = "no parameter was changed"
GO_ON = f"{SAFE}; go on from the last checkpoint with a smaller --lr or with --clip"
OF_INPUT = f"{SAFE}; look at this event, prepare it again or leave it out"
AGAIN = "a second pass of the step"
OF_MACHINE = f"{SAFE}; look at the memory of that rank's machine, then go on from the last checkpoint with --resume"


class Suspect(NamedTuple):
    """A sample of which this rank met something not finite in the first pass.

    Attributes:
        event: Its name.
        in_logits: Whether its logits were not finite; else its loss was too large, or a gradient was the first.
    """

    event: str
    in_logits: bool


class Finding(NamedTuple):
    """Where it began on this rank; the smallest of all ranks is where it began at all.

    Attributes:
        sample: Position of the sample in the step; -1 for what concerns all of them.
        stage: Which of the checks of a sample it was.
        position: The layer's place in the order of the pass.
        what: In words.
        phase: `forward` or `backward`.
        event: The sample's name.
        largest: The largest magnitude, if that is what is wrong.
        hint: What to do about it.
    """

    sample: int
    stage: int
    position: int
    what: str
    phase: str
    event: str | None
    largest: float | None = None
    hint: str = GO_ON


class SecondPass:
    """Does the passes of a step again and looks at everything they make.

    Args:
        model: The network.
        now: Told what is done again.
        step: The step.
        forward: Logits of a part, with the random numbers of the first pass. *Collective* over the domain group.
        step_weight: What the step's loss is divided by.
    """

    def __init__(
        self,
        model: nn.Module,
        now: Now,
        step: int,
        forward: Callable[[LabelledPart], Tensor],
        step_weight: float,
    ) -> None:
        self._model, self._now, self._step, self._forward = model, now, step, forward
        self._step_weight = step_weight

    def look(self, parts: Sequence[LabelledPart]) -> Finding | None:
        """Where it begins on this rank; None if all is finite here. *Collective* over the domain group.

        Ends after the first sample in which any rank of the domain group found something.
        """
        found = self._parameters()
        for number, part in enumerate(parts):
            found = found or _inputs(number, part)
            if self._any_of_domain(found is not None):
                return found
            found = self._one(number, part)
        return found

    def _one(self, number: int, part: LabelledPart) -> Finding | None:
        """One sample forward and, if no rank found anything on the way, back."""
        with LayerWatch(self._model).watching() as layers:
            self._now.begin("forward", self._step, part=part)
            logits = self._forward(part)
            loss = IntegerSums(1, self._now.world.device)
            gradient = edge_loss(logits, part.part.graph, part.weights, self._step_weight, loss)
            found = _finding(number, 1, layers.forward, "forward", part) or _loss(number, part, loss)
            if not self._any_of_domain(found is not None):
                self._now.begin("backward", self._step, part=part)
                logits.backward(gradient)
                found = _finding(number, 3, layers.backward, "backward", part)
        return found

    def _parameters(self) -> Finding | None:
        names = [name for name, one in self._model.named_parameters() if not is_finite(one)]
        if not names:
            return None
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return Finding(-1, 0, 0, f"parameter {names[0].removeprefix('module.')}{more}", "forward", None)

    def _any_of_domain(self, found: bool) -> bool:
        flag = torch.tensor([int(found)])
        self._now.world.domain.all_reduce(flag)
        return bool(flag)


def _inputs(number: int, part: LabelledPart) -> Finding | None:
    graph = part.part.graph
    inputs = {"node features": graph.features, "edge features": graph.edge_features, "weights of edges": part.weights}
    for position, (name, tensor) in enumerate(inputs.items()):
        if not is_finite(tensor):
            return Finding(number, 0, position, f"the {name}", "forward", part.name, hint=OF_INPUT)
    return None


def _loss(number: int, part: LabelledPart, loss: IntegerSums) -> Finding | None:
    """The loss of finite logits: not finite only by being too large."""
    if not loss.rejected:
        return None
    return Finding(number, 2, 0, "the loss", "forward", part.name, LARGEST_PARTIAL)


def _finding(number: int, stage: int, spoilt: Spoilt | None, phase: str, part: LabelledPart) -> Finding | None:
    if spoilt is None:
        return None
    return Finding(number, stage, spoilt.position, spoilt.what, phase, part.name, spoilt.largest)


def stop(found: Finding | None, suspects: Sequence[Suspect], world: World) -> NoReturn:
    """Stop all ranks, with what the first in the order of the computation found. *Collective*.

    Args:
        found: What the second pass found on this rank.
        suspects: What the first pass met on this rank.
        world: The ranks.

    Raises:
        StepFailed: On the first rank that it is about.
        RanksFailed: On all others.
    """
    told = gather(world.transport, [found, list(suspects)])
    findings = {rank: Finding(*one) for rank, (one, _) in enumerate(told) if one is not None}
    if not findings:
        met = {rank: [Suspect(*one) for one in of_rank] for rank, (_, of_rank) in enumerate(told)}
        fail_alike(world, *_not_again(met, world))
    first = min(findings.values(), key=_order)
    ranks = [rank for rank, one in findings.items() if _order(one) == _order(first)]
    on = "" if len(ranks) == world.size else f" on {world.transport.name_ranks(ranks)}"
    layer = f"{first.what} ({first.phase})" if first.what.startswith("layer") else first.what
    fail_alike(world, StepFailed(f"{_wrong(first)}: first in {layer}{on}", first.hint, event=first.event), ranks[0])


def _order(found: Finding) -> tuple[int, int, int]:
    return found[:3]


def _wrong(found: Finding) -> str:
    if found.largest is None:
        return "the loss or a gradient is not finite"
    return f"the loss or a gradient is too large, {found.largest:.3g} where 2^26 = 6.71e+07 is the most"


def _not_again(met: dict[int, list[Suspect]], world: World) -> tuple[StepFailed, int]:
    """What is said if a second pass finds nothing, and the rank that it is about."""
    in_logits = {rank: [one.event for one in of_rank if one.in_logits] for rank, of_rank in met.items()}
    in_gradients = {rank: [one.event for one in of_rank] for rank, of_rank in met.items()}
    for where, events in (("the logits", in_logits), ("a gradient", in_gradients)):
        if ranks := [rank for rank, names in events.items() if names]:
            on = world.transport.name_ranks(ranks)
            what = f"the loss or a gradient was not finite, first in {where} on {on}; {AGAIN} is finite"
            return StepFailed(what, OF_MACHINE, event=events[ranks[0]][0]), ranks[0]
    what = f"a gradient was not finite once summed over events and ranks; {AGAIN} is finite on each rank"
    return StepFailed(what, GO_ON), 0
