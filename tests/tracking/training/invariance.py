"""What a training run leaves that must not depend on ranks, as hashes; importable by spawned ranks."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from proving import no_rank_holds_all

from domainpar.common.agreement import gather
from domainpar.runs.checkpoint import Checkpoints
from domainpar.tracking.config import TrainConfig
from domainpar.tracking.training.metrics import EDGE_METRICS
from domainpar.tracking.training.sampler import samples_of
from domainpar.train import train

SMALL = {"hidden": 16, "graph_iters": 2, "epochs": 2, "lr": 1e-2, "overwrite": True}


def results(world, store, out, flags):
    """Train, then score every event: losses and metrics of all steps, parameters, and scores, one hash each."""
    config = TrainConfig(**{**SMALL, "store": str(store), "out": str(out), **flags})
    run = train(config, Path(store), world)
    world.transport.barrier()  # rank 0 writes its last line after the last collective
    written = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    told = [{name: record.get(name) for name in TOLD} for record in written]
    checkpoints = Checkpoints(run.directory / "checkpoints")
    checkpoint = checkpoints.place(checkpoints.pointed("last")) if world.is_root else None
    world.transport.barrier()
    return {
        "steps": json.dumps(told),
        "parameters": parameters_of(run),
        "scores": hashlib.sha256(scores_of_all_edges(run, world)).hexdigest(),
        "checkpoint": None if checkpoint is None else [(checkpoint / name).read_bytes() for name in FILES],
    }


def parameters_of(run):
    """One hash of all parameters."""
    return hashlib.sha256(
        b"".join(value.numpy().tobytes() for value in run.trainer.model.state_dict().values())
    ).hexdigest()


TOLD = (
    *("split", "epoch", "step", "loss", "lr", "grad_norm", *(metric.name for metric in EDGE_METRICS)),
    *("edges", "edges_not_scored", "target_edges", "counted_against"),
)
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def scores_of_all_edges(run, world):
    """Logits of every edge of every event in global order, as bytes, whoever computed them."""
    pieces, proving = [], False
    for number, sample in enumerate(samples_of(run.store.events(), None)):
        part = run.trainer.loader.load(sample) if number % world.num_data_groups == world.data_group else None
        mine = {}
        if part is not None:
            with torch.no_grad():
                logits = run.trainer.model(part.graph, part.halo)
            plan = part.graph.plan
            mine = {
                "ids": plan.edge_ids[plan.edge_owned].tolist(),
                "logits": logits[torch.from_numpy(plan.edge_owned)].tolist(),
                "held": plan.local_ids.tolist(),
                "ends": plan.local_ids[plan.edge_rows].tolist(),
            }
        everyone = gather(world.transport, mine)
        proving |= no_rank_holds_all([(one["held"], one["ends"]) for one in everyone if one])
        ids = np.concatenate([np.array(one["ids"], int) for one in everyone if one])
        logits = np.concatenate([np.array(one["logits"], float) for one in everyone if one])
        assert len(ids) == sample.record.num_edges
        pieces.append(logits[np.argsort(ids)].tobytes())
    assert proving or world.domain.size == 1, "of each event some rank holds all nodes that have edges"
    return b"".join(pieces)


def many_results(world, store, out, cases):
    """Several runs in one launch of processes."""
    return [results(world, store, f"{out}-{number}", flags) for number, flags in enumerate(cases)]
