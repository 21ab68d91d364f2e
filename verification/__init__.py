"""Scores the QLoRA reference and the merged checkpoint, judges, explains, certifies.

The public functions are imported on first use, so that ``import verification`` and every ``--help`` stay instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "AuditOptions": "verification.audit_api",
    "AuditResult": "verification.audit_api",
    "CheckedCertificate": "verification.gate",
    "DecisionOptions": "verification.prepare",
    "EngineOptions": "verification.arms",
    "Inconclusive": "verification.errors",
    "Limits": "verification.limits",
    "MeasureOptions": "verification.measure",
    "Outcome": "verification.checks",
    "Policy": "verification.gate",
    "SourceOptions": "verification.sources",
    "Verdict": "verification.verdict",
    "VerificationError": "verification.errors",
    "VerifyOptions": "verification.api",
    "audit_merge": "verification.audit_api",
    "check_certificate": "verification.gate",
    "judge": "verification.verdict",
    "read_measurements": "verification.drift_file",
    "read_reference": "verification.reference",
    "record_reference": "verification.reference",
    "verify_skip_drift": "verification.api",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from verification.api import VerifyOptions as VerifyOptions
    from verification.api import verify_skip_drift as verify_skip_drift
    from verification.arms import EngineOptions as EngineOptions
    from verification.audit_api import AuditOptions as AuditOptions
    from verification.audit_api import AuditResult as AuditResult
    from verification.audit_api import audit_merge as audit_merge
    from verification.checks import Outcome as Outcome
    from verification.drift_file import read_measurements as read_measurements
    from verification.errors import Inconclusive as Inconclusive
    from verification.errors import VerificationError as VerificationError
    from verification.gate import CheckedCertificate as CheckedCertificate
    from verification.gate import Policy as Policy
    from verification.gate import check_certificate as check_certificate
    from verification.limits import Limits as Limits
    from verification.measure import MeasureOptions as MeasureOptions
    from verification.prepare import DecisionOptions as DecisionOptions
    from verification.reference import read_reference as read_reference
    from verification.reference import record_reference as record_reference
    from verification.sources import SourceOptions as SourceOptions
    from verification.verdict import Verdict as Verdict
    from verification.verdict import judge as judge


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
