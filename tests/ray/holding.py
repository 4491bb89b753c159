"""A program that holds a process, as a replica does: started by ``test_holder.py``, which kills it.

``holding.py FOLDER PORT``: prints the pids of the process and of what that has started, each once it is ready. A line
with a number on standard input: it is stopped by so many at once.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from antiphon.config.plan import ProcessPlan
from antiphon.ray.holder import Holder, HolderOptions

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen(["sleep", "100"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *args): pass
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def hold(folder: Path, port: int) -> None:
    plan = ProcessPlan(
        name="engine",
        role="prefill",
        kind="simulated",
        host="127.0.0.1",
        argv=(sys.executable, "-c", SERVER, str(port)),
        ports={"http": port},
        base_url=f"http://127.0.0.1:{port}",
    )
    options = HolderOptions("held", folder, start_timeout_s=60.0, stop_grace_s=2.0)
    holder = Holder(plan, options, lambda text: print(text, file=sys.stderr, flush=True))
    await holder.start()
    child = re.findall(r"^child (\d+)$", (folder / "engine.log").read_text(), re.MULTILINE)
    print(holder.pid, child[-1], flush=True)
    if num_stops := await asyncio.to_thread(sys.stdin.readline):
        await asyncio.gather(*(holder.stop() for _ in range(int(num_stops))))
        print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(hold(Path(sys.argv[1]), int(sys.argv[2])))
