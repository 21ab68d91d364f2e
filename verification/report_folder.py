"""The report folder: ``drift.json``, ``drift.jsonl``, the certificate ``gate.intoto.json``, and ``junit.xml``.

What lies there is always of one run. An earlier run's files stay until there is a new verdict to replace them. Then its
certificate goes first and the new one comes last, so that none ever stands beside what another run measured.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from lora_merge.readable import json_text, printable
from verification.certificate import CERTIFICATE_FILE, MEASUREMENT_FILE, make_statement, write_certificate
from verification.checks import Outcome
from verification.drift_file import write_measurements
from verification.errors import VerificationError
from verification.measurement import Measurements
from verification.verdict import Verdict
from verification.whole_file import write_whole

VERDICT_FILE = "drift.json"
JUNIT_FILE = "junit.xml"
FILES = (CERTIFICATE_FILE, VERDICT_FILE, MEASUREMENT_FILE, JUNIT_FILE)
_MARKS = {
    CERTIFICATE_FILE: b"in-toto",  # in the type of a statement and of an envelope
    VERDICT_FILE: b'"lora-merge/verdict"',
    MEASUREMENT_FILE: b'"lora-merge/drift"',
    JUNIT_FILE: b'"verify-skip-drift"',
}
_ENOUGH = 1 << 24


def make(folder: Path) -> None:
    """Make ``folder``, or find out before the work that it cannot hold a report. What lies in it stays.

    Raises:
        VerificationError: it cannot be written to, or a file that another tool wrote has a name of ours.
    """
    if folder.exists() and not folder.is_dir():
        raise VerificationError(f"report folder {folder}: is a file; expected a folder, choose another --report")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        foreign = next((name for name in FILES if (folder / name).exists() and not _is_ours(folder / name)), None)
    except OSError as error:
        raise VerificationError(
            f"report folder {folder}: cannot be used: {error.strerror or error}; choose another --report"
        ) from error
    if foreign is not None:
        raise VerificationError(
            f"report folder {folder}: its {foreign} is not of an earlier run and would be replaced; choose another --report"
        )


def holds_measurement(folder: Path) -> bool:
    """Whether an earlier run left there what it measured, which can be judged again, or a certificate."""
    return any((folder / name).exists() for name in (MEASUREMENT_FILE, CERTIFICATE_FILE))


def _is_ours(path: Path) -> bool:
    """Whether the file says what kind it is, as all that are written here do within their first megabytes."""
    with path.open("rb") as file:
        return _MARKS[path.name] in file.read(_ENOUGH)


def write(folder: Path, verdict: Verdict, measurements: Measurements | None, sign_key: str | os.PathLike[str] | None) -> None:
    """Replace what an earlier run left by everything that ``verdict`` amounts to; an inconclusive one gets no certificate.

    Raises:
        VerificationError: a file cannot be written, or the key cannot sign.
    """
    try:
        for name in FILES:  # the certificate first
            (folder / name).unlink(missing_ok=True)
        digest = None if measurements is None else write_measurements(measurements, folder / MEASUREMENT_FILE)
        write_whole(folder / VERDICT_FILE, (json_text(verdict.to_json(), indent=2, allow_nan=False) + "\n").encode())
        write_whole(folder / JUNIT_FILE, junit(verdict).encode())
        if measurements is not None and digest is not None and verdict.outcome is not Outcome.INCONCLUSIVE:
            statement = make_statement(verdict, measurements.conditions, digest)
            write_certificate(statement, folder / CERTIFICATE_FILE, sign_key)
    except OSError as error:
        raise VerificationError(f"report folder {folder}: cannot be written: {error.strerror or error}") from error


def junit(verdict: Verdict) -> str:
    """The verdict as JUnit XML, one test case a check: failed ones as failures, inconclusive ones as errors, warnings as
    output.
    """
    counts = {outcome: sum(check.outcome is outcome for check in verdict.checks) for outcome in Outcome}
    suite = ElementTree.Element(
        "testsuite",
        name="verify-skip-drift",
        tests=str(len(verdict.checks)),
        failures=str(counts[Outcome.FAILED]),
        errors=str(counts[Outcome.INCONCLUSIVE]),
    )
    for check in verdict.checks:
        case = ElementTree.SubElement(suite, "testcase", classname="verify-skip-drift", name=check.name)
        tag = {Outcome.FAILED: "failure", Outcome.INCONCLUSIVE: "error"}.get(check.outcome)
        if tag is not None:
            ElementTree.SubElement(case, tag, message=printable(check.detail))
        else:
            ElementTree.SubElement(case, "system-out").text = printable(f"{check.outcome}: {check.detail}")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
