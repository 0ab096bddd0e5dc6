"""Ranks on two hosts that are two network namespaces of this machine, joined by a cable that can be pulled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import small_training

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


@dataclass
class Host:
    """One torchrun in a namespace of its own."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def end(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            subprocess.run(["pkill", "-9", "-s", str(self.process.pid)], check=False)
            self.process.kill()
            self.process.wait()


def start(number: int, folder: Path, words: list[str]) -> Host:
    """Two of four ranks, on a host with a name that nobody can look up."""
    output = folder / f"output-{number}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
    torchrun += ["--nproc-per-node", "2", "--master-addr", ADDRESSES[0], "--master-port", "29431"]
    named = ["unshare", "-u", "sh", "-c", f'hostname node-{number} && exec "$0" "$@"', *torchrun]
    command = ["ip", "netns", "exec", SPACES[number], *named, "-m", "--", f"domainpar.{words[0]}", *words[1:]]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return Host(process, output)


def test_two_hosts_train_to_the_bits_of_one(cable, store, tmp_path):
    hosts = [start(number, tmp_path, small_training(store, tmp_path / "two")) for number in (0, 1)]
    codes = [host.end(200) for host in hosts]
    assert codes == [0, 0], hosts[0].text + hosts[1].text
    subprocess.run([sys.executable, "-m", *_alone(store, tmp_path / "one")], check=True, capture_output=True)
    of_two, of_one = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("two", "one"))
    assert of_two["ranks"] == 4
    assert of_two["parameters_sha256"] == of_one["parameters_sha256"]


def _alone(store: Path, out: Path) -> list[str]:
    words = small_training(store, out)
    return [f"domainpar.{words[0]}", *words[1:]]


def test_a_pulled_cable_is_noticed_and_the_ranks_behind_it_are_named(cable, store, tmp_path, measured):
    timeout = 5
    words = small_training(store, tmp_path / "run", "--timeout", str(timeout), epochs=100_000)
    hosts = [start(number, tmp_path, words) for number in (0, 1)]
    give_up_at = time.monotonic() + 200
    while "step=20 " not in hosts[0].text:
        assert time.monotonic() < give_up_at, hosts[0].text + hosts[1].text
        time.sleep(0.1)
    run("ip", "-n", SPACES[0], "link", "set", CABLE[0], "down")
    pulled = time.monotonic()
    while "domainpar: error: " not in hosts[0].text:
        assert time.monotonic() < pulled + 60, hosts[0].text
        time.sleep(0.1)
    measured("pulled cable, beyond the timeout, until it is named", time.monotonic() - pulled - timeout)
    codes = [host.end(100) for host in hosts]
    measured("pulled cable, beyond the timeout, until both hosts have ended", time.monotonic() - pulled - timeout)
    assert 0 not in codes
    text = hosts[0].text
    assert "  rank 2 on node-1: " in text
    assert "no sign of life" in text
    assert "domainpar: error: ranks 2, 3 did not come: " in text
    assert "| rank 2/4 host node-1 | step " in text
