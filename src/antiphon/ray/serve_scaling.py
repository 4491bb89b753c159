"""The ``autoscaling_config`` of a Serve deployment, from the settings of its replicas.

Serve's own delays and factors are left at nothing: the policy has the pool's (``autoscaling.py``).

How often a replica tells the controller what it measures is ``metrics_interval_s`` here. Ray announces a variable of
the environment in its place, which Ray 2.60 reads nowhere.
"""

from __future__ import annotations

from typing import Any

from antiphon.ray import autoscaling
from antiphon.ray.scaling import ROLE_TARGETS, ReplicaSettings

POLICY = f"{autoscaling.__name__}:{autoscaling.PoolScaling.__name__}"


def serve_autoscaling(settings: ReplicaSettings) -> dict[str, Any] | None:
    """``autoscaling_config`` for ``serve.deployment``; None where the number is fixed, which is ``num_replicas`` then.

    The ingress, whose requests pass through Serve, is scaled by Serve's own policy.
    """
    if settings.min_replicas == settings.max_replicas:
        return None
    common: dict[str, Any] = {
        "min_replicas": settings.min_replicas,
        "max_replicas": settings.max_replicas,
        "initial_replicas": settings.initial_replicas,
        "look_back_period_s": settings.look_back_s,
        "metrics_interval_s": settings.metrics_interval_s,
    }
    if settings.role == "ingress":
        return common | {
            "target_ongoing_requests": settings.targets.ongoing_requests,
            "upscale_delay_s": settings.upscale_delay_s,
            "downscale_delay_s": settings.downscale_delay_s,
            "upscaling_factor": settings.upscaling_factor,
            "downscaling_factor": settings.downscaling_factor,
        }
    written = {name: getattr(settings.targets, name) for name in ROLE_TARGETS[settings.role]}
    kwargs = {
        "role": settings.role,
        "targets": {name: float(value) for name, value in written.items() if value is not None},
        "delays_s": [settings.upscale_delay_s, settings.downscale_delay_s],
        "factors": [settings.upscaling_factor, settings.downscaling_factor],
        "look_back_s": settings.look_back_s,
        "interval_s": settings.metrics_interval_s,
    }
    assert kwargs["targets"], "a pool that can grow has a target"
    policy = {"policy_function": POLICY, "policy_kwargs": kwargs}
    return common | {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0, "policy": policy}
