"""Stages on a GPU in own kernels, whose bits depend on no launch. Here is what they can be asked for.

`calls` are those of stages, `fused_mlp` what they launch; the kernels are in `arithmetic`, `rows` and `between`.

Triton, in which they are written, comes with torch's builds for GPUs. It is loaded when a GPU is used.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from domainpar.nn.mlp import MLP

ENGINE = "DOMAINPAR_GPU_ENGINE"
"""Environment variable: `torch` has stages on a GPU computed in plain torch, to rounding."""

WIDEST = 256
"""Columns of a layer: more do not fit the registers of a program."""


MOST_THAT_DROP = 4
"""Layers of an MLP that have dropout, all but its last."""


OLDEST = (8, 0)
"""Compute capability of the GPUs that the kernels were compiled for, at least."""


def missing() -> str | None:
    """Why these kernels cannot be used here, in words; None if they can."""
    if os.environ.get(ENGINE) == "torch":
        return f"{ENGINE}=torch has the GPU compute in plain torch"
    if not _has_triton():
        return "triton is not installed, so the GPU computes in plain torch"
    return _of_card(torch.cuda.current_device()) if torch.cuda.is_available() else None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _of_card(index: int) -> str | None:
    """The same of one GPU."""
    if torch.version.hip is not None:
        return "the GPU kernels are for CUDA, and this is a torch for ROCm: it computes in plain torch"
    if (capability := torch.cuda.get_device_capability(index)) < OLDEST:
        return f"the GPU kernels need compute capability 8.0, and this GPU has {'.'.join(map(str, capability))}"
    import triton

    if triton.knobs.runtime.interpret:
        return None
    try:
        triton.runtime.driver.active.get_current_target()  # compiles a library the first time
    except Exception as error:  # whatever stands in the way: the compute nodes of a cluster may have no compiler
        return f"triton does not start here ({type(error).__name__}: {error}), so the GPU computes in plain torch"
    return None


def refused(mlp: MLP) -> str | None:
    """Why the kernels do not compute an MLP, in words; None if they do."""
    kinds = {parameter.dtype for parameter in mlp.all_parameters()}
    if {kind.itemsize for kind in kinds} != {4}:
        return f"the GPU kernels compute in float32, and parameters are {', '.join(sorted(map(str, kinds)))}"
    if (widest := max(layer.linear.out_features for layer in mlp.layers)) > WIDEST:
        return f"the GPU kernels take at most {WIDEST} columns, and a layer has {widest}"
    if mlp.dropout and len(mlp.layers) > MOST_THAT_DROP + 1:
        return f"the GPU kernels drop in at most {MOST_THAT_DROP} layers, and an MLP has {len(mlp.layers)}"
    return None
