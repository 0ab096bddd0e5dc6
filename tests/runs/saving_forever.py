"""A process that saves checkpoints without an end, to be killed; importable by the processes of tests."""

from pathlib import Path

import torch

from domainpar.common import faults
from domainpar.nn.interaction import InteractionNetwork
from domainpar.runs.checkpoint import Checkpoints, TrainingState


def network(seed=0):
    return InteractionNetwork(3, 6, hidden=16, graph_iters=2, seed=seed)


def weights_of_step(model, step):
    """Set all parameters to what they are after a step, so that any checkpoint can be told to be that of its step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))


def save_forever(directory, first):
    """Save step after step, beginning with `first`; every third one is the best, and every fifth is saved twice."""
    torch.set_num_threads(1)
    faults.arm(0)
    checkpoints, model = Checkpoints(Path(directory)), network()
    optimizer = torch.optim.AdamW(model.parameters())
    step = first
    while True:
        weights_of_step(model, step)
        for _ in range(2 if step % 5 == 0 else 1):
            checkpoints.save(model, optimizer, TrainingState(step=step), best=step % 3 == 0)
            checkpoints.drop_old()
        step += 1
