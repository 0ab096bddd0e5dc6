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
from domainpar.tracking.networks.on_events import on_device
from domainpar.parallel.world import World
from domainpar.tracking.training.loop import Schedule, Trainer
from domainpar.tracking.training.parts import PartLoader
from domainpar.tracking.training.sampler import samples_of

store = EventStore(Path(write_random_store(Path(sys.argv[1]), 1, 0, 20, 40, 2, compared=False)))
world = World.alone("cuda")
sizes = len(store.feature_names), len(store.edge_feature_names)
options = NetworkOptions(hidden=16, graph_iters=4, dropout=float(sys.argv[2]))
model = on_device(build_model("interaction", *sizes, options), world.device)
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


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "most_launches"), [("0", 600), ("0.1", 1200)])
def test_the_host_waits_a_few_times_in_a_step(environment, tmp_path, dropout, most_launches):
    """Of hidden 16 x 4: launches are as many as of any width."""
    path = os.pathsep.join([environment["PYTHONPATH"], str(TESTS)])
    command = [sys.executable, "-c", TRAINER + COUNTED, str(tmp_path), dropout]
    done = subprocess.run(command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    # For the largest gradients, by which sums are scaled, and for what the step found.
    assert counts["waits"] == {"copy gpu to host": 2, "copy host to gpu": 2}
    assert sum(counts["launches"].values()) <= most_launches
