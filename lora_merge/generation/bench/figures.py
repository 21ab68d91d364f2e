"""What a comparison amounts to: ratios, break-even, quantiles, the knee of a sweep. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lora_merge.generation.bench.arms import ArmResult, WriteList
from lora_merge.generation.bench.proof import SameWork

KNEE = 0.05
"""A batch size is good enough when its time is within this share of the best."""


def ratios(arms: Mapping[str, ArmResult], slow: str, fast: str) -> dict[str, float]:
    """Time of ``slow`` over time of ``fast``: ``total``, and where both have phases ``decide`` and ``write``."""
    one, other = arms[slow], arms[fast]
    found = {"total": one.work_seconds / other.work_seconds}
    for phase in ("decide", "write"):
        if one.seconds.get(phase) and other.seconds.get(phase):
            found[phase] = one.seconds[phase] / other.seconds[phase]
    return found


def pairs(arms: Mapping[str, ArmResult]) -> list[tuple[str, str]]:
    """Which times are divided by which: one engine's by the other's in each mode, and one-shot by two-phase in each engine."""
    wanted = [
        ("hf-two-phase", "vllm-two-phase"),
        ("hf-one-shot", "vllm-one-shot"),
        ("hf-one-shot", "hf-two-phase"),
        ("vllm-one-shot", "vllm-two-phase"),
        ("hf-one-shot", "vllm-two-phase"),
    ]
    return [(slow, fast) for slow, fast in wanted if slow in arms and fast in arms]


def comparable(slow: str, fast: str, proof: Mapping[str, SameWork]) -> bool:
    """Whether both did the reference arm's work, which has no proof of its own."""
    return all(name not in proof or proof[name].holds for name in (slow, fast))


def break_even(slow: ArmResult, fast: ArmResult, prompts: int) -> float | None:
    """From how many prompts on ``fast`` is done first, loading included; 0 when it always is, None when it never is.

    Both are taken to start once and then to need the same time for each prompt as here.
    """
    a_prompt = (slow.work_seconds - fast.work_seconds) / prompts
    head_start = fast.start_seconds - slow.start_seconds
    if a_prompt <= 0:
        return None
    return max(0.0, float(math.ceil(head_start / a_prompt)))


def by_length(slow: ArmResult, fast: ArmResult, listed: WriteList) -> list[dict[str, float]]:
    """Speed-up of writing for each group of the list by text length."""
    count = min(len(slow.quantile_seconds), len(fast.quantile_seconds))
    lengths = dict(zip(listed.indices, listed.lengths, strict=True))
    groups = []
    for number, group in enumerate(listed.quantiles(count) if count else []):
        if not group:
            continue
        tokens = [lengths[index] for index in group]
        seconds = slow.quantile_seconds[number], fast.quantile_seconds[number]
        groups.append(
            {
                "shortest": min(tokens),
                "longest": max(tokens),
                "texts": len(group),
                "slow_seconds": seconds[0],
                "fast_seconds": seconds[1],
                "ratio": seconds[0] / seconds[1],
            }
        )
    return groups


def best(sizes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest entry of a sweep; None when none fitted."""
    return min((entry for entry in sizes if "failed" not in entry), key=lambda entry: entry["seconds"], default=None)


def knee(sizes: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest batch size whose time is within 5 % of the best; None when none fitted."""
    fitted = [entry for entry in sizes if "failed" not in entry]
    if not fitted:
        return None
    best = min(entry["seconds"] for entry in fitted)
    return int(min(entry["batch"] for entry in fitted if entry["seconds"] <= best * (1 + KNEE)))


def rates(arm: ArmResult, listed: WriteList) -> dict[str, float]:
    """Prompts decided a second, texts a second, and tokens of texts a second, of whatever phases the arm has."""
    texts = [arm.texts.get(index, ()) for index in listed.indices]
    found = {"prompts": len(arm.decisions) / arm.work_seconds}
    if arm.seconds.get("decide"):
        found["decided"] = len(arm.decisions) / arm.seconds["decide"]
    if arm.seconds.get("write"):
        found["texts"] = len(texts) / arm.seconds["write"]
        found["text_tokens"] = sum(map(len, texts)) / arm.seconds["write"]
    if arm.seconds.get("one_shot"):
        found["written_tokens"] = arm.written_tokens / arm.seconds["one_shot"]
    return found


def waste(arm: ArmResult) -> float | None:
    """Share of padding and waiting in all tokens that went through the model for writing; None where the engine does not tell."""
    if arm.computed is None:
        return None
    total = sum(arm.computed.values())
    return (arm.computed["padding"] + arm.computed["waiting"]) / total if total else 0.0


def saved_by_threshold(arm: ArmResult, listed: WriteList) -> dict[str, float] | None:
    """What it brings to apply the threshold before writing rather than after: what is dropped is never written."""
    if arm.kept_seconds is None or listed.kept is None:
        return None
    lengths = dict(zip(listed.indices, listed.lengths, strict=True))
    tokens, kept_tokens = sum(listed.lengths), sum(lengths[index] for index in listed.kept)
    return {
        "texts": len(listed.indices),
        "kept_texts": len(listed.kept),
        "tokens": tokens,
        "kept_tokens": kept_tokens,
        "tokens_saved": tokens - kept_tokens,
        "seconds": arm.kept_seconds["all"],
        "kept_seconds": arm.kept_seconds["kept"],
        "seconds_saved": arm.kept_seconds["all"] - arm.kept_seconds["kept"],
        "same_texts": arm.kept_seconds["same"],
    }
