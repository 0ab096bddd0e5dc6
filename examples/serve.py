"""A server of an exported network, one event a request: python examples/serve.py runs/0001/model.onnx --port 8000.

POST an .npz with the tables of docs/export.md (x, edge_index, edge_attr): get one with logits, [edges], or 400 and
why not. GET tells the metadata. kill -TERM answers what was asked, then ends.
"""

import argparse
import io
import json
import signal
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime

parser = argparse.ArgumentParser(description="A server of an exported network, one event a request.")
parser.add_argument("model")
parser.add_argument("--port", type=int, default=8000, help="0: any free one")
parser.add_argument("--at-once", type=int, default=2, choices=range(1, 257), metavar="N", help="events at a time")


def answer(body: bytes) -> tuple[int, bytes]:
    """Status and content of the answer to the tables of an event."""
    try:
        tables = np.load(io.BytesIO(body)) if zipfile.is_zipfile(io.BytesIO(body)) else {}
        feed = {given.name: tables[given.name] for given in session.get_inputs()}
        with turns:
            (logits,) = session.run(None, feed)
    except Exception as error:  # of this request: the next one may be good
        return 400, f"no .npz with the network's tables: {type(error).__name__}: {error}\n".encode()
    np.savez(file := io.BytesIO(), logits=logits[:, 0])
    return 200, file.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    timeout = 60  # seconds that a client may be silent

    def do_GET(self) -> None:
        self.reply(200, json.dumps(session.get_modelmeta().custom_metadata_map).encode())

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        self.reply(*answer(self.rfile.read(int(length)) if length.isdecimal() else b""))

    def reply(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, form: str, *values: object) -> None: ...


options = parser.parse_args()
turns = threading.BoundedSemaphore(options.at_once)
how = onnxruntime.SessionOptions()
how.intra_op_num_threads = 1  # for an event: --at-once of them are the parallelism
session = onnxruntime.InferenceSession(options.model, how, providers=["CPUExecutionProvider"])
server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
server.socket.listen(128)  # more may knock at a time than are taken in at once
server.daemon_threads = False  # so that the end waits until all have been answered
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
with server:
    print(f"http://127.0.0.1:{server.server_port}: {options.model}", flush=True)
    server.serve_forever()
