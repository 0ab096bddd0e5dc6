"""A server of an exported network, one event per request: python examples/serve.py runs/0001/model.onnx --port 8000.

POST an .npz with the tables of docs/export.md (x, edge_index, edge_attr). The reply is an .npz with logits, [E], or
status 400 with the reason. GET returns the metadata. After kill -TERM it answers open requests, then ends.
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

parser = argparse.ArgumentParser(description="A server of an exported network, one event per request.")
parser.add_argument("model")
parser.add_argument("--port", type=int, default=8000, help="0: any free port")
parser.add_argument("--at-once", type=int, default=2, choices=range(1, 257), metavar="N", help="events at a time")


def answer(body: bytes) -> tuple[int, bytes]:
    """Status and content of the reply to the tables of an event."""
    try:
        tables = np.load(io.BytesIO(body)) if zipfile.is_zipfile(io.BytesIO(body)) else {}
        feed = {given.name: tables[given.name] for given in session.get_inputs()}
        with turns:
            (logits,) = session.run(None, feed)
    except Exception as error:  # of this request only: the next one may be valid
        return 400, f"no .npz with the network's tables: {type(error).__name__}: {error}\n".encode()
    np.savez(file := io.BytesIO(), logits=logits[:, 0])
    return 200, file.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    timeout = 60  # seconds before a silent client is disconnected

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
how.intra_op_num_threads = 1  # threads per event: --at-once events run in parallel
# On a GPU: providers=[("CUDAExecutionProvider", {"use_tf32": "0"})]. With TF32, its default, edges cross a cut.
session = onnxruntime.InferenceSession(options.model, how, providers=["CPUExecutionProvider"])
server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
server.socket.listen(128)  # requests that may wait to be accepted
server.daemon_threads = False  # the server ends after the last reply
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
with server:
    print(f"http://127.0.0.1:{server.server_port}: {options.model}", flush=True)
    server.serve_forever()
