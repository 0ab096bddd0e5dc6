"""The one place where kernels of the GPU engine are launched."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": False, "num_warps": 8, "num_stages": 1, "maxnreg": 255}
"""With which kernels are compiled. Fewer registers than a thread can have would be made up for by memory."""

PROGRAMS = 264
"""Of a launch, two for each processor of an H100: each goes on with the next block, in memory of its own. That of all
fits its L2 up to 64 columns (33 MiB), not at 128 (83 MiB), if they run at once."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, if there is anything to do. All launches go through here."""
    if not all(grid):
        return
    device = next(each for each in arguments if isinstance(each, Tensor)).device
    # Triton launches on the current device, whatever its tensors lie on.
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[grid](*arguments, **constants, **OPTIONS)
