"""vLLM's own publisher in a process of its own: one line of JSON in, one batch out.

Run with: endpoint, replay endpoint, topic. A line is a list of [kind, fields]; ``null`` makes a batch of no events.
"""

from __future__ import annotations

import json
import os
import sys
import time

from vllm.distributed import kv_events

publisher = kv_events.ZmqEventPublisher(0, endpoint=sys.argv[1], replay_endpoint=sys.argv[2], topic=sys.argv[3])
print("ready", flush=True)
for line in sys.stdin:
    events = [getattr(kv_events, kind)(**fields) for kind, fields in json.loads(line) or []]
    publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=events))
publisher.shutdown()
os._exit(0)  # the end of the interpreter waits for ZMQ's context, which waits for a socket that nobody reads
