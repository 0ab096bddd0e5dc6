"""Non-finite losses, gradients and parameters: the layer, rank and event where they began.

An ordinary step only counts non-finite partials and looks at one norm of the parameters. Where something is wrong a
second pass over the same samples looks at everything it makes. The keys of its random numbers are those of the first
pass, so it drops the same and meets the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from domainpar.common.agreement import gather
from domainpar.nn.classifier import EdgeClassifier
from domainpar.nn.gradients import GradientSink, GradSink
from domainpar.nn.heads import Readings
from domainpar.nn.uncompiled import pass_back
from domainpar.parallel.integer_sums import LARGEST_PARTIAL
from domainpar.parallel.world import World
from domainpar.placed.tensor import Placed
from domainpar.plan import IntArray
from domainpar.tracking.training.monitor.failure import Now, StepFailed, fail_alike
from domainpar.tracking.training.parts import LabelledPart

SAFE = "no parameter was changed"
GO_ON = f"{SAFE}; go on from the last checkpoint with a smaller --lr or with --clip"
OF_INPUT = f"{SAFE}; look at this event, prepare it again or leave it out"
AGAIN = "a second pass of the step"
OF_MACHINE = f"{SAFE}; look at the memory of that rank's machine, then go on from the last checkpoint with --resume"
OF_PARAMETERS = (
    "go on from the last checkpoint with a smaller --lr or with --clip; if only one rank says this, look at its memory"
)


def is_finite(tensor: Tensor) -> bool:
    """Whether all its numbers are that this rank holds; those that are no floats are."""
    tensor = tensor.local if isinstance(tensor, Placed) else tensor
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())


def _spoilt_parameters(model: nn.Module) -> str | None:
    """The first parameter that is not finite, and the number of the others; None if all are."""
    names = [name for name, parameter in model.named_parameters() if not is_finite(parameter)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"parameter {names[0]}{more}" if names else None


def check_parameters(model: nn.Module, rate: float) -> None:
    """Refuse to go on with parameters that are not finite, after a step of the optimiser with some learning rate.

    One norm over all of them. Without talk: ranks hold the same parameters, and the next collective call of a step
    ends the others where one rank alone has spoilt ones.

    Raises:
        StepFailed: With the first of them.
    """
    # The norm overflows for some finite parameters, so it is only a reason to look closer.
    if bool(torch.nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()]).isfinite()):
        return
    if spoilt := _spoilt_parameters(model):
        what = f"{spoilt} is not finite after a step with learning rate {rate:g}; nothing was saved"
        raise StepFailed(what, OF_PARAMETERS)


class Pass(NamedTuple):
    """The results of both passes over a part; read only where something was not finite."""

    event: str  # name of the sample
    # before, after: partials of loss and gradients that this rank had rejected before and after the passes
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    outputs: Sequence[Tensor]  # of the network


class NonFinite(NamedTuple):
    """Where it began on this rank; the smallest of all ranks is where it began at all."""

    # position of the sample in the step (-1 for the parameters, which concern all samples), number of the check among
    # those of a sample, and place in the pass; the same layer has the same on every rank
    order: tuple[int, int, int]
    what: str  # in words, such as `layer edge_stages.2 (forward)`
    event: str | None = None  # the sample's name
    # the largest magnitude, if that is what is wrong, infinite where it is not known; None for numbers that are not
    # finite
    largest: float | None = None
    hint: str = GO_ON  # the way out


class _Onlooker(NamedTuple):
    """Stands in for a `GradientSink`: looks at gradients, and adds nothing."""

    look: Callable[[Sequence[Tensor]], None]

    def add_limbs(self, parameters: Sequence[nn.Parameter], limbs: IntArray, rejected: int, largest: float) -> None:
        if rejected:  # of which the largest magnitude says what is wrong: that of NaN counts as larger than all others
            self.look([torch.tensor([largest], dtype=torch.float64)])

    def finished(self, stage: GradSink) -> None:
        pass


@contextmanager
def layers_watched(
    model: nn.Module, findings: list[NonFinite], number: int = 0, event: str | None = None
) -> Iterator[None]:
    """Around one pass forward and back: looks at the results of all layers, and at the gradients that come back.

    Args:
        findings: Get a finding for each result that is not finite, and each gradient that is not or is too large.
        number: Position of the sample in the step.
    """
    times, last_call = Counter[str](), dict[str, int]()

    def look_at_result(name: str, module: nn.Module, arguments: Any, result: Any) -> None:
        times[name] += 1
        last_call[name] = times.total()
        if not all(is_finite(it.detach()) for it in tree_leaves(result) if isinstance(it, Tensor)):
            again = f", call {times[name]}" if times[name] > 1 else ""
            what = f"layer {name}{again} (forward)" if name else "the logits"
            findings.append(NonFinite((number, 1, times.total()), what, event))

    def look_back(name: str, gradients: Sequence[Tensor], largest: float | None = None) -> None:
        """May be called by several threads."""
        place = -last_call.get(name, 0)  # the last on the way forward is the first on the way back
        what = f"layer {name} (backward)" if name else "the logits"
        for gradient in gradients:
            size = float(gradient.abs().max()) if largest is not None and gradient.numel() else 0.0
            if not is_finite(gradient):
                findings.append(NonFinite((number, 3, place), what, event))
            elif largest is not None and size >= largest:
                findings.append(NonFinite((number, 3, place), what, event, size))

    hooks = [module.register_forward_hook(partial(look_at_result, name)) for name, module in model.named_modules()]
    stages = {name: module for name, module in model.named_modules() if isinstance(module, GradSink)}
    # Gradients of stages go to a sink; those of other layers are left in their parameters.
    of_stages = {id(parameter) for stage in stages.values() for parameter in stage.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in of_stages:
            layer = name.rpartition(".")[0]
            hooks.append(parameter.register_hook(lambda gradient, layer=layer: look_back(layer, [gradient])))
    sinks = {name: stage.sink for name, stage in stages.items()}
    for name, stage in stages.items():
        stage.sink = cast(GradientSink, _Onlooker(partial(look_back, name, largest=LARGEST_PARTIAL)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, stage in stages.items():
            stage.sink = sinks[name]


def look_again(
    parts: Sequence[LabelledPart],
    model: EdgeClassifier,
    now: Now,
    step: int,
    forward: Callable[[LabelledPart], Readings],
    losses_of: Callable[[LabelledPart, Readings], tuple[Sequence[Tensor], Tensor]],
) -> NonFinite | None:
    """Do the passes of a step again and look at everything they make. *Collective* over the domain group.

    Ends after the first sample in which any rank of the domain group finds something.

    Args:
        now: Takes note of the phases that are done again.
        forward: Outputs of the network for a part, with the random numbers of the first pass. *Collective* over the
            domain group.
        losses_of: Gradients of the losses of a part, and how many of their partials were not finite or too large.

    Returns:
        Where it begins on this rank; None if all is finite here.
    """
    spoilt = _spoilt_parameters(model.layers)
    findings = [] if spoilt is None else [NonFinite((-1, 0, 0), spoilt)]

    def any_of_domain() -> bool:
        flag = torch.tensor([int(bool(findings))])
        now.world.domain.all_reduce(flag)
        return bool(flag)

    for number, part in enumerate(parts):
        graph, weights = part.graph, part.weights
        inputs = {"node features": graph.features, "edge features": graph.edge_features, "weights of edges": weights}
        for place, (name, tensor) in enumerate(inputs.items()):
            if not is_finite(tensor):
                findings.append(NonFinite((number, 0, place), f"the {name}", part.name, hint=OF_INPUT))
        if any_of_domain():
            break
        with layers_watched(model.computed, findings, number, part.name):
            now.begin("forward", step, part=part)
            readings = forward(part)
            gradients, rejected = losses_of(part, readings)
            if rejected:  # of finite logits it can only be too large; of others a layer comes before it
                findings.append(NonFinite((number, 2, 0), "the loss", part.name, math.inf))
            if not any_of_domain():
                now.begin("backward", step, part=part)
                pass_back(readings.tensors, list(gradients))
    return min(findings, key=lambda finding: finding.order, default=None)


def stop_all(finding: NonFinite | None, passes: Sequence[Pass], world: World) -> NoReturn:
    """Stop all ranks, with the finding that is the first in the order of the computation. *Collective*.

    The finding is that of this rank when the step was done again, `passes` are those of the step itself.

    Raises:
        StepFailed: On the first rank that it is about.
        RanksFailed: On all others.
    """
    # Samples with something not finite, and whether the logits were; else the loss was too large, or a gradient.
    suspects = [
        (one.event, not all(map(is_finite, one.outputs)))
        for one in passes
        if any(int(before) != int(after) for before, after in zip(one.before, one.after))
    ]
    of_ranks = gather(world.transport, [finding, suspects])
    findings = {rank: NonFinite(*values) for rank, (values, _) in enumerate(of_ranks) if values is not None}
    if not findings:
        in_logits = [[event for event, of_logits in of_rank if of_logits] for _, of_rank in of_ranks]
        in_gradients = [[event for event, _ in of_rank] for _, of_rank in of_ranks]
        for where, events in (("the logits", in_logits), ("a gradient", in_gradients)):
            if ranks := [rank for rank, names in enumerate(events) if names]:
                on = world.transport.name_ranks(ranks)
                what = f"the loss or a gradient was not finite, first in {where} on {on}; {AGAIN} is finite"
                fail_alike(world, StepFailed(what, OF_MACHINE, event=events[ranks[0]][0]), ranks[0])
        what = f"a gradient was not finite once summed over events and ranks; {AGAIN} is finite on each rank"
        fail_alike(world, StepFailed(what, GO_ON), 0)
    first = min(findings.values(), key=lambda finding: finding.order)
    ranks = [rank for rank, finding in findings.items() if finding.order == first.order]
    on = "" if len(ranks) == world.size else f" on {world.transport.name_ranks(ranks)}"
    wrong = "the loss or a gradient is not finite"
    if first.largest is not None:
        size = "" if math.isinf(first.largest) else f", {first.largest:.3g}"
        wrong = f"the loss or a gradient is too large{size} where 2^26 = 6.71e+07 is the most"
    fail_alike(world, StepFailed(f"{wrong}: first in {first.what}{on}", first.hint, event=first.event), ranks[0])
