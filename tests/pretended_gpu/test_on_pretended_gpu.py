"""Every test that needs a GPU, on a pretended one; and the counts of a step there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import card
import pytest

from domainpar.testing import patient

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def environment():
    try:
        return {**os.environ, **card.environment(), "OMP_NUM_THREADS": "1"}
    except card.Missing as why:
        pytest.skip(str(why))


@pytest.mark.slow
def test_every_test_that_needs_a_gpu_passes_on_a_pretended_one(environment):
    files = [path for path in TESTS.rglob("test_*.py") if "@needs_gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", *map(str, files)]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=patient(500)
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-3000:]
    assert len(files) >= 2


TRAINER = """
import sys
from pathlib import Path
import card, json, torch
from random_store import write_random_store
from domainpar.tracking.events.store import EventStore
from domainpar.nn.options import NetworkOptions
from domainpar.tracking.networks.catalogue import build_model
from domainpar.parallel.world import World
from domainpar.tracking.training.loop import Schedule, Trainer
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of

store = EventStore(Path(write_random_store(Path(sys.argv[1]), 1, 0, 20, 40, 2, compared=False)))
world = World.alone("cuda")
sizes = len(store.feature_names), len(store.edge_feature_names)
options = NetworkOptions(hidden=16, graph_iters=4, dropout=float(sys.argv[2]))
model = build_model("interaction", *sizes, options).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
trainer = Trainer(model, optimizer, PartLoader(store, world), world, Schedule(1e-3, "constant", 0, 9, 1), clip=1.0)
samples = samples_of(store.events(), None)[:1]
"""

COUNTED = """
trainer.step(samples, 0)  # the first one loads, and sorts edges by node
card.reset()
trainer.step(samples, 1)
print(json.dumps(card.counts()))
"""

SPOILT = """
plain = model.read
def read(*given):
    said = plain(*given)
    if said.edges.requires_grad:
        said.edges.register_hook(lambda gradient: 1e20 * gradient)
    return said
model.read = read
trainer.step(samples, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "most_launches"), [("0", 1150), ("0.1", 2250)])
def test_the_host_waits_once_in_a_step_of_plain_torch(environment, tmp_path, dropout, most_launches):
    """Launches are those of plain torch, which makes one for each operation."""
    launches, waits = _counted(environment, tmp_path, "torch", dropout)
    assert waits == {"copy gpu to host": 1}
    assert launches <= most_launches


def test_a_step_of_own_kernels_is_at_most_150_launches_and_one_wait(environment, tmp_path):
    """Also with dropout, whose random bits are made in the kernels."""
    pytest.importorskip("triton")
    launches, waits = _counted(environment, tmp_path, "triton", "0.1")
    assert waits == {"copy gpu to host": 1}
    assert launches <= 150


@pytest.mark.slow
def test_a_gradient_that_is_too_large_for_own_kernels_is_named_by_its_layer(environment, tmp_path):
    pytest.importorskip("triton")
    done = _trained(environment, tmp_path, "triton", "0", SPOILT)
    assert "a gradient is not finite, or larger than 2^26" in done.stderr
    assert "first in layer head (backward) | event" in done.stderr


def _counted(environment, tmp_path, engine, dropout):
    """Launches of a training step of hidden 16 x 4: as many as of any width, and for what the host waited how often."""
    done = _trained(environment, tmp_path, engine, dropout, COUNTED)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    return sum(counts["launches"].values()), counts["waits"]


def _trained(environment, tmp_path, engine, dropout, program):
    """What a program with a trainer on a small event came to."""
    path = os.pathsep.join([environment["PYTHONPATH"], str(TESTS)])
    asked = {"PYTHONPATH": path, "DOMAINPAR_GPU_ENGINE": engine, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TRAINER + program, str(tmp_path), dropout]
    return subprocess.run(command, env={**environment, **asked}, capture_output=True, text=True)
