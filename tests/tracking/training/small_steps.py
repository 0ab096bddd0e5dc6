"""A short training on any number of ranks, as threads: what its `run.json` says."""

import json
from pathlib import Path

from domainpar.testing import run_ranks
from domainpar.tracking.config import TrainConfig
from domainpar.train import train

SMALL = {"hidden": 16, "graph_iters": 2, "epochs": 2, "lr": 1e-2}


def _train(world, store, out, flags):
    train(TrainConfig(**{**SMALL, **flags}, out=str(out)), Path(store), world)


def trained_with(store, out, ranks, **flags):
    """Train with some flags; what the run says of itself."""
    run_ranks(_train, ranks, store, out, flags)
    return json.loads((Path(out) / "run.json").read_text())
