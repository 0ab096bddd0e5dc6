"""`make test-slow SHARE=0.3` runs a drawn share of the slow tests: by a seed, alike in every process."""

from types import SimpleNamespace

import marks

NAMES = [f"tests/test_some.py::test_law[{number}]" for number in range(1000)]


def drawn(share, seed, always=False):
    marker = {"always": True} if always else {}
    items = [SimpleNamespace(nodeid=name, get_closest_marker=marker.get) for name in NAMES]
    return {item.nodeid for item in items if marks.drawn(item, share, seed)}


def test_a_share_is_drawn_and_the_same_one_again_by_its_seed():
    assert 250 < len(drawn(0.3, "1")) < 350
    assert drawn(0.3, "1") == drawn(0.3, "1") < drawn(0.6, "1")
    assert drawn(0.3, "1") != drawn(0.3, "2")


def test_a_share_of_1_is_all_and_what_is_always_run_is_in_any():
    assert len(drawn(1.0, "1")) == len(drawn(0.0, "1", always=True)) == 1000
    assert not drawn(0.0, "1")
