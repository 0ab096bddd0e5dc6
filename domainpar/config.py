"""What each command can be asked to do, as frozen dataclasses: one field, one flag, one key of a YAML file.

The docstring under a field is its line in `--help`. Fields are gathered in small groups, shared between commands.
What is wrong in a group, or between groups, is found when the object is made, before anything else is imported.
Only commands and the rooms' entry points read these objects; everything below takes plain arguments.
"""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import yaml

LayerPair = tuple[tuple[int, int], tuple[int, int]]

# Kernels take so many numbers of a row at once (`nn.lanes`).
COLUMN_BLOCK = 16

# Networks by name. The first two are built on stages; `nn.catalogue` makes them all.
ON_STAGES = ("interaction", "interaction-node-first")
MODELS = (*ON_STAGES, "agnn", "mpnn", "gcn", "resin", "acorn", "acorn2")
OWN_MODEL = "own"
"""What a run's `config.yaml` says in place of a user's own network: a file is data and never names code."""

# How a command was started, not what it computes: left out of a run's `config.yaml`.
_NOT_KEPT = ("out", "resume", "overwrite", "report", "verify")


class ConfigError(ValueError):
    """What was asked cannot be done, found before work began: commands print it once and end with exit code 2.

    Every rank raises it together, or none: rank 0 alone prints.

    Attributes:
        hint: What to do instead, one line.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def flag(name: str) -> str:
    """The command-line flag of a field: `--events-per-step` of `events_per_step`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Fields that belong together: one heading of `--help`."""

    def __post_init__(self) -> None:
        for group in type(self).__mro__:
            if check := vars(group).get("check"):
                check(self)

    def _bounded(self, *names: str, least: float = 0, below: float = math.inf) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not least <= value < below:
                upper = "" if below == math.inf else f" and below {below:g}"
                bound = f"a finite number of at least {least:g}" if isinstance(value, float) else f"at least {least:g}"
                raise ConfigError(
                    f"{flag(name)} is {value}; it must be {bound}{upper}",
                    f"leave {flag(name)} away to have its default",
                )

    def _above_zero(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(
                    f"{flag(name)} is {value}; it must be a finite number above 0",
                    f"leave {flag(name)} away to have its default",
                )


@dataclass(frozen=True, kw_only=True)
class Ranks(Group):
    """Ranks and how an event is split over them"""

    mode: Literal["halo", "naive"] = "halo"
    """halo: the answer of one rank, exactly. naive: independent sectors, cut edges dropped (approximate)."""

    sectors: int | None = None
    """Sectors of an event in naive mode, each a sample of its own; independent of the number of ranks."""

    grouping: Literal["contiguous", "metis", "random"] = "contiguous"
    """How tiles are gathered into parts. The answer does not depend on it, only the speed."""

    domain_size: int | None = None
    """Ranks that share one event; the others take other events. Default: the largest divisor of all, up to 8."""

    transport: Literal["auto", "mpi", "gloo", "nccl"] = "auto"
    """What carries rows between ranks. auto: NCCL on GPU, MPI under an MPI launcher, gloo under torchrun."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where a rank computes. cuda: one GPU for each rank of a machine."""

    threads: int | None = None
    """Threads of a rank on cpu. The answer does not depend on it. Default: an equal share of the cores."""

    allocator: Literal["keep", "system"] = "keep"
    """keep: memory that is freed stays with its process for the next step (glibc). system: as the C library does."""

    def check(self) -> None:
        """Refuse what the ranks cannot do."""
        self._bounded("sectors", "domain_size", "threads", least=1)
        if self.mode == "naive" and self.sectors is None:
            raise ConfigError("--mode naive needs --sectors", "say how many sectors to cut an event into: --sectors 8")
        if self.mode == "halo" and self.sectors is not None:
            raise ConfigError(f"--sectors {self.sectors} means nothing with --mode halo", "add --mode naive or drop it")
        if self.transport == "nccl" and self.device == "cpu":
            raise ConfigError("--transport nccl moves GPU memory, but --device is cpu", "add --device cuda or drop it")


@dataclass(frozen=True, kw_only=True)
class Run(Group):
    """The run, its events and its results"""

    store: str | None = None
    """Store of prepared events (see domainpar.prepare). Default: built-in simulated events."""

    out: str | None = None
    """Directory of the run. Default: a new numbered one, runs/0001, runs/0002, ..."""

    resume: bool = False
    """Continue the run in --out from its last checkpoint, with the flags it began with unless others are given."""

    overwrite: bool = False
    """Replace the run that lies in --out."""

    verify: bool = True
    """Before training a model of your own, run it whole and split on a piece of the first event and compare."""

    seed: int = 0
    """Seed of the first weights, of the order of events and of everything else that is random."""

    def check(self) -> None:
        """Refuse contradictions about the output directory."""
        self._bounded("seed", below=2**63)
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite exclude each other", "keep one: continue the run or replace it")
        if self.resume and self.out is None:
            raise ConfigError("--resume does not say which run", "name its directory: --out runs/0001 --resume")


@dataclass(frozen=True, kw_only=True)
class Network(Group):
    """The network"""

    model: str = "interaction"
    """interaction, interaction-node-first (the same bits on any number of ranks); agnn, mpnn, gcn, resin, acorn, acorn2
    (to rounding); or your own, package.module:factory."""

    hidden: int = 64
    """Width of node and edge states, a multiple of 16."""

    graph_iters: int = 4
    """Message-passing iterations."""

    shared_weights: bool = False
    """Use the same weights in every iteration."""

    dropout: float = 0.0
    """Probability with which a number of a hidden layer is dropped in training."""

    dtype: Literal["float32", "float64"] = "float32"
    """Precision of states and weights."""

    precision: Literal["full", "bf16"] = "full"
    """Precision of edge states and their products. full: that of --dtype. bf16: half the memory of edge states."""

    def check(self) -> None:
        """Refuse a network that cannot be built."""
        if self.model == OWN_MODEL:
            raise ConfigError(
                "the network of this run is code of your own, which no file names",
                "repeat --model package.module:factory; run.json says what it was",
            )
        if self.model not in MODELS and not is_code(self.model):
            close = difflib.get_close_matches(self.model, MODELS, n=1)
            raise ConfigError(
                f"--model is {self.model!r}; expected one of {', '.join(MODELS)}, or package.module:factory",
                f"did you mean {close[0]}?" if close else "python -m domainpar.train --help explains it",
            )
        self._bounded("hidden", "graph_iters", least=1)
        self._bounded("dropout", below=1)
        if self.precision == "bf16" and self.dtype == "float64":
            raise ConfigError("--precision bf16 and --dtype float64 exclude each other", "drop one of them")
        if self.model in ON_STAGES and (extra := self.hidden % COLUMN_BLOCK):
            nearest = sorted({max(self.hidden - extra, COLUMN_BLOCK), self.hidden - extra + COLUMN_BLOCK})
            raise ConfigError(
                f"--hidden is {self.hidden}, not a multiple of {COLUMN_BLOCK}: "
                f"rows are computed {COLUMN_BLOCK} numbers at a time",
                "use " + " or ".join(f"--hidden {width}" for width in nearest),
            )


@dataclass(frozen=True, kw_only=True)
class Learning(Group):
    """Learning"""

    epochs: int = 20
    """Times every training event is seen."""

    max_steps: int | None = None
    """Stop after so many steps, whatever the epochs."""

    events_per_step: int = 1
    """Events (in naive mode: sectors) of one optimiser step. The ranks change who computes them, never what."""

    lr: float = 3e-3
    """Learning rate of AdamW."""

    weight_decay: float = 0.01
    """Weight decay of AdamW."""

    clip: float | None = None
    """Largest norm of the gradient; larger ones are scaled down to it. Default: no limit."""

    warmup: int = 10
    """Steps in which the learning rate rises linearly from 0."""

    lr_schedule: Literal["constant", "cosine", "step"] = "cosine"
    """Learning rate after the warm-up. cosine: down to 0 at the end of the epochs. step: times 0.9 every 10 epochs."""

    def check(self) -> None:
        """Refuse numbers an optimiser cannot use."""
        self._bounded("epochs", "max_steps", "events_per_step", least=1)
        self._bounded("weight_decay", "warmup")
        self._above_zero("lr")
        if self.clip is not None:
            self._above_zero("clip")


@dataclass(frozen=True, kw_only=True)
class Memory(Group):
    """Less memory for more time; the answer stays the same"""

    recompute_every: int | None = None
    """Keep the states of every so many iterations only, and compute those between once more. Default: keep all.

    At least 2: of one iteration no more than its inputs is kept in any case."""

    offload: bool = False
    """Keep what waits for the backward pass in the host's memory (with --device cuda)."""

    def check(self) -> None:
        """Refuse intervals that save nothing."""
        self._bounded("recompute_every", least=2)


@dataclass(frozen=True, kw_only=True)
class Loss(Group):
    """Weights of edges in the loss"""

    true_weight: float = 1.0
    """Weight of a true edge of a target particle."""

    fake_weight: float = 1.0
    """Weight of a false edge."""

    other_weight: float = 0.0
    """Weight of a true edge of a particle that is not a target."""

    target: str | None = None
    """Target particles, e.g. 'pt: [1, .inf], nhits: [3, .inf]' (closed intervals). Default: all."""

    def check(self) -> None:
        """Refuse weights that leave nothing to learn, and a target that is no mapping."""
        self._bounded("true_weight", "fake_weight", "other_weight")
        if self.true_weight == 0 or self.fake_weight == 0:
            raise ConfigError(
                "--true-weight and --fake-weight must be above 0: "
                f"they are {self.true_weight:g} and {self.fake_weight:g}, so one answer would fit every edge",
                "to weigh true edges less, use a small number",
            )
        if self.target is not None:
            target_conditions(self.target)


@dataclass(frozen=True, kw_only=True)
class Record(Group):
    """What is printed and kept"""

    log_every: int = 10
    """Steps between two printed lines."""

    checkpoint_every: int | None = None
    """Steps between two checkpoints, besides the one at the end of each epoch."""

    def check(self) -> None:
        """Refuse intervals below one step."""
        self._bounded("log_every", "checkpoint_every", least=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Run, Ranks, Network, Learning, Memory, Loss, Record):
    """What `train` is asked to do."""

    def check(self) -> None:
        """Refuse what this device cannot do."""
        if self.offload and self.device == "cpu":
            raise ConfigError(
                "--offload moves states from a GPU to the host, but --device is cpu, whose states lie there already",
                "use --recompute-every 2 to save memory, or --device cuda",
            )


@dataclass(frozen=True, kw_only=True)
class Source(Group):
    """Where events come from"""

    source: Literal["simulate", "trackml", "heptrkx", "pyg"] = "simulate"
    """simulate: built in, TrackML geometry, exact truth. trackml: CSV. heptrkx: npz graphs. pyg: PyG Data files."""

    input: str | None = None
    """Directory with the files of the source."""

    events: int | None = None
    """How many events to prepare. Default: all in --input, or 10 simulated ones."""

    hits: int = 20_000
    """Hits of a simulated event, from 500 to full density (about 100000)."""

    seed: int = 0
    """Seed of the simulation, of the partitioner and of the split."""

    def check(self) -> None:
        """Refuse a source without its files, and files without their source."""
        self._bounded("events", least=1)
        self._bounded("hits", least=500)
        self._bounded("seed", below=2**63)
        if self.source == "simulate" and self.input is not None:
            raise ConfigError(
                f"--input {self.input} means nothing with --source simulate", "say what the files are: --source trackml"
            )
        if self.source != "simulate" and self.input is None:
            raise ConfigError(f"--source {self.source} needs --input", "name the directory of its files: --input DIR")


@dataclass(frozen=True, kw_only=True)
class CandidateEdges(Group):
    """Candidate edges, for sources that give hits"""

    phi_slope: float = 6e-4
    """Largest change of phi over change of r of an edge, in rad/mm."""

    z0: float = 200.0
    """Largest distance from the origin at which an edge meets the beam axis, in mm."""

    layer_pairs: str | None = None
    """Pairs of layers to join, VOLUME.LAYER each: '8.2-8.4, 8.4-8.6'. Default: neighbours along a track."""

    same_layer: bool = False
    """Join overlapping modules of one layer as well."""

    def check(self) -> None:
        """Refuse cuts that let nothing pass, and layer pairs that cannot be read."""
        self._above_zero("phi_slope", "z0")
        if self.layer_pairs is not None:
            parse_layer_pairs(self.layer_pairs)


@dataclass(frozen=True, kw_only=True)
class Tiles(Group):
    """Tiles, the small regions an event is stored in"""

    partitioner: Literal["phi", "eta", "phi-eta", "metis", "contiguous", "random"] | None = None
    """How nodes become tiles: regions of equal cost, or metis: fewest edges cut.
    Default: phi-eta, or metis without positions."""

    tiles: int | None = None
    """Tiles of each event. Default: some 4600 edges a tile, small events finer."""

    def check(self) -> None:
        """Refuse an event without tiles."""
        self._bounded("tiles", least=1)


@dataclass(frozen=True, kw_only=True)
class Storage(Group):
    """The store"""

    store: str | None = None
    """Directory of the store. Default: one named after the events, in stores/."""

    val_split: float = 0.1
    """Share of the events kept for validation."""

    test_split: float = 0.1
    """Share of the events kept for a final test."""

    overwrite: bool = False
    """Replace the store, if it was made with other flags."""

    report: bool = False
    """Print nodes, edges and predicted memory for each rank, and what each partitioner and grouping would cut."""

    def check(self) -> None:
        """Refuse a split that leaves nothing to train on."""
        self._bounded("val_split", "test_split", below=1)
        if self.val_split + self.test_split >= 1:
            raise ConfigError(
                f"--val-split {self.val_split:g} and --test-split {self.test_split:g} leave nothing to train on",
                "make their sum less than 1",
            )


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Source, CandidateEdges, Tiles, Storage):
    """What `prepare` is asked to do."""


@dataclass(frozen=True, kw_only=True)
class Scoring(Group):
    """What to score, with which weights, and where scores go"""

    run: str | None = None
    """Directory of a training run. Default: the newest in runs/."""

    checkpoint: Literal["best", "last"] = "best"
    """best: the weights with the best validation metric. last: the newest."""

    model: str | None = None
    """package.module:factory again, if the run's network is code of your own."""

    store: str | None = None
    """Store of prepared events. Default: the one the run was trained on."""

    split: Literal["all", "train", "val", "test"] = "all"
    """Which events of the store."""

    out: str | None = None
    """Directory of the scores, one file an event. Default: scores/ in the run's directory."""

    overwrite: bool = False
    """Replace the scores that lie in --out."""


@dataclass(frozen=True, kw_only=True)
class InferConfig(Scoring, Ranks):
    """What `infer` is asked to do."""


def is_code(model: str) -> bool:
    """Whether the name of a model is that of a user's own, `package.module:factory`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", model) is not None


def target_conditions(text: str) -> dict[str, Any]:
    """Read `--target`: a YAML mapping from a particle's quantity to a condition, braces optional.

    Raises:
        ConfigError: If the text is no such mapping.
    """
    hint = "write it as --target 'pt: [1, .inf], nhits: [3, .inf]'"
    try:
        conditions = yaml.safe_load(text if text.lstrip().startswith("{") else "{" + text + "}")
    except yaml.YAMLError as error:
        raise ConfigError(f"--target {text!r} is not YAML: {str(error).splitlines()[0]}", hint) from error
    if not isinstance(conditions, dict) or not conditions or None in conditions.values():
        raise ConfigError(f"--target {text!r} is not a mapping from quantities to conditions", hint)
    return conditions


def parse_layer_pairs(text: str) -> tuple[LayerPair, ...]:
    """Read `--layer-pairs`: ((volume, layer), (volume, layer)) of the inner and the outer end of each pair.

    Raises:
        ConfigError: If a pair is not of the form `8.2-8.4`.
    """
    pairs: list[LayerPair] = []
    for pair in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*-\s*(\d+)\.(\d+)\s*", pair)
        if match is None:
            raise ConfigError(
                f"--layer-pairs has {pair.strip()!r}", "write VOLUME.LAYER-VOLUME.LAYER: '8.2-8.4, 8.4-8.6'"
            )
        inner_volume, inner_layer, outer_volume, outer_layer = (int(number) for number in match.groups())
        pairs.append(((inner_volume, inner_layer), (outer_volume, outer_layer)))
    return tuple(pairs)


def groups(config_class: type[Group]) -> tuple[type[Group], ...]:
    """The groups a configuration is made of, in the order of its `--help`."""
    return tuple(base for base in config_class.__bases__ if issubclass(base, Group))


def title(group: type[Group]) -> str:
    """The heading of a group: its docstring."""
    return (group.__doc__ or group.__name__).strip()


def resolved_yaml(config: TrainConfig | PrepareConfig | InferConfig) -> str:
    """The whole configuration as YAML, defaults included, to be given to `--config` for another run.

    The output directory and `--resume`, `--overwrite`, `--report` are left out: they say how a command was started.
    """
    sections = []
    for group in groups(type(config)):
        kept = {name: getattr(config, name) for name in group.__annotations__ if name not in _NOT_KEPT}
        if is_code(str(kept.get("model"))):
            kept["model"] = OWN_MODEL
        sections.append(f"# {title(group)}\n" + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))
    return "\n".join(sections)
