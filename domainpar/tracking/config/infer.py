"""The flags of `infer`."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from domainpar.tracking.config.group import Bounded, ConfigError, Group, MeansNothing, flag, rules
from domainpar.tracking.config.ranks import BadEventFlags, MeetingFlags, RankFlags
from domainpar.tracking.config.texts import ConditionsOrAll, check_sectors

SHIPPED = "pretrained:"
"""What the name of a network that is shipped begins with."""


@dataclass(frozen=True, kw_only=True)
class ScoringFlags(Group):
    """What to score, with which weights, and where scores go"""

    run: str | None = None
    """Directory of a training run, or pretrained:NAME for a network that is shipped, which is copied to
    runs/pretrained-NAME. Default: the one in runs/ that was started last."""

    then: str | None = None
    """A second run: the network of --run is a filter, and this one scores the edges that it leaves, in one process; the
    same bits as with prepare --source scores in between. Scores go into this run's directory."""

    min_score: float | None = None
    """Least score of an edge that the filter leaves to --then. Default: the one that --then was trained with."""

    checkpoint: Literal["best", "last"] = "best"
    """best: the weights with the best validation metric. last: the newest."""

    model: str | None = None
    """package.module:factory again, if the run's network (that of --then, if given) is code of your own."""

    store: str | None = None
    """Store of prepared events. Default: the one the run was trained on; three simulated events, made for it, with
    --run pretrained:NAME."""

    split: Literal["all", "train", "val", "test"] = "all"
    """Which events of the store."""

    events_per_call: int = 1
    """Small events that go through the network in one call: less time for each, the same bits on CPU. Of networks built
    on stages."""

    stream: bool = False
    """Score events as they come into the store, while prepare lets it grow, each written when it is done; goes on where
    it stopped. TERM, USR1 or Ctrl-C ends it after the events under way."""

    idle_seconds: float | None = None
    """End --stream when nothing came for so long. Default: it waits until it is told to stop."""

    out: str | None = None
    """Directory of the scores, one file an event. Default: scores/ in the run's directory."""

    overwrite: bool = False
    """Replace the scores that lie in --out."""

    RULES = rules(
        Bounded("events_per_call", least=1),
        Bounded("min_score", positive=True, below=1),
        MeansNothing("then", without="run", hint="name the filter: --run DIR"),
        MeansNothing("min_score", without="then"),
    )


@dataclass(frozen=True, kw_only=True)
class TrackFlags(Group):
    """Tracks, built from the scores"""

    tracks: Literal["greedy", "cc", "walk", "junction"] | None = None
    """greedy: segments join hits, the best first, while one helix goes through them. cc: connected components. walk:
    simple chains, the rest walked along good segments. junction: simple chains, then one way in and out of a hit."""

    tune: bool = False
    """Choose --score-cut, --max-chi2, --walk-min, --walk-add and --min-quality on validation events first, and keep
    them with the run: it is scored with them from then on, where they are not given."""

    max_fake_rate: float | None = None
    """--tune: the cuts with the most efficiency among those with at most this share of fakes and unlabelled tracks, not
    those with the most efficiency less these and duplicates."""

    score_cut: float | None = None
    """Score that a segment must exceed to be looked at. Default: as tuned, else 0.1 for greedy, 0.01 for walk and 0.5
    for the others."""

    max_chi2: float | None = None
    """greedy, --refine, --shared-hits: largest mean square distance of a track's hits from its helix, in units of the
    errors allowed. Default: as tuned, or 1."""

    walk_min: float | None = None
    """walk: a path follows its best segment if that exceeds this. Default: as tuned, or 0.1."""

    walk_add: float | None = None
    """walk: a path branches to every other segment above this. Default: as tuned, or 0.6."""

    min_hits: int = 3
    """Drop tracks with fewer hits."""

    double_hits: bool = True
    """walk, junction: give free hits to tracks that have another hit of the same surface next to the same neighbour."""

    refine: bool = False
    """Grow each track, also those of --ckf, anew from its own hits: outliers fall off, wrong joins come apart."""

    stitch: bool = True
    """Join pieces of one helix, broken by a missing hit or a pair of layers that no candidate edge joins."""

    extend: bool = False
    """Follow each track through all hits with a Kalman filter at last, as --ckf follows its seeds: hits that no
    segment leads to are added, wrong ones fall off. TrackML's detector only."""

    min_quality: float | None = None
    """Drop tracks of lower quality: the number of their hits, plus twice the sum of the scores of their segments, plus
    2 for a helix through the beam line. Default: as tuned, or 0."""

    shared_hits: bool = False
    """Let a track also have hits of other tracks, where one helix goes through them and all of its own, of which there
    are four or more. In track_id and the table of --format csv such a hit keeps its first track alone."""

    ckf: bool = False
    """Find tracks by following helices through the hits as well, to compare with: some seconds for a full event."""

    border_sectors: int | str | None = None
    """Sectors to whose borders efficiency is shown against distance: 8, or 8x2. Default: --sectors, or 8."""

    format: Literal["zarr", "acorn", "acts", "csv", "edges", "colliderml"] = "zarr"
    """Besides the scores: acorn: files for acorn's track building and evaluation. acts: tracks with the ids of their
    measurements as CSV. csv: a table of hits and tracks. edges: edges with their scores as CSV, for ACTS. colliderml: a
    submission to its benchmark, parquet."""

    RULES = rules(
        Bounded("min_hits", least=1),
        Bounded("max_chi2", positive=True),
        Bounded("min_quality", most=1000),
        Bounded("score_cut, walk_min, walk_add, max_fake_rate", below=1),
        MeansNothing("walk_min, walk_add", without="tracks walk"),
        MeansNothing("max_chi2", without="tracks greedy, refine, shared_hits"),
        MeansNothing("max_fake_rate", without="tune"),
        MeansNothing(
            "tune, refine, extend, min_quality, shared_hits, ckf, format csv, format acts, format colliderml",
            without="tracks",
            hint="it is about tracks, but none are built: add --tracks greedy",
        ),
    )

    def check(self) -> None:
        """Refuse what is no number or grid of sectors."""
        check_sectors("--border-sectors", self.border_sectors)


@dataclass(frozen=True, kw_only=True)
class MatchingFlags(Group):
    """How tracks are compared with true particles"""

    preset: Literal["quickstart", "pixel", "full"] | None = None
    """Targets and matching of the literature, as in prepare: sets --track-target, --matching-style and
    --min-track-length, and any of them given as well wins. Default: NAME with --run pretrained:NAME."""

    track_target: ConditionsOrAll = ConditionsOrAll("pt: [1, .inf], nhits: [5, .inf]")
    """Particles one wants to find, as in --target of train. '' for all."""

    matching_style: Literal["atlas", "one_way", "two_way"] = "atlas"
    """Of what the printed efficiency asks for --matching-fraction. atlas: a track's hits. one_way: a particle's.
    two_way: both. scores.json holds all three."""

    matching_fraction: float = 0.5
    """Share of hits that must agree; at 0.5 more than half."""

    min_track_length: int = 5
    """Fewest hits of a track that counts."""

    RULES = rules(Bounded("min_track_length", least=1))

    def check(self) -> None:
        """Refuse shares at which several particles match one track."""
        if not 0.5 <= self.matching_fraction <= 1:
            raise ConfigError(
                f"--matching-fraction is {self.matching_fraction:g}; it must be from 0.5 to 1",
                "below half, several particles could match one track",
            )


@dataclass(frozen=True, kw_only=True)
class InferConfig(ScoringFlags, TrackFlags, MatchingFlags, RankFlags, MeetingFlags, BadEventFlags):
    """All flags of `infer`."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "quickstart": {"track_target": "pt: [1, .inf], eta: [-4, 4], nhits: [3, .inf]", "min_track_length": 3},
        "pixel": {
            "track_target": "pt: [0.9, .inf], eta: [-4, 4], nhits: [3, .inf]", "min_track_length": 3,
            "matching_style": "two_way",
        },
        "full": {},
    }  # fmt: skip
    """Flags that a preset sets."""

    RULES = rules(
        MeansNothing("idle_seconds", without="stream"),
        MeansNothing("then", beside="mode naive", hint="filter whole events"),
        MeansNothing(
            "tune, overwrite, format colliderml, format acorn",
            beside="stream",
            hint="it is about all events together, which --stream never has: omit it",
        ),
    )

    def check(self) -> None:
        """Refuse to choose a grid: what scoring takes is not predicted."""
        for name in ("domain_size", "grouping"):
            if getattr(self, name) == "auto":
                raise ConfigError(f"{flag(name)} auto is of train", "omit it, or say which")
