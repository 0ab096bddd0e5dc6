"""Ranks on two hosts that are two network namespaces of this machine, joined by a cable that can be pulled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from jobs import Job, running, small_training, started
from marks import fault

pytestmark = pytest.mark.faults

SPACES = ("dpar-a", "dpar-b")
ADDRESSES = ("10.199.77.1", "10.199.77.2")
CABLE = ("dpar-va", "dpar-vb")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def unplug() -> None:
    for space in SPACES:
        subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


@pytest.fixture
def cable() -> Iterator[None]:
    """Two network namespaces and a veth pair between them; skips where that may not be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` and root")
    unplug()
    try:
        for space in SPACES:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1])
        for space, end, address in zip(SPACES, CABLE, ADDRESSES):
            run("ip", "link", "set", end, "netns", space)
            run("ip", "-n", space, "address", "add", f"{address}/24", "dev", end)
            run("ip", "-n", space, "link", "set", end, "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        unplug()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield
    unplug()


def started_on(number: int, words: list[str]) -> AbstractContextManager[Job]:
    """Two of four ranks, on a host with a name that nobody can look up."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
    torchrun += ["--nproc-per-node", "2", "--master-addr", ADDRESSES[0], "--master-port", "29431"]
    named = ["unshare", "-u", "sh", "-c", f'hostname node-{number} && exec "$0" "$@"', *torchrun]
    return running(["ip", "netns", "exec", SPACES[number], *named, "-m", "--", f"domainpar.{words[0]}", *words[1:]])


@fault(9)
def test_two_hosts_train_to_the_bits_of_one(cable, store, tmp_path):
    words = small_training(store, tmp_path / "two")
    with started_on(0, words) as first, started_on(1, words) as second:
        codes = [host.wait(200).code for host in (first, second)]
    assert codes == [0, 0], first.text + second.text
    with started(None, 1, small_training(store, tmp_path / "one")) as alone:
        assert alone.wait().code == 0, alone.text
    of_two, of_one = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("two", "one"))
    assert of_two["ranks"] == 4
    assert of_two["parameters_sha256"] == of_one["parameters_sha256"]


@fault(33)
def test_a_pulled_cable_is_noticed_and_the_ranks_behind_it_are_named(cable, store, tmp_path, measured):
    timeout = 5
    words = small_training(store, tmp_path / "run", "--timeout", str(timeout), epochs=100_000)
    with started_on(0, words) as first, started_on(1, words) as second:
        first.wait_for("step=20 ", 200)
        run("ip", "-n", SPACES[0], "link", "set", CABLE[0], "down")
        pulled = time.time()
        first.wait_for("domainpar: error: ", 60)
        measured("pulled cable, beyond the timeout, until it is named", time.time() - pulled - timeout)
        ended = [host.wait(100) for host in (first, second)]
    last = max(host.ended for host in ended)
    measured("pulled cable, beyond the timeout, until both hosts have ended", last - pulled - timeout)
    assert 0 not in [host.code for host in ended]
    assert "  rank 2 on node-1: " in first.text
    assert "no sign of life" in first.text
    assert "domainpar: error: ranks 2, 3 did not come: " in first.text
    assert "| rank 2/4 host node-1 | step " in first.text
