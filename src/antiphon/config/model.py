"""What every part of the spec has in common: frozen, no unknown keys, every field described.

It imports pydantic and nothing else of this room, so that a process which needs one part of the spec loads only that.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SpecModel(BaseModel):
    """A part of the spec: immutable, and a key that it does not know is an error rather than ignored.

    Pydantic's own text of an error repeats no value, which may be a secret; ``explain`` says what is wrong.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), hide_input_in_errors=True
    )
