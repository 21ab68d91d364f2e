"""Tokenized prompts on disk between intake and engine, so that memory does not grow with their number.

The file has no name: it goes when the process does, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from lora_merge.engines.prompts import Prompt
from lora_merge.generation.errors import GenerationError


class PromptSpool:
    """Prompts are appended once, then read back in their order as often as needed."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is where the space is taken: beside the results, because a temporary folder is often memory."""
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by close()
        except OSError as error:
            raise GenerationError(f"{folder}: cannot be written to: {error.strerror or error}") from error
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, line: bytes) -> None:
        """Add one prompt as :func:`spool_line` encoded it."""
        self._store(lambda: self._file.write(line))
        self._count += 1

    def flush(self) -> None:
        """Find out now whether the disk takes all of it."""
        self._store(self._file.flush)

    def _store(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            raise GenerationError(
                f"the tokenized prompts cannot be stored beside the results: {error.strerror or error}"
            ) from error

    def chunks(self, size: int) -> Iterator[list[Prompt]]:
        """All prompts in lists of ``size``, the last one shorter."""
        self._file.seek(0)
        chunk: list[Prompt] = []
        for line in self._file:
            id, number, ids, fields = json.loads(line)
            chunk.append(Prompt(id, tuple(ids), fields, line=number))
            if len(chunk) == size:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def close(self) -> None:
        """Free the space."""
        # What a full disk kept from being written is not missed any more.
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> PromptSpool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def spool_line(prompt: Prompt) -> bytes:
    """``prompt`` as one line."""
    value = [prompt.id, prompt.line, prompt.token_ids, dict(prompt.fields)]
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
