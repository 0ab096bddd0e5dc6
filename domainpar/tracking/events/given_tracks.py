"""Tracks of any finder, in files of others: which hits of which event are on which track.

a table, CSV, CSV.gz or parquet      columns event or event_id, track or track_id, hit_id: a hit of a track each
event000000007-tracks.csv            the same of one event, as `infer --format csv` writes it
event000000007-tracks_ambi.csv       ACTS (`CsvTrackWriter`): a track a row, its measurements in Measurements_ID
event000000007.txt                   acorn: a track a line, its hit_ids
ColliderML's parquet of tracks       an event a row: hit_ids, a list of lists; also a folder of such files
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from domainpar.common.problems import EventPlace, Problem
from domainpar.common.words import some_of
from domainpar.tracking.events.colliderml import import_parquet
from domainpar.tracking.events.graph import IntArray

_OF_EVENT = re.compile(r"event(?P<event>.+?)(?P<kind>-tracks[^.]*\.(?:csv|csv\.gz|parquet)|\.txt)")
_EVENT, _TRACK, _HIT, _LISTS = ("event", "event_id"), ("track", "track_id"), ("hit_id",), ("Measurements_ID", "hit_ids")
_FORMS = "expected are columns event_id, track_id and hit_id, or files of ACTS, acorn or ColliderML (--help)"


@dataclass(frozen=True, eq=False)
class GivenTracks:
    """The hits of tracks of one event, in the order of their file.

    Attributes:
        place: The event, by its name in the file, and the file.
        hit: The number of a hit, int64 [M]; a hit may be there several times, on several tracks.
        track: The number of its track, int64 [M]; negative for none.
        of_acts: Whether hits are numbers of measurements, from 0, and not hit_ids.
    """

    place: EventPlace
    hit: IntArray
    track: IntArray
    of_acts: bool = False


def rows_of(hit: IntArray, hit_id: IntArray) -> IntArray:
    """The row of each of some hits, all of which are among those of an event, by its number."""
    order = np.argsort(hit_id)
    return np.asarray(order[np.searchsorted(hit_id, hit, sorter=order)])


def plain_name(event: str) -> str:
    """The name of an event without zeros in front: `7` of `000000007`."""
    return event.lstrip("0") or "0" if event.isdecimal() else event


def read_tracks(path: str) -> dict[str, GivenTracks]:
    """The tracks of each event of a file, of a folder of files, or of those of a pattern, by `plain_name`.

    Raises:
        Problem: Naming the file, and what was found and expected: if there is none, or a folder has several kinds of
            them; if it cannot be read or lacks a column; if a number is none; if an event is in two files.
    """
    events: dict[str, GivenTracks] = {}
    for file in _files(Path(path)):
        for tracks in _read(file):
            event = plain_name(tracks.place.event)
            if event in events:
                raise tracks.place.problem(f"{events[event].place.file} has tracks of this event, too", "remove one")
            events[event] = tracks
    return events


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not (files := [path] if path.is_file() else sorted(map(Path, glob.glob(str(path))))):
            raise Problem(f"{path}: no such file", "name a file of tracks, a folder of them, or a pattern in quotes")
        return files
    kinds: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        if (match := _OF_EVENT.fullmatch(file.name)) is not None:
            kinds.setdefault(f"event*{match['kind']}", []).append(file)
    if not kinds and (tables := sorted(path.rglob("*.parquet"))):  # of a whole sample, those in its folder of tracks
        of_tracks = [table for table in tables if table.relative_to(path.parent).parent.name.endswith("tracks")]
        return of_tracks or tables
    if len(kinds) != 1:
        hint = f"name one kind: --tracks '{path / min(kinds)}'" if kinds else _FORMS
        raise Problem(f"{path} holds {' and '.join(kinds) or 'no tracks of events'}", hint)
    return next(iter(kinds.values()))


def _read(file: Path) -> list[GivenTracks]:
    table, named = _table(file), _OF_EVENT.fullmatch(file.name)
    event = "" if named is None else named["event"]
    lists = next((name for name in _LISTS if name in table), None)
    hit, track = (None, None) if lists else (_whole_numbers(table, names, file) for names in (_HIT, _TRACK))
    rows_of = {event: np.arange(len(table))}
    if len(table) or not event:
        events = next((table[name] for name in _EVENT if name in table), None)
        if events is None and not event:
            raise _lacks(table, _EVENT, file)
        rows_of = rows_of if events is None else events.groupby(events.astype(str), sort=False).indices
    tracks = []
    for name, rows in rows_of.items():
        place = EventPlace(str(name), file)
        if hit is None or track is None:
            tracks.append(_parse_lists(place, table[lists].iloc[rows].tolist(), lists == _LISTS[0]))
        else:
            tracks.append(GivenTracks(place, hit[rows], track[rows]))
    return tracks


def _table(file: Path) -> pd.DataFrame:
    try:
        if file.suffix == ".txt":
            return pd.DataFrame({"hit_ids": [line for line in file.read_text().splitlines() if line.strip()]})
        if file.suffix == ".parquet":
            import_parquet()
            return pd.read_parquet(file)
        # index_col: else a row with one field too many would silently shift all columns by one.
        return pd.read_csv(file, index_col=False, dtype=dict.fromkeys(_EVENT, str))
    except (OSError, EOFError, ValueError) as error:  # those of pandas and of pyarrow are ValueErrors
        if isinstance(error, Problem):
            raise
        raise Problem(f"cannot be read, {type(error).__name__}: {error}", _FORMS, file=file) from error


def _lacks(table: pd.DataFrame, names: Sequence[str], file: Path) -> Problem:
    return Problem(f"no column {' or '.join(names)}; found {some_of([str(name) for name in table])}", _FORMS, file=file)


def _whole_numbers(table: pd.DataFrame, names: Sequence[str], file: Path) -> IntArray:
    if (name := next((name for name in names if name in table), None)) is None:
        raise _lacks(table, names, file)
    numbers = pd.to_numeric(table[name], errors="coerce").to_numpy(np.float64)
    bad = np.flatnonzero(~(np.abs(numbers) < 2.0**53) | (numbers != np.rint(numbers)))
    if len(bad):
        seen = f"{name} is {table[name].iloc[bad[0]]} in row {bad[0]}, which is no whole number"
        raise Problem(f"{seen}; {len(bad):,} rows have none", "is the file cut off?", file=file)
    whole: IntArray = numbers.astype(np.int64)
    return whole


def _parse_lists(place: EventPlace, lists: Sequence[Any], of_acts: bool) -> GivenTracks:
    """Tracks as lists of their hits: a text of numbers each, a list of them, or lists of all tracks of an event."""
    tracks: list[list[int]] = []
    for listed in lists:
        try:
            if isinstance(listed, str) and re.fullmatch(r"\[?[\d\s,]*\]?\s*", listed):
                tracks.append([int(number) for number in re.findall(r"\d+", listed)])
            else:
                nested = len(listed) > 0 and np.ndim(listed[0]) > 0
                tracks += [[index(hit) for hit in one] for one in (listed if nested else [listed])]
        except TypeError as error:
            what = f"the hits of track {len(tracks)} are {str(listed)[:60]!r}, no list of numbers"
            raise place.problem(what, _FORMS) from error
    track = np.repeat(np.arange(len(tracks)), [len(one) for one in tracks])
    return GivenTracks(place, np.array([hit for one in tracks for hit in one], np.int64), track, of_acts)
