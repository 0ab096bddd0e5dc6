"""Programs that are killed between any two changes of names in the file system, and machines that go down."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator

import pytest

CHANGES = ("rename", "replace", "remove", "unlink", "rmdir")


class Killed(BaseException):
    """Nothing happens after it: no cleaning up either."""


def killed_at_every_change(arrange: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Do something again and again, each time killed one change of a name later; yields after each time.

    Args:
        arrange: Called before each time, not killed.
        act: What is done. It is not killed the last time.
    """
    place, ended = 0, False
    while not ended:
        arrange()
        with pytest.MonkeyPatch.context() as patch:
            left = [place]

            def killable(change: Callable[..., None], left: list[int]) -> Callable[..., None]:
                def call(*args: object, **kwargs: object) -> None:
                    left[0] -= 1
                    if left[0] < 0:
                        raise Killed
                    change(*args, **kwargs)

                return call

            for name in CHANGES:
                patch.setattr(os, name, killable(getattr(os, name), left))
            try:
                act()
                ended = True
            except Killed:
                place += 1
        yield


def names_and_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done from now on to the names of files, and what is brought to the disk: a file or a directory."""
    done: list[str] = []

    def told(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def tell(*args: object, **kwargs: object) -> None:
            call(*args, **kwargs)
            is_sync = name == "fsync"
            done.append(("directory" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else "file") if is_sync else name)

        return tell

    for name in (*CHANGES, "fsync"):
        monkeypatch.setattr(os, name, told(name, getattr(os, name)))
    return done
