"""The board says which rank the others wait for: the silent one, the busy one, or the one that is behind."""

import json

import pytest
from marks import fault

from domainpar.parallel.board import Entry, Life, Mark, SideChannel, describe, missing


def entries(*lives: Life | None, alive: dict[int, bool] | None = None) -> list[Entry]:
    known, mark = alive or {}, Mark(3, "forward", "7")
    return [Entry(rank, "node", mark, life, known.get(rank, True)) for rank, life in enumerate(lives)]


WAITING, BUSY = Life(9, 20, 12.0, "an exchange"), Life(9, 20)


@fault(33)
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (entries(WAITING, BUSY, WAITING), [1]),
        (entries(WAITING, WAITING, WAITING, alive={2: False}), [2]),
        (entries(WAITING, BUSY, WAITING, alive={2: False}), [2]),
        (entries(WAITING, Life(9, 19, 12.0, "all_reduce"), WAITING), [1]),
        (entries(WAITING, Life(9, 20, 0.1, "an exchange"), WAITING), [1]),
        (entries(WAITING, WAITING), []),
        (entries(BUSY, BUSY), []),
        (entries(None, None), []),
        ([], []),
    ],
)
def test_who_the_others_wait_for(found, expected):
    assert [entry.rank for entry in missing(found)] == expected


def test_the_one_that_is_waited_for_stands_first():
    found = entries(WAITING, BUSY, WAITING)
    lines = describe(found, missing(found)).splitlines()
    assert lines[0] == "Last seen:"
    assert lines[1].startswith("  rank 1 on node: step 3, forward of event 7, ")
    assert lines[1].endswith("; not waiting for others   <- the others wait for it")
    assert "waiting for others in an exchange, 12.0 s" in lines[2]
    assert len(lines) == 4


def test_what_is_posted_is_read_again():
    board, mark, life = (
        SideChannel.for_threads(2),
        Mark(12, "backward", "event 'x'", 1790000000.125),
        Life(3, 7, None, ""),
    )
    board.post(1, mark)
    board.store.set("life/0", json.dumps(life))
    assert [(entry.mark, entry.life) for entry in board.read()] == [(None, life), (mark, None)]
