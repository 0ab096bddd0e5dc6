"""Every transport keeps the same promises: `transport_cases.py` says which."""

import pytest
import transport_cases
from transport_cases import CASES

from domainpar.testing import find_mpiexec, run_ranks

needs_mpi = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
PROCESSES = ["gloo", pytest.param("mpi", marks=needs_mpi)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_on_threads(num_ranks, case):
    run_ranks(case, num_ranks, timeout=20)


def test_trouble_on_threads_is_named_with_its_rank():
    check_trouble(run_ranks(transport_cases.trouble, 4, timeout=20), "threads")


@pytest.mark.parametrize("transport", PROCESSES)
def test_on_processes_in_one_launch(transport):
    results = run_ranks(transport_cases.all_cases_then_trouble, 4, transport=transport, timeout=50)
    assert [ran for ran, _ in results] == [[case.__name__ for case in CASES]] * 4
    check_trouble([told for _, told in results], transport)


def check_trouble(told: list[tuple[str, str]], transport: str) -> None:
    """The error of a deadline names the silent rank 1, that of a short message its sender, rank 0."""
    silence = [told[rank][1] for rank in (0, 2, 3)]
    if transport == "gloo":
        # The first rank to give up closes its connections, which the others may then complain about.
        silence = [text for text in silence if "lost" not in text]
        assert silence
    else:  # gloo does not notice; plans are compared before the first exchange
        for rank in (1, 2, 3):
            assert "from rank 0" in told[rank][0] or "rank 0 sent" in told[rank][0]
    for text in silence:
        assert "waited 0.4 s" in text
        assert "nothing came from rank 1" in text
        assert "rank 1: step 3, reading event 5" in text
