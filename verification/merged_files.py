"""The files of a merged checkpoint: which count, their digests, and whether they are those that the merge wrote."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lora_merge.console import Progress, no_progress
from lora_merge.merging.checkpoint import INDEX_FILE
from lora_merge.merging.digests import file_digests
from lora_merge.merging.errors import MergeError
from lora_merge.merging.manifest import read_manifest
from lora_merge.merging.side_files import MANIFEST_FILE
from lora_merge.readable import readable
from verification.at_first_sight import no_checkpoint
from verification.checks import Check, Outcome
from verification.errors import VerificationError

WRITTEN_CHECK = "merged-files"
_WEIGHTS = ".safetensors"
_INDEX = re.compile(r"\.index\.([^/]*\.)?json$")
"""The index of weights in several files, in whichever format, and of a variant (``model.safetensors.index.fp16.json``)."""
_SHOWN = 5
_UNREAD_FILES = re.compile(
    r"README\.md|(LICENSE|NOTICE)([-_][A-Za-z0-9_-]+)?(\.md|\.txt)?"  # for people
    r"|\.gitattributes|\.gitignore"  # for git, and every upload to the hub adds one
    r"|\.DS_Store|Thumbs\.db|\.nfs[0-9A-Fa-f]+"  # what a file manager or a network file system leaves
)
"""Files that no engine, tokenizer or processor reads, by their whole name, in any folder. They come, change and go as a
checkpoint is moved, so they are no part of it. Whatever could be read counts: Python code, JSON, templates, vocabularies (which
are .txt and .model files too), weights of every kind, and all that is not named here.
"""
_UNREAD_FOLDERS = (".git", ".cache/huggingface")
"""What ``git clone`` and ``hf download --local-dir`` keep beside the files, in the checkpoint itself."""
_VOLUME = ".."
"""What the folders begin with in which Kubernetes keeps a volume's versions; its files are links into the one that is current."""


def folder_files(folder: str | os.PathLike[str], progress: Progress = no_progress) -> dict[str, str]:
    """File name -> SHA-256 of every file that an engine could read from ``folder``.

    A byte of a name that is no UTF-8 stands as :func:`~lora_merge.readable.readable` has it.

    Raises:
        VerificationError: as :func:`file_names`, or two names are the same then.
    """
    try:
        digests = file_digests(folder, file_names(folder), progress)
    except MergeError as error:
        raise VerificationError(str(error)) from error
    found = {readable(name): digest for name, digest in digests.items()}
    if len(found) < len(digests):
        raise VerificationError(f"{folder}: two of its files have names that are written alike; rename one")
    return found


def file_names(folder: str | os.PathLike[str]) -> list[str]:
    """The names of the files in ``folder`` that count (:func:`counts`), relative to it, with ``/``, sorted.

    Raises:
        VerificationError: it is no checkpoint, as far as its names tell, something in it cannot be read, there is a link to a
            folder, or an index names a file that is not among them: nothing would vouch for what an engine reads there.
    """
    if reason := no_checkpoint(folder):
        raise VerificationError(reason)
    try:
        names = sorted(_names_below(Path(folder), ""))
        for name in filter(_INDEX.search, names):
            _check_index(Path(folder), name)
        return names
    except OSError as error:
        raise VerificationError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error


def _check_index(folder: Path, name: str) -> None:
    """Make sure that the index ``name`` sends whoever loads the weights to files beside it, and to such as count.

    Transformers joins what stands there to the folder's path, however it leads on from there.
    """
    try:
        index = json.loads((folder / name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"{folder / name}: the index cannot be read: {error}") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    beside = name.rpartition("/")[0]
    for tensor, file in places.items() if isinstance(places, dict) else ():  # nothing can be loaded by another
        if not isinstance(file, str) or not file or "/" in file or not counts(f"{beside}/{file}" if beside else file):
            raise VerificationError(
                f"{folder / name}: tensor {tensor!r} lies in {file!r}; expected the plain name of a file of weights beside the "
                "index, since nothing vouches for other places; save the weights again as one checkpoint"
            )


def counts(name: str) -> bool:
    """Whether an engine, its tokenizer or its processor could read the file ``name``, relative to the checkpoint, with ``/``."""
    *folders, file = name.split("/")
    within = ("/".join(folders[:depth]) for depth in range(1, len(folders) + 1))
    return not any(map(_is_passed_over, within)) and file != ".git" and not _UNREAD_FILES.fullmatch(file)


def _is_passed_over(folder: str) -> bool:
    return folder in _UNREAD_FOLDERS or ("/" not in folder and folder.startswith(_VOLUME))


def _names_below(root: Path, prefix: str) -> Iterator[str]:
    for entry in os.scandir(root / prefix):
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            if _is_passed_over(name):
                continue
            if entry.is_symlink() and not (prefix == "" and _leads_into_volume(root, name)):
                raise VerificationError(f"{root / name}: is a link to a folder; put the files themselves there")
            yield from _names_below(root, f"{name}/")
        elif counts(name):
            if not entry.is_file():
                raise VerificationError(f"{root / name}: neither a file nor a folder (a dangling link?)")
            yield name


def _leads_into_volume(root: Path, name: str) -> bool:
    """Whether a link leads into the folder of a Kubernetes volume's version, in ``root`` itself, as all links of a volume do."""
    target, home = (root / name).resolve(), root.resolve()
    return target.is_relative_to(home) and target != home and target.relative_to(home).parts[0].startswith(_VOLUME)


def manifest_findings(merged: Path, files: Mapping[str, str], *, bit_by_bit: bool = False) -> Iterator[Check]:
    """The files of ``merged`` (name -> SHA-256) against what its merge manifest says was written; nothing without a manifest.

    Weights that changed since the merge fail, however little: they are damaged, or another checkpoint than the manifest's. Only
    where the weight audit found every tensor ``bit_by_bit`` as base and adapter make it, other bytes are the same weights, stored
    anew. Another file that changed (a configuration, a chat template) may be meant, and is a warning. So is one that was added: a
    ``chat_template.jinja`` takes the place of the template that was written, a ``special_tokens_map.json`` that of its tokens.
    """
    if not (merged / MANIFEST_FILE).is_file():
        return
    written = {name: digest for name, digest in read_manifest(merged).output.items() if counts(name)}
    added = sorted(name for name in {*files} - {*written, MANIFEST_FILE} if not (bit_by_bit and _is_audited(name)))
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
    elif not anew and not added:
        yield Check(WRITTEN_CHECK, Outcome.PASSED, f"all {len(written)} files are as lora-merge wrote them")
    if added:
        named = f"{listed(added)} {'is' if len(added) == 1 else 'are'} not of the merge"
        advice = "engines and tokenizers could read that; take out what is not meant"
        yield Check(WRITTEN_CHECK, Outcome.WARNED, f"{named}; {advice}")


def listed(names: Sequence[str]) -> str:
    """In words, the first of ``names``, and how many more there are."""
    more = len(names) - _SHOWN
    parts = [*names[:_SHOWN], f"{more} more"] if more > 0 else names
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _is_audited(name: str) -> bool:
    """Whether the weight audit answers for what the file holds: it reads the checkpoint's own weights, and no module's."""
    return "/" not in name and (name.endswith(_WEIGHTS) or name == INDEX_FILE)
