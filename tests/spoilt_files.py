"""Files of events that a disk has spoilt."""

import zipfile
from pathlib import Path


def flip_a_byte(path: Path, member: str) -> None:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(member)
        start = info.header_offset + 30 + len(member) + info.compress_size // 2
    content = bytearray(path.read_bytes())
    content[start] ^= 0xFF
    path.write_bytes(content)
