"""Everything in float64, so that rounding is far below what is wrong: modules, arguments, and what models make."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from domainpar.nn.adapt.data import is_data, with_fields
from domainpar.nn.adapt.rows import UNKNOWN, mark, rows_of


@contextmanager
def on_our_terms() -> Iterator[None]:
    """Float64 for what models make themselves, one thread, random numbers that nobody misses; all put back."""
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)


def doubled_module(module: nn.Module) -> nn.Module:
    """A copy on the CPU, tensors that are no parameters or buffers included."""
    module = copy.deepcopy(module).cpu().double()
    for child in module.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(child, name, value.cpu().double())
    return module


def doubled(value: Any) -> Any:
    """Arguments, their tensors marked as they were."""
    if isinstance(value, Tensor):
        return _doubled_tensor(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(doubled, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(doubled, value))
    if isinstance(value, dict):
        return {name: doubled(one) for name, one in value.items()}
    return with_fields(value, doubled(value.to_dict())) if is_data(value) else value


def _doubled_tensor(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    rows = rows_of(tensor)
    made = tensor.detach().double().requires_grad_(tensor.requires_grad)
    return made if rows is UNKNOWN else mark(made, None if rows is None else rows.but())
