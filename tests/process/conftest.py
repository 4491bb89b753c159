"""Fixtures that several files of this folder share."""

from __future__ import annotations

from tests.process.handed_over import engine_alone
from tests.process.ray_cluster import ray_app, ray_cluster

__all__ = ["engine_alone", "ray_app", "ray_cluster"]
