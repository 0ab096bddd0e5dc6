"""The files of checkpoints: whole or not there at all, and checked when read. Knows bytes and names, no tensors.

    checkpoints/step_000120/  model.safetensors  optimizer.safetensors  state.json  manifest.json
    checkpoints/last, checkpoints/best             the names of two of them

A checkpoint is written under another name, flushed to disk and renamed; then the pointers are replaced. If the process
is killed at any moment, `last` and `best` lead to a whole checkpoint. The sha256 of each file is in its manifest, since
neither torch nor safetensors would notice a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from domainpar.common import faults
from domainpar.common.atomic_files import PARTIAL, json_bytes, sync_directory, write_synced, write_whole
from domainpar.common.problems import Problem
from domainpar.runs.own_files import remove

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
MANIFEST = "manifest.json"
KEEP = 3
REPLACED = ".replaced-"  # about to be replaced by another one of the same step

_NAME = re.compile(r"step_(\d{6,18})")
_MOST_OF_A_POINTER = 100  # bytes; a name is shorter


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step_{step:06d}"


def step_of(name: str) -> int:
    """The step of a checkpoint, by its name; -1 for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1


class CheckpointChoice(NamedTuple):
    """The checkpoint that a run resumes from."""

    name: str
    manifest: str  # hash of its manifest, which every rank must see under that name
    problems: Sequence[str] = ()  # of the preferred checkpoints, or of the pointer


class CheckpointFiles:
    """The checkpoints in one directory, which need not exist before the first is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._whole: set[str] = set()  # names that this process has written or verified

    def names(self) -> list[str]:
        """Names of the checkpoints there are, whole or not, by step."""
        names = {path.name.removeprefix(REPLACED) for path in self.directory.glob("*step_*") if path.is_dir()}
        return sorted((name for name in names if step_of(name) >= 0), key=step_of)

    def pointed(self, which: str) -> str:
        """The name that `last` or `best` holds; a Problem if there is none, or none of a checkpoint that is there."""
        pointer = self.directory / which
        try:
            with pointer.open("rb") as file:
                text = file.read(_MOST_OF_A_POINTER).decode(errors="replace")
        except OSError as error:
            hint, what = f"its checkpoints: {self._listed()}", f"{pointer} cannot be read: {error.strerror}"
            if isinstance(error, FileNotFoundError):
                what = f"no {which} checkpoint in {self.directory}"
                hint = hint if self.names() else "train first, or name another run"
            raise Problem(what, hint) from error
        name, another = text.rstrip(" \r\n"), "take --checkpoint last"
        if which == "last":
            another = f"write the name of one of these into it: {self._listed()}"
        if step_of(name) < 0:
            raise Problem(f"{pointer} holds {text[:40]!r}, which is no name of a checkpoint", another, file=pointer)
        if name not in self.names():
            raise Problem(f"{pointer} names {name}, which is not there", another)
        return name

    def place(self, name: str) -> Path:
        """Where a checkpoint lies: one that a killed save was about to replace stands in for the new one."""
        final, replaced = self.directory / name, self.directory / f"{REPLACED}{name}"
        return replaced if replaced.is_dir() and not final.is_dir() else final

    def read(self, name: str, manifest: str | None = None) -> dict[str, bytes]:
        """The files of a checkpoint, each with the hash that its manifest says.

        Raises:
            Problem: If one is missing, damaged, or another than was expected: `manifest` is the hash of the manifest.
        """
        place = self.place(name)
        hint = f"copy it anew, or write the name of another step into {self.directory / 'last'}"
        try:
            described = (place / MANIFEST).read_bytes()
            hashes = {file: str(json.loads(described)[file]) for file in FILES}
            files = {file: (place / file).read_bytes() for file in FILES}
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"checkpoint {place} cannot be read: {type(error).__name__}: {error}"
            raise Problem(what, hint, file=place / MANIFEST) from error
        for file, content in files.items():
            if (sha256 := _sha256(content)) != hashes[file]:
                what = f"{file} has sha256 {sha256[:12]}, its manifest says {hashes[file][:12]}; the file is damaged"
                raise Problem(f"checkpoint {place}: {what}", hint, file=place / file)
        if manifest is not None and _sha256(described) != manifest:
            what = f"checkpoint {place}: its manifest is another one than rank 0 has read"
            raise Problem(what, "let every rank see the same file system, without a stale copy")
        self._whole.add(name)
        return files

    def choose(self, strict: bool = False) -> CheckpointChoice:
        """The checkpoint to resume from: that of `last`, or if it is damaged the newest good one before it.

        If the pointer leads nowhere, all are candidates, newest first. A pointer that the user has set back is
        respected: checkpoints newer than `last` are tried only when none before it is good.

        Raises:
            Problem: If none is good; with `strict` also if it is another one than `last` names, or not the newest.
        """
        if not self.names():
            self.pointed("last")
        names, problems = self.names(), []
        try:
            first = names.index(self.pointed("last"))
            if first != len(names) - 1:
                problems.append(f"{self.directory / 'last'} names {names[first]} though {names[-1]} is there")
            candidates = names[first::-1] + names[first + 1 :]
        except Problem as wrong:
            problems.append(wrong.what)
            candidates = names[::-1]
        for name in candidates:
            try:
                self.read(name)
            except Problem as damaged:
                problems.append(damaged.what)
                continue
            manifest = _sha256((self.place(name) / MANIFEST).read_bytes())
            if strict and problems:
                raise Problem("; ".join(problems), f"--strict-resume is given; without it {name} would be used")
            return CheckpointChoice(name, manifest, tuple(problems))
        raise Problem(
            f"no checkpoint in {self.directory} is whole: " + "; ".join(problems),
            f"copy one anew, or start again without --resume; there: {self._listed()}",
        )

    def write(self, step: int, files: Mapping[str, bytes], best: bool) -> Path:
        """Write a checkpoint, then make it the last (and the best); after an OSError nothing of it is left."""
        files = {**files, MANIFEST: json_bytes({name: _sha256(content) for name, content in files.items()})}
        final = self.directory / name_of(step)
        try:
            self._tidy_up()
            partial = self.directory / f"{PARTIAL}{final.name}"
            partial.mkdir(parents=True)
            for number, (name, content) in enumerate(files.items()):
                write_synced(partial / name, content)
                if number == 0:
                    faults.reach("save:files")
            sync_directory(partial)
            faults.reach("save:rename")
            # A checkpoint that has this name already stays whole beside the new one until that has it.
            replaced = self.directory / f"{REPLACED}{final.name}"
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
            sync_directory(self.directory)
            if replaced.exists():
                remove([replaced])
            faults.reach("save:pointer")
            for pointer in ("last", "best") if best else ("last",):
                write_whole(self.directory / pointer, f"{final.name}\n".encode())
        except OSError:
            with suppress(OSError):  # the reason matters more than the remains
                self._tidy_up()
            raise
        self._whole.add(final.name)
        return final

    def drop_old(self) -> None:
        """Remove checkpoints older than the three newest good ones; never those that `last` and `best` name.

        Damaged ones are not among the three, and stay until they are older than those. Nor are those of later steps
        than `last`: a run that went back writes them anew.

        Raises:
            OSError: If one cannot be removed.
        """
        faults.reach("save:drop")
        named = {self.pointed(which) for which in ("last", "best") if (self.directory / which).is_file()}
        newest = step_of(self.pointed("last"))
        good = [name for name in self.names() if step_of(name) <= newest and self._is_whole(name)][-KEEP:]
        for name in self.names() if len(good) == KEEP else ():
            if step_of(name) < step_of(good[0]) and name not in named:
                shutil.rmtree(self.place(name))
                self._whole.discard(name)

    def _is_whole(self, name: str) -> bool:
        with suppress(Problem):  # read once: hashing all checkpoints at every save would take long
            return name in self._whole or bool(self.read(name))
        return False

    def _listed(self) -> str:
        return ", ".join(reversed(self.names())) or "none"

    def _tidy_up(self) -> None:
        """Remove the remains of a killed save, once every checkpoint that is pointed to has its name back."""
        for replaced in self.directory.glob(f"{REPLACED}*"):
            final = self.directory / replaced.name.removeprefix(REPLACED)
            if final.exists():
                remove([replaced])
            else:
                replaced.rename(final)
        remove(self.directory.glob(f"{PARTIAL}*"))  # a pointer that was being written, too


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
