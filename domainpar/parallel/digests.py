"""Checksums of what all ranks must hold alike: their tensors, and the program itself."""

from __future__ import annotations

import hashlib
import json
import platform
import zlib
from collections.abc import Hashable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from domainpar.common.agreement import differing_ranks, gather
from domainpar.parallel.transport import Transport

Name = TypeVar("Name", bound=Hashable)


def digest(tensors: Mapping[str, Tensor]) -> int:
    """A checksum of the bits of some tensors, in the order of their names; one flipped bit changes it."""
    checksum = 0
    for name in sorted(tensors):
        if tensors[name].numel():
            # As bytes: numpy knows no bfloat16, and equal values may have different bits (0.0 and -0.0).
            bits = bits_of(tensors[name].detach().cpu().contiguous()).numpy()
            checksum = zlib.crc32(bits, checksum)  # type: ignore[arg-type]
    return checksum


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in one dimension."""
    flat = tensor.reshape(-1)
    if len(flat) < 2:  # of which the stride may be anything
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def checksums(tensors: Mapping[Name, Tensor]) -> dict[Name, int]:
    """A checksum of the bits of each tensor. The host waits for a GPU once."""
    bits = [bits_of(tensor.detach()) for tensor in tensors.values()]
    if any(each.is_cuda for each in bits):
        joined = torch.cat([each.to(next(other.device for other in bits if other.is_cuda)) for each in bits]).cpu()
        bits = list(joined.split([len(each) for each in bits]))
    return {name: zlib.crc32(each.cpu().numpy()) for name, each in zip(tensors, bits)}  # type: ignore[arg-type]


def what_differs(tensors: Mapping[str, Tensor], transport: Transport) -> tuple[str, list[int]] | None:
    """Compare what every rank holds by its checksum. *Collective*.

    Returns:
        The difference in words, and the ranks that differ from the majority; None, on all ranks, if nothing differs.
    """
    if len(set(transport.all_gather(digest(tensors).to_bytes(4, "little")))) == 1:
        return None
    of_ranks = gather(transport, checksums(tensors))
    differing = [name for name in of_ranks[0] if len({held.get(name) for held in of_ranks}) > 1]
    if not differing:  # a rank that lacks tensors has others than rank 0
        differing = sorted({name for held in of_ranks for name in held} - set(of_ranks[0]))
    drifted = differing_ranks([json.dumps(held, sort_keys=True) for held in of_ranks])
    others = "the others" if 2 * len(drifted) < transport.size else "rank 0"
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    what = (
        f"{transport.name_ranks(drifted)} no longer {'holds' if len(drifted) == 1 else 'hold'} what {others} "
        f"{'hold' if others == 'the others' else 'holds'}: {differing[0]}{more} of {len(of_ranks[0])} tensors differ"
    )
    return what, drifted


def about_this_program() -> dict[str, str]:
    """Versions and code, which decide results and must be the same on every rank."""
    packages = {name: installed(name) or "not installed" for name in ("torch", "numpy", "numba")}
    return {"the code of domainpar": code_digest(), "Python": platform.python_version(), **packages}


def installed(package: str) -> str | None:
    """Version of a package; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def code_digest() -> str:
    """Hash of the source files of `domainpar` and `partitioners`, as far as they are files here."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    # Without compiled files and data: what is imported decides results.
    for folder in (package, package.parent / "partitioners"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
