"""One thread, as in every rank: other numbers of threads may give other bits."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is first imported: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
