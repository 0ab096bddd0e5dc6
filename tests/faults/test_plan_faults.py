"""Plans that do not belong together are refused before anything is exchanged; sender and receiver are named."""

import numpy as np
import pytest
from faults.on_purpose import OF_PLANS, spoilt_plan
from marks import fault

from domainpar.parallel.halo import Halo
from domainpar.plan import build_plans
from domainpar.testing import run_ranks

RANKS = 3
EDGES = np.array([[0, 1, 2, 3, 4, 6, 7, 8, 0, 1, 2], [3, 4, 5, 6, 7, 0, 1, 2, 7, 8, 6]])


def make_halo(world, plans, fault):
    plan = plans[world.rank]
    return Halo(spoilt_plan(plan, fault) if world.rank == 1 and fault else plan, world.transport)


@fault(35)
@pytest.mark.parametrize("fault", OF_PLANS)
def test_a_wrong_plan_on_one_rank_is_named_with_both_sides(fault):
    plans = build_plans(EDGES, np.repeat([0, 1, 2], 3), RANKS, "incident")
    assert len(run_ranks(make_halo, RANKS, plans, "")) == RANKS
    with pytest.raises(RuntimeError, match=r"plans disagree: rank \d would send \d+ rows .* to rank \d") as raised:
        run_ranks(make_halo, RANKS, plans, fault)
    assert "rank 1" in str(raised.value)


def test_the_faults_change_what_is_sent():
    plan = build_plans(EDGES, np.repeat([0, 1, 2], 3), RANKS, "incident")[1]
    for how in OF_PLANS:
        changed = spoilt_plan(plan, how)
        same = all(
            np.array_equal(getattr(changed, name), getattr(plan, name))
            for name in ("send_rows", "send_counts", "owned_ids", "ghost_ids")
        )
        assert not same
        assert len(changed.send_rows) == sum(changed.send_counts)
