"""The errors of this room."""

from __future__ import annotations

from typing import ClassVar

from lora_merge.errors import EXIT_INTERRUPTED, EXIT_USAGE, UserError


class GenerationError(UserError):
    """A run that must not start, cannot go on, or whose files do not fit together: says which, what was found and what to do."""


class ConflictingOptions(GenerationError):
    """Options that exclude each other, or have no effect beside another."""

    exit_code: ClassVar[int] = EXIT_USAGE


class NoCertificate(GenerationError):
    """The checkpoint has no certificate at all."""


class Interrupted(UserError):
    """Somebody stopped the run (Ctrl-C, SIGTERM): says what stays and how to go on."""

    exit_code: ClassVar[int] = EXIT_INTERRUPTED
