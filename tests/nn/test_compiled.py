"""Kernels that are kept on disk are those of the sources as they are now."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import domainpar
from domainpar.nn import operations, program

PROGRAM = """
import torch
from domainpar.nn import operations
operations.multiply_rows(torch.float32, torch.float32)
(kernel,) = operations._alive
print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""


def _hits_and_misses(directory):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=directory, capture_output=True, text=True, timeout=120, check=True
    )
    return tuple(int(number) for number in found.stdout.split())


@pytest.mark.slow
def test_a_kernel_is_taken_from_disk_until_a_source_of_another_kernel_changes(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    source = Path(domainpar.__file__).parent
    for package in ("domainpar", "partitioners"):
        shutil.copytree(source.parent / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _hits_and_misses(tmp_path) == (0, 1)
    assert _hits_and_misses(tmp_path) == (1, 0)
    lanes = tmp_path / "domainpar" / "nn" / "lanes.py"
    lanes.write_text(lanes.read_text() + "\n# changed\n")
    assert _hits_and_misses(tmp_path) == (0, 1)


def test_all_operations_share_one_stamp():
    one = torch.float32
    for kernel in (operations.multiply_rows, operations.outer_of_rows, operations.copy_columns):
        kernel(one, one)
    operations.layer_forward(16, one, one)
    operations.layer_backward(16, one, one, one, one)
    made = (program._run, *operations._alive)
    assert len(made) >= 6
    assert len({kernel._cache._cache_file._source_stamp for kernel in made}) == 1
