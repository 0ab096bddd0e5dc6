"""What the tests of faults share: a small store, and a table of measured seconds printed in the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from random_store import write_random_store

MEASURED: dict[str, list[float]] = {}


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    """Four events of some hundred edges, in enough tiles for eight ranks."""
    return write_random_store(tmp_path_factory.mktemp("store"), num_nodes=400, num_edges=1200, num_tiles=32)


@pytest.fixture(scope="session")
def measured() -> Iterator[Callable[[str, float], None]]:
    """Takes down seconds; what was taken down is printed in the end."""
    yield lambda what, seconds: MEASURED.setdefault(what, []).append(seconds)
    lines = [f"  {what}: {max(found):.2f} s at most ({len(found)} times)" for what, found in sorted(MEASURED.items())]
    if lines:
        sys.stderr.write("\n".join(["", "From the fault to the end of the last process:", *lines, ""]))
