"""The public functions of a verification; the command line is a thin shell over them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from verification import report_folder
from verification.arms import Stages
from verification.at_first_sight import impossible
from verification.checks import Outcome
from verification.drift_file import read_measurements
from verification.errors import Inconclusive, VerificationError
from verification.gate import certificate_path
from verification.limits import Limits
from verification.measure import MeasureOptions, measure
from verification.signing import check_signing_key
from verification.verdict import Verdict, could_not_measure, judge


@dataclass(frozen=True)
class VerifyOptions:
    """How to verify.

    Attributes:
        limits: what to judge by.
        measure: what to measure.
        report: folder for ``drift.json``, ``drift.jsonl``, ``junit.xml`` and the certificate; None for the merged checkpoint's
            name with ``-report``, beside it.
        sign_key: PEM file of the Ed25519 private key that signs the certificate; None leaves it unsigned.
    """

    limits: Limits = field(default_factory=Limits)
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    report: str | os.PathLike[str] | None = None
    sign_key: str | os.PathLike[str] | None = None


def verify_skip_drift(
    merged: str | os.PathLike[str],
    prompts: str | os.PathLike[str],
    options: VerifyOptions | None = None,
    stages: Stages | None = None,
) -> Verdict:
    """Measure how far a merged checkpoint's decisions drift from its QLoRA reference, judge, and write the report.

    Args:
        merged: folder of the merged checkpoint; nothing in it is changed.
        prompts: JSON Lines prompt file.
        options: limits, reference, engine and report; the defaults take base, adapter and recipe from the merge manifest.
        stages: told which model is at work and how far it is.

    Returns:
        The verdict. Where nothing could be measured it is inconclusive and says why; that is never an exception. Such a
        verdict does not replace the report of an earlier run that measured something.

    Raises:
        VerificationError: the report folder or the signing key cannot be used.
    """
    options = options or VerifyOptions()
    reason = next(impossible(merged, prompts, options.measure), None)
    if reason is not None:
        return could_not_measure("measurement", reason, options.limits)
    folder = certificate_path(merged).parent if options.report is None else Path(options.report)
    _check_apart(folder, Path(merged))
    if options.sign_key is not None:
        check_signing_key(options.sign_key)
    report_folder.make(folder)
    measurements = None
    try:
        measurements = measure(merged, prompts, options.measure, folder, stages)
        verdict = judge(measurements, options.limits)
    except Inconclusive as error:
        if error.checks:
            verdict = Verdict(Outcome.INCONCLUSIVE, error.checks, options.limits, {})
        else:
            verdict = could_not_measure("measurement", str(error), options.limits)
    if measurements is not None or not report_folder.holds_measurement(folder):
        report_folder.write(folder, verdict, measurements, options.sign_key)
    return verdict


def judge_again(
    drift_file: str | os.PathLike[str],
    limits: Limits,
    report: str | os.PathLike[str] | None = None,
    sign_key: str | os.PathLike[str] | None = None,
) -> Verdict:
    """Judge the measurements in a ``drift.jsonl`` again, without a model; with ``report`` write a whole report there.

    Returns:
        The verdict. Where the file cannot be read, or is not as docs/drift-format.md says, there is nothing to judge: it is
        inconclusive and says why, and ``report`` is left as it is.

    Raises:
        VerificationError: the report folder or key cannot be used.
    """
    try:
        measurements = read_measurements(drift_file)
    except VerificationError as error:
        return could_not_measure("measurement", str(error), limits)
    verdict = judge(measurements, limits)
    if report is not None:
        if sign_key is not None:
            check_signing_key(sign_key)
        report_folder.make(Path(report))
        report_folder.write(Path(report), verdict, measurements, sign_key)
    return verdict


def _check_apart(report: Path, merged: Path) -> None:
    """A report inside the checkpoint would change the very files it vouches for."""
    inside, outside = report.resolve(), merged.resolve()
    if inside == outside or outside in inside.parents:
        raise VerificationError(f"report folder {report}: lies in the merged checkpoint {merged}; choose a folder outside it")
