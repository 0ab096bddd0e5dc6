"""All pictures of a run, drawn and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from domainpar.atomic_files import write_whole
from domainpar.display.pictures.edges import draw_edges
from domainpar.display.pictures.particles import draw_particles
from domainpar.display.pictures.parts import draw_parts
from domainpar.display.pictures.ranks import draw_ranks
from domainpar.display.pictures.style import Picture, in_style, is_own, png
from domainpar.display.pictures.tracks import draw_tracks
from domainpar.display.pictures.training import draw_training
from domainpar.display.reading import RunFiles
from domainpar.problems import Problem


def draw_pictures(
    run: RunFiles,
    directory: Path,
    other: RunFiles | None = None,
    event_name: str | None = None,
    num_parts: int | None = None,
    tell: Callable[[str], object] = print,
) -> list[Path]:
    """Write every picture that there is something to draw for.

        run = read_run_files(Path("runs/0001"))
        draw_pictures(run, run.directory / "pictures", other=read_run_files(Path("runs/0002")))

    Args:
        run: The run, as `reading.read_run_files` gives it.
        directory: Where they go; made if it is not there. Older pictures of the same names are replaced, other files
            never; a picture that can no longer be drawn is left as it was, and `tell` names it.
        other: A run to lay beside it where both have the same: naive beside halo.
        event_name: The event to draw. Default: the first one that training did not see.
        num_parts: Parts to split it into. Default: the run's own, or its sectors, or 8.
        tell: Is given a sentence for each picture that is left out.

    Returns:
        The files, in the order in which a physicist asks.

    Raises:
        OSError: If one cannot be written.
        StoreError: If the file of an event is damaged.
        ValueError: If there is no such event, or scores and events do not belong together.
        Problem: If a file of the name of a picture is not one of ours; nothing is written then.
    """
    content: dict[Path, bytes] = {}
    with in_style():
        for picture in pictures_of(run, other, event_name, num_parts):
            path = directory / f"{picture.name}.png"
            if picture.figure is None:
                tell(f"{path.name} left out: {picture.absent}")
                continue
            if path.exists() and not is_own(path):
                raise Problem(f"{path} is there and is no picture of ours", "move it away, or choose another --png")
            content[path] = png(picture.figure)
    for path, picture_file in content.items():
        write_whole(path, picture_file)
    return list(content)


def pictures_of(
    run: RunFiles, other: RunFiles | None = None, event_name: str | None = None, num_parts: int | None = None
) -> Iterator[Picture]:
    """The pictures one by one, those without anything to draw among them; to be asked for `in_style`.

    Args and errors are those of `draw_pictures`.
    """
    record = run.choose_event(event_name)
    yield draw_training(run, other)
    yield draw_edges(run, other)
    yield from draw_tracks(run, other)
    event = None if record is None else run.read_event(record)
    yield draw_parts(run, event, num_parts)
    yield draw_particles(run, event)
    yield draw_ranks(run)
