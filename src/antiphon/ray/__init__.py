"""The Ray Serve application: prefill and decode engines that Ray places, watches and scales, behind Antiphon's router.

Importing this room does not import Ray: the schema, and what it means as a spec, are there without it.
:func:`build_pd_openai_app` needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from antiphon.core.errors import ConfigError
from antiphon.core.extras import install_remedy
from antiphon.ray.schema import LLMConfig, PDServingArgs

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["LLMConfig", "PDServingArgs", "build_pd_openai_app"]


def build_pd_openai_app(pd_config: dict[str, Any]) -> Application:
    """The application of ``pd_config``, for ``serve.run`` or, as an ``import_path``, for ``serve deploy``.

    Args:
        pd_config: ``prefill_config`` and ``decode_config``, each an :class:`LLMConfig`, a mapping, or the name of a
            YAML file that holds one; ``docs/ray.md`` lists every key.

    What was filled in, replaced or ignored is printed on standard error, a notice a line.

    Raises:
        SpecError: with every problem found.
        ConfigError: Ray Serve is not installed.
    """
    try:
        from antiphon.ray.app import build
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "antiphon":
            raise
        raise ConfigError(
            f"Ray Serve cannot be imported: there is no {error.name}", remedy=install_remedy("ray")
        ) from error
    return build(pd_config)
