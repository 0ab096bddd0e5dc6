"""Turn files or simulated collisions into a store: events with candidate edges, cut into tiles, for any ranks.

Started again with the same flags, it continues where it stopped. With more events, the store grows. Every event keeps
its split (train, val or test), which follows from a hash of its name.

Examples:
  python -m domainpar.prepare                                      built-in simulated events
  python -m domainpar.prepare --source trackml --input train_sample --store stores/trackml
  mpiexec -n 8 python -m domainpar.prepare --source trackml --input train_sample --store stores/trackml
  python -m domainpar.prepare --source acorn --input module_map --edge-features 'dr, dphi, dz, deta'
  python -m domainpar.prepare --config gnn_train.yaml              an acorn configuration: input_dir, node_features, ...
  python -m domainpar.prepare --store stores/trackml --report      nodes, edges, memory, and edges that would be cut
  mpiexec -n 2 python -m domainpar.prepare --source acts --simulate 10      top pairs, pile-up 200, simulated by ACTS
  python -m domainpar.prepare --events 2 --hits 100000 --store stores/full
  python -m domainpar.prepare --source stores --input 'stores/full, stores/acts-ttbar-200' --module-map build
"""

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domainpar.common.agreement import Refused, agree, on_all, on_root
from domainpar.tracking.command_line import run_command
from domainpar.tracking.config import SHIPPED, PrepareConfig
from domainpar.tracking.config.group import Text
from domainpar.tracking.config.prepare import default_store
from domainpar.tracking.config.texts import Spot
from domainpar.tracking.events.source_table import SOURCES

if TYPE_CHECKING:
    from domainpar.common.problems import Problem
    from domainpar.parallel.world import World
    from domainpar.tracking.events.construct import Candidates, Cuts
    from domainpar.tracking.events.embedding import Embedding
    from domainpar.tracking.events.graph import Hits, IntArray
    from domainpar.tracking.events.module_map import ModuleMap
    from domainpar.tracking.events.sources import Events
    from domainpar.tracking.reco.facts import EventFacts

MAP_EVENTS, MAP_SEED = 100, 1_000_000
"""Simulated events that a module map is learned from, and how much further on their seeds are."""

EMBEDDING_EVENTS = 20
"""Events that an embedding is learned from; every rank holds them in memory."""

HELD_EVENTS = 100
"""Events, the first ones, whose particles are held against their hits; every rank remembers some thousand numbers of
each."""

EDGES_PER_HIT = {"module_map": 30.0, "embedding": 5.0}
"""Pairs of hits a hit of a map that is built, of which triplets confirm some; edges a hit of an embedding."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare a store as the command line says; returns the exit code. Collective."""
    return run_command(PrepareConfig, _work, __doc__, argv)


def prepare_store(config: PrepareConfig, world: "World", facts: "list[EventFacts] | None" = None) -> Path:
    """Prepare a store with all ranks, events dealt to them, and show how it goes; returns its directory. *Collective*.

    Args:
        config: The flags of the command.
        world: The ranks.
        facts: Receives the facts of each event on every rank; None: events are not examined.

    Raises:
        Refused: On all ranks alike, if an event cannot be read or the store holds other events.
        NotWritten: If events or the list of them cannot be written; RanksFailed on all ranks but the first.
    """
    from domainpar.common.problems import NotWritten
    from domainpar.common.words import PROGRESS_LOG, progress
    from domainpar.tracking.events.given_edges import GivenEdges
    from domainpar.tracking.events.preparation import prepare
    from domainpar.tracking.events.store import LEARNED
    from domainpar.tracking.reco.facts import EventFacts, described, facts_of, too_few_segments
    from domainpar.tracking.training.monitor.failure import fail_alike

    if config.simulate is not None:
        config = _made(config, world)
    usual = default_store(config.source, config.input or "")
    if config.source == "simulate":
        other = "" if config.partitioner in (None, "phi-eta") else f"-{config.partitioner}"
        usual = Path("stores") / ((config.preset or f"simulate-{config.hits}") + other)
    directory = usual if config.store is None else Path(config.store)
    learned = _learned(config, directory, world)
    candidates = GivenEdges(config.edges_from) if config.edges_from is not None else learned or _cuts(config)
    source = on_all(world.transport, lambda: _source(config, directory, candidates))
    beside = {}
    if learned is not None:
        source = replace(source, learned_from=learned.learned_from)
        beside = {LEARNED[str(config.edges_learned)]: learned.to_bytes()}
    looking: dict[str, Any] = {}
    if facts is not None:
        target = targets_of(config)

        def look(hits: "Hits", edges: "IntArray", label: "IntArray | None") -> dict[str, Any]:
            settings = {**source.settings, **source.event_settings(hits.event_id)}
            return asdict(facts_of(hits, edges, label, source.unfiltered, settings, target))

        def useless() -> "Problem | None":
            problem = too_few_segments(facts, source.settings, config.least_segments)
            if problem is not None and world.is_root:
                PROGRESS_LOG.say("\n".join(described(facts, source.settings, target)))
            return problem

        def note(seen: dict[str, Any]) -> None:
            facts.append(EventFacts(**(seen if len(facts) < HELD_EVENTS else {**seen, "rows": ()})))

        looking |= {"look": look, "on_look": note, "refused": useless}
    with progress(f"prepare {directory}", len(source.names), "event", world.is_root) as advance:
        try:
            prepare(
                source,
                directory,
                partitioner=config.partitioner,
                num_tiles=config.tiles,
                val_split=config.val_split,
                test_split=config.test_split,
                seed=config.seed,
                overwrite=config.overwrite,
                beside=beside,
                ranks=world.transport,
                on_event=lambda record, kept: advance(),
                say=PROGRESS_LOG.say,
                **looking,
            )
        except Refused as refused:
            if refused.not_written:  # work had begun
                problem = NotWritten(refused.what, refused.hint, event=refused.event, file=refused.file)
                fail_alike(world, problem, spokesman=0)
            raise
        except ValueError as error:  # on all ranks alike
            agree(world.transport, error)
    return directory


def targets_of(config: PrepareConfig) -> Mapping[str, Any]:
    """The target particles whose segments are counted: those of a map or embedding that is built here."""
    from domainpar.tracking.reco.performance.matching import DEFAULT_TARGET

    learned = config.edges_learned
    is_built = learned is not None and getattr(config, learned) == "build"
    return config.map_target.value if is_built else DEFAULT_TARGET


def _made(config: PrepareConfig, world: "World") -> PrepareConfig:
    """The configuration of the files that the maker of a source has made by now. *Collective*."""
    from domainpar.common.words import progress

    assert config.simulate is not None
    made_by = import_module(f"domainpar.tracking.events.{config.source}_maker").Maker
    maker = on_all(world.transport, lambda: made_by.from_flags(_values(config)))
    directory = Path(config.input or maker.folder)
    numbers = range(config.seed, config.seed + config.simulate)
    with progress(f"make {directory}", len(numbers), "event", world.is_root) as advance:
        maker.make(directory, numbers, world.transport, advance)
    # Candidate edges go by the beam spot of the collisions; the store keeps the one that is measured.
    spread = Spot(", ".join(map(str, maker.beam_spot)))
    return replace(config, input=str(directory), beam_spot=spread, hit_inefficiency=0.0)


def _values(config: PrepareConfig) -> dict[str, Any]:
    """The flags by their names, with what texts and files mean in their place."""
    from domainpar.tracking.events.field import read_field
    from domainpar.tracking.events.surfaces import read_surfaces

    flags = {flag.name: getattr(config, flag.name) for flag in fields(config)}
    values = {name: value.value if isinstance(value, Text) else value for name, value in flags.items()}
    for name, read in (("field", read_field), ("surfaces", read_surfaces)):
        values[name] = None if values[name] is None else read(values[name])
    return values


def _cuts(config: PrepareConfig) -> "Cuts":
    """The cuts of a configuration."""
    from domainpar.tracking.events.beam_spot import BeamSpot
    from domainpar.tracking.events.construct import Cuts
    from domainpar.tracking.events.detector import FIELD_ELSEWHERE
    from domainpar.tracking.events.field import read_field
    from domainpar.tracking.events.sources import find_source

    spot, pairs = config.beam_spot, Cuts.layer_pairs
    if config.layer_pairs is not None:
        pairs = config.layer_pairs.value
    elif SOURCES[config.source].gives == "hits":
        pairs = find_source(config.source).layer_pairs
    z0 = config.z0 or max(Cuts.z0, 0.0 if spot is None else BeamSpot(spot.value[0], spot.value[-1]).reach)
    strongest = 0.0 if config.field is None else float(abs(read_field(config.field).bz).max())
    phi_slope = config.phi_slope or Cuts.phi_slope * max(1.0, strongest / FIELD_ELSEWHERE)
    return Cuts(phi_slope=phi_slope, z0=z0, same_layer=config.same_layer, layer_pairs=pairs)


def _source(config: PrepareConfig, directory: Path, cuts: "Candidates", **other: Any) -> "Events":
    """The events of a configuration, joined by these cuts; `other` replaces values of flags."""
    from domainpar.tracking.events.beam_spot import BeamSpot
    from domainpar.tracking.events.given_edges import GivenEdges
    from domainpar.tracking.events.selection import Selection
    from domainpar.tracking.events.sources import DetectorConditions, find_source, open_source

    values = {**_values(config), "num_events": _num_events(config, directory), "num_hits": config.hits, **other}
    volumes = None if config.volumes is None else tuple(map(int, values["volumes"]))
    selection = Selection(volumes, values["hard_cuts"], config.hit_inefficiency, config.seed)
    if config.source == "scores":
        from domainpar.tracking.scoring.scored_source import scored_events

        source = scored_events(str(config.input), config.min_score)
        return replace(source, names=source.names[: config.events])
    if config.source == "stores":
        from domainpar.tracking.events.mixing import mixed_events

        paths = [path.strip() for path in str(config.input).split(",")]
        return mixed_events(paths, None if config.edges_learned is None else cuts, selection)
    spot = None if config.simulate else values["beam_spot"] and BeamSpot(*values["beam_spot"])
    opened = open_source(
        config.source,
        config.input,
        num_events=values.pop("num_events"),
        cuts=cuts,
        selection=selection,
        conditions=DetectorConditions(values["field"], spot, values["surfaces"], values["beam_line"]),
        **{name: values[name] for name in find_source(config.source).options if values.get(name) is not None},
    )
    if not isinstance(cuts, GivenEdges):
        return opened
    return replace(opened, files=lambda name: [*opened.files(name), cuts.path(name)])


def _learned(config: PrepareConfig, directory: Path, world: "World") -> "ModuleMap | Embedding | None":
    """The module map or the embedding of a configuration, read or built; None without. *Collective*.

    A store that was made with one keeps it, also when it grows; only --overwrite builds it anew.
    """
    from domainpar.tracking.events.store import LEARNED
    from domainpar.tracking.training.pretrained import module_map_of

    if (kind := config.edges_learned) is None:
        return None
    given: str = getattr(config, kind)

    def place() -> Path:
        if given.startswith(SHIPPED) and kind == "module_map":
            return module_map_of(given)
        return directory / LEARNED[kind] if given == "build" else Path(given)

    path = on_all(world.transport, place)
    most = config.map_edges_per_hit
    if given == "build" and (config.overwrite or not on_root(world.transport, path.exists)):
        return _built(config, directory, world).best(most or EDGES_PER_HIT[kind])

    def read() -> "ModuleMap | Embedding":
        learned = _read_learned(kind, path)
        return learned if most is None else learned.best(most)

    return on_all(world.transport, read)


def _read_learned(kind: str, path: Path) -> "ModuleMap | Embedding":
    """The module map or the embedding that a file holds."""
    from domainpar.tracking.events.embedding import Embedding
    from domainpar.tracking.events.module_map import ModuleMap

    return ModuleMap.read(path) if kind == "module_map" else Embedding.read(path)


def _built(config: PrepareConfig, directory: Path, world: "World") -> "ModuleMap | Embedding":
    """A module map or an embedding, learned as a configuration says. *Collective*."""
    from domainpar.common.words import progress
    from domainpar.tracking.events.embedding_training import build_embedding, work_of
    from domainpar.tracking.events.map_building import COUNTED_EVENTS, build_map
    from domainpar.tracking.events.splits import splits_of

    simulated, of_map = config.source == "simulate", config.edges_learned == "module_map"
    usual = MAP_EVENTS if of_map else EMBEDDING_EVENTS
    other = {"num_events": config.map_events or usual, "seed": config.seed + MAP_SEED} if simulated else {}
    source = on_all(world.transport, lambda: _source(config, directory, _cuts(config), **other))
    names = source.names
    if not simulated:  # events for an evaluation must not have shaped its graph
        splits = source.splits or splits_of(names, config.val_split, config.test_split, config.seed)
        most = config.map_events if of_map else config.map_events or usual
        names = tuple(name for name in names if splits[name] == "train")[:most]
    origin = {"source": config.source, "hits": config.hits if simulated else None, "first": names[0], "last": names[-1]}
    assert source.hits is not None
    total = len(names) + min(len(names), COUNTED_EVENTS) if of_map else work_of(names)
    arguments = source.hits, names, config.map_target.value, origin, world.transport
    what, unit = ("module map", "event") if of_map else ("embedding", "step")
    with progress(f"learn {what}", total, unit, world.is_root) as advance:
        return build_map(*arguments, on_event=advance) if of_map else build_embedding(*arguments, on_event=advance)


def _work(config: PrepareConfig) -> int:
    from domainpar.parallel.world import World
    from domainpar.tracking.events.store import MANIFEST

    with World.session("auto") as world:
        # A store is reported without the flags that it was made with.
        alone = config.store is not None and config == PrepareConfig(store=config.store, report=True)
        directory = Path(config.store or "")
        if not alone or not on_root(world.transport, (directory / MANIFEST).is_file):
            facts: list[EventFacts] = []
            directory = prepare_store(config, world, facts)
            if world.is_root:
                _print_summary(directory, facts, config)
        if config.report and world.is_root:
            _report(directory)
    return 0


def _report(directory: Path) -> None:
    """Print what a store holds and how it can be cut, with the memory of the network that `train` takes by default."""
    from domainpar.measure.forecast import PartMemory, PerRow
    from domainpar.parallel.world import World
    from domainpar.tracking.config import TrainedFlags
    from domainpar.tracking.cost.cuts import median_event, print_report
    from domainpar.tracking.events.store import EventStore
    from domainpar.tracking.networks.catalogue import DTYPES, make_network
    from domainpar.tracking.training.step_memory import weight_of

    config, store = TrainedFlags(), EventStore(directory)
    weight, record = PartMemory(0.0, PerRow()), median_event(store)
    if record is not None:
        weight = weight_of(make_network(config, store), store, record, World.alone(), DTYPES[config.dtype], shared=True)
    network = f"hidden {config.hidden}, {config.graph_iters} iterations"
    print_report(directory, lambda nodes, edges: weight.of(nodes, 0, edges), network)


def _print_summary(directory: Path, facts: "list[EventFacts]", config: PrepareConfig) -> None:
    """Print what a store holds and was made with, and the next command."""
    from domainpar.common.words import PROGRESS_LOG, between, on_ranks, several, this_python
    from domainpar.tracking.events.field import Field
    from domainpar.tracking.events.store import LEARNED, EventStore
    from domainpar.tracking.events.surfaces import described_surfaces
    from domainpar.tracking.reco.facts import described
    from domainpar.tracking.training.pretrained import runs_of

    store = EventStore(directory)
    splits = ", ".join(f"{len(store.events(split))} {split}" for split in ("train", "val", "test"))
    nodes, edges, tiles = (
        [getattr(record, name) for record in store.events()] for name in ("num_nodes", "num_edges", "num_tiles")
    )
    print(f"{directory}: {several(len(store), 'event')} ({splits}), digest {store.digest[:16]}")
    for name, file in LEARNED.items():
        if name in store.settings and (directory / file).exists():
            print(_read_learned(name, directory / file))
    if filtered := store.settings.get("filter"):
        network = f"the network with parameters {filtered['parameters_sha256'][:16]}"
        print(f"filter: edges to which {network} gave a score of at least {filtered['min_score']:g}")
    print(f"each with {between(nodes, 'hit')}, {between(edges, 'candidate edge')}, {between(tiles, 'tile')}")
    if (field := store.settings.get("field")) is not None:
        print(f"field: {Field.of(field)}")
    if (spot := store.beam_spot) is not None:
        print(f"beam spot: {spot} ({'as given' if 'beam_spot' in store.settings else 'measured from true particles'})")
    if (rows := store.settings.get("surfaces")) is not None:
        print(described_surfaces(rows, store.settings.get("surfaces_learned")))
    if line := store.settings.get("beam_line"):
        print(f"beam line: x {line[0]:g} mm, y {line[1]:g} mm in the files; in the store it is x = y = 0")
    if lost := store.settings.get("hit_inefficiency"):
        print(f"hit inefficiency: {lost[0]:.4g} of the hits were removed at random, as in inefficient sensors")
    if store.settings.get("pt_unit") is not None:
        print(f"pt of the files is in {store.settings['pt_unit']}; stores hold GeV")
    if "positions" in store.settings:
        print("positions: TRUE POSITIONS OF HITS, because the files have no measured ones (global_x, ...)")
    if cuts := store.settings.get("hard_cuts"):
        left = "edges between hits" if store.settings["source"] == "acorn" else "hits"
        print(f"HARD CUTS BY TRUTH: {cuts}. Only {left} of passing particles are left.")
        print("What is measured on such a store does not hold for real data, which have no truth to cut by.")
    labelled = [record for record in store.events() if record.has_labels]
    if labelled:
        with store.open(labelled[0]) as event:
            if event.label_note is not None:
                print(f"true segments: {event.label_note}")
    PROGRESS_LOG.tell(*described(facts, store.settings, targets_of(config)))
    print(*store.standard.lines(store.feature_names, store.edge_feature_names), sep="\n")
    if labels := list(store.labels.values()):
        known_in = Counter(label.name for record in store.events() for label in record.labels)
        of_all = f"of {len(store):,} events"
        some = {name: f" in {count:,} {of_all}" for name, count in known_in.items() if count < len(store)}
        print(f"labels: {', '.join(label.what + some.get(label.name, '') for label in labels)}")
    trained = runs_of(config.module_map or "", filtered["parameters_sha256"] if filtered else None)
    trains = bool(not trained and (labelled or labels) and store.events("train"))
    command = [*on_ranks(), this_python(), "-m", "domainpar.train" if trains else "domainpar.infer", *trained]
    if trains and not labelled:
        command += ["--task", labels[0].task, "--label", labels[0].name]
    last = ["--tracks", "greedy", "--extend", "--ckf"] if trained else []  # as the shipped networks were evaluated
    last += ["--on-bad-event", "skip"] if trains and labelled and len(labelled) < len(store) else []
    PROGRESS_LOG.close(f"next: {shlex.join([*command, '--store', str(directory), *last])}")


def _num_events(config: PrepareConfig, directory: Path) -> int | None:
    """Number of events to prepare; by default, as many simulated ones as the store holds already."""
    from domainpar.tracking.events.simulate import USUAL_EVENTS
    from domainpar.tracking.events.store import EventStore, StoreError

    if config.events is not None or config.source != "simulate":
        return config.events if config.simulate is None else config.simulate
    try:
        return max(USUAL_EVENTS, len(EventStore(directory, check_files=False)))
    except StoreError:  # there is none yet, or it is prepared anew
        return None


if __name__ == "__main__":
    sys.exit(main())
