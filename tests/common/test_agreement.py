"""What one rank refuses all refuse alike; whoever can gather can agree, also without a transport."""

import errno

import pytest

from domainpar.common.agreement import Gathering, Refused, agree, agree_on, gather, on_all, on_root
from domainpar.common.problems import Problem

BAD = Problem("it is bad", "mend it", event="7", file="x.zip")


def refusal_of(*problems: Problem | str | None) -> Refused:
    """The refusal of ranks with these problems, asserted to be the same on all of them."""
    payloads: list[bytes] = []
    for rank, problem in enumerate(problems):
        agree_quietly = Gathering(rank, len(problems), lambda payload: payloads.append(payload) or [])
        agree(agree_quietly, problem)
    texts, refusal = set(), None
    for rank, problem in enumerate(problems):
        with pytest.raises(Refused) as raised:
            agree(Gathering(rank, len(problems), lambda _: payloads), problem)
        refusal = raised.value
        texts.add(refusal.text)
    assert len(texts) == 1
    assert refusal is not None
    return refusal


@pytest.mark.parametrize(
    ("problems", "text"),
    [
        ([BAD], "it is bad | event 7 | file x.zip\nhint: mend it"),
        ([None, BAD, None], "it is bad | event 7 | rank 1/3 | file x.zip\nhint: mend it"),
        ([BAD, BAD], "it is bad | event 7 | file x.zip\nhint: mend it"),
        ([None, "no store", "no store"], "ranks 1, 2: no store"),
        ([None, BAD, "no store"], "rank 1: it is bad\nrank 2: no store | event 7 | file x.zip\nhint: mend it"),
    ],
    ids=["alone", "one of three", "all", "some alike", "some unlike"],
)
def test_a_refusal_names_the_ranks_unless_all_have_the_same_problem(problems, text):
    assert str(refusal_of(*problems)) == text


def test_a_refusal_keeps_the_first_problem_apart_and_the_ranks_that_have_one():
    refusal = refusal_of(None, BAD, "no store")
    assert (refusal.first.what, refusal.first.event, refusal.first.file) == ("it is bad", "7", "x.zip")
    assert refusal.ranks == (1, 2)


@pytest.mark.parametrize(("number", "not_written"), [(errno.ENOSPC, True), (errno.ENOENT, False)])
def test_a_disk_that_is_full_on_any_rank_is_told_apart(number, not_written):
    assert refusal_of("no store", OSError(number, "on purpose")).not_written == not_written


def test_of_three_unlike_values_only_those_that_hold_the_one_shown_are_named():
    ranks = Gathering(0, 4, lambda _: [b'{"lr": "1"}', b'{"lr": "2"}', b'{"lr": "2"}', b'{"lr": "3"}'])
    with pytest.raises(Refused, match="lr is 2 on ranks 1, 2, but 1 on rank 0\n"):
        agree_on(ranks, {"lr": "1"})


def test_alone_values_come_back_and_errors_of_programs_are_no_refusals():
    assert gather(Gathering(), [1, "a"]) == [[1, "a"]]
    assert on_root(Gathering(), lambda: {"a": 1}) == {"a": 1}
    with pytest.raises(Refused, match="not there"):
        on_all(Gathering(), lambda: (_ for _ in ()).throw(OSError("not there")))
    with pytest.raises(KeyError):
        on_all(Gathering(), lambda: {}["nothing"])


def test_what_all_ranks_refused_already_is_not_agreed_on_again():
    def refuse() -> None:
        raise Refused("no", ranks=[1], size=3)

    with pytest.raises(Refused, match=r"^no \| rank 1/3$"):
        on_all(Gathering(0, 3, lambda _: pytest.fail("asked again")), refuse)
