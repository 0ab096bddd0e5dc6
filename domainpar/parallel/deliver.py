"""Rows of integers to the ranks they are addressed to: for lists whose receivers no plan knows beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from domainpar.parallel.transport import Transport
from domainpar.plan import IntArray


@dataclass(frozen=True, eq=False)
class Delivery:
    """What came to this rank.

    Attributes:
        rows: int64 [num_received, width], by the sender's rank, then in the order in which it was sent.
        sender: Rank that sent each row, int64 [num_received].
    """

    rows: IntArray
    sender: IntArray


def deliver(rows: IntArray, to: IntArray, transport: Transport) -> Delivery:
    """Send each row to the rank it is addressed to. *Collective*, also for ranks that have none.

    Args:
        rows: int64 [n, width]; the same width on every rank.
        to: Rank that each row goes to, [n]; may be this rank itself.
        transport: Joins the ranks.
    """
    order = np.argsort(to, kind="stable")
    packed, counts = np.ascontiguousarray(rows[order], np.int64), np.bincount(to, minlength=transport.size)
    table = np.stack([np.frombuffer(row, np.int64) for row in transport.all_gather(counts.astype(np.int64).tobytes())])
    coming = table[:, transport.rank]
    begin = int(counts[: transport.rank].sum())  # rows for this rank itself stay where they are
    end = begin + int(counts[transport.rank])
    before = int(coming[: transport.rank].sum())
    others = torch.empty(int(coming.sum()) - (end - begin), rows.shape[1], dtype=torch.int64)
    transport.start(
        torch.from_numpy(np.concatenate([packed[:begin], packed[end:]])),
        _to_others(counts, transport.rank),
        others,
        _to_others(coming, transport.rank),
    ).finish()
    received = np.concatenate([others[:before].numpy(), packed[begin:end], others[before:].numpy()])
    return Delivery(received, np.repeat(np.arange(transport.size), coming))


def _to_others(counts: IntArray, rank: int) -> list[int]:
    return [0 if peer == rank else int(count) for peer, count in enumerate(counts)]
