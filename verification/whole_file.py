"""A file that appears complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Give the name ``path`` to a file with ``content`` once the disk has all of it; until then it is a hidden sibling.

    Raises:
        OSError: it could not be written, as on a full disk. Nothing half-written stays, and what was at ``path`` is as it was.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
