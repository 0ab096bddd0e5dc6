"""Do rows reach the right ghosts, do sums come back, and is a split event the whole one? On a toy event."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from domainpar.diagnosis.finding import Finding, failed, passed
from domainpar.events.store import EventStore
from domainpar.measure.layouts import SMALL, of_all_ranks
from domainpar.measure.steps import trained_sha256
from domainpar.measure.toy import NUM_EDGE_FEATURES, NUM_FEATURES, ring_event, toy_store
from domainpar.nn.interaction import InteractionNetwork
from domainpar.nn.selftest import rows_are_independent
from domainpar.parallel.halo import Halo
from domainpar.parallel.part_loading import load_part
from domainpar.parallel.world import World

TRACKS = 60
COLUMNS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
ADVICE = "put this table into an issue; another --transport may work meanwhile"


def check_halo(world: World) -> list[Finding]:
    """Both verbs of the halo on a toy event that all ranks share. *Collective*."""
    with _store(world) as store, store.open(store.events()[0]) as event:
        halo: Halo = load_part(event, world.transport).halo
        return [check_ghosts(halo), check_sums(halo)]


def _store(world: World) -> AbstractContextManager[EventStore]:
    """A toy event of which every rank can own a part."""
    return toy_store(ring_event(max(TRACKS, world.size)), num_ranks=world.size)


def check_ghosts(halo: Halo) -> Finding:
    """Global ids through the exchange itself, into memory full of NaN. *Collective*."""
    plan = halo.plan
    ghosts = torch.full((plan.num_ghosts, len(COLUMNS)), torch.nan, dtype=torch.float64)
    halo.fill_ghosts(_column(plan.owned_ids) * COLUMNS, ghosts)
    wrong_rows = (ghosts != _column(plan.ghost_ids) * COLUMNS).any(1)
    unfilled, wrong = int(ghosts.isnan().any(1).sum()), int(wrong_rows.sum())
    text = f"{plan.num_ghosts:,} ghosts of {plan.num_owned:,} nodes here"
    if not wrong:
        return passed("halo: ghosts", f"{text}: all hold the row of their own node", ghosts=plan.num_ghosts)
    row = int(wrong_rows.nonzero()[0])
    return failed(
        "halo: ghosts",
        f"{text}: {wrong} are wrong, {unfilled} of them never filled; the first should hold node "
        f"{int(plan.ghost_ids[row])} and holds {ghosts[row].tolist()}",
        ADVICE,
        wrong=wrong,
        unfilled=unfilled,
    )


def _column(ids: object) -> Tensor:
    return torch.as_tensor(ids, dtype=torch.float64).unsqueeze(1)


def check_sums(halo: Halo) -> Finding:
    """Sums of ghosts' rows come back to owners as the adjoint of the copy, in whole numbers. *Collective*."""
    plan = halo.plan
    owned = _column(plan.owned_ids) % 97 - COLUMNS
    ghosts = _column(plan.ghost_ids) * (plan.part + 2) % 89 + COLUMNS
    filled, sums = halo.fill_ghosts(owned), halo.sum_to_owners(ghosts)
    spoilt = int((~filled.isfinite()).sum() + (~sums.isfinite()).sum())
    there, back = (int(product.nan_to_num().sum()) for product in (filled * ghosts, owned * sums))
    totals = torch.tensor([there, back, spoilt], dtype=torch.int64)
    halo.transport.all_reduce(totals)
    there, back, spoilt = totals.tolist()
    text = f"<fill x, y> = {there}, <x, sum y> = {back}" + (f", {spoilt} numbers not finite" if spoilt else "")
    if there == back and not spoilt:
        return passed("halo: sums", f"{text}: adjoint, exactly", product=there)
    return failed("halo: sums", f"{text}: the way back is not the adjoint of the way there", ADVICE)


def check_split(world: World) -> Finding:
    """Two training steps on all ranks, and on each rank alone with the whole event: one hash. *Collective*."""
    with _store(world) as store:
        split = trained_sha256(SMALL, store, World.over(world.transport, domain_size=world.size))
        whole = trained_sha256(SMALL, store, World.alone())
    splits, wholes = of_all_ranks(split, world), of_all_ranks(whole, world)
    text = f"forward, backward and step on {world.size} parts: {split[:12]}; whole, on one rank: {whole[:12]}"
    if len({*splits, *wholes}) == 1:
        return passed("split = whole", f"{text}, to the last bit", sha256=split)
    if len(set(wholes)) > 1:
        text += "; ranks alone do not agree with each other: their processors or libraries compute differently"
    return failed("split = whole", text, ADVICE, split=splits, whole=wholes)


def check_rows(world: World) -> Finding:
    """Whether a row's bits depend on the rows beside it, as compiled on this machine. *Collective*."""
    problem = rows_are_independent(InteractionNetwork(NUM_FEATURES, NUM_EDGE_FEATURES), world.transport)
    if problem is None:
        return passed("rows", "a row's bits do not depend on the rows beside it, and all ranks compute the same")
    return failed("rows", problem, "results are right to rounding but not to the bit here: " + ADVICE)
