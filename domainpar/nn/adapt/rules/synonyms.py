"""Calls that are said in other torch calls, whose rules then decide."""

from __future__ import annotations

from typing import Any

import torch

from domainpar.nn.adapt.calls import Call
from domainpar.nn.adapt.rows import NotExact
from domainpar.nn.adapt.watch import Watch, rule


@rule("index_put", takes="input indices values accumulate", knows_numbers=True)
def index_put(watch: Watch, call: Call) -> Any:
    """`x[indices] = values`, or `x[index] += values` for each time that a row is named."""
    into, indices, values = map(call.get, ("input", "indices", "values"))
    with watch.in_other_words():
        if not call.get("accumulate", False):
            into = into if call.in_place else into.clone()
            into[indices[0] if len(indices) == 1 else tuple(indices)] = values
            return into
        if len(indices) > 1:
            raise NotExact("torch.index_put adds at several indices; use index_add at the rows.")
        index = indices[0].nonzero().view(-1) if indices[0].dtype is torch.bool else indices[0]
        values = values.expand(index.size(0), *into.shape[1:])
        return (into.index_add_ if call.in_place else into.index_add)(0, index, values)


@rule("gumbel_softmax", takes="logits tau hard eps dim")
def gumbel_softmax(watch: Watch, call: Call) -> Any:
    """A random choice of classes, drawn by the global numbers of rows as all that is drawn."""
    logits, dim = call.get("logits"), call.get("dim", -1)
    with watch.in_other_words():
        uniform = torch.rand_like(logits).clamp(min=2.0**-25)  # neither 0 nor 1: what is made of it stays finite
        soft = ((logits - (-uniform.log()).log()) / call.get("tau", 1)).softmax(dim)
        if not call.get("hard", False):
            return soft
        chosen = torch.zeros_like(logits).scatter(dim, soft.detach().argmax(dim, keepdim=True), 1.0)
        return chosen - soft.detach() + soft


@rule("new_tensor", takes="input data")
def new_tensor(watch: Watch, call: Call) -> Any:
    """Numbers as a tensor of the type of rows."""
    like, data = call.args[0], call.get("data")
    kwargs = {name: value for name, value in call.kwargs.items() if name != "data" and value is not None}
    with watch.in_other_words():
        return torch.tensor(data, **({"dtype": like.dtype, "device": like.device} | kwargs))
