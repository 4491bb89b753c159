"""The Ray Serve application's configuration: its schema, what it means as a spec, and the way back.

Nothing here imports Ray. There is no builder in this version: the schema can be checked, and turned into a spec.
"""

from __future__ import annotations

from antiphon.ray.schema import LLMConfig, PDServingArgs

__all__ = ["LLMConfig", "PDServingArgs"]
