"""Do two names mean one base? Hub ids, snapshot folders of the hub's cache and plain folders, compared as far as names can be."""

from __future__ import annotations

import re
from pathlib import PurePath

_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_name(source: str) -> str:
    """The last part of a hub id, of a folder, or of the hub id in a snapshot folder of the hub's cache; lower case."""
    found = _SNAPSHOT.search(source)
    return (found["name"] if found else PurePath(source).name).lower()


def same_model(first: str, second: str) -> bool:
    """Whether the names can be of one model: equal, or alike in :func:`model_name`."""
    return first == second or model_name(first) == model_name(second)


def commit_of(source: str, revision: str | None) -> str | None:
    """The commit that ``source`` at ``revision`` is known to be, or None: a branch can have moved."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    found = _SNAPSHOT.search(source)
    return found["commit"] if found else None
