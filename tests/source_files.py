"""Events of a source by their files: what `open_source` reads of them before it joins anything."""

from __future__ import annotations

from pathlib import Path

from domainpar.tracking.events.sources import InputFiles, find_source


def names_in(source: str, directory: Path) -> list[str]:
    """The names of the events of a directory."""
    return list(find_source(source).open(Path(directory), find_source(source).options).names)


def paths_of(source: str, directory: Path, event: str, **options) -> list[Path]:
    """The files that an event is read from."""
    return find_source(source).open(Path(directory), {**find_source(source).options, **options}).files(event)


def read_event(source: str, directory: Path, event: str, **options):
    """What the module of a source makes of the files of one event, listed or not."""
    table, directory = find_source(source).tables[0], Path(directory)
    listed = table.find(directory, event) or directory / table.names[0].format(event)
    return find_source(source).read(InputFiles(event, directory, listed), **{**find_source(source).options, **options})


def read_file(source: str, path: Path, **options):
    """The same of the file that lists an event."""
    return find_source(source).read(
        InputFiles(find_source(source).tables[0].event_of(path), path.parent, path),
        **{**find_source(source).options, **options},
    )


def pt_unit_of(paths):
    """The unit of pt that the files of an acorn event tell together."""
    acorn = find_source("acorn")
    events = [InputFiles(acorn.tables[0].event_of(path), path.parent, path) for path in paths]
    return acorn.settle(events, acorn.options)["pt_unit"]
