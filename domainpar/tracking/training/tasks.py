"""What a network is to learn: scores of edges, labels of nodes and of events, each with its weight in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from domainpar.common.agreement import gather, on_all
from domainpar.common.models import read_as
from domainpar.common.problems import Problem, problem_record
from domainpar.nn.heads import EDGE, Head
from domainpar.nn.standard import FeatureSums, mean_and_scale
from domainpar.parallel.world import World
from domainpar.runs.directory import read_run
from domainpar.runs.records import Learning
from domainpar.tracking.config.train import TaskFlags, TrainingFlags
from domainpar.tracking.events.graph import IntArray
from domainpar.tracking.events.labels import OF_PARTICLES, Label, is_known
from domainpar.tracking.events.store import EventRecord, EventStore, StoredEvent
from domainpar.tracking.training.pretrained import source

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """A label that a network is trained on."""

    label: Label  # which
    weight: float = 1.0  # of its loss
    # mean, scale: of numbers: the output of the network times `scale`, plus `mean`, is in the units of the label
    mean: float = 0.0
    scale: float = 1.0
    usual_nodes: float = 1.0  # nodes of a training event, on average

    @property
    def name(self) -> str:
        return self.label.name

    @property
    def head(self) -> Head:
        """What the network is read for: a logit for each class, or one number."""
        return Head(self.name, self.label.of, max(1, self.label.classes), self.usual_nodes)

    def labels(self, event: StoredEvent, ids: IntArray) -> FloatArray:
        """Labels of some nodes, float64 [n], or the one of the event, [1]; as the network is to say them.

        Raises:
            StoreError: If the file is damaged.
            Problem: If the event has no such label, or a class that the network does not know.
        """
        if self.label.of == "node":
            values = event.read_label(self.name, ids)
        elif self.name in event.graph_labels:
            values = np.array([event.graph_labels[self.name]], np.float64)
        else:
            raise event.place.problem(f"the event has no label {self.name}", "--on-bad-event skip leaves it out")
        if not self.label.classes:
            standardised: FloatArray = (values - self.mean) / self.scale
            return standardised
        if len(bad := np.flatnonzero(values >= self.label.classes)):
            what = f"label {self.name} is {values[bad[0]]:g}, and the network knows {self.label.classes} classes"
            raise event.place.problem(what, "classes of all events are counted when a training begins")
        return values

    def values(self, output: FloatArray) -> npt.NDArray[Any]:
        """Predictions, [n, columns], as labels: the likeliest class, int64 [n], or a number, float64 [n]."""
        if self.label.classes:
            return np.asarray(output.argmax(axis=1))
        return np.asarray(output[:, 0] * self.scale + self.mean)


@dataclass(frozen=True)
class Tasks:
    """All that a network learns."""

    edge_weight: float = 1.0  # weight of the loss of edges; 0: it does not score them
    labels: tuple[Task, ...] = ()  # labels that it learns
    main: str = EDGE.name  # the name of the label, or of the edges, by which the best checkpoint is chosen

    @property
    def heads(self) -> tuple[Head, ...]:
        """What the network is read for."""
        return (*((EDGE,) if self.edge_weight else ()), *(task.head for task in self.labels))

    def missing(self, record: EventRecord) -> str | None:
        """What an event lacks to be trained on, as far as its record shows; None if that is nothing."""
        if self.edge_weight and not record.has_labels:
            return "truth"
        theirs = {label.name for label in record.labels} | {label.name for label in OF_PARTICLES}
        return next((f"label {task.name}" for task in self.labels if task.name not in theirs), None)

    def describe(self, figure: float) -> str:
        """The quantity that chooses the best checkpoint (`figure_of` of `runs.directory`), for the user."""
        if self.main == EDGE.name:
            return f"pooled edge AUC {figure:.4f}"
        of_classes = next(task for task in self.labels if task.name == self.main).label.classes
        return f"accuracy of {self.main} {figure:.4f}" if of_classes else f"RMSE of {self.main} {-figure:.4g}"

    @classmethod
    def of(cls, record: Learning) -> Tasks:
        """Those of a run, or of scores; shipped networks and imported ones name none, and score edges."""
        return EDGES if record.tasks is None else read_as(cls, record.tasks)


EDGES = Tasks()
"""Edges alone."""


def tasks_of(config: TrainingFlags, store: EventStore, world: World) -> Tasks:
    """What a configuration asks for, with numbers standardised over the training events. *Collective*.

    Raises:
        Refused: On all ranks alike, if no event has a label of this name, or it is of another kind, or none of the
            training events knows one.
    """
    tasks = on_all(world.transport, lambda: _configured_tasks(config, store))
    if not tasks.labels:
        return tasks
    if config.init is not None:  # in the units of the network that the run begins with: heads say numbers in these
        theirs = {task.name: task for task in Tasks.of(read_run(source(config.init))).labels}
        labels = []
        for task in tasks.labels:
            known = theirs.get(task.name)
            same = known is not None and known.head == task.head._replace(usual_nodes=known.usual_nodes)
            labels.append(replace(known, weight=task.weight, label=task.label) if known is not None and same else task)
        tasks = replace(tasks, labels=tuple(labels))
    records = [record for record in store.readable("train") if tasks.missing(record) is None]
    if not records:  # refused with the reason when events are checked
        return tasks
    skips = config.on_bad_event == "skip"
    share = records[world.rank :: world.size]
    sums = on_all(world.transport, lambda: [_sums(store, it, tasks.labels, skips) for it in share])
    of_events: list[Any] = []
    for rank, of_rank in enumerate(gather(world.transport, sums)):
        for record, of_event in zip(records[rank :: world.size], of_rank):
            if isinstance(of_event, dict):  # it is left out, on all ranks alike
                store.unreadable[record.event] = Problem(**of_event)
            else:
                of_events.append(of_event)
    usual_nodes = sum(record.num_nodes for record in records) / max(len(records), 1)

    def standardised() -> Tasks:
        labels = []
        for number, task in enumerate(tasks.labels):
            tables = [FeatureSums(*event[number]) for event in of_events]
            if not any(table.rows for table in tables):
                raise Problem(f"no training event knows its {task.name}", "there is nothing to learn it from")
            if task.usual_nodes == 1.0:  # else it has the units of the network that it begins with
                (mean,), (scale,) = ((0.0,), (1.0,)) if task.label.classes else mean_and_scale(tables)
                task = replace(task, mean=mean, scale=scale, usual_nodes=max(usual_nodes, 1.0))
            labels.append(task)
        return replace(tasks, labels=tuple(labels))

    return on_all(world.transport, standardised)


def _configured_tasks(config: TaskFlags, store: EventStore) -> Tasks:
    """The tasks of a configuration, not standardised yet."""
    theirs = {label.name: label for label in OF_PARTICLES if store.settings.get("source") != "pyg"} | store.labels
    edge_weight, labels, main = 1.0, [], EDGE.name
    if config.task != "edge":
        of, _, kind = config.task.partition("-")
        fitting = [label for label in theirs.values() if label.of == of and bool(label.classes) == (kind == "class")]
        chosen = [label for label in fitting if label.name == config.label]
        if config.label is None:
            chosen = [label for label in fitting if label.name in store.labels] or fitting
        if len(chosen) != 1:
            names = ", ".join(label.name for label in fitting)
            found = f"no label {config.label}" if config.label else f"{'several labels' if chosen else 'no label'}"
            hint = f"--label takes one of {names}" if names else f"its events have {_listed(theirs) or 'no labels'}"
            raise Problem(f"--task {config.task}: store {store.path} has {found} of this kind", hint)
        edge_weight, labels, main = 0.0, [Task(chosen[0])], chosen[0].name
    for name, weight in config.aux.value.items() if config.aux else ():
        if name == EDGE.name:
            edge_weight = weight
        elif name not in theirs:
            raise Problem(f"--aux: store {store.path} has no label {name}", f"it has {_listed(theirs) or 'none'}")
        elif name == config.label or (labels and name == labels[0].name):
            raise Problem(f"--aux {name}: that is what --task {config.task} is about", "name it once")
        else:
            labels.append(Task(theirs[name], weight))
    return Tasks(edge_weight, tuple(labels), main)


def going_on(tasks: Tasks, config: TaskFlags, store: EventStore) -> Tasks:
    """What a run goes on to learn: what it began with, with the weights that are asked for now.

    Raises:
        Problem: If other labels are asked for, or another one as what it is there for.
    """
    configured = _configured_tasks(config, store)
    (heads, main), (now, now_main) = (([head.name for head in each.heads], each.main) for each in (tasks, configured))
    if (heads, main) != (now, now_main):
        what = f"the run learns {', '.join(heads)}, and --task, --label and --aux ask for {', '.join(now)}"
        what += "" if heads != now else f", with {now_main} in place of {main} as what it is there for"
        raise Problem(what, "leave them as they were, or begin another run: --init takes weights of the same network")
    labels = tuple(replace(task, weight=of.weight) for task, of in zip(tasks.labels, configured.labels))
    return Tasks(configured.edge_weight, labels, main)


def _listed(labels: Mapping[str, Label]) -> str:
    return ", ".join(label.what for label in labels.values())


def _sums(store: EventStore, record: EventRecord, tasks: Sequence[Task], skips: bool) -> list[Any] | dict[str, Any]:
    """Of each label of an event that is known: their number, and exact sums of numbers; or why it is left out."""
    try:
        with store.open(record) as event:
            everything = np.arange(event.num_nodes)
            values = [replace(task, mean=0.0, scale=1.0).labels(event, everything) for task in tasks]
    except Problem as problem:
        if not skips:
            raise
        return problem_record(problem)
    known = [of[is_known(task.label, of)] for task, of in zip(tasks, values)]
    # Labels lie in float32, and are not standardised yet.
    return [FeatureSums.of(of.astype(np.float32)[:, None]) for of in known]


def label_arrays(tasks: Tasks, readings: Mapping[str, npt.NDArray[np.floating]]) -> dict[str, npt.NDArray[Any]]:
    """The predicted labels of an event, by the names of their arrays: `node_NAME` [N], `graph_NAME` [1].

    Classes are int16, with the logits of all beside them, `node_NAME_logits` [N, classes]; numbers float64.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for task in tasks.labels:
        output = readings[task.name].reshape(-1, task.head.columns)
        name, values = f"{task.label.of}_{task.name}", task.values(output.astype(np.float64))
        arrays[name] = values.astype(np.int16) if task.label.classes else values
        if task.label.classes:
            arrays[f"{name}_logits"] = output
    return arrays


def task_lines(tasks: Tasks) -> Iterator[str]:
    """What the network is trained on, in words; nothing where that is edges alone."""
    for task in tasks.labels:
        unit = "" if task.label.classes else f", mean {task.mean:.3g}, deviation {task.scale:.3g}"
        yield f"learns   : {task.label.what}{unit}" + ("" if task.weight == 1 else f", weight {task.weight:g}")
    if tasks.labels and tasks.edge_weight:
        yield "learns   : edges" + ("" if tasks.edge_weight == 1 else f", weight {tasks.edge_weight:g}")
