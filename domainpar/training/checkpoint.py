"""Checkpoints: the same bytes from 1 and from 8 ranks, whole or not there at all, and checked when loaded.

    checkpoints/step_000120/  model.safetensors  optimizer.safetensors  state.json  manifest.json
    checkpoints/last, checkpoints/best             the names of two of them

Rank 0 writes. Nothing that depends on ranks, times or hosts goes in. A checkpoint is written under another name,
flushed to disk and renamed; then the pointers are replaced. Whenever a save is killed, `last` and `best` lead to a
whole checkpoint. The sha256 of each file is in its manifest, since neither torch nor safetensors would notice a
flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
KEEP = 3
PARTIAL = ".partial-"  # being written
REPLACED = ".replaced-"  # about to be replaced by another one of the same step


@dataclass(frozen=True)
class TrainingState:
    """Where training stands.

    Attributes:
        step: Optimiser steps done.
        epoch: Epoch that the next step belongs to, from 0.
        step_in_epoch: Steps of that epoch already done.
        best: Best value of the validation metric so far; None before the first.
        best_step: Step it was reached at.
        dataset: Digest of the store.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    best: float | None = None
    best_step: int | None = None
    dataset: str = ""


def parameters_sha256(model: nn.Module) -> str:
    """One hash of all parameters, by name: what rank invariance is shown with."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Checkpoints:
    """The checkpoints of one run. Only rank 0 saves; every rank may load."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainingState, best: bool) -> Path:
        """Write a checkpoint, make it the last (and the best), and drop old ones."""
        files = {
            "model.safetensors": tensors_to_bytes(_cpu(_model_tensors(model))),
            "optimizer.safetensors": tensors_to_bytes(_cpu(_optimizer_tensors(model, optimizer))),
            "state.json": _json(asdict(state)),
        }
        files["manifest.json"] = _json({name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
        self._tidy_up()
        final = self.directory / f"step_{state.step:06d}"
        partial = self.directory / f"{PARTIAL}{final.name}"
        partial.mkdir(parents=True)
        for name, content in files.items():
            _write(partial / name, content)
        _sync(partial)
        self._put(partial, final)
        for pointer in ("last", "best") if best else ("last",):
            self._point(pointer, final.name)
        self._drop_old()
        return final

    def find(self, which: str = "last") -> Path:
        """Directory of the `last` or the `best` checkpoint.

        Raises:
            ValueError: If there is none.
        """
        pointer = self.directory / which
        if not pointer.is_file():
            raise ValueError(f"no {which} checkpoint in {self.directory}; train first, or name another run.")
        name = pointer.read_text().strip()
        replaced = self.directory / f"{REPLACED}{name}"  # stands in if a save was killed between its two renames
        return replaced if replaced.is_dir() and not (self.directory / name).is_dir() else self.directory / name

    def load(self, which: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
        """Load the `last` or `best` checkpoint into a model, and into its optimiser.

        Raises:
            ValueError: If there is none, it is damaged, or it belongs to another network.
        """
        found = self.find(which)
        files = _verified(found)
        weights = tensors_from_bytes(files["model.safetensors"])
        _check_same_shapes(found, weights, model)
        with torch.no_grad():
            for name, value in _model_tensors(model).items():
                value.copy_(weights[name])
        if optimizer is not None:
            _fill_optimizer(model, optimizer, tensors_from_bytes(files["optimizer.safetensors"]))
        return TrainingState(**json.loads(files["state.json"]))

    def _put(self, partial: Path, final: Path) -> None:
        """Give a whole checkpoint its name. One that has it already stays whole beside it until then."""
        replaced = self.directory / f"{REPLACED}{final.name}"
        if final.is_dir():
            final.rename(replaced)
        partial.rename(final)
        if replaced.is_dir():
            shutil.rmtree(replaced)

    def _point(self, pointer: str, name: str) -> None:
        temporary = self.directory / f"{PARTIAL}{pointer}"
        _write(temporary, f"{name}\n".encode())
        os.replace(temporary, self.directory / pointer)
        _sync(self.directory)

    def _tidy_up(self) -> None:
        """Remove what a killed save left, once everything that is pointed to has its name back."""
        for replaced in self.directory.glob(f"{REPLACED}*"):
            final = self.directory / replaced.name.removeprefix(REPLACED)
            if final.is_dir():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)
        for partial in self.directory.glob(f"{PARTIAL}*"):
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink()

    def _drop_old(self) -> None:
        kept = {self.find(which) for which in ("last", "best") if (self.directory / which).is_file()}
        steps = [path for path in self.directory.glob("step_*") if path.is_dir()]
        steps.sort(key=lambda path: (len(path.name), path.name))  # by number, beyond a million too
        for old in steps[:-KEEP]:
            if old not in kept:
                shutil.rmtree(old)


def _verified(directory: Path) -> dict[str, bytes]:
    """All files of a checkpoint, each as its manifest says."""
    instead = f"copy it anew, or write the name of another step into {directory.parent}/last"
    try:
        listed = json.loads((directory / "manifest.json").read_bytes())
        files = {name: (directory / name).read_bytes() for name in FILES}
        listed = {name: str(listed[name]) for name in FILES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"checkpoint {directory} cannot be read: {what}; {instead}.") from error
    for name, content in files.items():
        if (found := hashlib.sha256(content).hexdigest()) != listed[name]:
            raise ValueError(
                f"checkpoint {directory}: {name} has sha256 {found[:12]}, its manifest says {listed[name][:12]}; "
                f"the file is damaged; {instead}."
            )
    return files


def _check_same_shapes(directory: Path, weights: dict[str, Tensor], model: nn.Module) -> None:
    expected = {name: (tuple(value.shape), value.dtype) for name, value in _model_tensors(model).items()}
    found = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"checkpoint {directory} belongs to another network: {name} is {found.get(name, 'not there')}, this "
                f"network has {expected.get(name, 'no such parameter')}; give the flags the run was trained with."
            )


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once: a network with shared weights has fewer than one without."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as tensors named after parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}:{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _fill_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        parameter_name, key = name.rsplit(":", 1)
        parameter = parameters[parameter_name]
        optimizer.state[parameter][key] = value.clone() if key == "step" else value.to(parameter.device).clone()


def _cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}


def _json(values: object) -> bytes:
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
