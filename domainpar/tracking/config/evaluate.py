"""The flags of `evaluate`."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from domainpar.tracking.config.group import ConfigError, Group, MeansNothing, rules
from domainpar.tracking.config.infer import InferConfig, MatchingFlags


@dataclass(frozen=True, kw_only=True)
class GivenTrackFlags(Group):
    """The tracks and their events"""

    tracks: str | None = None
    """File of tracks, a folder of such files, or a pattern in quotes; may stand without the flag. CSV, CSV.gz or
    parquet with columns event_id, track_id and hit_id; ACTS's tracks as CSV; acorn's lists; ColliderML's parquet."""

    name: str | None = None
    """Name of the row in the table. Default: that of the file."""

    store: str | None = None
    """Store of the events, with truth. Its hits have the hit_id of the files from which it was prepared."""

    split: Literal["all", "train", "val", "test"] = "test"
    """Which events of the store to count."""

    scores: str | None = None
    """In place of --store: a run that was scored with --tracks, or a directory of scores. Its events are counted as
    they were there. The row is kept in its scores.json, and report shows it."""

    compare: Literal["acts"] | None = None
    """acts: in place of --tracks, run ACTS's seeding, Kalman filter and ambiguity resolution on the events, and print
    its seconds. Needs the extra [acts], events of ACTS's generic detector, and their files (--input)."""

    input: str | None = None
    """With --compare: folder of the CSV files from which the store was prepared."""

    acts_settings: str | None = None
    """With --compare: YAML file of settings of ACTS, one row of the table each. Default: ACTS's example, and the best
    of a scan."""

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
            raise ConfigError("there are no events to compare the tracks with", "name a store, --store, or --scores")


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
