"""Lines of `metrics.jsonl`: what a run that goes on keeps of them, and how they are printed."""

import errno
import json
import resource
import signal

import pytest
import torch
from marks import fault

from domainpar.measure.forecast import peak_rss_bytes
from domainpar.parallel.world import World
from domainpar.tracking.training.edge_counting import EdgeMetrics
from domainpar.tracking.training.metrics import AGAINST, EdgeCounts
from domainpar.tracking.training.record import MetricsFile, StepTotals, keep_records, readable


def lines(*steps):
    return "".join(json.dumps({"split": "train", "step": step}) + "\n" for step in steps)


def test_what_will_be_done_again_is_dropped_and_the_rest_stays_as_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2, 3, 3, 4, 5) + '{"split": "train", "st')
    keep_records(path, 3)
    assert path.read_text() == lines(1, 2, 3, 3)
    keep_records(path, 3)
    assert path.read_text() == lines(1, 2, 3, 3)
    keep_records(path, 0)
    assert path.read_text() == ""
    keep_records(tmp_path / "missing.jsonl", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


RECORD = {
    "split": "train",
    "epoch": 12,
    "step": 123456,
    "loss": 0.123456789,
    "lr": 1e-3,
    "edge_efficiency": 0.98765,
    "edge_purity": 0.12345,
    "edge_auc_pooled": 0.99999,
    "counted_against": AGAINST[False],
    "seconds": 123.456,
}


def test_the_printed_line_is_short_and_made_of_key_equals_value():
    line = readable(RECORD)
    assert line == (
        "split=train epoch=12 step=123456 loss=0.12346 "
        "edge_efficiency=0.9877 edge_purity=0.1235 edge_auc_pooled=1.0000 seconds=123"
    )
    assert len(line) <= 125


@fault(15)
def test_the_printed_line_leaves_out_what_is_not_known_and_says_what_is_approximate():
    line = readable({**RECORD, "loss": None, "edge_purity": None, "counted_against": AGAINST[True]})
    assert line == (
        "split=train epoch=12 step=123456 edge_efficiency=0.9877 edge_auc_pooled=1.0000 seconds=123 approximate=yes"
    )


def test_the_peak_of_memory_is_in_bytes():
    assert 30e6 < peak_rss_bytes() < 1e12


def test_lines_that_cannot_be_read_are_dropped_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1).encode() + b'{"split": "tr\xff\n{"split": 3}\n[]\n' + lines(2).encode() + b'{"st')
    assert keep_records(path, 3) == 3
    assert path.read_text() == lines(1, 2)
    assert keep_records(path, 3) == 0


def test_a_record_is_added_whole_or_not_at_all(tmp_path):
    """A disk that takes half a line leaves none of it, so that the next one does not begin in its middle."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.add({"step": 1}) is None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))
        problem = metrics.add({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert isinstance(problem, OSError)
    assert metrics.lost == 1
    assert metrics.add({"step": 3}) is None
    assert metrics.path.read_text() == '{"step": 1}\n{"step": 3}\n'
    full = MetricsFile(tmp_path / "full.jsonl")
    full.path.symlink_to("/dev/full")
    assert full.add({"step": 1}).errno == errno.ENOSPC


def test_counts_too_large_for_a_double_travel_exactly(monkeypatch):
    """Pairs of a large validation are more than 2^53."""
    counts = torch.tensor([1, 2, 3, 4, 5, 2**53 + 1, 7, 8])
    monkeypatch.setattr(EdgeMetrics, "counts_here", lambda metrics, transport: counts)
    step_totals = StepTotals(World.alone())
    step_totals.loss.add(torch.tensor([0.1], dtype=torch.float64))
    spoilt, (loss,), figures, found = step_totals.read(torch.tensor(3), [torch.tensor(0.5), torch.tensor(True)])
    assert (spoilt, figures, found) == (3, [0.5, 1.0], EdgeCounts(*counts.tolist()))
    assert loss == pytest.approx(0.1, abs=1e-15)
