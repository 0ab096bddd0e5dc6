"""The flags of `prepare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from domainpar.tracking.config.group import (
    BelowOne,
    ConfigError,
    Count,
    Fraction,
    Group,
    MeansNothing,
    Positive,
    Score,
    Seed,
    flag,
    rules,
)
from domainpar.tracking.config.texts import BeamLine, Conditions, FromTo, LayerPairs, NameList, Numbers, Spot
from domainpar.tracking.events.source_table import HELP, SOURCES, sources_that_give

if TYPE_CHECKING:
    SourceName = str
else:
    SourceName = Literal[tuple(SOURCES)]
PartitionerName = Literal["phi", "eta", "phi-eta", "metis", "contiguous", "random", "hilbert"]
"""What `partitioners.PARTITIONERS` names."""

OF_HITS = ", ".join(f"source {name}" for name in sources_that_give("hits"))
"""Sources of hits, which are selected and joined here; others are graphs."""

_OF_FILES = ", ".join(f"source {name}" for name in SOURCES if name not in ("simulate", "acts"))


@dataclass(frozen=True, kw_only=True)
class SourceFlags(Group):
    """Where events come from"""

    source: SourceName = "simulate"
    """What the events are, see `HELP`."""

    input: str | None = None
    """Directory with the files of the source; of stores: 'stores/a, stores/b'."""

    events: Count | None = None
    """Number of events to prepare. Default: all in --input; of simulate 10, or as many as the store holds if it holds
    more."""

    hits: Annotated[int, Meta(ge=500, le=1_000_000)] = 20_000
    """Number of hits of a simulated event, from 500 to full density (about 100000)."""

    seed: Seed = 0
    """Seed of the simulation, of the partitioner and of the split."""

    preset: Literal["quickstart", "pixel", "full"] | None = None
    """Settings of a publication (docs/your_data.md says of which one): sets --hits, --volumes, --hard-cuts,
    --module-map and --map-target. A flag that is given as well wins. --preset of infer sets target particles and
    matching."""

    volumes: Numbers | None = None
    """Keep only the hits of these detector volumes: '7, 8, 9'."""

    hard_cuts: Conditions | None = None
    """Keep only the hits of particles that pass: 'pt: [1, .inf]', in GeV. Noise is dropped, too, because the cuts use
    the truth. Of acorn files: keep only the edges between such hits."""

    hit_inefficiency: BelowOne = 0.0
    """Remove this fraction of the hits at random, as inefficient sensors do."""

    cluster_features: bool = False
    """Add size, charge and direction of each hit's cluster to the node features. They are read from -cells.csv and
    detectors.csv of --source trackml."""

    min_score: Score = 0.02
    """Smallest score of an edge that is kept, of --source scores."""

    HELP = (("source", HELP),)
    RULES = rules(
        MeansNothing("input", beside="source simulate", hint="say what the files are: --source trackml"),
        MeansNothing(_OF_FILES, without="input", hint="name the directory of its files: --input DIR"),
        MeansNothing(
            "source acts", without="input, simulate", hint="name the folder of its files: --input DIR; or --simulate 10"
        ),
        MeansNothing("cluster_features", without="source trackml", hint="its hits have no cells"),
        MeansNothing("min_score", without="source scores", hint="its edges have no scores"),
        MeansNothing(
            "volumes, hit_inefficiency",
            without=f"{OF_HITS}, source stores",
            hint="its files are graphs, joined already",
        ),
        MeansNothing("hard_cuts", without=f"{OF_HITS}, source stores, source acorn", hint="it selects hits"),
    )


@dataclass(frozen=True, kw_only=True)
class MadeFlags(Group):
    """Events that Pythia and ACTS simulate"""

    simulate: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """With --source acts: simulate this number of events with Pythia and ACTS, in its generic detector. They are
    numbered from --seed on, and stay as CSV files in --input (default: a folder of acts/). Needs the extra [acts]."""

    process: str = "ttbar"
    """The hard collision of an event: ttbar, or settings of Pythia, 'HardQCD:all = on; PhaseSpace:pTHatMin = 50'."""

    pile_up: FromTo = FromTo("200")
    """Mean number of other collisions in an event; '60, 200' draws it for each event."""

    dead_modules: Fraction = 0.0
    """Fraction of the modules that record no hit, the same modules in all events."""

    noise: Fraction = 0.0
    """Number of hits that no particle left, per measured hit of a particle."""

    RULES = rules(
        MeansNothing("simulate", without="source acts", hint="for the built-in simulation use --events"),
        MeansNothing("process, pile_up, dead_modules, noise", without="simulate", hint="its events exist already"),
        MeansNothing("events", beside="simulate", hint="--simulate is the number of events"),
    )


@dataclass(frozen=True, kw_only=True)
class DetectorFlags(Group):
    """Magnetic field, beam spot and surfaces, for track finding and fits of helices"""

    field: str | None = None
    """Magnetic field: one number, B_z in T, for everywhere; or a file, with a table of z and B_z or with a map of r, z,
    B_r, B_z as ACTS writes it, in mm and T. Default: for hits on TrackML's layers the field that was measured in the
    events of the challenge, a table of its B_z unless they are real ones; 2 T for all others, and for --source acts and
    colliderml."""

    beam_spot: Spot | None = None
    """Where collisions lie along the beam: mean z and its standard deviation in mm, '0, 55'. Default: measured from
    events with truth; without truth that of the TrackML events, '0, 5.44', which simulated events have, too; '0, 55'
    with --simulate, where '0, 5, 60' draws the standard deviation of each event between 5 and 60."""

    beam_line: BeamLine | None = None
    """x and y of the beam in mm, '-0.5, 0.3': positions of hits and particles are taken from there on, and so are d0
    and all features. Default: 0, 0."""

    surfaces: str | None = None
    """CSV file with the surfaces of the detector, from one to the next of which --ckf and --extend of infer
    extrapolate: volume, layer, kind, place, low, high, sigma_u, sigma_v, seeds and, if known, material
    (docs/another_detector.md). Default: those of TrackML, or, if hits do not lie on them, surfaces that are learned
    from the hits of the first events."""

    RULES = rules(
        MeansNothing("surfaces", beside="source simulate", hint="it has TrackML's"),
        MeansNothing("beam_line", beside="source simulate, simulate", hint="events are made about x = y = 0"),
    )


@dataclass(frozen=True, kw_only=True)
class AcornFlags(Group):
    """How acorn files are read"""

    node_features: NameList | None = None
    """Columns that become node features: 'r, phi, z, eta'. Default: 'r, phi, z'."""

    node_scales: Numbers | None = None
    """Divisor of each of --node-features. Default: '1000, 3.14159265359, 1000'."""

    edge_features: NameList | None = None
    """Columns that become edge features, computed if absent: 'dr, dphi, dz, deta, phislope, rphislope', or none.
    Default: as of candidate edges that are found here."""

    edge_scales: Numbers | None = None
    """Divisor of each of --edge-features. Default: 1."""

    pt_unit: Literal["MeV", "GeV"] | None = None
    """Unit of pt in the files; stores hold GeV. Default: guessed from the values."""

    def check(self) -> None:
        """Refuse lists that do not fit each other."""
        for of in ("node", "edge"):
            features, scales = (getattr(self, f"{of}_{kind}") for kind in ("features", "scales"))
            names = 3 if features is None and of == "node" else len(NameList(features or "").value)
            if scales is not None and len(scales.value) != names:
                raise ConfigError(
                    f"--{of}-scales {scales!r} are not one for each of {names} {of} features",
                    f"name the features, and as many scales: --{of}-features ... --{of}-scales ...",
                )
        if self.node_features is not None and self.node_scales is None:
            raise ConfigError(
                f"--node-features {self.node_features!r} have no scales", "say what each is divided by: --node-scales"
            )
        if self.node_features is not None and not self.node_features.value:
            raise ConfigError("--node-features names none", "omit it to have 'r, phi, z'")


_CUTS = "phi_slope, z0, layer_pairs, same_layer"


@dataclass(frozen=True, kw_only=True)
class CandidateFlags(Group):
    """Candidate edges, for sources that give hits"""

    phi_slope: Positive | None = None
    """Largest change of phi per change of r along an edge, in rad/mm. Default: 0.0006, which keeps particles above some
    0.5 GeV in 2 T, and more in proportion in a --field that is stronger."""

    z0: Positive | None = None
    """Largest distance from the origin at which the line through an edge meets the beam axis, in mm. Default: 200,
    or four standard deviations of a --beam-spot that is wider."""

    layer_pairs: LayerPairs | None = None
    """Pairs of layers to join, each layer as VOLUME.LAYER: '8.2-8.4, 8.4-8.6'. Default: those layers of TrackML's
    detector that follow each other along a straight line. skip-one, skip-two: also pairs with one or two layers between
    them, for four or nine times as many edges."""

    same_layer: bool = False
    """Also join overlapping modules of one layer."""

    edges_from: str | None = None
    """Directory with candidate edges, which replace those that are found here: event<name>-graph.csv for each event, as
    ACTS writes graphs, with columns edge0 and edge1, which are rows of the event's hits."""

    module_map: str | None = None
    """File of a module map, which makes the candidate edges in place of the cuts above. The store keeps a copy. build:
    first build a map from events with truth. pretrained:NAME: the map that a shipped network was trained with."""

    embedding: str | None = None
    """Metric learning: file of an embedding, a network that places hits in a space in which those that are near become
    candidate edges, in place of the cuts above. The store keeps a copy. build: first train one on events with truth."""

    map_edges_per_hit: Positive | None = None
    """Mean number of pairs of hits, per hit, that a module map may hold, its purest boxes first; triplets then confirm
    some of them as edges. Of an embedding: of candidate edges, which sets the radius, at most twice the margin of the
    training. Default: 30 for a map that is built, 5 for an embedding that is trained; of a
    file all pairs of a map, and the radius of an embedding."""

    map_target: Conditions = Conditions("pt: [1, .inf], nhits: [5, .inf]")
    """Particles whose segments a map must hold when it is built, or an embedding learns."""

    map_events: Count | None = None
    """Number of events that a module map or an embedding is built from. Default: all training events of the files, for
    an embedding 20 of them; for simulated events 100, or 20, others, which are not in the store."""

    least_segments: Fraction = 0.3
    """Smallest fraction of the segments of target particles that must be candidate edges, where the truth is known.
    With fewer, or without any candidate edge, there is no store. 0: any fraction will do."""

    RULES = rules(
        MeansNothing(_CUTS, beside="module_map", hint="a map has bounds of its own"),
        MeansNothing(_CUTS, beside="embedding", hint="its edges are those within a radius"),
        MeansNothing("module_map", beside="embedding", hint="keep one", spares_presets=True),
        MeansNothing("map_edges_per_hit", without="module_map, embedding", hint="it says how much of one is used"),
        MeansNothing(f"{_CUTS}, module_map, embedding", beside="edges_from", hint="its files join hits already"),
    )


@dataclass(frozen=True, kw_only=True)
class TileFlags(Group):
    """Tiles: the small regions of which an event is stored"""

    partitioner: PartitionerName | None = None
    """How nodes are divided into tiles: into regions of equal cost, or by METIS with the fewest cut edges. Default:
    phi-eta, or metis for events without positions."""

    tiles: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    """Number of tiles of each event. Default: one for some 4600 edges; small events have smaller tiles."""


@dataclass(frozen=True, kw_only=True)
class StoreFlags(Group):
    """The store"""

    store: str | None = None
    """Directory of the store. Default: one named after the events, in stores/."""

    val_split: Fraction = 0.1
    """Fraction of the events for validation, chosen by a hash of their names: at least one event of two. 0: none."""

    test_split: Fraction = 0.1
    """Fraction of the events for the final test, chosen in the same way: at least one event of three. 1 with
    --val-split 0: all events, with none to train on."""

    overwrite: bool = False
    """Replace the store, if it was made with other flags, or holds events that these flags leave out."""

    report: bool = False
    """Print nodes, edges and predicted memory of each rank, and how many edges each partitioner and each grouping would
    cut. With --store alone: of a store that is there, as it is."""

    def check(self) -> None:
        """Refuse shares of more than there is."""
        if self.val_split + self.test_split > 1:
            what = f"--val-split {self.val_split:g} and --test-split {self.test_split:g} are more than all events"
            raise ConfigError(what, "make their sum 1 at most")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(SourceFlags, MadeFlags, DetectorFlags, AcornFlags, CandidateFlags, TileFlags, StoreFlags):
    """All flags of `prepare`."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "quickstart": {
            "hits": 100_000, "hard_cuts": "pt: [1, .inf]", "module_map": "build",
            "map_target": "pt: [1, .inf], eta: [-4, 4], nhits: [3, .inf]",
        },
        "pixel": {
            "hits": 120_000, "volumes": "7, 8, 9", "module_map": "build",
            "map_target": "pt: [0.9, .inf], eta: [-4, 4], nhits: [3, .inf]",
        },
        "full": {"hits": 100_000, "module_map": "build"},
    }  # fmt: skip
    """Flags that a preset sets."""

    RULES = rules(
        MeansNothing(
            "map_target, map_events",
            without="module_map build, embedding build",
            hint="it says what a map or an embedding is built from",
            spares_presets=True,
        ),
        MeansNothing(
            "field, beam_spot, beam_line, surfaces",
            beside="source scores, source stores",
            hint="the store of the events keeps them",
        ),
        MeansNothing("beam_line", without=OF_HITS, hint="its files are graphs, whose features are made already"),
        MeansNothing("edges_from", without=OF_HITS, hint="its files are graphs, joined already"),
        MeansNothing(
            "module_map, embedding",
            without=f"{OF_HITS}, source stores",
            hint="its files are graphs, joined already",
        ),
        MeansNothing("events", beside="source stores", hint="name stores of as many events as are wanted"),
        MeansNothing(
            ", ".join(AcornFlags.__annotations__), without="source acorn", hint="it says how acorn files are read"
        ),
    )

    def check(self) -> None:
        """Refuse to leave out hits that are counted, a map that would be learned from nothing, widths of no event."""
        if self.beam_spot is not None and len(self.beam_spot.value) > 2 and self.simulate is None:
            what = f"{self.spelt('beam_spot')}: widths are drawn where events are made"
            raise ConfigError(what, "name one, or make events: --source acts --simulate")
        if selects := [
            name for name in ("volumes", "hard_cuts", "hit_inefficiency") if self.edges_from and self.has(name)
        ]:
            asks = f"{flag(selects[0])}{self.of_preset(selects[0])}"
            what = f"{asks} leaves hits out, and the rows of --edges-from count all of them"
            raise ConfigError(what, "leave it out")
        if self.source == "stores" and self.edges_learned is None:
            for name in filter(self.has, ("volumes", "hard_cuts", "hit_inefficiency")):
                what = f"{self.spelt(name)} leaves hits out, and the events of stores keep their edges"
                raise ConfigError(what, "join them anew: --module-map build, or a file")
        learned, to_train_on = self.edges_learned, self.source == "simulate" or self.val_split + self.test_split < 1
        if learned is not None and getattr(self, learned) == "build" and not to_train_on:
            what = f"{self.spelt(learned)}{self.of_preset(learned)} learns from events to train on, and "
            none = f"{self.spelt('val_split')} and {self.spelt('test_split')} leave none"
            files = {"module_map": "name a map: --module-map pretrained:full, or a file", "embedding": "name a file"}
            raise ConfigError(what + none, files[learned])

    @property
    def edges_learned(self) -> Literal["module_map", "embedding"] | None:
        """Which flag names what was learned to make candidate edges; an embedding stands in for the map of a preset."""
        return "embedding" if self.embedding is not None else "module_map" if self.module_map is not None else None


def default_store(source: str, directory: str) -> Path:
    """The directory in which `prepare` puts the events of another one by default."""
    names = [
        Path(path.strip()).resolve().name for path in (directory.split(",") if source == "stores" else [directory])
    ]
    return Path("stores") / f"{source}-{'-'.join(names)}"
