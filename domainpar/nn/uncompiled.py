"""Optimisers, modes and backward passes that do not load torch's compiler.

Torch imports the compiler, or sympy for it, where it marks a function as not compiled and where gradients of several
tensors are given. This takes a second and some 70 MiB on every rank. If a release of torch imports it for another
reason, only this gain is lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)


class UncompiledMode(TorchDispatchMode):
    """A mode that sees operations of torch in its `__torch_dispatch__`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @staticmethod
    def are_plain(types: Sequence[Any]) -> bool:
        """Whether tensors of some classes compute nothing themselves; else a mode answers `NotImplemented`, and sees
        the calls of plain tensors that they make."""
        return all(kind.__torch_dispatch__ is Tensor.__torch_dispatch__ for kind in types)


def uncompiled(kind: type[_Optimizer]) -> type[_Optimizer]:
    """Give a kind of optimiser, which is changed, the methods that torch has wrapped as they were before.

    Its steps are not differentiable.
    """
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        setattr(kind, name, inspect.unwrap(getattr(kind, name)))
    kind.step = torch.no_grad()(inspect.unwrap(kind.step))  # type: ignore[method-assign]
    return kind


class _Given(torch.autograd.Function):
    """A scalar 0 whose backward pass returns given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


def never_compiled(*functions: Callable[..., Any]) -> None:
    """Have torch's compiler leave functions alone, and all that they call: `torch.compiler.disable` in place.

    What talks to other ranks, and marks tensors, cannot be traced. A compiled program calls it as it is.
    """
    for function in functions:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]  # so it is called where one is traced
        eval_frame.set_code_exec_strategy(
            function.__code__, eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        )


def pass_back(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Pass gradients of some tensors back: `torch.autograd.backward`, where each needs one and each is there."""
    assert all(tensor.requires_grad and tensor.shape == it.shape for tensor, it in zip(tensors, gradients, strict=True))
    _Given.apply(gradients, *tensors).backward()  # type: ignore[no-untyped-call]
