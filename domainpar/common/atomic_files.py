"""Files that appear whole or not at all: written under another name, brought to the disk, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path

PARTIAL = ".partial-"
"""Begins the name of a file that is being written. Those of a killed writer may be removed."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or replace it: a killed writer leaves the old file or none. Its directory is made where missing.

    Raises:
        OSError: If that is impossible, naming the file; an old file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
    try:
        write_synced(partial, content)
        os.replace(partial, path)
    except OSError as error:
        error.filename = str(path)  # a failing write names no file, another one the temporary
        raise
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file under its own name, and return when it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory, so that renames in it are on the disk. File systems that refuse this are ignored."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def json_bytes(values: object) -> bytes:
    """JSON with sorted keys, a value a line: the same bytes for the same values."""
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()
