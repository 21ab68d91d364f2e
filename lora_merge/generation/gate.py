"""Stands before the run: nothing loads until the certificate allows this very checkpoint, and nothing is written if it
changed since.

Without a certificate a run is possible when it is asked for; it is then not gated, and every row says so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_merge.console import Progress, no_progress
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.opening import EngineKind
from lora_merge.generation.errors import GenerationError, NoCertificate
from lora_merge.generation.options import GateOptions
from verification.at_first_sight import no_checkpoint
from verification.errors import VerificationError
from verification.gate import CheckedCertificate, Policy, certificate_places, check_certificate
from verification.merged_files import file_names, folder_files

_KINDS: dict[str, EngineKind] = {"transformers": "hf", "vllm": "vllm"}


@dataclass(frozen=True)
class Gate:
    """An open gate.

    Attributes:
        model: the checkpoint's folder, links followed: a link that is switched later leads nobody elsewhere.
        root: its root digest.
        certificate: what allowed the run; None when it is not gated.
        stamps: size, modification and change time and inode of each file when its digest was taken.
        place: inode and change time of the folder itself.
    """

    model: Path
    root: str
    certificate: CheckedCertificate | None
    stamps: Mapping[str, tuple[int, ...]]
    place: tuple[int, int]

    @property
    def is_gated(self) -> bool:
        """Whether a certificate allowed the run."""
        return self.certificate is not None

    @property
    def engine(self) -> EngineKind | None:
        """The certified engine as an option of this program names it."""
        return None if self.certificate is None else _engine_kind(self.certificate)

    @property
    def dtype(self) -> str | None:
        """The certified dtype."""
        return None if self.certificate is None else str(self.certificate.engine.get("dtype"))

    def check_use(self, engine: Mapping[str, Any], labels: DecisionLabels, prefill: str) -> tuple[str, ...]:
        """Refuse to read the decision in another way than was certified, or of another checkpoint; returns lesser differences.

        ``engine``: the ``describe()`` of the engine that is to run. Gated or not, the results are said to be of the folder that
        was hashed.

        Raises:
            GenerationError: the engine says that it runs another folder's checkpoint.
            VerificationError: what differs forbids the run.
        """
        runs = (engine.get("settings") or {}).get("model", str(self.model))
        if Path(str(runs)).resolve() != self.model.resolve():
            raise GenerationError(
                f"{self.model}: the engine runs {runs}, which is not the checkpoint that was checked; load this one"
            )
        if self.certificate is None:
            return ()
        return self.certificate.check_use(engine=engine, labels=labels, prefill=prefill)

    def check_loaded(self) -> None:
        """Make sure that no file changed between the moment it was hashed and the moment the engine had read it.

        Nor the folder: one that is renamed away and back, with another in its place meanwhile, has another change time.
        """
        problem = "while the run was starting; start again when nobody writes there"
        self._check_files(f"changed {problem}")
        if folder_stamp(self.model) != self.place:
            raise GenerationError(f"{self.model}: the folder was moved, or something in it came or went, {problem}")

    def check_unchanged(self) -> None:
        """Make sure that no file has changed since: before rows are saved, and at the end.

        An engine may not be done with a file when it has loaded it. In Transformers on a CPU the weights stay memory-mapped,
        and what is written into the file later is what decides from then on.
        """
        self._check_files(
            "changed during the run, and the engine may have read it; what was not saved yet is dropped, saved rows stay: "
            "bring the certified file back and go on with --resume"
        )

    def _check_files(self, problem: str) -> None:
        try:
            now = file_stamps(self.model)
        except VerificationError as error:  # it is gone, or no checkpoint any more
            raise GenerationError(f"{self.model}: {problem} (now: {error})") from error
        moved = sorted(name for name in {*self.stamps, *now} if self.stamps.get(name) != now.get(name))
        if moved:
            raise GenerationError(f"{self.model / moved[0]}: {problem}")

    def to_json(self) -> dict[str, Any]:
        """What a run record says of the gate."""
        if self.certificate is None:
            return {"gated": False}
        return {
            "gated": True,
            "certificate": str(self.certificate.path),
            "certificate_sha256": self.certificate.sha256,
            "signed": self.certificate.signed,
            "outcome": self.certificate.outcome.value,
            "warnings": list(self.certificate.warnings),
            "limits": self.certificate.limits.to_json(),
            "labels": self.certificate.labels.to_json(),
            "prefill": self.certificate.prefill,
            "engine": dict(self.certificate.engine),
        }


def open_gate(model: Path, options: GateOptions, progress: Progress = no_progress) -> Gate:
    """Check the certificate of the checkpoint in ``model``. ``progress`` is told of bytes hashed.

    Raises:
        VerificationError: the certificate is missing, did not pass, is of another checkpoint, or a byte of the files changed.
        NoCertificate: it has none, and ``options`` does not allow that.
        GenerationError: there is no such folder, or no checkpoint in it, as far as its names tell.
    """
    if reason := no_checkpoint(model):
        raise GenerationError(f"model {reason}")
    folder = _without_links(model)
    place, stamps = folder_stamp(folder), file_stamps(folder)
    if options.allow_ungated:
        return Gate(folder, _root(folder_files(folder, progress)), None, stamps, place)
    path, *others = (Path(options.certificate),) if options.certificate is not None else certificate_places(model)
    beside = "".join(
        f"; {other}, beside the folder that {model} leads to, was not looked at" for other in others if other.exists()
    )
    if not path.exists():
        places = path if beside or not others else f"{path} or {others[0]}"
        way_out = f"run: verify-skip-drift --merged {model} --prompts PROMPTS"
        raise NoCertificate(f"{model} has no certificate at {places}; {way_out}{beside}")
    policy = Policy(
        max_delta=options.max_delta,
        trusted_key=options.trusted_key,
        accept_assumed_recipe=options.accept_assumed_recipe,
        accept_warnings=options.accept_warnings,
    )
    try:
        checked = check_certificate(folder, path, policy, progress)
    except VerificationError as error:
        raise VerificationError(f"{error}{beside}") from error
    _engine_kind(checked)
    return Gate(folder, checked.root, checked, stamps, place)


def file_stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """Size, modification and change time (ns) and inode of every file in ``folder`` that an engine could read.

    The change time is the system's own: setting a modification time back does not hide an edit.

    Raises:
        VerificationError: as :func:`~verification.merged_files.file_names`.
        GenerationError: something there cannot be looked at.
    """
    stamps: dict[str, tuple[int, ...]] = {}
    try:
        for name in file_names(folder):
            found = (folder / name).stat()
            stamps[name] = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
    except OSError as error:
        raise GenerationError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error
    return stamps


def folder_stamp(folder: Path) -> tuple[int, int]:
    """Inode and change time (ns) of ``folder`` itself; :class:`GenerationError` when it cannot be looked at."""
    try:
        found = folder.stat()
    except OSError as error:
        raise GenerationError(f"{folder}: cannot be read: {error.strerror or error}") from error
    return found.st_ino, found.st_ctime_ns


def _without_links(folder: Path) -> Path:
    """The folder that ``folder`` leads to; ``folder`` as it was written where no link is in its way."""
    resolved = folder.resolve()
    return folder if Path(os.path.abspath(folder)) == resolved else resolved


def folder_bytes(folder: Path) -> int:
    """The size of all files below ``folder``: what checking a certificate reads, which is nothing where it is no checkpoint."""
    return 0 if no_checkpoint(folder) else sum(size for size, *_ in file_stamps(folder).values())


def _engine_kind(certificate: CheckedCertificate) -> EngineKind:
    kind = certificate.engine.get("kind")
    if kind not in _KINDS:
        raise VerificationError(
            f"certificate {certificate.path}: was measured in engine {kind!r}; this version runs {', '.join(sorted(_KINDS))}"
        )
    return _KINDS[str(kind)]


def _root(files: Mapping[str, str]) -> str:
    """The root digest as a certificate has it: SHA-256 over the raw file digests in the order of their names."""
    return hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in sorted(files))).hexdigest()
