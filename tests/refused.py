"""Errors about events and files: what they say, and of which event and file they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from domainpar.common.agreement import Refused
from domainpar.common.problems import Problem


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


@contextmanager
def refused_alike(match: str) -> Iterator[None]:
    """Expect ranks to agree to refuse; what they say, or the hint behind it, matches."""
    with pytest.raises((Refused, RuntimeError)) as found:
        yield
    refused_by = found.value if isinstance(found.value, Refused) else found.value.__cause__
    assert isinstance(refused_by, Refused), found.value
    text = f"{refused_by.first.what}; {refused_by.first.hint}"
    assert re.search(match, text), f"{match!r} is not in {text!r}"
