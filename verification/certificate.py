"""``gate.intoto.json``: the verdict as an in-toto attestation, bound to every byte of the checkpoint that was measured.

Statement v1 with a test-result predicate (https://in-toto.io/attestation/test-result/v0.1). Each file of the checkpoint is a
subject, and so is the folder, named ``.``, by its root digest. The configuration binds what the verdict depends on. Unsigned it
guards against mistakes and not against forgery: whoever can write the checkpoint can write the certificate. Signed (DSSE), it
guards against both.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lora_merge
from verification.checks import Outcome
from verification.drift_file import ORIGINS
from verification.errors import VerificationError
from verification.limits import Limits
from verification.measurement import Conditions
from verification.signing import check_trusted_key, is_envelope, open_envelope, sign
from verification.strict_json import canonical, expect_keys, strict_loads
from verification.verdict import Verdict
from verification.whole_file import write_whole

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
CERTIFICATE_FILE = "gate.intoto.json"
MEASUREMENT_FILE = "drift.jsonl"
ROOT_NAME = "."
VERSION = 1

_BOUND = ("certificate", "limits", "decision", "recipe", "engine", "reference", "prompts")
_TESTS = {"passedTests": Outcome.PASSED, "warnedTests": Outcome.WARNED, "failedTests": Outcome.FAILED}


def make_statement(verdict: Verdict, conditions: Conditions, measurement_sha256: str) -> dict[str, Any]:
    """The in-toto statement of ``verdict``. ``measurement_sha256``: of the bytes of ``drift.jsonl``.

    Raises:
        ValueError: the verdict is inconclusive; there is nothing to certify.
    """
    if verdict.outcome is Outcome.INCONCLUSIVE:
        raise ValueError("an inconclusive verdict certifies nothing")
    bound = {
        "certificate": {"version": VERSION, "tool": f"lora-merge {lora_merge.__version__}"},
        "limits": verdict.limits.to_json(),
        "decision": {"labels": conditions.labels.to_json(), "prefill": conditions.prefill},
        "recipe": {"recipe": conditions.recipe, "origin": conditions.recipe_origin},
        "engine": dict(conditions.arms["merged"]),
        "reference": dict(conditions.arms["reference"]),
        "prompts": dict(conditions.prompts),
    }
    configuration: list[dict[str, Any]] = [{"name": MEASUREMENT_FILE, "digest": {"sha256": measurement_sha256}}]
    configuration += [{"name": name, "digest": {"sha256": _digest(bound[name])}, "annotations": bound[name]} for name in _BOUND]
    subjects = {**conditions.merged_files, ROOT_NAME: conditions.merged_root}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": subjects[name]}} for name in sorted(subjects)],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": verdict.outcome.value,
            "configuration": configuration,
            **{
                key: sorted({check.name for check in verdict.checks if check.outcome is outcome})
                for key, outcome in _TESTS.items()
            },
        },
    }


def write_certificate(
    statement: Mapping[str, Any], path: str | os.PathLike[str], sign_key: str | os.PathLike[str] | None
) -> None:
    """Write ``statement`` to ``path``, complete or not at all, in a DSSE envelope when there is a key to sign it with."""
    payload = canonical(statement)
    text = payload if sign_key is None else canonical(sign(payload.encode(), sign_key))
    write_whole(path, f"{text}\n".encode("ascii"))


def read_statement(path: str | os.PathLike[str], trusted_key: str | os.PathLike[str] | None = None) -> tuple[Statement, bool]:
    """The statement in a certificate file, and whether ``trusted_key`` signed it.

    Raises:
        VerificationError: the file is missing or malformed, of an unknown version, or, with a key, not signed by it.
    """
    return parse_certificate(read_certificate(path), path, trusted_key)


def read_certificate(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a certificate file; :class:`VerificationError` where there are none."""
    what = f"certificate {path}"
    if Path(path).is_dir():
        raise VerificationError(f"{what}: is a folder; give the file in it, such as {Path(path) / CERTIFICATE_FILE}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise VerificationError(f"{what}: cannot be read: {error.strerror or error}; run verify-skip-drift first") from error


def parse_certificate(
    content: bytes, path: str | os.PathLike[str], trusted_key: str | os.PathLike[str] | None = None
) -> tuple[Statement, bool]:
    """As :func:`read_statement`, from the bytes that the file ``path`` held."""
    what = f"certificate {path}"
    if trusted_key is not None:
        check_trusted_key(trusted_key)
    value = strict_loads(content, what)
    if is_envelope(value):
        value = strict_loads(open_envelope(value, trusted_key), what)
    elif trusted_key is not None:
        raise VerificationError(f"{what}: is not signed, but a trusted key is given; sign it with verify-skip-drift --sign-key")
    return Statement.parse(value, what), trusted_key is not None


@dataclass(frozen=True)
class Statement:
    """A certificate's statement, taken apart strictly: an unknown type, key, name or version is an error.

    Attributes:
        outcome: PASSED, WARNED or FAILED.
        files: file name -> SHA-256, of every file of the checkpoint.
        root: the root digest over them.
        measurement_sha256: of ``drift.jsonl``.
        tests: outcome -> names of the checks that came out so.
        bound: what the configuration binds, by name.
    """

    outcome: Outcome
    files: Mapping[str, str]
    root: str
    measurement_sha256: str
    tests: Mapping[Outcome, tuple[str, ...]]
    bound: Mapping[str, Mapping[str, Any]]

    @property
    def limits(self) -> Limits:
        """What was judged by."""
        return Limits.from_mapping(self.bound["limits"])

    @classmethod
    def parse(cls, value: Any, what: str) -> Statement:
        """Take ``value`` apart; ``what`` names it in the :class:`VerificationError`."""
        statement = expect_keys(value, {"_type", "subject", "predicateType", "predicate"}, what)
        for key, expected in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
            if statement[key] != expected:
                raise VerificationError(f"{what}: {key} is {statement[key]!r}, expected {expected!r}")
        predicate = expect_keys(statement["predicate"], {"result", "configuration", *_TESTS}, f"{what}: predicate")
        subjects = _digests_by_name(statement["subject"], f"{what}: subject")
        if ROOT_NAME not in subjects or len(subjects) < 2:
            raise VerificationError(
                f"{what}: names {len(subjects)} subjects; expected every file and the root digest {ROOT_NAME!r}"
            )
        tests = {outcome: _names(predicate[key], f"{what}: {key}") for key, outcome in _TESTS.items()}
        outcome = _outcome(predicate["result"], tests, what)
        measurement_sha256, bound = _configuration(predicate["configuration"], f"{what}: configuration")
        root = subjects.pop(ROOT_NAME)
        parsed = cls(outcome, subjects, root, measurement_sha256, tests, bound)
        _ = parsed.limits  # an unknown or impossible limit is found now
        return parsed


def _outcome(result: Any, tests: Mapping[Outcome, tuple[str, ...]], what: str) -> Outcome:
    """The result, which must be the one that the lists of tests amount to."""
    expected = next((outcome for outcome in (Outcome.FAILED, Outcome.WARNED, Outcome.PASSED) if tests[outcome]), None)
    if expected is None or result != expected.value:
        found = "no test at all" if expected is None else f"tests that amount to {expected}"
        raise VerificationError(f"{what}: result is {result!r}, but it lists {found}")
    return expected


def _configuration(value: Any, what: str) -> tuple[str, dict[str, Mapping[str, Any]]]:
    if not isinstance(value, list):
        raise VerificationError(f"{what}: is no list")
    digests = _digests_by_name(
        [{key: entry[key] for key in entry if key != "annotations"} for entry in value if isinstance(entry, dict)], what
    )
    if set(digests) != {MEASUREMENT_FILE, *_BOUND} or len(value) != len(digests):
        raise VerificationError(
            f"{what}: names {', '.join(sorted(digests))}; expected exactly {', '.join((MEASUREMENT_FILE, *_BOUND))}"
        )
    bound = {entry["name"]: entry.get("annotations") for entry in value if entry["name"] != MEASUREMENT_FILE}
    for name, content in bound.items():
        if not isinstance(content, Mapping) or _digest(content) != digests[name]:
            raise VerificationError(f"{what}: {name} is not what its digest says; the certificate was edited")
    if expect_keys(bound["certificate"], {"version", "tool"}, f"{what}: certificate")["version"] != VERSION:
        raise VerificationError(f"{what}: certificate version {bound['certificate']['version']!r}; this version reads {VERSION}")
    if expect_keys(bound["recipe"], {"recipe", "origin"}, f"{what}: recipe")["origin"] not in ORIGINS:
        raise VerificationError(f"{what}: recipe origin {bound['recipe']['origin']!r} is not known")
    expect_keys(bound["decision"], {"labels", "prefill"}, f"{what}: decision")
    return digests[MEASUREMENT_FILE], bound


def _digests_by_name(value: Any, what: str) -> dict[str, str]:
    """``[{"name", "digest": {"sha256"}}]`` as a mapping; twin names and other digests are errors."""
    if not isinstance(value, list):
        raise VerificationError(f"{what}: is no list")
    found: dict[str, str] = {}
    for entry in value:
        name = expect_keys(entry, {"name", "digest"}, what)["name"]
        digest = expect_keys(entry["digest"], {"sha256"}, f"{what} {name!r}")["sha256"]
        if not isinstance(name, str) or name in found:
            raise VerificationError(f"{what}: name {name!r} occurs twice or is no string")
        if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise VerificationError(f"{what} {name!r}: {digest!r} is no hexadecimal SHA-256")
        found[name] = digest
    return found


def _names(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise VerificationError(f"{what}: expected a list of names")
    return tuple(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()
