"""Programs on a machine with other instructions, as far as kernels know."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from domainpar.testing import patient

OTHERS = {
    "vectors of 256 bits": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,-avx512f"},
    "of 128 bits, no multiply-add": {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "-avx,-fma"},
}

needs_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="not an x86-64")

WITHOUT_512_BITS = """
import llvmlite.binding
llvmlite.binding.get_host_cpu_features = dict  # as a machine would say that has none
"""


def printed_on(machine: str, program: str, folder: Path, cache: Path, timeout: float = 300) -> list[str]:
    """The words that a program prints on one of `OTHERS`, for which its kernels are compiled anew, into `cache`."""
    tests = Path(__file__).parent
    path = os.pathsep.join(map(str, (tests, tests.parent)))
    environment = {**os.environ, **OTHERS[machine], "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": path}
    command = [sys.executable, "-c", WITHOUT_512_BITS + program]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patient(timeout)
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()
