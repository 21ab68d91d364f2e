"""The error of this room."""

from __future__ import annotations

from lora_merge.errors import UserError


class GenerationError(UserError):
    """A run that must not start, cannot go on, or whose files do not fit together: says which, what was found and what to do."""
