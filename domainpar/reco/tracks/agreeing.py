"""One logit for each cut edge: what its owner says."""

from __future__ import annotations

import numpy as np

from domainpar.parallel.deliver import deliver
from domainpar.parallel.transport import Transport
from domainpar.plan import PartitionPlan
from domainpar.reco.tracks.segments import Floats


def owners_logits(logits: Floats, plan: PartitionPlan, transport: Transport) -> Floats:
    """The logits of local edges, those of edges that another part owns taken from there. *Collective*.

    Networks on stages say the same bits on both parts of a cut edge; any other one the same to rounding. A segment that
    two parts see differently could be taken by one of them and not by the other.

    Args:
        logits: Logits of the local edges, float64 [num_edges].
        plan: This part's plan, `incident`.
        transport: Joins the ranks that share the event.

    Returns:
        float64 [num_edges].
    """
    src = plan.edge_rows[0]
    told = np.flatnonzero(plan.edge_owned & (src >= plan.num_owned))
    rows = np.stack([plan.edge_ids[told], logits[told].view(np.int64)], axis=1)
    heard = deliver(rows, plan.local_owners[src[told]], transport).rows
    agreed = logits.copy()
    agreed[np.searchsorted(plan.edge_ids, heard[:, 0])] = np.ascontiguousarray(heard[:, 1]).view(np.float64)
    return agreed
