"""What all ranks should hold alike, compared by checksums of its bits."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from domainpar.parallel.transport import Transport


def digest(tensors: Mapping[str, Tensor]) -> int:
    """A checksum of the bits of some tensors, in the order of their names; one flipped bit changes it."""
    checksum = 0
    for name in sorted(tensors):
        if tensors[name].numel():
            checksum = zlib.crc32(_bytes_of(tensors[name]), checksum)
    return checksum


def _bytes_of(tensor: Tensor) -> Any:
    """The bits of a tensor as they lie in the host's memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def what_differs(ours: Mapping[str, Tensor], transport: Transport) -> tuple[str, list[int]] | None:
    """Compare what every rank holds by its checksum. *Collective*.

    Returns:
        What differs, in words, and the ranks that differ from the most; None, on all ranks, if nothing does.
    """
    if len(set(transport.all_gather(digest(ours).to_bytes(4, "little")))) == 1:
        return None
    checksums = _of_all_ranks(ours, transport)
    differing = [name for name in checksums[0] if len({one.get(name) for one in checksums}) > 1]
    if not differing:  # a rank that lacks tensors has others than rank 0
        differing = sorted({name for one in checksums for name in one} - set(checksums[0]))
    strays = strays_among([json.dumps(one, sort_keys=True) for one in checksums])
    others = "the others" if 2 * len(strays) < transport.size else "rank 0"
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    what = (
        f"{transport.name_ranks(strays)} no longer {'holds' if len(strays) == 1 else 'hold'} what {others} "
        f"{'hold' if others == 'the others' else 'holds'}: {differing[0]}{more} of {len(checksums[0])} tensors differ"
    )
    return what, strays


def _of_all_ranks(ours: Mapping[str, Tensor], transport: Transport) -> list[dict[str, int]]:
    mine = {name: digest({name: tensor}) for name, tensor in ours.items()}
    return [json.loads(text) for text in transport.all_gather(json.dumps(mine).encode())]


def strays_among(held: Sequence[str]) -> list[int]:
    """Ranks that hold something else than most do; without a majority, something else than rank 0 does."""
    (commonest, count), *_ = Counter(held).most_common()
    most = commonest if 2 * count > len(held) else held[0]
    return [rank for rank, one in enumerate(held) if one != most]
