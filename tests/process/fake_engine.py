"""A child for tests of the supervisor: an HTTP server with a stubborn grandchild, as small as it can be.

Run by path. ``--grandchildren N`` starts processes that ignore SIGTERM, in the same session; ``--escape`` starts one
more in a session of its own. ``--fail TEXT`` writes a traceback and exits with 1; ``--chatter N`` writes N lines first.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
METRICS = b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'


class Handler(BaseHTTPRequestHandler):
    metrics_delay_s = 0.0

    def do_GET(self) -> None:
        if self.path == "/metrics":
            time.sleep(self.metrics_delay_s)
        body = METRICS if self.path == "/metrics" else b"ok"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grandchildren", type=int, default=0)
    parser.add_argument("--escape", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--fail")
    parser.add_argument("--fail-unless")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--chatter", type=int, default=0)
    parser.add_argument("--say")
    parser.add_argument("--say-when")
    parser.add_argument("--metrics-delay-s", type=float, default=0.0)
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if args.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in range(args.chatter):
        print(f"chatter {line} " + "x" * 80)
    sys.stdout.flush()
    for _ in range(args.grandchildren):
        subprocess.Popen([sys.executable, "-S", "-c", STUBBORN])
    if args.escape:
        subprocess.Popen([sys.executable, "-S", "-c", STUBBORN], start_new_session=True)
    if args.fail and not (args.fail_unless and os.path.exists(args.fail_unless)):
        raise RuntimeError(args.fail)
    if args.never_ready:
        time.sleep(600)
    if args.say:
        threading.Thread(target=say_when, args=(args.say, args.say_when), daemon=True).start()
    Handler.metrics_delay_s = args.metrics_delay_s
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


def say_when(text: str, path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.02)
    print(text, flush=True)


if __name__ == "__main__":
    main()
