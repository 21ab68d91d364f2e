"""The files of a merged checkpoint: their digests, and whether they are those that the merge wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_merge.console import Progress, no_progress
from lora_merge.errors import no_folder
from lora_merge.merging.checkpoint import INDEX_FILE
from lora_merge.merging.digests import folder_digests
from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import read_manifest
from lora_merge.merging.side_files import MANIFEST_FILE
from verification.checks import Check, Outcome
from verification.errors import VerificationError

WRITTEN_CHECK = "merged-files"
_WEIGHTS = ".safetensors"


def folder_files(folder: str | os.PathLike[str], progress: Progress = no_progress) -> dict[str, str]:
    """File name -> SHA-256 of every file that an engine could read from ``folder``.

    Raises:
        VerificationError: a file cannot be read, or there is a link to a folder, whose files nothing would vouch for.
    """
    root = Path(folder)
    if reason := no_folder(root, "a merged checkpoint"):
        raise VerificationError(reason)
    linked = next((path for path in sorted(root.rglob("*")) if path.is_symlink() and path.is_dir()), None)
    if linked is not None:
        raise VerificationError(f"{linked}: is a link to a folder; put the files themselves there")
    try:
        return folder_digests(root, progress)
    except MergeError as error:
        raise VerificationError(str(error)) from error


def manifest_findings(merged: Path, files: Mapping[str, str], *, bit_by_bit: bool = False) -> Iterator[Check]:
    """The files of ``merged`` (name -> SHA-256) against what its merge manifest says was written; nothing without a manifest.

    Weights that changed since the merge fail, however little: they are damaged, or another checkpoint than the manifest's. Only
    where the weight audit found every tensor ``bit_by_bit`` as base and adapter make it, other bytes are the same weights, stored
    anew. Another file that changed (a configuration, a chat template) may be meant, and is a warning.
    """
    if not (merged / MANIFEST_FILE).is_file():
        return
    written = read_manifest(merged).output
    changed = sorted(name for name, digest in written.items() if files.get(name) != digest)
    anew = [name for name in changed if bit_by_bit and _is_audited(name)]
    rest = [name for name in changed if name not in anew]
    weights = [name for name in rest if name.endswith(_WEIGHTS)]
    if anew:
        found = f"{anew[0]} is not the file that lora-merge wrote, but every weight is as planned, bit by bit"
        how = "in other files, another order or type, or with other metadata"
        yield Check(WRITTEN_CHECK, Outcome.PASSED, f"{found}: the weights were stored anew, {how}")
    if weights:
        yield Check(WRITTEN_CHECK, Outcome.FAILED, f"{weights[0]} is not the file that lora-merge wrote; merge again")
    elif rest:
        found = f"{rest[0]} is not the file that lora-merge wrote"
        yield Check(WRITTEN_CHECK, Outcome.WARNED, f"{found}; merge again unless you changed it")
    elif not anew:
        yield Check(WRITTEN_CHECK, Outcome.PASSED, f"all {len(written)} files are as lora-merge wrote them")


def _is_audited(name: str) -> bool:
    """Whether the weight audit answers for what the file holds: it reads the checkpoint's own weights, and no module's."""
    return "/" not in name and (name.endswith(_WEIGHTS) or name == INDEX_FILE)
