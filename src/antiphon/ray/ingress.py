"""The deployment of the ingress: Serve's HTTP address, whose requests go to the router (``forwarding.py``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from antiphon.ray import inside
from antiphon.ray.forwarding import Forwarder
from antiphon.ray.plans import AppSettings
from antiphon.ray.replica import within

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

WHERE_TIMEOUT_S = 5.0
"""Of the router's replica; one that starts again is asked again."""


class Ingress:
    """One replica of the ingress.

    Args:
        settings: of the application.
        router: handle of the router's deployment.
        pools: the engines' deployments, so that they belong to the application.
    """

    def __init__(self, settings: AppSettings, router: DeploymentHandle[Any], *pools: DeploymentHandle[Any]) -> None:
        self._pools = pools
        inside.keep_replica_near(is_published=settings.is_published)
        self.forwarder = Forwarder(
            router_finder(router), settings.spec.router.body_max_bytes, is_published=settings.is_published
        )

    def __serve_build_asgi_app__(self) -> Forwarder:  # Serve's name
        return self.forwarder


def router_finder(router: DeploymentHandle[Any]) -> Callable[[], Awaitable[str]]:
    """Asks the router's replica for its URL."""

    async def find() -> str:
        return str((await within(WHERE_TIMEOUT_S, router.where.remote()))["url"])

    return find
