"""The certificate: which layouts agree, and what a GPU may differ by."""

import json

import certificate
import garbling
import pytest
import torch

from domainpar.diagnosis.finding import Verdict
from domainpar.testing import run_ranks
from domainpar.tracking.diagnosis import toy


@pytest.fixture(autouse=True)
def small_events(monkeypatch):
    monkeypatch.setattr(certificate, "TRACKS_OF_LAYOUTS", (14, 12))
    monkeypatch.setattr(toy, "NUM_TILES", 4)


def test_ranks_agree_in_every_layout_and_steps_are_measured():
    (content, findings), (_, there) = run_ranks(certificate.certify, 2, [20, 30], 3, timeout=120)
    assert findings == there
    assert json.loads(json.dumps(content)) == content
    assert [case["how"] for case in content["cases"]] == [
        "each rank alone", "2 ranks as one domain", "4 threads as ranks",
    ]  # fmt: skip
    assert len({sha256 for case in content["cases"] for sha256 in case["sha256"]}) == 1
    verdicts = {check["check"]: check["verdict"] for check in content["checks"]}
    assert verdicts["same bits, float32"] == "PASS"
    assert all(step["seconds_alone"] > 0 and len(step["taken_bytes"]) == 2 for step in content["steps"])


def test_layouts_over_a_broken_network_do_not_agree_and_which_is_named():
    def broken(world):
        return certificate.layout_cases(garbling.garbled(world, torch.float32, "one bit"), 3)

    finding = certificate.bits_finding(run_ranks(broken, 2)[0], "float32")
    assert finding.verdict is Verdict.FAIL
    groups = [set(names) for names in finding.figures.values()]
    assert {"each rank alone", "4 threads as ranks"} <= next(group for group in groups if "each rank alone" in group)
    assert not any({"each rank alone", "2 ranks as one domain"} <= group for group in groups)


def test_a_gpu_that_computes_otherwise_fails(monkeypatch):
    honest = certificate.gradients
    error = 1e-6

    def gradients(precision, store, device):
        scale = 1.0 if device.type == "cpu" else 1.0 + error
        return {name: value * scale for name, value in honest(precision, store, torch.device("cpu")).items()}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(certificate, "gradients", gradients)
    assert certificate.gpu_finding("float32", 0).verdict is Verdict.PASS
    assert certificate.gpu_finding("float64", 0).verdict is Verdict.FAIL
