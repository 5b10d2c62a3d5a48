"""A stub of the processes that `kvferry up` starts, without an engine: it announces a port, serves
HTTP, and ends as its mode says.

Usage: `stub_process.py MODE [PORT]`. MODE is serve, deaf (ignores SIGTERM and has a child that
ignores it too), fail, silent, unhealthy or finish. Three more modes imitate engines with running
requests: patient needs a moment after SIGINT, busy needs longer than any caller waits, and stubborn
ignores SIGINT. These three abort at SIGTERM.
"""

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType

from kvferry.cli.cluster.addresses import announce_address
from kvferry.types import Address

METRICS = """\
# TYPE kvferry:transfer_bytes_total counter
kvferry:transfer_bytes_total{transport="shm"} 3145728.0
# TYPE kvferry:transfer_seconds_total counter
kvferry:transfer_seconds_total{transport="shm"} 0.5
# TYPE kvferry:transfers_total counter
kvferry:transfers_total{transport="shm"} 2.0
kvferry:transfers_total{transport="nixl"} 0.0
"""


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(
            503 if sys.argv[1] == "unhealthy" else 200, METRICS if self.path == "/metrics" else ""
        )

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = '"text": "hello"'
        if self.path == "/v1/chat/completions":
            # The tokens ended while the model was reasoning.
            answer = '"message": {"content": null, "reasoning": "Hm."}'
        self._send(200, f'{{"choices": [{{{answer}}}], "usage": {{"completion_tokens": 1}}}}')

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        return


WORK_S = {"patient": 0.5, "busy": 120.0}


def finish_work(number: int, frame: FrameType | None) -> None:
    print("finishing", flush=True)
    time.sleep(WORK_S[sys.argv[1]])
    print("finished", flush=True)
    sys.exit(0)


def break_off(number: int, frame: FrameType | None) -> None:
    print("aborted", flush=True)
    os._exit(0)


def main() -> None:
    mode, port = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(f"this is {mode}", flush=True)
    if mode == "finish":
        return
    if mode == "fail":
        sys.exit("the model has three legs")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(120)",
            ]
        )
    if mode in (*WORK_S, "stubborn"):
        signal.signal(signal.SIGINT, finish_work if mode in WORK_S else signal.SIG_IGN)
        signal.signal(signal.SIGTERM, break_off)
    if mode == "silent":
        time.sleep(120)
    server = ThreadingHTTPServer(("127.0.0.1", port), Answers)
    announce_address(Address("127.0.0.1", server.server_address[1]), os.environ)
    server.serve_forever()


if __name__ == "__main__":
    main()
