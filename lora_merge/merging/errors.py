"""The error of this room."""

from __future__ import annotations

from lora_merge.errors import UserError


class MergeError(UserError):
    """A merge that cannot be done correctly: names the file or tensor, what was found, what was expected, what to do."""
