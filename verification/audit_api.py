"""The plan that a merged checkpoint is held against, and the audit as a function of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lora_merge.console import Progress, no_progress
from lora_merge.merging.api import plan_merge
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import resolve_folder
from lora_merge.merging.plan import ORIGINAL_WEIGHTS, MergePlan
from verification.at_first_sight import no_checkpoint
from verification.audit import WeightAudit, audit_weights
from verification.checks import Check, Outcome, worst
from verification.errors import Inconclusive
from verification.sources import SourceOptions, Sources, find_sources

Method = Literal["auto", "from-4bit", "original-weights"]


@dataclass(frozen=True)
class AuditOptions:
    """What to hold a checkpoint against.

    Attributes:
        sources: base, adapter and recipe.
        method: how it should have been merged; ``auto``: through 4 bit where a recipe was recorded at training or given, or the
            base is stored quantized; else as its manifest says.
        trust_remote_code: whether Python code in the base may run to build its architecture.
        jobs: threads; None for one a core.
    """

    sources: SourceOptions = field(default_factory=SourceOptions)
    method: Method = "auto"
    trust_remote_code: bool = False
    jobs: int | None = None


@dataclass(frozen=True)
class AuditResult:
    """The audit of a checkpoint, and what was checked about base, adapter and recipe."""

    audit: WeightAudit
    findings: tuple[Check, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks; the audit's own comes last."""
        return (*self.findings, self.audit.check())

    @property
    def outcome(self) -> Outcome:
        """The worst of the checks."""
        return worst(self.checks)


def audit_merge(
    merged: str | os.PathLike[str], options: AuditOptions | None = None, progress: Progress = no_progress
) -> AuditResult:
    """Hold every tensor of a merged checkpoint against what base, adapter and recipe make it; no prompt, no model run.

    Args:
        merged: folder of the checkpoint, whichever tool merged it.
        options: base, adapter and recipe; the defaults take base and adapter from the merge manifest.
        progress: told of bytes of weights checked.

    Raises:
        Inconclusive: base or adapter are not named or cannot be read, or nothing says how the merge should have been done.
    """
    options = options or AuditOptions()
    folder = Path(merged)
    if reason := no_checkpoint(merged):
        raise Inconclusive(reason)
    try:
        sources = find_sources(folder, options.sources, None, several_adapters=True)
        plan = merge_plan(sources, options.method, trust_remote_code=options.trust_remote_code)
        findings = (*sources.findings, *_method_findings(sources, options.method))
        return AuditResult(audit_weights(plan, folder, progress, options.jobs), findings)
    except MergeError as error:
        raise Inconclusive(str(error)) from error


def _method_findings(sources: Sources, method: Method) -> Iterator[Check]:
    """A method given by hand, against what the training run recorded."""
    if method == "original-weights" and (sources.prequantized or sources.recipe_origin == "adapter"):
        recipe = "4-bit weights" if sources.recipe is None else sources.recipe.describe()
        reason = f"--method original-weights, but the adapter was trained through {recipe}: as planned is not as trained here"
        yield Check("method", Outcome.WARNED, reason)


def merge_plan(sources: Sources, method: Method = "auto", *, trust_remote_code: bool = False) -> MergePlan:
    """The plan of the right merge of ``sources``, which must have a base and an adapter.

    Raises:
        Inconclusive: nothing says whether the adapter was trained on a quantized base.
        MergeError: the merge cannot be planned.
    """
    assert sources.base is not None and sources.adapter is not None
    manifest = sources.manifest
    adapters = [str(sources.adapter.path)]
    weights: tuple[float, ...] | None = None
    if manifest is not None and len(manifest.adapters) > 1:
        found = (
            resolve_folder(location, "adapter", commit) for location, commit in (more.location for more in manifest.more_adapters)
        )
        adapters += [str(more.path) for more in found]
    if manifest is not None:
        weights = manifest.weights
    options = sources.merge_options(dtype=None, trust_remote_code=trust_remote_code)
    if not _through_4bit(sources, method):
        options = replace(options, from_4bit=False, recipe={})
    return plan_merge(str(sources.base.path), adapters, replace(options, weights=weights))


def _through_4bit(sources: Sources, method: Method) -> bool:
    if method != "auto":
        return method == "from-4bit"
    if sources.recipe is None:
        return sources.prequantized
    if sources.recipe_origin in ("reference", "adapter", "base", "flags"):
        return True
    if sources.manifest is None:
        raise Inconclusive(
            "nothing says whether the adapter was trained on a 4-bit base: no recipe beside it, no manifest in the checkpoint; "
            "give --method from-4bit or original-weights"
        )
    return sources.manifest.method != ORIGINAL_WEIGHTS
