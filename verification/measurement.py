"""What was measured, prompt by prompt: the scores of every arm, paired, and the conditions they were taken under.

The arms are ``reference`` (R, the QLoRA reference), ``merged`` (M, the merged checkpoint in the generation engine), ``base``
(B, the bare base, maybe on a sample), and with ``--split`` ``reference_float32`` and ``merged_float32``: both functions in
float32 arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.prompts import Prompt, token_ids_sha256
from lora_merge.engines.scores import DecisionScore
from verification.checks import Check
from verification.errors import Inconclusive, VerificationError
from verification.json_readers import listed, number, record, text, whole

ARMS = ("reference", "merged", "base", "reference_float32", "merged_float32")
DECISIONS = ("skip", "write", "other")
THRESHOLDS = tuple(hundredth / 100 for hundredth in range(1, 100))
"""Skip thresholds at which the flips of a noise floor are counted; which one generation will use is not known when it is."""
DEQUANTIZED = "the reference against its dequantized base with the unmerged adapter"
"""The source of the noise floor that bitsandbytes' kernels make."""
LONGEST_FIELD = 200
"""Characters of a pass-through field that can name a slice."""
_SHOWN_IDS = 8


@dataclass(frozen=True)
class NoiseFloor:
    """How far one and the same function drifts from itself when only its arithmetic changes.

    Attributes:
        source: what was compared with what.
        prompts: how many prompts were compared.
        mean_abs_delta: mean |difference of the skip probability|.
        max_abs_delta: the largest one.
        flips: prompts whose decision changed.
        kept_flips: at each of :data:`THRESHOLDS` the prompts whose text would be kept on one side only; None where that was not
            counted, as in files from before it was.
    """

    source: str
    prompts: int
    mean_abs_delta: float
    max_abs_delta: float
    flips: int
    kept_flips: tuple[int, ...] | None = None

    @classmethod
    def between(cls, source: str, first: Sequence[DecisionScore], second: Sequence[DecisionScore]) -> NoiseFloor:
        """The floor that two scorings of the same prompts, in the same order, show."""
        one, two = ArmArrays.of(first), ArmArrays.of(second)
        delta = np.abs(one.skip_probability - two.skip_probability)
        flips = int((one.decision != two.decision).sum())
        kept = tuple(int((one.kept(threshold) != two.kept(threshold)).sum()) for threshold in THRESHOLDS)
        return cls(source, len(first), float(delta.mean()), float(delta.max()), flips, kept)

    def flips_at(self, threshold: float) -> int:
        """The prompts whose text would be kept on one side only, at the nearest counted thresholds: the larger number of the two.
        Where they were not counted, the decisions by arg-max that changed stand for them.
        """
        if self.kept_flips is None:
            return self.flips
        place = round(threshold * 100, 6)
        around = (min(max(int(near), 1), len(THRESHOLDS)) for near in (math.floor(place), math.ceil(place)))
        return max(self.kept_flips[hundredth - 1] for hundredth in around)

    def to_json(self) -> dict[str, Any]:
        """Every attribute by name; ``kept_flips`` only where they were counted."""
        counted = {} if self.kept_flips is None else {"kept_flips": list(self.kept_flips)}
        return {**{name: getattr(self, name) for name in _FLOOR_FIELDS}, **counted}

    @classmethod
    def from_json(cls, value: Any, where: str) -> NoiseFloor:
        """The inverse of :meth:`to_json`; raises :class:`VerificationError` for anything else, and for a floor that cannot be.

        ``where`` names the place in the message.
        """
        floor = cls(**_FLOOR(value, where))
        if floor.kept_flips is not None and len(floor.kept_flips) != len(THRESHOLDS):
            raise VerificationError(f"{where}: kept_flips are {len(floor.kept_flips)} numbers, expected {len(THRESHOLDS)}")
        most = max(floor.flips, *(floor.kept_flips or (0,)))
        if most > floor.prompts:
            raise VerificationError(f"{where}: {most} of {floor.prompts} prompts flip")
        if floor.mean_abs_delta > floor.max_abs_delta + _ROUNDING:
            raise VerificationError(
                f"{where}: mean_abs_delta is {floor.mean_abs_delta:g}, above max_abs_delta {floor.max_abs_delta:g}"
            )
        return floor


_FLOOR_FIELDS = {
    "source": text,
    "prompts": whole(1),
    "mean_abs_delta": number(0, 1),
    "max_abs_delta": number(0, 1),
    "flips": whole(0),
}
_FLOOR = record(_FLOOR_FIELDS, {"kept_flips": listed(whole(0))})
_ROUNDING = 1e-9
"""The mean of equal numbers can lie above them by an ulp."""


@dataclass(frozen=True)
class Measurement:
    """One prompt.

    Attributes:
        id: the prompt's.
        token_ids_sha256: digest of its final ids, the same in every arm.
        scores: arm -> score; ``reference`` and ``merged`` are always there.
        fields: its pass-through fields that are short enough to slice by.
    """

    id: str
    token_ids_sha256: str
    scores: Mapping[str, DecisionScore]
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conditions:
    """What the scores were taken under: everything that a verdict or a certificate says besides the scores.

    Attributes:
        labels: the decision labels and their token ids.
        prefill: text between prompt and decision.
        prompts: ``{"source", "total", "scored", "seed", "token_ids_sha256"}``; seed is null unless a sample was scored. ``date``
            too, where the chat template writes one into the prompts.
        arms: arm -> engine kind, versions, dtype, device, settings, and where its model came from.
        recipe: the reference's quantization recipe, or null where it is not known.
        recipe_origin: who says so: ``reference``, ``adapter``, ``base``, ``flags``, ``manifest`` or ``assumed``.
        merged_files: file name -> SHA-256 of the merged checkpoint as it was measured.
        merged_root: the root digest over them.
        noise_floors: all that were measured.
        findings: checks that were made before scoring and cannot be repeated from the scores.
    """

    labels: DecisionLabels
    prefill: str
    prompts: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    recipe: Mapping[str, Any] | None
    recipe_origin: str
    merged_files: Mapping[str, str]
    merged_root: str
    noise_floors: tuple[NoiseFloor, ...] = ()
    findings: tuple[Check, ...] = ()


@dataclass(frozen=True)
class ArmArrays:
    """The scores of one arm as arrays, one value a prompt.

    Attributes:
        skip_probability: (n,) P(skip) / (P(skip) + P(write)).
        label_mass: (n,) P(skip) + P(write).
        decision: (n,) index into :data:`DECISIONS`.
    """

    skip_probability: NDArray[np.float64]
    label_mass: NDArray[np.float64]
    decision: NDArray[np.int8]

    @classmethod
    def of(cls, scores: Sequence[DecisionScore]) -> ArmArrays:
        """The arrays of ``scores``, in their order."""
        return cls(
            np.array([score.skip_probability for score in scores], dtype=np.float64),
            np.array([score.label_mass for score in scores], dtype=np.float64),
            np.array([DECISIONS.index(score.decision) for score in scores], dtype=np.int8),
        )

    def kept(self, threshold: float) -> NDArray[np.bool_]:
        """(n,) whether a text would be kept: the decision is ``write`` and the skip probability at most ``threshold``."""
        kept: NDArray[np.bool_] = (self.decision == DECISIONS.index("write")) & (self.skip_probability <= threshold)
        return kept


@dataclass(frozen=True)
class Measurements:
    """All prompts of one run, and its conditions."""

    conditions: Conditions
    rows: tuple[Measurement, ...]

    def has(self, arm: str) -> bool:
        """Whether any prompt was scored in ``arm``."""
        return any(arm in row.scores for row in self.rows)

    def rows_with(self, *arms: str) -> tuple[Measurement, ...]:
        """The prompts that were scored in all of ``arms``."""
        return tuple(row for row in self.rows if all(arm in row.scores for arm in arms))

    def different(self, *arms: str) -> NDArray[np.bool_]:
        """(n,) of the prompts that were scored in all of ``arms``: False for one whose token ids an earlier one already had."""
        seen: set[str] = set()
        firsts = []
        for row in self.rows_with(*arms):
            firsts.append(row.token_ids_sha256 not in seen)
            seen.add(row.token_ids_sha256)
        return np.array(firsts, dtype=np.bool_)

    def arrays(self, arm: str) -> ArmArrays:
        """The arrays of one arm, over the prompts that it scored."""
        return ArmArrays.of([row.scores[arm] for row in self.rows_with(arm)])

    def paired(self, first: str, second: str) -> tuple[ArmArrays, ArmArrays]:
        """The arrays of two arms, over the prompts that both of them scored."""
        rows = self.rows_with(first, second)
        return ArmArrays.of([row.scores[first] for row in rows]), ArmArrays.of([row.scores[second] for row in rows])


def pair(prompts: Sequence[Prompt], arms: Mapping[str, Sequence[DecisionScore]]) -> tuple[Measurement, ...]:
    """One measurement a prompt, in the order of ``prompts``.

    ``arms``: arm -> its scores in any order, matched by id. ``reference`` and ``merged`` must cover every prompt; the others
    may be of a sample. A score of a prompt that is not asked for is an error.

    Raises:
        Inconclusive: the ids of an arm do not match.
    """
    by_id: dict[str, dict[str, DecisionScore]] = {prompt.id: {} for prompt in prompts}
    if len(by_id) != len(prompts):
        raise Inconclusive(f"{len(prompts) - len(by_id)} prompt ids occur twice; expected each once")
    for arm, scores in arms.items():
        for score in scores:
            if score.id not in by_id:
                raise Inconclusive(
                    f"arm {arm} scored prompt {score.id!r}, which is none of the {len(prompts)} prompts of this run"
                )
            if arm in by_id[score.id]:
                raise Inconclusive(f"arm {arm} scored prompt {score.id!r} twice")
            by_id[score.id][arm] = score
    for arm in ("reference", "merged"):
        missing = [id for id, scores in by_id.items() if arm not in scores]
        if missing:
            raise Inconclusive(f"arm {arm} lacks {len(missing)} of {len(prompts)} prompts, {missing[0]!r} first")
    return tuple(
        Measurement(prompt.id, token_ids_sha256(prompt), by_id[prompt.id], short_fields(prompt.fields)) for prompt in prompts
    )


def match_token_ids(prompts: Sequence[Prompt], recorded: Mapping[str, str], date: str | None = None) -> None:
    """Make sure that a recorded reference answered exactly these prompts.

    ``recorded``: id -> digest of the token ids that were scored. ``date``: the day that the reference says its prompts are of.

    Raises:
        Inconclusive: an id is missing on one side, or the token ids of one differ.
    """
    own = {prompt.id: token_ids_sha256(prompt) for prompt in prompts}
    hint = "give the prompts it was recorded on (--num-prompts takes a sample of them)"
    absent = [id for id in own if id not in recorded]
    if absent:
        raise Inconclusive(f"the reference has no score for {len(absent)} of {len(own)} prompts, {absent[0]!r} first; {hint}")
    extra = [id for id in recorded if id not in own]
    if extra:
        raise Inconclusive(f"the reference has {len(extra)} prompts that the prompt file lacks, {extra[0]!r} first; {hint}")
    changed = [prompt for prompt in prompts if recorded[prompt.id] != own[prompt.id]]
    if changed:
        first = changed[0]
        begin = ", ".join(map(str, first.token_ids[:_SHOWN_IDS]))
        reasons = (
            "another tokenizer, library version, chat template, prefill or prompt text; nothing can be compared (a tokenizer or "
            "template of the training's own belongs beside the adapter before it is merged: tokenizer.save_pretrained)"
        )
        if first.date is not None and date is None:
            known = "the chat template writes the date into its prompts, and the reference does not say of which day it is"
            reasons = f"{known}; record it again, or it is {reasons}"
        raise Inconclusive(
            f"the token ids of {len(changed)} of {len(own)} prompts differ from those of the reference: {reasons}. The reference "
            f"holds only a digest of its ids; here {first.id!r} has {len(first.token_ids)} tokens, {begin} first"
        )


def short_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields whose values can name a slice."""
    return {name: value for name, value in fields.items() if is_slice_value(value)}


def is_slice_value(value: Any) -> bool:
    """Whether ``value`` can name a slice: booleans, whole numbers, null and strings of at most 200 characters."""
    return value is None or type(value) in (bool, int) or (isinstance(value, str) and len(value) <= LONGEST_FIELD)
