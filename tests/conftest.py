"""One thread, as in every rank: other numbers of threads may give other bits. Signs of life of long tests."""

import gc
import multiprocessing.forkserver
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from marks import drawn

from domainpar.common.words import PROGRESS_LOG

_A_DAY = 86_400.0

# How long an example takes to draw or to try is a matter of the machine, and of what else it does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

MAY_BE_MISSING = (
    "no GPU|there is a GPU|chromium|hadolint|lightning|mkdocs|tensorboard",
    "root|unshare|namespaces|no right to|small /dev/shm",  # what only some may do
    "C library|compiler|no g\\+\\+|cannot be held on a core",
    "products keep rows apart|no Python of that kind|fixed address|not an x86-64|Yama|does not read other",
    "rank 0 saves|an environment of its own",
)
"""Reasons for a test to be skipped where all is installed that `make test` installs; any other one hides a test."""

READ_BEFORE_RANKS_ARE_FORKED = ["pytest", "hypothesis", "domainpar.tracking.training.run"]
"""What most functions of tests need, read once for all ranks that are processes over gloo: half the cost of each."""


def preload(names: list[str], plain=multiprocessing.forkserver.set_forkserver_preload) -> None:
    plain([*names, *READ_BEFORE_RANKS_ARE_FORKED])


multiprocessing.forkserver.set_forkserver_preload = preload


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
        PROGRESS_LOG.say(str(self), sys.stderr)
        with PROGRESS_LOG.heard(self):
            return (yield)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.append(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.remove(nodeid)
        self.done += 1
        PROGRESS_LOG.spoke()


class Skips:
    """Ends a run in failure if tests were skipped for reasons that are not in `MAY_BE_MISSING`."""

    def __init__(self) -> None:
        self.others: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if not re.search("|".join(MAY_BE_MISSING), reason):
                self.others[report.nodeid] = reason

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, reason in self.others.items():
            terminalreporter.write_line(f"skipped for a reason that tests/conftest.py does not list: {name}: {reason}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.others and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


LONG = (
    "bench/test_exchange bench/test_campaign bench/test_grid bench/test_programs bench/test_scaling",
    "commands/test_doctor commands/test_export commands/test_first_lines commands/test_interrupted commands/test_serve",
    "examples/test_examples examples/test_showers test_notebooks test_planted test_wheel",
    "nn/test_instructions pretended_gpu/test_on_pretended_gpu pretended_gpu/test_ranks",
    "tracking/events/test_acts_maker tracking/training/test_covering tracking/training/test_tasks",
)
"""Files with tests of ten seconds and more: they run first, so that none is left alone at the end."""


gc.disable()  # while tests are collected: modules and tests stay, and looking at them would take a third of the time


def pytest_collection_finish() -> None:
    """What has been imported by now stays: else each full collection of garbage would look at all of it again."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--listed-skips", action="store_true", help="fail if a test is skipped for a reason not listed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the slow tests a share that a seed draws, each by its name: the same in every process. Long ones go first."""
    share, seed = float(os.environ.get("SHARE", "1")), os.environ.get("DRAW_SEED", "0")
    rest = [item for item in items if item.get_closest_marker("slow") and not drawn(item, share, seed)]
    config.hook.pytest_deselected(items=rest)
    left_out = set(rest)
    long = {Path(__file__).parent / f"{name}.py" for name in " ".join(LONG).split()}
    items[:] = sorted((item for item in items if item not in left_out), key=lambda item: item.path not in long)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--listed-skips"):
        config.pluginmanager.register(Skips(), "skips")
    if config.getoption("numprocesses", None):  # else the output of this process is that of the test that runs
        config.pluginmanager.register(Progress(), "progress")
    else:  # on a busy machine any command may be silent for long; what it says then is the matter of few tests
        PROGRESS_LOG.silence = _A_DAY
