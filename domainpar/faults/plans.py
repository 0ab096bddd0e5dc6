"""Plans that are wrong on one rank only: gloo and MPI would exchange their rows without an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np


def _first_with(plan: Any, least: int) -> int:
    """The first receiver of at least `least` of this rank's rows."""
    peers = np.flatnonzero(np.asarray(plan.send_counts) >= least)
    if not len(peers):
        raise RuntimeError(f"a fault on purpose needs a rank that sends {least} rows to another; take another rank.")
    return int(peers[0])


def _starts(plan: Any) -> Any:
    return np.concatenate([[0], np.cumsum(plan.send_counts)])


def _short(plan: Any) -> Any:
    peer = _first_with(plan, 1)
    counts = np.array(plan.send_counts)
    counts[peer] -= 1
    rows = np.delete(plan.send_rows, _starts(plan)[peer + 1] - 1)
    return replace(plan, send_rows=rows, send_counts=counts)


def _long(plan: Any) -> Any:
    peer = _first_with(plan, 1)
    counts = np.array(plan.send_counts)
    counts[peer] += 1
    end = _starts(plan)[peer + 1]
    return replace(plan, send_rows=np.insert(plan.send_rows, end, plan.send_rows[end - 1]), send_counts=counts)


def _swap(plan: Any) -> Any:
    start = _starts(plan)[_first_with(plan, 2)]
    rows = np.array(plan.send_rows)
    rows[[start, start + 1]] = rows[[start + 1, start]]
    return replace(plan, send_rows=rows)


def _peer(plan: Any) -> Any:
    wrong = _first_with(plan, 1)
    others = [rank for rank in range(len(plan.send_counts)) if rank not in (wrong, plan.part)]
    if not others:
        raise RuntimeError("a fault on purpose: rows for the wrong rank need at least 3 ranks.")
    blocks = np.split(plan.send_rows, _starts(plan)[1:-1])
    blocks[wrong], blocks[others[0]] = blocks[others[0]], blocks[wrong]
    counts = np.array([len(block) for block in blocks])
    return replace(plan, send_rows=np.concatenate(blocks), send_counts=counts)


def _stale(plan: Any) -> Any:
    return replace(plan, owned_ids=plan.owned_ids + 1, ghost_ids=plan.ghost_ids + 1)


def _id(plan: Any) -> Any:
    rows = np.array(plan.send_rows)
    start = _starts(plan)[_first_with(plan, 1)]
    rows[start] = (rows[start] + 1) % plan.num_owned
    return replace(plan, send_rows=rows)


PLAN_FAULTS: dict[str, Callable[[Any], Any]] = {
    "short": _short,
    "long": _long,
    "swap": _swap,
    "peer": _peer,
    "stale": _stale,
    "id": _id,
}
