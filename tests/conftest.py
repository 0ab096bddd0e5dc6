"""One thread, as in every rank: other numbers of threads may give other bits."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
