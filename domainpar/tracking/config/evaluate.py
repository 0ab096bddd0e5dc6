"""The flags of `evaluate`."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from domainpar.tracking.config.group import ConfigError, Group, MeansNothing, rules
from domainpar.tracking.config.infer import InferConfig, MatchingFlags


@dataclass(frozen=True, kw_only=True)
class GivenTrackFlags(Group):
    """Tracks, and the events that they are of"""

    tracks: str | None = None
    """File of tracks, a folder of such files, or a pattern in quotes; also without the flag. CSV, CSV.gz or parquet
    with columns event_id, track_id and hit_id; ACTS's tracks as CSV; acorn's lists; ColliderML's parquet."""

    name: str | None = None
    """Name of the row in the table. Default: the file's."""

    store: str | None = None
    """Store of the events, with truth. Their hits have the hit_id of the files that it was prepared from."""

    split: Literal["all", "train", "val", "test"] = "test"
    """Which events of the store."""

    scores: str | None = None
    """A run that was scored with --tracks, or a directory of scores, in place of --store: its events are counted as
    there, and the row is kept in its scores.json, from where report shows it."""

    compare: Literal["acts"] | None = None
    """acts: have ACTS find the tracks, with its seeds, Kalman filter and ambiguity resolution, in place of --tracks.
    Takes the extra [acts], events of its generic detector, and their files, --input. Seconds are printed."""

    input: str | None = None
    """Folder of the CSV files, of --compare acts, that the store was prepared from."""

    acts_settings: str | None = None
    """YAML file of working points, of --compare acts, a row each. Default: ACTS's example, and one that was scanned."""

    WORDS = ("tracks",)

    RULES = rules(
        MeansNothing("tracks, name", beside="compare", hint="its tracks are found here"),
        MeansNothing("compare", without="input", hint="name the folder of the events' CSV files: --input"),
        MeansNothing("input, acts_settings", without="compare"),
    )

    def check(self) -> None:
        """Refuse a command without tracks or events."""
        if self.tracks is None and self.compare is None:
            raise ConfigError("there are no tracks to evaluate", "name a file, a folder or a pattern")
        if self.store is None and self.scores is None:
            raise ConfigError("there are no events to hold the tracks against", "name a store, --store, or --scores")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(GivenTrackFlags, MatchingFlags):
    """All flags of `evaluate`."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = InferConfig.PRESETS

    RULES = rules(
        MeansNothing(
            "store, split, " + ", ".join(MatchingFlags.__annotations__),
            beside="scores",
            hint="events are those that were scored, and counted as they were: omit it",
        ),
    )
