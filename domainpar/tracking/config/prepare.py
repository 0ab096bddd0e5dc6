"""The flags of `prepare`."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from domainpar.tracking.config.group import Bounded, ConfigError, Group, MeansNothing, flag, rules
from domainpar.tracking.config.texts import Conditions, FromTo, LayerPairs, NameList, Numbers, Spot
from domainpar.tracking.events.kinds import KindOfHits, SourceKind

SourceName = Literal[SourceKind, "scores"]
PartitionerName = Literal["phi", "eta", "phi-eta", "metis", "contiguous", "random"]
"""What `partitioners.PARTITIONERS` names."""

OF_HITS = ", ".join(f"source {kind}" for kind in get_args(KindOfHits))
"""Sources of hits, which are selected and joined here; others are graphs."""

_OF_FILES = ", ".join(f"source {kind}" for kind in get_args(SourceName) if kind not in ("simulate", "acts"))


@dataclass(frozen=True, kw_only=True)
class SourceFlags(Group):
    """Where events come from"""

    source: SourceName = "simulate"
    """simulate: built in, TrackML geometry, exact truth. trackml: CSV. acts: its CSV or parquet. colliderml: parquet.
    heptrkx: npz graphs. pyg: PyG Data files. acorn: graphs of the acorn framework, in trainset, valset and testset or
    all in one directory. scores: events that infer scored, with the edges of at least --min-score (a filter)."""

    input: str | None = None
    """Directory with the files of the source."""

    events: int | None = None
    """How many events to prepare. Default: all in --input, or 10 simulated ones (all of a store that holds more)."""

    hits: int = 20_000
    """Hits of a simulated event, from 500 to full density (about 100000)."""

    seed: int = 0
    """Seed of the simulation, of the partitioner and of the split."""

    preset: Literal["quickstart", "pixel", "full"] | None = None
    """A selection of the literature: sets --hits, --volumes, --hard-cuts, --module-map and --map-target, and any of
    them given as well wins. docs/your_data.md tells whose they are; infer has the same for targets and matching."""

    volumes: Numbers | None = None
    """Keep only hits of these detector volumes: '7, 8, 9'."""

    hard_cuts: Conditions | None = None
    """Keep only hits of particles that pass: 'pt: [1, .inf]', in GeV; of acorn files, edges between such hits. It looks
    at the truth: noise goes as well."""

    hit_inefficiency: float = 0.0
    """Lose this share of the hits at random, as inefficient sensors do: what does a missing hit cost?"""

    cluster_features: bool = False
    """Size, charge and direction of the cluster of each hit as node features too, from -cells.csv and detectors.csv of
    --source trackml."""

    min_score: float = 0.02
    """Least score of an edge that stays, of --source scores."""

    RULES = rules(
        Bounded("events", least=1),
        Bounded("hit_inefficiency", below=1),
        Bounded("seed", below=2**63),
        Bounded("min_score", positive=True, below=1),
        Bounded("hits", least=500, most=1_000_000),  # ten times as dense as a collider will be
        MeansNothing("input", beside="source simulate", hint="say what the files are: --source trackml"),
        MeansNothing(_OF_FILES, without="input", hint="name the directory of its files: --input DIR"),
        MeansNothing(
            "source acts", without="input, simulate", hint="name the folder of its files: --input DIR; or --simulate 10"
        ),
        MeansNothing("cluster_features", without="source trackml", hint="its hits have no cells"),
        MeansNothing("min_score", without="source scores", hint="its edges have no scores"),
        MeansNothing("volumes, hit_inefficiency", without=OF_HITS, hint="its files are graphs, joined already"),
        MeansNothing("hard_cuts", without=f"{OF_HITS}, source acorn", hint="it selects hits"),
    )


@dataclass(frozen=True, kw_only=True)
class MadeFlags(Group):
    """Events that ACTS makes"""

    simulate: int | None = None
    """With --source acts: have Pythia and ACTS make so many events in its generic detector, number --seed and those
    after it, which stay as CSV in --input (default: acts/ and process and pile-up). Takes the extra [acts]."""

    process: str = "ttbar"
    """The hard collision of an event: ttbar, or settings of Pythia, 'HardQCD:all = on; PhaseSpace:pTHatMin = 50'."""

    pile_up: FromTo = FromTo("200")
    """Mean number of other collisions in an event; '60, 200': drawn evenly for each event."""

    dead_modules: float = 0.0
    """Share of the modules that see nothing, the same ones in all events."""

    noise: float = 0.0
    """Hits that no particle left, per true one."""

    RULES = rules(
        Bounded("simulate", least=1, most=100_000),
        Bounded("dead_modules, noise", most=1),
        MeansNothing("simulate", without="source acts", hint="--source simulate has --events"),
        MeansNothing("process, pile_up, dead_modules, noise", without="simulate", hint="its events are there already"),
        MeansNothing("events", beside="simulate", hint="--simulate tells how many"),
    )


@dataclass(frozen=True, kw_only=True)
class DetectorFlags(Group):
    """The field and the collisions, which track finding and fits of helices go by"""

    field: str | None = None
    """Magnetic field: B_z in T, the same everywhere, or a file: a table of z and B_z, or a map of r, z, B_r, B_z as
    ACTS writes one, in mm and T. Default: that of the TrackML events on TrackML's layers; elsewhere, and of
    --source acts, 2 T."""

    beam_spot: Spot | None = None
    """Where collisions lie along the beam: z of its middle and its width (sigma) in mm, '0, 55'. Default: measured from
    events with truth, else that of the TrackML events, '0, 5.44'; simulated ones have this one, too, and those of
    --simulate '0, 55'. '0, 5, 60' of these: of a width drawn evenly for each event."""

    surfaces: str | None = None
    """CSV file with the surfaces of the detector, by which --ckf and --extend of infer follow tracks: volume, layer,
    kind, place, low, high, sigma_u, sigma_v, seeds (docs/another_detector.md). Default: those of TrackML."""

    RULES = rules(MeansNothing("surfaces", beside="source simulate", hint="it has TrackML's"))


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

    phi_slope: float = 6e-4
    """Largest change of phi over change of r of an edge, in rad/mm."""

    z0: float = 200.0
    """Largest distance from the origin at which an edge meets the beam axis, in mm."""

    layer_pairs: LayerPairs | None = None
    """Pairs of layers to join, VOLUME.LAYER each: '8.2-8.4, 8.4-8.6'. Default: TrackML's that follow each other along a
    straight line; skip-one, skip-two: with one or two layers between as well, four or nine times the edges."""

    same_layer: bool = False
    """Join overlapping modules of one layer as well."""

    edges_from: str | None = None
    """Directory with the candidate edges of each event, event<name>-graph.csv with columns edge0 and edge1, rows of its
    hits, as ACTS writes graphs; instead of the cuts above."""

    module_map: str | None = None
    """File of a module map, which joins hits instead of the cuts above; the store keeps a copy. 'build': learn one
    first, from events with truth. pretrained:NAME: the one that a shipped network was trained with."""

    map_edges_per_hit: float | None = None
    """Pairs of hits a hit that a module map may hold on average, its purest boxes first; triplets then confirm some of
    them as edges. Default: 30 where one is built, all that a file holds."""

    map_target: Conditions = Conditions("pt: [1, .inf], nhits: [5, .inf]")
    """Particles whose segments a module map that is built is to hold."""

    map_events: int | None = None
    """Events that a module map is learned from. Default: all training events of the files; 100 simulated ones, which
    are none of the store's."""

    RULES = rules(
        Bounded("phi_slope, z0, map_edges_per_hit", positive=True),
        Bounded("map_events", least=1),
        MeansNothing(_CUTS, beside="module_map", hint="a map has bounds of its own"),
        MeansNothing(f"{_CUTS}, module_map", beside="edges_from", hint="its files join hits already"),
    )


@dataclass(frozen=True, kw_only=True)
class TileFlags(Group):
    """Tiles, the small regions an event is stored in"""

    partitioner: PartitionerName | None = None
    """How nodes become tiles: regions of equal cost, or metis: fewest edges cut.
    Default: phi-eta, or metis without positions."""

    tiles: int | None = None
    """Tiles of each event. Default: some 4600 edges a tile, small events finer."""

    RULES = rules(
        Bounded("tiles", least=1, most=65_536),  # of some thousand edges each, more than a machine can hold
    )


@dataclass(frozen=True, kw_only=True)
class StoreFlags(Group):
    """The store"""

    store: str | None = None
    """Directory of the store. Default: one named after the events, in stores/."""

    val_split: float = 0.1
    """Share of the events kept for validation: those of which a hash of the name says so. One at least of two; 0:
    none."""

    test_split: float = 0.1
    """Share of the events kept for a final test, likewise. One at least of three. 1 with --val-split 0: all of them,
    and nothing to train on."""

    overwrite: bool = False
    """Replace the store, if it was made with other flags, or holds events that these flags leave out."""

    report: bool = False
    """Print nodes, edges and predicted memory for each rank, and what each partitioner and grouping would cut."""

    RULES = rules(Bounded("val_split, test_split", most=1))

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
            without="module_map build",
            hint="it tells how one is built",
            spares_presets=True,
        ),
        MeansNothing("field, beam_spot, surfaces", beside="source scores", hint="the store of the events keeps them"),
        MeansNothing("module_map, edges_from", without=OF_HITS, hint="its files are graphs, joined already"),
        MeansNothing(
            ", ".join(AcornFlags.__annotations__), without="source acorn", hint="it tells how acorn files are read"
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
        if self.module_map == "build" and self.source != "simulate" and self.val_split + self.test_split == 1:
            what = f"{self.spelt('module_map')}{self.of_preset('module_map')} learns from events to train on, and "
            none = f"{self.spelt('val_split')} and {self.spelt('test_split')} leave none"
            raise ConfigError(what + none, "name a map: --module-map pretrained:full, or a file")
