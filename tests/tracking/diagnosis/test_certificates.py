"""The certificate: which layouts agree, what was left out, and no names in it where none are wanted."""

import json
import platform
from pathlib import Path
from types import SimpleNamespace

import garbling
import pytest
import torch

from domainpar.diagnosis.finding import Verdict, works
from domainpar.parallel.launcher import Launcher
from domainpar.testing import run_ranks
from domainpar.tracking.config import DoctorConfig
from domainpar.tracking.diagnosis import certificate, toy
from domainpar.tracking.diagnosis import layouts as measured
from domainpar.tracking.diagnosis.certificate import Budget, certify, check_layouts, judge_layouts, without_names

THREADS = Launcher("none", "no launcher")


@pytest.fixture(autouse=True)
def small_events(monkeypatch):
    monkeypatch.setattr(certificate, "TRACKS", {"small": 20, "large": 30})
    monkeypatch.setattr(certificate, "TRACKS_OF_LAYOUTS", (14, 12))
    monkeypatch.setattr(toy, "NUM_TILES", 4)
    monkeypatch.setattr(measured, "THREAD_RANKS", (2,))


def test_layouts_of_four_ranks_are_all_there():
    names = run_ranks(
        lambda world: [(layout.training.precision_in_words, layout.name) for layout in measured.layouts(world)], 4
    )
    assert names[0] == names[3]
    assert set(names[0]) >= {
        *((precision, "each rank alone") for precision in ("float32", "float64", "bf16")),
        *((precision, "4 ranks as one domain") for precision in ("float32", "float64", "bf16")),
        ("float32", "4 groups of 1"),
        ("float32", "2 groups of 2"),
        ("float32", "4 ranks with metis parts"),
        ("float32", "4 ranks of 3 threads that recompute"),
    }


def _broken(world):
    return check_layouts(garbling.garbled(world, torch.float32, "one bit"), Budget(world, 60.0, talks=False))


def test_layouts_over_a_broken_network_do_not_agree_and_which_is_said(monkeypatch):
    for module in (certificate, measured):
        monkeypatch.setattr(module, "PRECISIONS", {"float32": {}})
    findings, _ = run_ranks(_broken, 2)[0]
    assert findings[0].verdict is Verdict.FAIL
    groups = [set(names) for names in findings[0].figures.values()]
    assert {"each rank alone", "4 threads as ranks"} <= next(group for group in groups if "each rank alone" in group)
    assert not any({"each rank alone", "2 ranks as one domain"} <= group for group in groups)


def test_layouts_that_agree_are_told_from_those_that_do_not():
    cases = [{"how": how, "sha256": [64 * letter]} for how, letter in (("one", "a"), ("two", "a"), ("three", "b"))]
    assert judge_layouts("float32", cases[:2]).verdict is Verdict.PASS
    assert judge_layouts("float32", cases[:1]).verdict is Verdict.SKIP
    finding = judge_layouts("float32", cases)
    assert finding.verdict is Verdict.FAIL
    assert finding.found == "layouts do not agree: aaaaaaaaaaaa: one, two; bbbbbbbbbbbb: three"
    ranks_differ = {"how": "ranks differ", "sha256": [64 * "a", 64 * "b"]}
    assert judge_layouts("float32", [cases[0], ranks_differ]).verdict is Verdict.FAIL


def _certificate(world, config):
    content, findings = certify(config, THREADS, world, [works("transport threads", "fast", latency_seconds=1e-6)])
    return content, findings


@pytest.mark.slow
def test_a_certificate_holds_what_was_measured(capsys):
    config = DoctorConfig(certify=True, minutes=2.0)
    (content, findings), (_, there) = run_ranks(_certificate, 2, config, timeout=120)
    assert findings == there
    assert content["certificate_version"] == 1
    assert json.loads(json.dumps(content)) == content
    assert content["exit_code"] == 0, findings
    cases = content["invariance"]["cases"]
    assert all(len(case["sha256"]) == 1 for case in cases)
    assert len({case["sha256"][0] for case in cases}) == 3, "three precisions, which differ"
    assert content["transports"] == {"threads": {"latency_seconds": 1e-6}}
    assert [place["rank"] for place in content["layout"]] == [0, 1]
    assert list(content["machines"]) == [platform.node()]
    for name in ("small", "large"):
        assert content["scaling"][name]["seconds_alone"] > 0
        assert len(content["scaling"][name]["ranks"]["seconds_wait"]) == 2
    checks = {check["check"] for check in content["checks"]}
    assert checks >= {"same bits, float32", "same bits, bf16", "scaling, large", "memory, small", "GPU = CPU, float64"}
    assert content["left_out"] == []
    printed = capsys.readouterr().out.splitlines()
    assert all(line.startswith("certify ") for line in printed)
    assert any(line.endswith("bf16 2 ranks as one domain") for line in printed)


def test_what_there_was_no_time_for_is_said_and_nothing_else_is_claimed(capsys):
    content, findings = run_ranks(_certificate, 2, DoctorConfig(certify=True, minutes=1e-6))[0]
    assert {finding.verdict for finding in findings} == {Verdict.SKIP}
    assert content["invariance"]["cases"] == []
    assert "scaling and memory, small event" in content["left_out"]
    assert capsys.readouterr().out.count("left out: no time") == len(content["left_out"])


def test_an_anonymous_certificate_names_nobody():
    content, _ = run_ranks(_certificate, 1, DoctorConfig(certify=True, minutes=1e-6, anonymous=True))[0]
    assert content["layout"][0]["host"] == "host0"
    assert list(content["machines"]) == ["host0"]
    text = json.dumps(content)
    for name in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert f'"{name}' not in text


def test_names_are_replaced_as_whole_words():
    names = {"/home/me": "~", "node1": "host0", "me": "<user>"}
    content = {"node1": ["on node1, not node11", "/home/me/x by me", 3, None, "some"]}
    assert without_names(content, names) == {"host0": ["on host0, not node11", "~/x by <user>", 3, None, "some"]}


def test_slow_and_hungry_ranks_are_warned_about():
    alone = {"seconds": 1.0, "expected_bytes": [400]}

    def steps(seconds, expected, taken):
        return {"seconds": seconds, "expected_bytes": expected, "taken_bytes": taken}

    together = steps(0.3, [100] * 4, [100, None, 90, 80])
    assert certificate.judge_time("small", 4, together, alone).found.endswith("3.33 times as fast, 83 % of ideal")
    assert certificate.judge_time("small", 4, steps(0.9, [], []), alone).verdict is Verdict.WARN
    assert certificate.judge_memory("small", together, alone).verdict is Verdict.PASS
    assert certificate.judge_memory("small", steps(1, [100, 100], [100, 140]), alone).verdict is Verdict.WARN
    assert certificate.judge_memory("small", steps(1, [100], [None]), alone).verdict is Verdict.SKIP


def test_a_gpu_that_computes_otherwise_fails(monkeypatch):
    assert certificate.check_gpu("float64", 0).verdict is Verdict.SKIP or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    honest = certificate.gradients

    def pretended(error):
        def gradients(precision, store, device):
            values = honest(precision, store, torch.device("cpu"))
            return values if device.type == "cpu" else {name: value * (1 + error) for name, value in values.items()}

        return gradients

    monkeypatch.setattr(certificate, "gradients", pretended(1e-6))
    assert certificate.check_gpu("float32", 0).verdict is Verdict.PASS
    assert certificate.check_gpu("float64", 0).verdict is Verdict.FAIL


def test_the_bits_of_gpus_are_not_compared():
    (finding,), cases = check_layouts(SimpleNamespace(device=torch.device("cuda", 0)), None)
    assert (finding.verdict, finding.check, cases) == (Verdict.SKIP, "same bits", [])


def test_time_is_rank_0s():
    def asks(world):
        budget = Budget(world, 1e6 if world.is_root else -1.0, talks=False)
        return budget.allows("a"), budget.allows("b", 2e6), budget.left_out

    assert run_ranks(asks, 3) == [(True, False, ["b"])] * 3
