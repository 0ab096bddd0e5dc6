"""Calls that tell Python something of a tensor: sizes, and values that a program might decide by."""

from __future__ import annotations

import math
from typing import Any

import torch

from domainpar.nn.adapt.calls import ASKED_BY_PYTHON, Call
from domainpar.nn.adapt.nested import tensors_in
from domainpar.nn.adapt.rows import NotExact, RowCount
from domainpar.nn.adapt.watch import Watch, rule


@rule("size", "shape", takes="input dim", knows_numbers=True)
def size(watch: Watch, call: Call) -> Any:
    """Sizes, in which the number of rows knows what it counts."""
    tensor, dim = call.args[0], call.get("dim")
    rows = watch.known(tensor)
    count = RowCount(rows.axis)
    if dim is None:
        return torch.Size([count if at == rows.dim else length for at, length in enumerate(tensor.shape)])
    return count if dim % tensor.dim() == rows.dim else tensor.size(dim)


@rule("python len", knows_numbers=True)
def length(watch: Watch, call: Call) -> Any:
    """The whole graph's number. Python makes it a plain integer, which as a size is refused later."""
    rows = watch.known(call.args[0])
    return rows.axis.total if rows.dim == 0 else call()


@rule("untyped_storage", "storage", "set data", "set", "resize")
def memory(watch: Watch, call: Call) -> Any:
    """Refused: no rule sees changes of memory."""
    raise NotExact(
        f"torch.{call.name} takes rows by the memory they lie in, as invertible blocks do to give it back; switch that "
        "off: disable=True in GroupAddRev and its kin."
    )


@rule("numel", "nelement", knows_numbers=True)
def number_of_elements(watch: Watch, call: Call) -> Any:
    """That of the whole graph."""
    tensor = call.args[0]
    rows = watch.known(tensor)
    return rows.axis.total * math.prod(size for dim, size in enumerate(tensor.shape) if dim != rows.dim)


@rule(*(f"python {name}" for name in ASKED_BY_PYTHON - {"len"}))
@rule("item", "tolist", "numpy", "is_nonzero", "equal", "allclose")
def value(watch: Watch, call: Call) -> Any:
    """Values of one rank's rows; others would decide otherwise."""
    axes = {rows.axis.name for tensor in tensors_in(call.args) if (rows := watch.rows(tensor)) is not None}
    raise NotExact(
        f"Python asks for values of {' and '.join(sorted(axes))} ({call.name}), of which each rank has its own; take a "
        "sum, mean, min, max, any or all over the rows first: those are the whole graph's."
    )


@rule("data_ptr")
def address(watch: Watch, call: Call) -> Any:
    """Where rows lie in memory: what is read and written there, torch does not tell."""
    raise NotExact(
        f"the address of {watch.known(call.args[0]).axis.name} in memory is asked for (data_ptr, by a kernel of your "
        "own or an extension): what it reads and writes there cannot be watched; switch to the torch form of that step."
    )


@rule("autograd.grad")
def gradient_within(watch: Watch, call: Call) -> Any:
    """Forces and penalties: a gradient that is itself differentiated, through the exchange."""
    raise NotExact(
        "torch.autograd.grad in a forward pass (forces, gradient penalties): a part has only its share of such a "
        "gradient, and its own gradient would have to go through the exchange twice. Take gradients after the forward "
        "pass, of the sum over ranks."
    )
