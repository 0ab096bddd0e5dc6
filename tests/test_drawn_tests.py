"""`make test-slow SHARE=0.3` runs a drawn share of the slow tests: by a seed, alike in every process."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

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


def test_files_with_long_tests_are_there_and_run_first(request):
    conftest = request.config.pluginmanager.getplugin(str(Path(__file__).with_name("conftest.py")))
    names = " ".join(conftest.LONG).split()
    assert len(names) == len(set(names)) > 10
    assert all((Path(__file__).parent / f"{name}.py").is_file() for name in names)
    places = [Path(__file__).parent / f"{name}.py" for name in ("parallel/test_halo", names[0], "test_docs", names[-1])]
    items = [Mock(path=place, get_closest_marker=lambda _: None) for place in places]
    by_hand = [items[1], items[3], items[0], items[2]]
    conftest.pytest_collection_modifyitems(request.config, items)
    assert items == by_hand
