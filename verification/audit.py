"""The weight audit: replays the merge plan against a merged checkpoint, in a stream, without a single prompt.

Output drift cannot see everything: leaving out the adapter of one layer can stay below any sensible limit. Here every tensor of
the checkpoint is held against what the plan says it must be, bit by bit. One that differs is explained by the history that
comes closest to it; distances are in units of the adapter's own change, so 0 is exact and about 1 means that the adapter is
missing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.console import Progress, no_progress
from lora_merge.merging.checkpoint import read_checkpoint
from lora_merge.merging.dtypes import FLOATING, DType
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder
from lora_merge.merging.names import NameMap
from lora_merge.merging.operations import Decoder
from lora_merge.merging.plan import MergePlan, TensorPlan
from lora_merge.merging.safetensors_file import TensorInfo
from verification.checks import Check, Outcome
from verification.histories import (
    AS_PLANNED,
    EDITED,
    EXPECTED,
    OTHER_SCALE,
    ROUNDED_BEFORE,
    ROUNDED_TWICE,
    UNEXPLAINED,
    base_operations,
    other_histories,
)
from verification.weight_reader import TensorReader, Tolerance, norm, read_bytes, rounded

AUDIT_CHECK = "weights"
NEAR = 0.3
"""Distance up to which another history explains a weight."""
_FEW = 0.01
"""Share of elements that may lie beyond rounding where the base goes through 4 bit: CPU and CUDA disagree on that few scales of
double quantization, or FP4 codes. None may lie beyond what such a disagreement can do.
"""
_CLEAR = 0.002
"""Distance from which on no other history is tried: sums rounded by way of float32 differ from those rounded once by about
that.
"""
_SAME_SCALE = 0.02
_BETTER = 0.95
"""How much nearer than as planned another scale has to come: fitted to noise, one always comes a little nearer."""
_SOME = 0.1
"""Share of elements that differ up to which the others show that it was merged as planned, and edited."""
_NOT_MUCH = 0.1
"""How much of the adapter's change all elements beyond rounding may make together..."""
_LITTLE = 0.002
"""...or of the whole weight, where the change is small: machines disagree as much about the base, however weak the adapter."""


@dataclass(frozen=True)
class TensorAudit:
    """How one tensor of the checkpoint stands to the plan.

    Attributes:
        name: in the base.
        history: what explains it: ``as planned``, or one of :mod:`verification.histories`.
        distance: \\|\\|W - expected\\|\\| / \\|\\|change by the adapter\\|\\|, of the round trip where there is no adapter, of
            the weight itself where it is copied; 0 when every bit is as planned, infinite (null in JSON) where it has no meaning.
        differing: share of its elements with other bits than the plan's. Of one that is as planned, rounded to a narrower type
            before, both are told from the plan so rounded.
        scale: the factor of the adapter's change that fits best; None where that was not asked.
    """

    name: str
    history: str
    distance: float
    differing: float
    scale: float | None = None

    @property
    def as_planned(self) -> bool:
        """Whether it is what the plan says, up to rounding."""
        return self.history in AS_PLANNED

    def to_json(self) -> dict[str, Any]:
        """Every attribute by name."""
        return {**vars(self), "distance": _finite(self.distance)}


@dataclass(frozen=True)
class WeightAudit:
    """All tensors, and the names that do not match.

    Attributes:
        method: of the plan: ``from-4bit`` or ``original-weights``.
        tensors: in the order of the plan.
        missing: planned tensors that the checkpoint lacks.
        unknown: tensors of the checkpoint that are no part of the plan, and weight files that are no part of the checkpoint: some
            engines read every one they find.
    """

    method: str
    tensors: tuple[TensorAudit, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def bit_by_bit(self) -> bool:
        """Whether every planned tensor is there, and nothing else, and each has the very bits of the plan."""
        complete = self.tensors and not self.missing and not self.unknown
        return bool(complete) and all(tensor.as_planned and tensor.differing == 0 for tensor in self.tensors)

    def check(self) -> Check:
        """The audit as one check: passed when every tensor is as planned and none is missing or unknown."""
        wrong = sorted((tensor for tensor in self.tensors if not tensor.as_planned), key=lambda tensor: -tensor.distance)
        exact = sum(tensor.differing == 0 for tensor in self.tensors)
        worst = max((tensor.distance for tensor in self.tensors), default=0.0)
        if self.missing or self.unknown:
            names, state = (self.missing, "missing") if self.missing else (self.unknown, "no part of the merge")
            counted = "1 tensor or file is" if len(names) == 1 else f"{len(names)} tensors or files are"
            return Check(AUDIT_CHECK, Outcome.FAILED, f"{counted} {state}, {names[0]} first", _finite(worst))
        if wrong:
            kinds = Counter(tensor.history for tensor in wrong).most_common()
            told = ", ".join(f"{count}: {kind}" for kind, count in kinds[:3])
            found = f"{len(wrong)} of {len(self.tensors)} tensors are not as planned ({told})"
            reason = f"{found}; {wrong[0].name} is off by {wrong[0].distance:.3g} of its change"
            return Check(AUDIT_CHECK, Outcome.FAILED, reason, _finite(worst))
        found = f"all {len(self.tensors)} tensors are as planned ({self.method}), {exact} of them bit by bit"
        for history in ROUNDED_BEFORE.values():
            if count := sum(tensor.history == history for tensor in self.tensors):
                found += f", {count} {history.removeprefix(f'{EXPECTED}, ')}"
        return Check(AUDIT_CHECK, Outcome.PASSED, found, worst)

    def to_json(self) -> dict[str, Any]:
        """The audit as ``verify-merge --format json`` shows it (docs/verification.md)."""
        check = self.check()
        return {
            "format": "lora-merge/audit",
            "version": 1,
            "outcome": check.outcome.value,
            "detail": check.detail,
            "method": self.method,
            "histories": dict(Counter(tensor.history for tensor in self.tensors)),
            "missing": list(self.missing),
            "unknown": list(self.unknown),
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }


def audit_weights(plan: MergePlan, merged: Path, progress: Progress = no_progress, jobs: int | None = None) -> WeightAudit:
    """Hold the checkpoint in ``merged`` against ``plan``. ``progress`` is told of bytes of planned tensors.

    Memory holds a few blocks of rows for each of ``jobs`` threads (None: one a core), whatever the model's size.

    Raises:
        MergeError: base, adapter or checkpoint cannot be read.
    """
    found = read_checkpoint(ModelFolder(merged, str(merged)), "merged checkpoint").tensors
    names = NameMap.of(found)
    pairs = [(tensor, names.find(tensor.name)) for tensor in plan.tensors]
    present = [(tensor, found[name]) for tensor, name in pairs if name is not None]
    missing = tuple(tensor.name for tensor, name in pairs if name is None)
    unknown = sorted(set(found) - {name for _, name in pairs if name is not None})
    read = {tensor.path.resolve() for tensor in found.values()}
    strays = sorted(path.name for path in merged.glob("*.safetensors") if path.resolve() not in read)
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        tensors = tuple(pool.map(lambda pair: _audit(pair[0], pair[1], progress), present))
    return WeightAudit(plan.method, tensors, missing, (*_beyond_copies(unknown, found), *strays))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _audit(tensor: TensorPlan, found: TensorInfo, progress: Progress) -> TensorAudit:
    """One tensor. Explaining is done on some blocks only, and only where a bit differs."""
    try:
        if math.prod(found.shape) != math.prod(tensor.shape) or (
            found.shape != tensor.shape and 1 not in (*found.shape, *tensor.shape)
        ):
            return TensorAudit(tensor.name, f"of shape {list(found.shape)}, expected {list(tensor.shape)}", math.inf, 1.0)
        if found.dtype.name not in FLOATING or tensor.dtype.name not in FLOATING:
            return _audit_bytes(tensor, found)
        with TensorReader(tensor, found) as reader:
            differing, error = reader.compare(tensor.operations)
            if differing == 0:
                return TensorAudit(tensor.name, EXPECTED, 0.0, 0.0)
            if not math.isfinite(error):
                return TensorAudit(tensor.name, "NaN or infinite values", math.inf, differing)
            narrower = reader.narrower()
            if not narrower:
                return _explain(tensor, reader, differing, error)
        return min((_audit_narrower(tensor, found, dtype) for dtype in narrower), key=lambda audit: audit.differing)
    finally:
        progress(tensor.nbytes)


def _audit_narrower(tensor: TensorPlan, found: TensorInfo, dtype: DType) -> TensorAudit:
    """A tensor that holds no more digits than ``dtype`` has, against what the plan makes in that type: it was saved anew."""
    with TensorReader(tensor, found, dtype) as reader:
        differing, error = reader.compare(tensor.operations)
        audit = _explain(tensor, reader, differing, error) if differing else TensorAudit(tensor.name, EXPECTED, 0.0, 0.0)
    return replace(audit, history=ROUNDED_BEFORE[dtype.name]) if audit.history == EXPECTED else audit


def _audit_bytes(tensor: TensorPlan, found: TensorInfo) -> TensorAudit:
    """A tensor of whole numbers or the like: the same bytes or not."""
    same = found.dtype == tensor.dtype and tensor.copied and read_bytes(found) == read_bytes(tensor.source)
    return TensorAudit(tensor.name, EXPECTED, 0.0, 0.0) if same else TensorAudit(tensor.name, UNEXPLAINED, math.inf, 1.0)


def _explain(tensor: TensorPlan, reader: TensorReader, differing: float, error: float) -> TensorAudit:
    """The history that comes closest to a tensor that is not bit by bit as planned."""
    blocks = reader.sample()
    weight = reader.found_values(blocks)
    expected = reader.values(tensor.operations, blocks)
    base_of_update = reader.values(base_operations(tensor), blocks)
    change = norm(expected - _unchanged(tensor, reader, blocks, base_of_update)) or norm(expected) or 1.0
    added = rounded(base_of_update, reader.dtype) + rounded(expected - base_of_update, reader.dtype)
    candidates = {
        EXPECTED: norm(weight - rounded(expected, reader.dtype)),
        ROUNDED_TWICE: norm(weight - rounded(added, reader.dtype)),
    }
    for history in other_histories(tensor):
        if min(candidates.values()) < _CLEAR * change:
            break  # nothing else can come much closer, and each history costs a look at the whole tensor
        with contextlib.suppress(MergeError):  # a mistake that cannot even be made here explains nothing
            candidates.setdefault(history.name, norm(weight - rounded(reader.values(history.operations, blocks), reader.dtype)))
    scale = _fitted_scale(weight - base_of_update, expected - base_of_update)
    if scale is not None and abs(scale - 1) > _SAME_SCALE:
        fitted = rounded(base_of_update + scale * (expected - base_of_update), reader.dtype)
        # The fit has a free parameter; it must beat the others, not just equal them.
        candidates[OTHER_SCALE] = norm(weight - fitted) / _BETTER + 1e-3 * change
    nearest = min(candidates, key=candidates.__getitem__)
    # The distance is of the whole tensor; only the change's norm is scaled up from the sample.
    whole_change = change * math.sqrt(reader.elements / weight.size)
    distance = math.sqrt(error) / whole_change
    if nearest in (EXPECTED, ROUNDED_TWICE):
        whole_weight = norm(expected) * math.sqrt(reader.elements / weight.size)
        if not _is_rounding(tensor, reader, max(_NOT_MUCH * whole_change, _LITTLE * whole_weight)):
            nearest = EDITED if candidates[nearest] <= NEAR * change else UNEXPLAINED
    elif candidates[nearest] > NEAR * change:
        nearest = UNEXPLAINED
    if nearest == UNEXPLAINED and differing <= _SOME:
        nearest = EDITED
    if nearest == OTHER_SCALE and scale is not None:
        nearest = f"{OTHER_SCALE}: {scale:.3g} times"
    return TensorAudit(tensor.name, nearest, distance, differing, scale)


def _is_rounding(tensor: TensorPlan, reader: TensorReader, allowed: float) -> bool:
    """Whether rounding alone lies between the tensor and the plan, over all of its elements and not only the sampled ones.

    ``allowed``: the norm of all differences beyond rounding.
    """
    if not tensor.operations:
        return False  # there is nothing to round in a copy
    base = base_operations(tensor)
    beyond, error = 0, 0.0
    for outside, squared, far in reader.beyond(tensor.operations, base, Tolerance(quantized=bool(base))):
        beyond, error = beyond + outside, error + squared
        if far or beyond > _FEW * reader.elements or error > allowed**2:
            return False
    return True


def _unchanged(
    tensor: TensorPlan, reader: TensorReader, blocks: list[tuple[int, int]], base_of_update: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What the change is measured from: the base of the adapter's update; without one, the weight before its round trip."""
    operations = base_operations(tensor)
    if len(operations) < len(tensor.operations):
        return base_of_update
    if any(isinstance(operation, Decoder) for operation in operations):
        return np.zeros_like(base_of_update)
    return reader.values((), blocks)


def _fitted_scale(moved: NDArray[np.float64], change: NDArray[np.float64]) -> float | None:
    power = float((change * change).sum())
    return float((moved * change).sum()) / power if power > 0 else None


def _beyond_copies(unknown: list[str], found: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Those of ``unknown`` that are not just a tied tensor written out twice."""
    for name in unknown:
        twins = (other for other_name, other in found.items() if other_name != name and other.shape == found[name].shape)
        embedding = next((other for other in twins if other.name.endswith("embed_tokens.weight")), None)
        copied = name.endswith("lm_head.weight") and embedding is not None and read_bytes(found[name]) == read_bytes(embedding)
        if not copied:
            yield name
