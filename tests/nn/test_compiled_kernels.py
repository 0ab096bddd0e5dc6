"""The GPU engine's kernels as the compiler makes them for two architectures; no GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from domainpar.testing import patient

pytest.importorskip("triton")
PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "compiled.py"
MOST_STACK = {
    (64, "full"): 0,
    (64, "tf32x3"): 160,
    (64, "bf16"): 32,
    (128, "full"): 32,
    (128, "tf32x3"): 64,
    (128, "bf16"): 64,
}
"""Bytes that a thread has in memory for want of registers, by hidden width and precision."""


def compiled(arch, hidden, precision, *more):
    words = ["--arch", arch, "--hidden", hidden, "--precision", precision, "--json", *more]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, PROGRAM, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(400))
    assert done.returncode == 0, done.stderr[-3000:]
    *_, kernels = json.loads(done.stdout)
    return kernels


# Of other networks than the default one: (90, 64, "full") has those of all.
SPILLED = {"tables [4], widths [64, 64]": 16, "tables [64], widths [64, 64, 1]": 280}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "hidden", "precision"),
    [(90, 64, "full"), (80, 64, "full"), (80, 64, "tf32x3"), (90, 128, "bf16")],
)
def test_kernels_fit_the_registers_add_no_floats_by_atomics_and_keep_the_order_of_products(arch, hidden, precision):
    everything = (arch, hidden, precision) == (90, 64, "full")
    kernels = compiled(arch, hidden, precision, *["--everything"] * everything)
    assert not everything or "gates_back" in {kernel["name"] for kernel in kernels}
    assert {"rows_forward", "rows_backward", "node_products_back", "sums_at_ends", "edge_losses"} <= {
        kernel["name"] for kernel in kernels
    }
    for kernel in kernels:
        about = f"{kernel['name']} {kernel['about']}"
        most = next((of for name, of in SPILLED.items() if everything and kernel["about"].startswith(name)), 0)
        assert kernel["stack"] <= max(most, MOST_STACK[hidden, precision]), about
        assert all(".F32" not in name and ".F64" not in name and "64" in name for name in kernel["atomics"]), about
        assert kernel["forks"] == 0, about
    of_hidden = [kernel for kernel in kernels if kernel["name"] == "rows_backward"]
    assert all(kernel["atomics"] for kernel in of_hidden)
    unit = {"full": "FFMA", "tf32x3": "HMMA", "bf16": "HMMA"}[precision]
    # In bf16 those of nodes stay in float32.
    on_unit = [bool(kernel["instructions"].get(unit) or kernel["instructions"].get("HGMMA")) for kernel in of_hidden]
    assert any(on_unit) if precision == "bf16" else all(on_unit)
