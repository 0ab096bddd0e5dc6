"""`examples/serve.py`: one event a request, the logits of the exported file, bad requests and a quiet end."""

from __future__ import annotations

import http.client
import io
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from random_store import write_random_store
from test_infer import trained

from domainpar.export import _inputs, export
from domainpar.testing import patient
from domainpar.tracking.config import ExportConfig
from domainpar.tracking.events.store import EventStore

onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (pip install '.[export]')")
pytest.importorskip("onnxscript", reason="onnxscript is not installed (pip install '.[export]')")
SERVER = Path(__file__).parents[2] / "examples" / "serve.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An exported network, its session here, and the tables of an event."""
    place = tmp_path_factory.mktemp("serve")
    store = write_random_store(place / "store")
    trained(store, place / "run", max_steps=1, graph_iters=1)
    path = export(ExportConfig(run=str(place / "run"), checkpoint="last"))
    events = EventStore(store)
    with events.open(events.events()[0]) as event:
        tables = {name: table.numpy() for name, table in _inputs(event, True).items()}
    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads = 1  # as the server has it
    return path, onnxruntime.InferenceSession(path, how, providers=["CPUExecutionProvider"]), tables


@pytest.fixture
def server(model):
    command = [sys.executable, str(SERVER), str(model[0]), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().split(":")[2])
        yield port, process
        process.kill()


def ask(port, body, method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(60))
    connection.request(method, "/", body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def packed(**tables):
    np.savez(body := io.BytesIO(), **tables)
    return body.getvalue()


def test_answers_are_the_logits_of_the_file_also_of_many_at_a_time_and_after_bad_requests(model, server):
    _, session, tables = model
    (expected,) = session.run(None, tables)
    port, _ = server
    bad = {
        b"no npz": "no .npz with the network's tables: KeyError: 'x'",
        packed(x=tables["x"]): "edge_index is not a file in the archive",
        packed(**tables | {"x": tables["x"][:, :1]}): "InvalidArgument",
        packed(**tables | {"x": np.array([{}])}): "Object arrays cannot be loaded",
    }
    for body, why in bad.items():
        status, said = ask(port, body)
        assert (status, why in said.decode()) == (400, True), said
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(ask(port, packed(**tables)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    for status, body in answers:
        assert status == 200
        assert np.array_equal(np.load(io.BytesIO(body))["logits"], expected[:, 0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(60))
    connection.putrequest("POST", "/")
    connection.putheader("Content-Length", "-1")
    connection.endheaders()
    assert connection.getresponse().status == 400
    status, said = ask(port, None, "GET")
    assert (status, set(json.loads(said))) == (200, set(session.get_modelmeta().custom_metadata_map))


def test_what_was_asked_before_the_end_is_answered(model, server):
    _, _, tables = model
    port, process = server
    body = packed(**tables)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(60))
    connection.putrequest("POST", "/")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[:100])
    assert ask(port, None, "GET")[0] == 200  # it has come to this one, so it reads the first
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    connection.send(body[100:])
    answer = connection.getresponse()
    assert answer.status == 200
    assert np.isfinite(np.load(io.BytesIO(answer.read()))["logits"]).all()
    assert process.wait(patient(30)) == 0
