"""Runs the arms one after the other and puts what they said, and the conditions they said it under, into one measurement."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lora_merge.engines.errors import EngineError
from lora_merge.merging.digests import root_digest
from lora_merge.merging.errors import MergeError
from verification.arms import (
    Arm,
    EngineOptions,
    Stages,
    control_arm,
    float32_arms,
    live_reference,
    merged_arm,
    recorded_reference,
)
from verification.audit import AUDIT_CHECK, WeightAudit, audit_weights
from verification.audit_api import merge_plan
from verification.checks import Check, Outcome
from verification.errors import Inconclusive, VerificationError
from verification.measurement import Conditions, Measurements, NoiseFloor, pair
from verification.merged_files import folder_files, manifest_findings
from verification.prepare import DecisionOptions, Prepared, prepare
from verification.reference import read_reference
from verification.sources import SourceOptions, Sources, find_sources


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure, and with what.

    Attributes:
        reference: a recorded reference; None scores one live, through bitsandbytes.
        record_reference: write the live reference there, to be used as ``reference`` later.
        sources: base, adapter and recipe of the reference.
        decision: how the decision is read, and how many prompts are.
        engine: of the merged checkpoint.
        control: whether the bare base is scored on a sample, to show that the adapter moves it.
        audit: whether every weight is held against base and adapter before anything is scored, where these can be found.
        split: also measure both functions in float32 arithmetic.
    """

    reference: str | os.PathLike[str] | None = None
    record_reference: str | os.PathLike[str] | None = None
    sources: SourceOptions = field(default_factory=SourceOptions)
    decision: DecisionOptions = field(default_factory=DecisionOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    control: bool = True
    audit: bool = True
    split: bool = False


def measure(
    merged: str | os.PathLike[str],
    prompts: str | os.PathLike[str],
    options: MeasureOptions,
    scratch: Path,
    stages: Stages | None = None,
) -> Measurements:
    """Score every arm. ``scratch``: an existing folder for the float32 weights of ``split``.

    Raises:
        Inconclusive: whatever keeps the arms from being measured and compared, with the reason.
    """
    try:
        return _measure(Path(merged), prompts, options, scratch, stages or Stages())
    except (EngineError, MergeError, VerificationError) as error:
        raise Inconclusive(str(error)) from error
    except OSError as error:
        raise Inconclusive(f"{error.filename or merged}: {error.strerror or error}") from error


def _measure(
    merged: Path, prompts: str | os.PathLike[str], options: MeasureOptions, scratch: Path, stages: Stages
) -> Measurements:
    files = folder_files(merged)
    recorded = None if options.reference is None else read_reference(options.reference)
    sources = find_sources(merged, options.sources, recorded)
    trust = options.engine.trust_remote_code
    prepared = prepare(prompts, merged, sources, recorded, options.decision, trust_remote_code=trust)
    known = (*sources.findings, *prepared.findings)
    # What makes any measurement say nothing is said before the models load.
    for check in known:
        if check.outcome is Outcome.INCONCLUSIVE:
            raise Inconclusive(check.detail, (*known, *manifest_findings(merged, files)))
    audit, audited = _audit(merged, sources, options, stages)
    written = tuple(manifest_findings(merged, files, bit_by_bit=audit is not None and audit.bit_by_bit))
    arms: dict[str, Arm] = {}
    if recorded is not None:
        arms["reference"] = recorded_reference(recorded, prepared)
        if options.control and sources.base is not None:
            arms["base"] = control_arm(prepared, sources, options.engine, stages)
    else:
        record_to = None if options.record_reference is None else Path(options.record_reference)
        arms["reference"], control = live_reference(prepared, sources, options.engine, record_to, stages)
        if options.control:
            arms["base"] = control
    arms["merged"] = merged_arm(merged, prepared, options.engine, stages)
    if options.split:
        truth, merged_float32 = float32_arms(merged, prepared, sources, options.engine, scratch, stages)
        floor = NoiseFloor.between("the reference against float32 arithmetic", truth.scores, arms["reference"].scores)
        arms |= {"reference_float32": replace(truth, floors=(floor,)), "merged_float32": merged_float32}
    if folder_files(merged) != files:
        raise Inconclusive(f"{merged}: changed while it was measured; measure again when nothing writes to it")
    conditions = Conditions(
        labels=prepared.labels,
        prefill=prepared.prefill,
        prompts=prepared.about,
        arms={name: arm.facts for name, arm in arms.items()},
        recipe=None if sources.recipe is None else sources.recipe.to_json(),
        recipe_origin=sources.recipe_origin,
        merged_files=files,
        merged_root=root_digest(files),
        noise_floors=tuple(floor for arm in arms.values() for floor in arm.floors),
        findings=(*known, *written, audited),
    )
    return _joined(conditions, prepared, arms)


def _audit(merged: Path, sources: Sources, options: MeasureOptions, stages: Stages) -> tuple[WeightAudit | None, Check]:
    """The weight audit and its finding; a warning where there is none, because output drift does not see every mistake."""
    trust_remote_code = options.engine.trust_remote_code
    absent = [role for role, folder in (("base", sources.base), ("adapter", sources.adapter)) if folder is None]
    if not options.audit or absent:
        reason = f"no {' and no '.join(absent)} on this machine" if options.audit else "--no-audit"
        return None, Check(AUDIT_CHECK, Outcome.WARNED, f"no weight was held against base and adapter ({reason})")
    try:
        plan = merge_plan(sources, trust_remote_code=trust_remote_code)
    except (MergeError, Inconclusive) as error:
        return None, Check(AUDIT_CHECK, Outcome.WARNED, f"the weights could not be audited: {error}")
    with stages.stage("weights against base and adapter", plan.weight_bytes, "bytes") as progress:
        audit = audit_weights(plan, merged, progress)
    return audit, audit.check()


def _joined(conditions: Conditions, prepared: Prepared, arms: Mapping[str, Arm]) -> Measurements:
    return Measurements(conditions, pair(prepared.prompts, {name: arm.scores for name, arm in arms.items()}))
