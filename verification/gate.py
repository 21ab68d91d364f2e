"""The gate in front of generation: does this certificate allow a run of this very checkpoint, in this very way?"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_merge.console import Progress, no_progress
from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import DecisionLabels
from lora_merge.merging.digests import file_digest, root_digest
from lora_merge.merging.side_files import MANIFEST_FILE
from verification.certificate import CERTIFICATE_FILE, MEASUREMENT_FILE, Statement, parse_certificate, read_certificate
from verification.checks import Outcome
from verification.errors import VerificationError
from verification.limits import DEFAULT_MAX_DELTA, Limits
from verification.merged_files import counts, folder_files
from verification.strict_json import canonical

_MAKE_ANOTHER_MODEL: dict[str, Any] = {
    "adapter": None,
    "quantization": None,
    "hf_overrides": None,
    "kv_cache_dtype": "auto",
    "trust_remote_code": False,  # of a checkpoint with Python code of its own, which is then the model
}
"""Engine settings that make the checkpoint another function, and what they are where a description does not have them."""

RECIPE_CHECK = "recipe-provenance"
"""The name of the check that warns of an assumed recipe; the one warning with a consent of its own."""


@dataclass(frozen=True)
class Policy:
    """What generation asks of a certificate.

    Attributes:
        max_delta: the loosest limit of the mean \\|drift\\| that a certificate may have been judged by.
        trusted_key: PEM file of the Ed25519 public key that must have signed it; None accepts an unsigned one, which guards
            against mistakes and not against forgery.
        accept_assumed_recipe: let a warning pass that the reference's quantization recipe was not recorded at training.
        accept_warnings: let every other warning pass.
    """

    max_delta: float = DEFAULT_MAX_DELTA
    trusted_key: str | os.PathLike[str] | None = None
    accept_assumed_recipe: bool = False
    accept_warnings: bool = False


@dataclass(frozen=True)
class CheckedCertificate:
    """A certificate that allows a run.

    Attributes:
        path: the certificate's file.
        sha256: of the bytes that were checked; what lies there later may be another.
        signed: whether the trusted key signed it; False when no key was given.
        outcome: PASSED, or WARNED where the policy accepts the warnings.
        warnings: names of the checks that warned.
        root: the checkpoint's root digest.
        limits: what was judged by.
        labels, prefill: how the decision was read.
        engine: the engine it was measured in, as its ``describe()`` said.
    """

    path: Path
    sha256: str
    signed: bool
    outcome: Outcome
    warnings: tuple[str, ...]
    root: str
    limits: Limits
    labels: DecisionLabels
    prefill: str
    engine: Mapping[str, Any] = field(repr=False)

    def check_use(self, *, engine: Mapping[str, Any], labels: DecisionLabels, prefill: str) -> tuple[str, ...]:
        """Make sure that a run reads the decision as it was measured; returns the differences that do not forbid it.

        ``engine``: the running engine's ``describe()``. Another kind or dtype, other labels or another prefill is another
        measurement, and so are an adapter on top, another quantization and a configuration that is overridden. Other versions,
        another device and other settings are told. Without ``settings`` (before the engine is there) those are not compared.

        Raises:
            VerificationError: what differs forbids the run.
        """
        certified = {
            "engine": self.engine.get("kind"),
            "dtype": self.engine.get("dtype"),
            "labels": self.labels,
            "prefill": self.prefill,
        }
        running = {"engine": engine.get("kind"), "dtype": engine.get("dtype"), "labels": labels, "prefill": prefill}
        for name, value in certified.items():
            if running[name] != value:
                raise VerificationError(
                    f"certificate {self.path}: was measured with {name} {_plain(value)}, this run has {_plain(running[name])}; "
                    f"verify again with what generation uses"
                )
        before, now = (described.get("settings") or {} for described in (self.engine, engine))
        for name, usual in _MAKE_ANOTHER_MODEL.items() if "settings" in engine else ():
            if canonical(before.get(name, usual)) != canonical(now.get(name, usual)):
                was, found = _plain(before.get(name, usual)), _plain(now.get(name, usual))
                raise VerificationError(
                    f"certificate {self.path}: the checkpoint was measured with {name} {was}, the engine has {found}, "
                    "which makes it another model; open the checkpoint as it was certified"
                )
        return tuple(_differences(self.engine, engine))


def certificate_path(folder: str | os.PathLike[str]) -> Path:
    """Where the certificate of a merged checkpoint lies unless told otherwise: in the report folder beside it."""
    target = Path(os.path.abspath(folder))
    return target.with_name(f"{target.name}-report") / CERTIFICATE_FILE


def certificate_places(folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Where the certificate of ``folder`` can lie: beside the name that was given and, where that is a link, beside the folder
    that it leads to. The first one whose report folder is there is the one that counts: a run that came to no verdict leaves a
    report without a certificate, and none is looked for elsewhere then.
    """
    own, target = certificate_path(folder), certificate_path(Path(folder).resolve())
    if own.parent.resolve() == target.parent.resolve():
        return (own,)
    return (target, own) if target.parent.is_dir() and not own.parent.exists() else (own, target)


def check_certificate(
    folder: str | os.PathLike[str],
    certificate: str | os.PathLike[str],
    policy: Policy | None = None,
    progress: Progress = no_progress,
) -> CheckedCertificate:
    """Allow a run of the merged checkpoint in ``folder``, or raise.

    The certificate is read once. Every file of the folder is hashed, in parallel; ``progress`` is told of bytes. Where the
    measurements lie beside the certificate they must be the ones that it names.

    Raises:
        VerificationError: the certificate is missing, malformed, of an unknown version, unsigned or signed by another key where
            the policy has one, did not pass, was judged by a looser limit than the policy's, or is of other files than these:
            one was added, removed, renamed or changed.
    """
    policy = policy or Policy()
    path = Path(certificate)
    content = read_certificate(path)
    statement, signed = parse_certificate(content, path, policy.trusted_key)
    what = f"certificate {path}"
    _check_outcome(statement, policy, what)
    _check_limit(statement.limits, policy, what)
    _check_measurements(statement, path, what)
    found = folder_files(folder, progress)
    _check_files(statement, found, folder, what)
    try:
        labels = DecisionLabels.from_json(statement.bound["decision"]["labels"])
    except EngineError as error:
        raise VerificationError(f"{what}: {error}") from error
    for part in ("versions", "settings"):
        if not isinstance(statement.bound["engine"].get(part) or {}, Mapping):
            raise VerificationError(
                f"{what}: {part} of the engine is {statement.bound['engine'][part]!r}, expected names and values"
            )
    prefill = statement.bound["decision"]["prefill"]
    if not isinstance(prefill, str):
        raise VerificationError(f"{what}: prefill is {prefill!r}, expected a string")
    return CheckedCertificate(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        signed=signed,
        outcome=statement.outcome,
        warnings=statement.tests[Outcome.WARNED],
        root=root_digest(found),
        limits=statement.limits,
        labels=labels,
        prefill=prefill,
        engine=statement.bound["engine"],
    )


def _check_outcome(statement: Statement, policy: Policy, what: str) -> None:
    if statement.outcome is Outcome.FAILED:
        failed = ", ".join(statement.tests[Outcome.FAILED])
        raise VerificationError(f"{what}: its result is FAILED ({failed}); merge again, then verify-skip-drift")
    refused = [
        name
        for name in statement.tests[Outcome.WARNED]
        if not (policy.accept_assumed_recipe if name == RECIPE_CHECK else policy.accept_warnings)
    ]
    if refused:
        flags = dict.fromkeys("--accept-assumed-recipe" if name == RECIPE_CHECK else "--accept-warnings" for name in refused)
        found = f"its result is WARNED ({', '.join(refused)})"
        raise VerificationError(f"{what}: {found}; remove the reason, or accept it with {' and '.join(flags)}")


def _check_limit(limits: Limits, policy: Policy, what: str) -> None:
    if limits.max_delta > policy.max_delta:
        raise VerificationError(
            f"{what}: was judged by a mean |delta| of up to {limits.max_delta:g}, this run allows {policy.max_delta:g} "
            "(--max-delta); verify again with that limit"
        )


def _check_measurements(statement: Statement, path: Path, what: str) -> None:
    measurements = path.with_name(MEASUREMENT_FILE)
    if measurements.is_file() and file_digest(measurements) != statement.measurement_sha256:
        raise VerificationError(f"{what}: {measurements} beside it is not the file it was judged from; verify again")


def _check_files(statement: Statement, found: Mapping[str, str], folder: str | os.PathLike[str], what: str) -> None:
    certified = {name: digest for name, digest in statement.files.items() if counts(name)}
    absent, added = sorted(set(certified) - set(found)), sorted(set(found) - set(certified))
    changed = sorted(name for name in set(certified) & set(found) if certified[name] != found[name])
    if _is_of_another(certified, found):
        others = _counted(changed or absent or added, "is", "are")
        raise VerificationError(f"{what}: is of another checkpoint than {folder}: {others} not what it names; verify it too")
    for names, one, more, problem in (
        (changed, "was", "were", "changed"),
        (absent, "is", "are", "missing"),
        (added, "was", "were", "added"),
    ):
        if names:
            found_so = f"{Path(folder) / _counted(names, one, more)} {problem}"
            raise VerificationError(f"{found_so} since it was certified; verify it again")
    if root_digest(statement.files) != statement.root:
        raise VerificationError(f"{folder}: the certificate's root digest is not the one of its files; it was edited")


def _is_of_another(certified: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """Whether the certificate was never about these files: they have the manifest and the weights of another merge, or nothing in
    common with it. An edited or damaged checkpoint keeps one of the two.
    """
    if not any(found.get(name) == digest for name, digest in certified.items()):
        return True
    if MANIFEST_FILE not in certified or MANIFEST_FILE not in found or certified[MANIFEST_FILE] == found[MANIFEST_FILE]:
        return False
    return any(found.get(name) != digest for name, digest in certified.items() if name.endswith(".safetensors"))


def _counted(names: Sequence[str], one: str, more: str) -> str:
    """The first of ``names``, how many there are beside it, and the verb."""
    return f"{names[0]} {one}" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more {more}"


def _differences(certified: Mapping[str, Any], running: Mapping[str, Any]) -> list[str]:
    """What else differs between two engine descriptions. Where the model lies does not count, nor which dtype vLLM was asked for,
    which earlier versions told: the one that was used is compared on its own, as is what makes another model.
    """
    found = []
    for part in ("versions", "settings"):
        before, now = (dict(described.get(part) or {}) for described in (certified, running))
        for name in sorted((set(before) | set(now)) - {"model", "dtype", *_MAKE_ANOTHER_MODEL}):
            if canonical(before.get(name)) != canonical(now.get(name)):
                found.append(f"{name} was {_plain(before.get(name))}, is {_plain(now.get(name))}")
    if certified.get("device") != running.get("device"):
        found.append(f"device was {_plain(certified.get('device'))}, is {_plain(running.get('device'))}")
    return found


def _plain(value: Any) -> str:
    if isinstance(value, DecisionLabels):
        return f"{value.skip.text!r} ({value.skip.token_id}) and {value.write.text!r} ({value.write.token_id})"
    return repr(value) if isinstance(value, str) else str(value)
