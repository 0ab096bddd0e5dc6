"""What all ranks must have in common before they work: the program itself, and what it was asked to do."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

from domainpar.problems import Problem
from domainpar.words import several


def wrong_number(wanted: int | None, started: int) -> Problem | None:
    """What is wrong with the number of ranks, if anything is."""
    if wanted in (None, started):
        return None
    return Problem(
        f"config wants {several(wanted, 'rank')}, {started} started",
        f"mpiexec -n {wanted} python -m ..., or leave --ranks away to take as many as are started",
    )


def about_this_program() -> dict[str, str]:
    """What decides results and must be the same on every rank: versions, and the code itself."""
    versions = {name: _version(name) for name in ("torch", "numpy", "numba")}
    return {"the code of domainpar": code_digest(), "Python": platform.python_version(), **versions}


@cache
def code_digest() -> str:
    """Hash of the source files of `domainpar` and `partitioners`, as far as they are files here."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in (package, package.parent / "partitioners"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
