"""Norms whose statistics are of the whole graph: over owned rows of all ranks, in two passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from domainpar.nn.adapt.calls import Call
from domainpar.nn.adapt.rows import NotExact, mark
from domainpar.nn.adapt.rules.reductions import Reduced, moments
from domainpar.nn.adapt.watch import Watch, rule


@rule("batch_norm", takes="input running_mean running_var weight bias training momentum eps")
@rule("instance_norm", takes="input running_mean running_var weight bias use_input_stats momentum eps")
def batch_norm(watch: Watch, call: Call) -> Any:
    """Statistics over rows; in evaluation with running statistics each row by itself.

    `batch_norm(x, mean, var, weight, bias, training, momentum, eps)`, and `instance_norm` alike: its statistics are
    taken over rows only where these are its length, as in PyG's InstanceNorm.
    """
    x = call.get("input")
    rows = watch.known(x)
    uses_own = call.get("training", False) if call.name == "batch_norm" else call.get("use_input_stats", True)
    per_entry = call.name == "instance_norm"
    if not uses_own or watch.alone or (per_entry and rows.dim == 0 and x.dim() > 2):
        if rows.dim == 1:
            raise NotExact(f"torch.{call.name} with a feature for each of the {rows.axis.name}.")
        return mark(call(), rows.but())
    if rows.dim == 1:
        raise NotExact(f"torch.{call.name} with a feature for each of the {rows.axis.name}.")
    dims = tuple(dim for dim in range(x.dim()) if dim != 1 and not (per_entry and dim == 0))
    of = Reduced(x, rows, dims, True, None)
    if of.num_summed() <= 1:
        raise ValueError(
            f"torch.{call.name} in training needs more than one value a feature; the graph has {of.num_summed()}."
        )
    mean, variance = moments(watch, of)
    _update_running(call, mean, variance, of.num_summed(), per_entry)
    result = (x - mean) * torch.rsqrt(variance + call.get("eps", 1e-5))
    return mark(_affine(result, call.get("weight"), call.get("bias")), rows.but())


def _update_running(call: Call, mean: Tensor, variance: Tensor, count: int, per_entry: bool) -> None:
    momentum = call.get("momentum", 0.1)
    running_mean, running_var = call.get("running_mean"), call.get("running_var")
    dims = [dim for dim in range(mean.dim()) if dim != 1]
    with torch.no_grad():
        for running, statistic in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.lerp_(statistic.detach().mean(dims).to(running.dtype), momentum)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [1, -1] + [1] * (x.dim() - 2)
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


@rule("group_norm", takes="input")
def group_norm(watch: Watch, call: Call) -> Any:
    """Statistics of each row by itself."""
    rows = watch.rows(call.get("input"))
    if rows is None or rows.dim != 0:
        raise NotExact("torch.group_norm runs over rows.")
    return mark(call(), rows.but())
