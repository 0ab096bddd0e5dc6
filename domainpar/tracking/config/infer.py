"""The flags of `infer`."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from domainpar.tracking.config.group import (
    BelowOne,
    Count,
    Group,
    MeansNothing,
    Positive,
    Score,
    Sectors,
    rules,
)
from domainpar.tracking.config.rank_flags import BadEventFlags, MeetingFlags, RankFlags
from domainpar.tracking.config.texts import Conditions, ConditionsOrAll


@dataclass(frozen=True, kw_only=True)
class ScoringFlags(Group):
    """What to score, with which weights, and where scores go"""

    run: str | None = None
    """Directory of a training run, or pretrained:NAME for a shipped network, which is copied to runs/pretrained-NAME.
    Default: the run in runs/ that was started last."""

    then: str | None = None
    """A second run. The network of --run is a filter, and this network scores the edges that the filter keeps, in one
    process. The bits are those of two commands with prepare --source scores in between. Scores go to this run."""

    min_score: Score | None = None
    """Smallest score of an edge that the filter keeps for --then. Default: the one that --then was trained with."""

    checkpoint: Literal["best", "last"] = "best"
    """best: the weights with the best validation metric. last: the newest."""

    model: str | None = None
    """package.module:factory once more, if the network of the run (that of --then, if given) is code of your own."""

    store: str | None = None
    """Store of prepared events. Default: the store that the run was trained on; with --run pretrained:NAME, three
    simulated events that are made for it."""

    split: Literal["all", "train", "val", "test"] = "all"
    """Which events of the store to score."""

    events_per_call: Count = 1
    """Number of small events that go through the network in one call, which takes less time per event. The bits are the
    same on CPU. For networks on stages (built-in fused layers) only."""

    out: str | None = None
    """Directory of the scores, one file per event. Default: scores/ in the run's directory."""

    overwrite: bool = False
    """Replace the scores that lie in --out."""

    RULES = rules(
        MeansNothing("then", without="run", hint="name the filter: --run DIR"),
        MeansNothing("min_score", without="then"),
    )


@dataclass(frozen=True, kw_only=True)
class TrackFlags(Group):
    """Tracks, built from the scores"""

    tracks: Literal["greedy", "cc"] | None = None
    """greedy: segments join hits in the order of their scores, as long as one helix fits all hits of the track. cc:
    connected components, also of hits without positions."""

    tune: bool = False
    """Choose --score-cut, --max-chi2 and --min-quality on validation events first, and keep them with the run. From
    then on they are the defaults for this run."""

    max_fake_rate: BelowOne | None = None
    """With --tune: choose the cuts of the largest efficiency among those whose fake rate and unlabelled rate together
    are at most this. Default: the cuts of the largest efficiency less fake rate, unlabelled rate and duplicates."""

    score_cut: BelowOne | None = None
    """Use only segments with a score above this. Default: as tuned, else 0.1 for greedy and 0.5 for cc."""

    max_chi2: Positive | None = None
    """For greedy, --refine and --shared-hits: largest chi2 per degree of freedom of a track of four hits or more, as a
    Kalman filter fits it. Default: as tuned, else 12."""

    refine: bool = False
    """Build each track again from its own hits alone, those of --ckf, too: outliers are removed, and wrong joins are
    separated."""

    stitch: bool = True
    """Join pieces of one helix that a missing hit, or a pair of layers without candidate edges, has separated."""

    extend: bool = False
    """Extend each track with a Kalman filter through all surfaces, as --ckf extends its seeds: hits that no segment
    joins to it are added, and wrong ones are removed. The surfaces are those that prepare has found or was given."""

    min_quality: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """Drop tracks below this quality, and build tracks again of the hits that they leave. The quality is the number of
    hits, plus twice the sum of the scores of their segments, plus up to 2 for a helix from the beam line, plus up to 8
    for hits that the fit of the track meets. Default: as tuned, else 0."""

    shared_hits: bool = False
    """Let a track of four hits or more also have hits of other tracks, if one helix fits all of them. In track_id and
    in the table of --format csv such a hit has its first track only."""

    ckf: bool = False
    """Also find tracks with a combinatorial Kalman filter, which needs no network, for comparison. It takes some
    seconds for a full event."""

    border_sectors: Sectors | None = None
    """Number of sectors for the efficiency against the distance to a sector border: 8, or 8x2. Default: --sectors, else
    8."""

    format: Literal["zarr", "acorn", "acts", "csv"] = "zarr"
    """What to write besides the scores. acorn: files for acorn's track building and evaluation. acts: tracks with the
    ids of their measurements as CSV. csv: a table of hits and tracks."""

    RULES = rules(
        MeansNothing("max_chi2", without="tracks greedy, refine, shared_hits"),
        MeansNothing("max_fake_rate", without="tune"),
        MeansNothing(
            "tune, refine, extend, min_quality, shared_hits, ckf, format csv, format acts",
            without="tracks",
            hint="it is about tracks, but none are built: add --tracks greedy",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class MatchingFlags(Group):
    """How tracks are compared with true particles"""

    preset: Literal["quickstart", "pixel", "full"] | None = None
    """Target particles and matching of a publication, as in prepare: sets --track-target, --matching-style and --min-
    track-length. A flag that is given as well wins. Default: NAME, if infer is given --run pretrained:NAME or
    pretrained:NAME-hllhc."""

    track_target: ConditionsOrAll | None = None
    """Target particles: those that the tracking is meant to find, as --target of train. '': all. Default: in infer the
    --target of the training, of at least --min-track-length hits where it asks for no nhits; else 'pt: [1, .inf],
    nhits: [5, .inf]'."""

    matching_style: Literal["atlas", "one_way", "two_way"] = "atlas"
    """Whose hits must agree by --matching-fraction for the efficiency that is printed. atlas: the track's. one_way: the
    particle's. two_way: both. scores.json holds all three."""

    matching_fraction: Annotated[float, Meta(ge=0.5, le=1)] = 0.5
    """Fraction of the hits that must agree; 0.5 means more than half. Below that several
    particles could match one track."""

    min_track_length: Count = 5
    """Smallest number of hits of a track that is counted."""

    def trained_for(self, target: Conditions | None) -> Self:
        """The same with the target particles of a training, or the usual ones, where no flag names others."""
        if self.track_target is not None:
            return self
        if target is None or "nhits" in target.value:
            return replace(self, track_target=ConditionsOrAll(target or "pt: [1, .inf], nhits: [5, .inf]"))
        inside = target.strip().removeprefix("{").removesuffix("}")
        return replace(self, track_target=ConditionsOrAll(f"{inside}, nhits: [{self.min_track_length}, .inf]"))


@dataclass(frozen=True, kw_only=True)
class CountedTrackFlags(TrackFlags, MatchingFlags):
    """Tracks, and what makes them good ones."""


@dataclass(frozen=True, kw_only=True)
class InferConfig(CountedTrackFlags, ScoringFlags, TrackFlags, MatchingFlags, RankFlags, MeetingFlags, BadEventFlags):
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
        MeansNothing("then", beside="mode naive", hint="filter whole events"),
    )
