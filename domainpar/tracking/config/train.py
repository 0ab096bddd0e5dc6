"""The flags of `train`."""

from dataclasses import dataclass
from typing import Literal

from domainpar.nn import COLUMN_BLOCK
from domainpar.tracking.config.group import (
    BelowOne,
    ConfigError,
    Count,
    Group,
    MeansNothing,
    NameOrCode,
    NotNegative,
    Positive,
    Seed,
    Whole,
    rules,
)
from domainpar.tracking.config.rank_flags import BadEventFlags, MeetingFlags, RankFlags
from domainpar.tracking.config.texts import Conditions, LossWeights, Weighting

# Networks by name; `networks.catalogue` makes them all. The first two have all options of a network; those and the
# next are built on stages.
ON_STAGES = ("interaction", "interaction-node-first")
BITWISE = (*ON_STAGES, "acorn")
MODELS = (*BITWISE, "acorn2")

IN_EXAMPLES = {
    "agnn": "examples.networks:AttentionNetwork",
    "mpnn": "examples.networks:MessagePassingNetwork",
    "gcn": "examples.networks:GraphConvolutionalNetwork",
    "resin": "examples.networks:ResidualInteractionNetwork",
    "graphnets": "examples.networks:GraphNetsNetwork",
}
"""Names that were built in, and the code of the examples that those networks are now."""

_OPTIMIZERS_IN_EXAMPLES = {"lars": "examples.optimizers:Lars", "lamb": "examples.optimizers:Lamb"}


class Network(NameOrCode):
    """The name of a network, or the user's own."""

    FIELD, KNOWN, MOVED = "model", MODELS, IN_EXAMPLES


class OptimizerName(NameOrCode):
    """The name of an optimiser, or the user's own."""

    FIELD, KNOWN, MOVED, FORM = "optimizer", ("adamw", "adam", "sgd"), _OPTIMIZERS_IN_EXAMPLES, "package.module:Class"


@dataclass(frozen=True, kw_only=True)
class RunFlags(Group):
    """The run, its events and its results"""

    store: str | None = None
    """Store of prepared events (see domainpar.prepare). Default: built-in simulated events."""

    partitioner: Literal["phi-eta", "eta", "phi", "metis"] | None = None
    """How the built-in events are cut into tiles; any other store was cut when it was prepared. Default: phi-eta."""

    out: str | None = None
    """Directory of the run. Default: a new numbered one, runs/0001, runs/0002, ..."""

    init: str | None = None
    """Begin with the best weights of this run, or of a shipped network, pretrained:NAME, and with the flags of that
    network. Default: random weights."""

    resume: bool | Literal["auto"] = False
    """Continue the run in --out from its last checkpoint, with the flags it began with unless others are given. auto:
    do so if there is one, else begin; for jobs that are queued again."""

    strict_resume: bool = False
    """Refuse to resume from an older checkpoint if the newest is damaged."""

    overwrite: bool = False
    """Replace the run that lies in --out."""

    verify: bool = True
    """Before a model of your own is trained, run it whole and split on a piece of the first event, and compare."""

    seed: Seed = 0
    """Seed of the initial weights, of the order of events and of everything else that is random."""

    RULES = rules(
        MeansNothing("resume", beside="overwrite", hint="keep one: continue the run or replace it"),
        MeansNothing("resume", without="out", hint="name the directory of the run: --out runs/0001"),
    )


@dataclass(frozen=True, kw_only=True)
class NetworkFlags(Group):
    """The network"""

    model: Network = Network("interaction")
    """interaction, interaction-node-first, acorn (on CPUs the same bits on any number of ranks); acorn2 (to rounding);
    or your own, package.module:factory. Others that were published are in examples/networks.py."""

    hidden: Count = 64
    """Width of node and edge states, a multiple of 16."""

    graph_iters: Count = 3
    """Number of message-passing iterations."""

    shared_weights: bool = False
    """Use the same weights in every iteration."""

    residual: bool = True
    """Update states in each iteration instead of replacing them. For interaction networks only."""

    aggregate: Literal["sum", "mean", "root"] = "root"
    """How edges are summed at nodes. sum: as they are. mean: divided by their number. root: divided by the square root
    of their number. For interaction networks only."""

    activation: Literal["relu", "silu", "tanh"] = "relu"
    """Activation of hidden layers. For interaction networks only."""

    norm: Literal["layer", "batch", "graph", "none"] = "layer"
    """Norm before each activation. For interaction networks only (acorn2 has batch norms, too). batch and graph run
    over all nodes or edges of an event, on all ranks, in plain torch, and are exact up to rounding."""

    readouts: Literal["last", "all"] = "last"
    """Logits that enter the loss. last: those after the last iteration. all: those after every iteration, with the mean
    of their losses (deep supervision, auxiliary losses). Scores are those after the last. For networks on stages
    (built-in fused layers) only."""

    dropout: BelowOne = 0.0
    """Probability with which a number of a hidden layer is set to zero in training."""

    dtype: Literal["float32", "float64"] = "float32"
    """Precision of states and weights."""

    precision: Literal["full", "bf16"] = "full"
    """Precision of edge states and their products. full: that of --dtype. bf16: half the memory of edge states; on a
    GPU, and for models that are not built on stages, torch's autocast."""

    standardise: bool = True
    """Bring input features to one scale by constants of the store, which checkpoints keep. For interaction and
    interaction-node-first only; other models take features as they are."""

    RULES = rules(
        MeansNothing("precision bf16", beside="dtype float64", hint="drop one of them"),
    )

    @property
    def is_bitwise(self) -> bool:
        """Whether the network is built on stages: on CPUs the same bits on any number of ranks."""
        return self.model in BITWISE and self.norm in ("layer", "none")

    @property
    def precision_in_words(self) -> str:
        """Precision of states and products."""
        return self.dtype if self.precision == "full" else self.precision

    @property
    def standardises(self) -> bool:
        """Whether the network standardises features: interaction networks can."""
        return self.standardise and self.model in ON_STAGES

    def check(self) -> None:
        """Refuse a network that cannot be built."""
        if self.model in BITWISE and (extra := self.hidden % COLUMN_BLOCK):
            nearest = sorted({max(self.hidden - extra, COLUMN_BLOCK), self.hidden - extra + COLUMN_BLOCK})
            raise ConfigError(
                f"--hidden is {self.hidden}, not a multiple of {COLUMN_BLOCK}: "
                f"rows are computed {COLUMN_BLOCK} numbers at a time",
                "use " + " or ".join(f"--hidden {width}" for width in nearest),
            )


@dataclass(frozen=True, kw_only=True)
class TaskFlags(Group):
    """What the network is trained on"""

    task: Literal["edge", "node-class", "node-regression", "graph-class", "graph-regression"] = "edge"
    """edge: which candidate edges are segments. All others: a label of each node, or of the event as a whole, which is
    a class or a number."""

    label: str | None = None
    """Label that --task is about: one of the store's own, or one that follows from the particle of a hit: origin
    (noise, collision, secondary), pt, eta, radius, vz, nhits. Default: the only label of this kind in the store."""

    aux: LossWeights | None = None
    """More labels to train on, with the weights of their losses: 'pt:0.1, origin:0.5'; edge: the edges. Numbers are
    trained on in units of their standard deviation."""

    stop_early: Count | None = None
    """Stop after so many epochs without a better validation. Default: never."""

    RULES = rules(
        MeansNothing(
            "label",
            beside="task edge",
            hint="add its --task, such as --task node-class; or learn it beside edges, such as --aux pt:0.1",
        ),
    )

    def check(self) -> None:
        """Refuse to learn edges beside edges."""
        if self.aux is not None and "edge" in self.aux.value and self.task == "edge":
            raise ConfigError("--aux edge: that is what --task edge is about", "name it once")


@dataclass(frozen=True, kw_only=True)
class LearningFlags(Group):
    """Learning"""

    epochs: Count = 40
    """Number of passes over all training events."""

    max_steps: Count | None = None
    """Stop after N steps, even inside an epoch."""

    events_per_step: Count = 1
    """Number of events (in naive mode: sectors) per optimiser step. The number of ranks changes which rank computes an
    event, never which events are in a step."""

    sampling: Literal["shuffle", "buckets", "budget"] = "shuffle"
    """How events are chosen for a step. shuffle: at random. buckets: events of about one size, so that ranks with
    events of their own wait less. budget: as many as --node-budget holds, in place of --events-per-step."""

    node_budget: Count | None = None
    """Number of hits per step, with --sampling budget. An event with more hits is a step of its own."""

    optimizer: OptimizerName = OptimizerName("adamw")
    """adamw, adam, sgd (momentum 0.9); or your own, package.module:Class, made with groups of parameters, lr, and
    weight_decay if it takes it. LARS and LAMB, for steps of many events, are in examples/optimizers.py."""

    lr: Positive = 3e-3
    """Learning rate. The default suits AdamW."""

    weight_decay: NotNegative = 0.01
    """Weight decay. adamw: apart from the gradient. adam, sgd: added to the gradient. Your own: as its code says."""

    clip: Positive | None = None
    """Largest norm of the gradient; larger ones are scaled down to it. Default: no limit."""

    warmup: Whole = 10
    """Number of steps in which the learning rate rises linearly from 0."""

    warmup_epochs: Whole | None = None
    """The same as a number of epochs, in place of --warmup."""

    lr_schedule: Literal["constant", "trapezoid", "cosine", "step"] = "trapezoid"
    """Learning rate after the warm-up. trapezoid: falls linearly to 0 in the last fifth of the steps. cosine: falls to
    0 at the end of the epochs. step: is multiplied by 0.9 every 10 epochs."""

    RULES = rules(
        MeansNothing("sampling budget", without="node_budget"),
        MeansNothing("node_budget", without="sampling budget"),
        MeansNothing(
            "events_per_step",
            beside="sampling budget",
            hint="the budget decides on the events of a step: drop it",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class MemoryFlags(Group):
    """Less memory for more time; the result stays the same"""

    recompute_every: Count | Literal["auto"] | None = None
    """Keep the states of every N-th iteration only, and compute those between once more. auto: only as much as
    --memory-limit, or the memory that is free, makes necessary. Default: keep all.

    For built-in networks. On CPUs interaction and acorn keep no more than the inputs of an iteration in any case, so
    that N is 2 or more. Other networks recompute what their own code says (torch.utils.checkpoint)."""

    memory_limit: Positive | None = None
    """Memory that a rank may take, in GiB. A run that is expected to take more is refused before its first step."""

    scratch: str | None = None
    """Folder on a disk of the machine. A run that is expected to take more than --memory-limit, or than is free, keeps
    its tables in files there. For networks on stages, on CPU. The folder is left empty."""


@dataclass(frozen=True, kw_only=True)
class LossFlags(Group):
    """Weights of edges in the loss"""

    true_weight: Positive = 1.0
    """Weight of a true edge of a target particle, where a false edge has 1, and a true one of another particle 0."""

    target: Conditions | None = None
    """Target particles, e.g. 'pt: [1, .inf], nhits: [3, .inf]' (closed intervals). Default: all."""

    weighting: Weighting | None = None
    """Weights by rules, in place of --true-weight; later rules win: '[{weight: 2, conditions: {y: true, pt: [1,
    .inf]}}]'. Where no rule holds, false edges have the weight 1 and true ones 0. A negative weight trains an edge as
    false. Metrics, and the best checkpoint, go by --target."""

    RULES = rules(
        MeansNothing("true_weight", beside="weighting", hint="write the weight as a rule of --weighting"),
    )


@dataclass(frozen=True, kw_only=True)
class RecordFlags(Group):
    """What is printed and kept"""

    log_every: Count = 10
    """Steps between two printed lines."""

    log: Literal["tensorboard"] | None = None
    """Also write the metrics of metrics.jsonl as event files, into trackers/ of the run. The package tensorboard must
    be installed."""

    checkpoint_every: Count | None = None
    """Steps between two checkpoints, besides the one at the end of each epoch."""

    profile: Count | None = None
    """Number of steps to profile, from the third one on: operations, memory over time and floating-point operations of
    each rank, in profile/ of the run, for the report. Default: none."""

    save_every_minutes: NotNegative | None = 15.0
    """Minutes between two checkpoints, besides those of steps and epochs. 0: none."""


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags(Group):
    """Checks between ranks"""

    check_replicas_every: Whole = 100
    """Steps between two checks that all ranks hold the same parameters. They are checked before each checkpoint, too.
    0: never."""


@dataclass(frozen=True, kw_only=True)
class TrainedFlags(RunFlags, RankFlags, NetworkFlags, LossFlags):
    """The groups of which the use of a trained network needs something."""


@dataclass(frozen=True, kw_only=True)
class TrainingFlags(
    TrainedFlags, RunFlags, RankFlags, BadEventFlags, NetworkFlags, TaskFlags, LearningFlags, LossFlags
):
    """What training reads, but for how it is carried through."""


@dataclass(frozen=True, kw_only=True)
class UpkeepFlags(MeetingFlags, MemoryFlags, RecordFlags, ReplicaFlags):
    """How a run is carried through; its weights do not depend on these."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    TrainingFlags,
    UpkeepFlags,
    # the groups of both, in the order of `--help`:
    RunFlags,
    RankFlags,
    MeetingFlags,
    BadEventFlags,
    NetworkFlags,
    TaskFlags,
    LearningFlags,
    MemoryFlags,
    LossFlags,
    RecordFlags,
    ReplicaFlags,
):
    """All flags of `train`."""
