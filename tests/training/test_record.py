"""Lines of `metrics.jsonl`: what a run that goes on keeps of them, and how they are printed."""

import json

from domainpar.training.record import AGAINST, keep_records, peak_rss_bytes, readable


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
    "edge_auc": 0.99999,
    "counted_against": AGAINST[False],
    "seconds": 123.456,
}


def test_the_printed_line_is_short_and_made_of_key_equals_value():
    line = readable(RECORD)
    assert line == (
        "split=train epoch=12 step=123456 loss=0.12346 "
        "edge_efficiency=0.9877 edge_purity=0.1235 edge_auc=1.0000 seconds=123"
    )
    assert len(line) <= 120


def test_the_printed_line_leaves_out_what_is_not_known_and_says_what_is_approximate():
    line = readable({**RECORD, "loss": None, "edge_purity": None, "counted_against": AGAINST[True]})
    assert line == (
        "split=train epoch=12 step=123456 edge_efficiency=0.9877 edge_auc=1.0000 seconds=123 approximate=yes"
    )


def test_the_peak_of_memory_is_in_bytes():
    assert 30e6 < peak_rss_bytes() < 1e12
