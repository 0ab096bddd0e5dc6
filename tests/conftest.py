"""One thread, as in every rank: other numbers of threads may give other bits. Signs of life of long tests."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from domainpar.words import VOICE

if not torch.cuda.is_available():
    # Triton reads it when it is first imported: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Progress:
    """Says which tests run where no dot has come for long; for the process that prints the dots of all others."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.done = 0

    def __str__(self) -> str:
        now = ", ".join(self.running) or "none yet: all are collected first"
        return f"{self.done:,} tests done; running: {now}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        VOICE.say(str(self), sys.stderr)
        with VOICE.heard(self):
            return (yield)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.append(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.remove(nodeid)
        self.done += 1
        VOICE.spoke()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # else the output of this process is that of the test that runs
        config.pluginmanager.register(Progress(), "progress")
