"""A local Ray with Serve for a script: on loopback, with four processors, and gone with the block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def local_ray(folder: str, http_port: int) -> Iterator[None]:
    """Ray in ``folder`` and Serve on ``http_port``. Nothing may have imported Ray before."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_TOKEN": os.urandom(16).hex(),
    }
    import ray
    from ray import serve

    ray.init(
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": http_port})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
