"""Errors about events and files: what they say, and of which event and file they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from domainpar.problems import Problem


@contextmanager
def refused(match: str, event: str | None = None, file: Path | None = None) -> Iterator[pytest.ExceptionInfo[Problem]]:
    """Expect a `Problem` about this event and this file whose text, or whose hint behind it, matches."""
    with pytest.raises(Problem) as found:
        yield found
    error = found.value
    assert re.search(match, f"{error.what}; {error.hint}"), f"{match!r} is not in {error.what!r}; {error.hint!r}"
    assert (error.event, error.file) == (event, None if file is None else str(file))
    assert not error.what.endswith(".")
    assert f"event {error.event}" not in error.what
