"""Checkpoints: weights, optimiser and position of a run, with the same bytes from 1 and from 8 ranks.

Rank 0 writes them. They contain nothing that depends on ranks, times or hosts, so a run can resume on other ranks.
`checkpoint_files` writes the files, and checks them when they are read.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from domainpar.common import faults
from domainpar.common.agreement import on_all, on_root
from domainpar.common.atomic_files import json_bytes
from domainpar.common.problems import Problem
from domainpar.common.words import PROGRESS_LOG
from domainpar.nn.optimizers import optimizer_name
from domainpar.parallel.world import World
from domainpar.runs.checkpoint_files import CheckpointChoice, CheckpointFiles, name_of


@dataclass(frozen=True)
class TrainingState:
    """Where training stands."""

    step: int = 0  # optimiser steps done
    epoch: int = 0  # that the next step belongs to, from 0
    step_in_epoch: int = 0  # steps of that epoch already done
    best: float | None = None  # value of the validation metric, the larger the better; None before the first
    best_step: int | None = None  # of the checkpoint that `best` names; None before the first
    best_epoch: int | None = None  # epochs done by then; None before the first, and of shipped networks
    dataset: str = ""  # digest of the store


def parameters_sha256(model: nn.Module) -> str:
    """One hash of all parameters, by name: the evidence of rank invariance."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        # Raw bytes, so that -0.0 and 0.0, or two NaNs, differ.
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Checkpoints(CheckpointFiles):
    """The checkpoints of one run. Only rank 0 saves; every rank may load."""

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState, best: bool) -> Path:
        """Write a checkpoint and make it the last (and the best); `drop_old` makes room afterwards.

        Raises:
            OSError: If it cannot be written; earlier checkpoints are as they were.
        """
        faults.reach("save")
        files = {
            "model.safetensors": tensors_to_bytes(_cpu(_model_tensors(model))),
            "optimizer.safetensors": tensors_to_bytes(_cpu(optimizer_tensors(model, optimizer))),
            "state.json": json_bytes({**asdict(state), "optimizer": optimizer_name(optimizer)}),
        }
        return self.write(state.step, files, best)

    def load(self, which: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
        """Load the `last` or `best` checkpoint, and no other, into a model, and into its optimiser.

        Raises:
            Problem: If there is none, it is damaged, or it belongs to another network.
        """
        name = self.pointed(which)
        try:
            files = self.read(name)
        except Problem as damaged:
            if which != "best":
                raise
            raise Problem(damaged.what, "copy it anew, or take the newest with --checkpoint last") from damaged
        state = self.fill(name, files, model, optimizer)
        if which == "best" and state.best_step not in (None, state.step):
            raise Problem(
                f"{self.directory / 'best'} names {name}, but then the best was that of step {state.best_step}: "
                "the pointer is damaged",
                f"write {name_of(state.best_step or 0)} into it if that is there, or take --checkpoint last",
            )
        return state

    def fill(
        self, name: str, files: dict[str, bytes], model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> TrainingState:
        """Fill a model, and its optimiser, from the files of a checkpoint; a Problem if they are another network's."""
        weights, tensors = tensors_from_bytes(files["model.safetensors"]), _model_tensors(model)
        state = json.loads(files["state.json"])
        saved, needed = (
            {name: (tuple(value.shape), value.dtype) for name, value in held.items()} for held in (weights, tensors)
        )
        # Compared before anything is copied: a network is filled whole or not at all.
        for tensor in sorted(needed.keys() | saved.keys()):
            if needed.get(tensor) != saved.get(tensor):
                raise Problem(
                    f"checkpoint {self.place(name)} belongs to another network: {tensor} is "
                    f"{saved.get(tensor, 'not there')}, this network has {needed.get(tensor, 'no such parameter')}",
                    "give the flags the run was trained with",
                )
        with torch.no_grad():
            for tensor, value in tensors.items():
                value.copy_(weights[tensor])
        # A run writes a file also before its first step, one without tensors; `recipes/ship.py` writes no bytes.
        if optimizer is not None and not files["optimizer.safetensors"]:
            what = f"checkpoint {self.place(name)} holds weights alone, as networks that are shipped do"
            raise Problem(what, "begin a run with them: --init")
        theirs = state.pop("optimizer", None)
        if optimizer is not None:
            if theirs != (ours := optimizer_name(optimizer)):
                raise Problem(
                    f"checkpoint {self.place(name)} was left by {theirs}, and what that keeps means nothing to {ours}",
                    f"give --optimizer {theirs}, or begin a new run with its weights: --init",
                )
            parameters, kept = dict(model.named_parameters()), tensors_from_bytes(files["optimizer.safetensors"])
            # Sorted: the order in which they were read differs between ranks.
            for label, value in sorted(kept.items()):
                of_parameter, key = label.rsplit(":", 1)
                parameter = parameters[of_parameter]
                # AdamW keeps its count of steps on the host, also for parameters on a GPU.
                optimizer.state[parameter][key] = value.clone() if key == "step" else value.to(parameter.device).clone()
        return TrainingState(**state)


def load_agreed(
    checkpoints: Checkpoints,
    which: str,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = False,
) -> TrainingState:
    """Load one checkpoint on all ranks, the same that rank 0 has verified. *Collective*.

    If `last` is damaged, the newest good one before it is taken and rank 0 warns. A damaged `best` is refused, because
    another network must not take its place.

    Args:
        checkpoints, world: Those of the run.
        which: `last` or `best`.
        model, optimizer: To be filled.
        strict: Refuse in place of taking another one.

    Raises:
        Refused: On all ranks alike, if there is none, none is good, or it belongs to another network.
    """
    if which != "last":
        return on_all(world.transport, lambda: checkpoints.load(which, model, optimizer))
    choice = CheckpointChoice(*on_root(world.transport, lambda: checkpoints.choose(strict)))
    if choice.problems and world.is_root:
        warn(f"{'; '.join(choice.problems)}; going on from {choice.name}")

    def load() -> TrainingState:
        files = checkpoints.read(choice.name, choice.manifest)
        return checkpoints.fill(choice.name, files, model, optimizer)

    return on_all(world.transport, load)


def first_not_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """The first parameter, or state of the optimiser, that holds a NaN or an infinity; None if there is none.

    Buffers may hold infinities, as masks often do.
    """
    for name, value in {**dict(model.named_parameters()), **optimizer_tensors(model, optimizer)}.items():
        # A sum is much faster than looking at each value; it may overflow though all of them are finite.
        if value.is_floating_point() and not (torch.isfinite(value.sum()) or torch.isfinite(value).all()):
            return name
    return None


def warn(text: str) -> None:
    """Print a warning in one piece, beside the progress bar; on rank 0."""
    PROGRESS_LOG.say(f"WARNING: {text}", sys.stderr)
    sys.stderr.flush()


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once: a network with shared weights has fewer than one without."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as tensors named after parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}:{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
