"""The verdict for people: a few lines that say what came out, by how much, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_merge.readable import printable
from verification.audit import AUDIT_CHECK
from verification.checks import IF_TRAINED_IN_4BIT, MERGE_AGAIN, Outcome
from verification.mean_bound import MIN_PROMPTS
from verification.merged_files import WRITTEN_CHECK
from verification.verdict import Verdict

_ABOUT_FILES = (AUDIT_CHECK, WRITTEN_CHECK)
"""Checks of the files themselves, which can fail however little the decisions drift."""

UNSIGNED = "unsigned: it guards against mistakes, not against forgery (--sign-key signs it)"


def render(verdict: Verdict) -> Iterator[tuple[str, Outcome | None]]:
    """The lines of the report, each with the outcome that colors it, or None. What other people's files say is text in them."""
    return ((printable(line), outcome) for line, outcome in _lines(verdict))


def _lines(verdict: Verdict) -> Iterator[tuple[str, Outcome | None]]:
    numbers = verdict.numbers
    yield f"{verdict.outcome}{_headline(verdict)}", verdict.outcome
    if numbers:
        yield from ((line, None) for line in _numbers(numbers, verdict))
        yield "", None
    for check in verdict.checks:
        yield (
            f"  {check.outcome.value:<13}{check.name:<22}{check.detail}",
            None if check.outcome is Outcome.PASSED else check.outcome,
        )
    ways_out = [check.detail for check in verdict.checks if check.detail.endswith(MERGE_AGAIN)]
    if verdict.outcome is Outcome.FAILED and ways_out:
        known = not all(detail.endswith(IF_TRAINED_IN_4BIT) for detail in ways_out)
        yield "", None
        yield f"{'The' if known else 'If the'} adapter was trained on a 4-bit base{':' if known else ','} {MERGE_AGAIN}", None


def _headline(verdict: Verdict) -> str:
    if not verdict.numbers:
        return ": nothing was measured, so nothing is certified"
    failed = [check.name for check in verdict.checks if check.outcome is Outcome.FAILED]
    meaning = {
        Outcome.PASSED: "the merged checkpoint decides as its QLoRA reference did",
        Outcome.WARNED: "within the limits, but with a reservation; generation asks for consent",
        Outcome.FAILED: _failure(failed),
        Outcome.INCONCLUSIVE: "the measurement says nothing, so nothing is certified",
    }
    if verdict.outcome is Outcome.FAILED:
        return f": {meaning[verdict.outcome]} ({', '.join(failed)})"
    drift, limits = verdict.numbers["drift"], verdict.limits
    flips = f"{drift['argmax_flips']} of {drift['prompts']} by arg-max, {drift['threshold_flips']} at {limits.skip_threshold:g}"
    limit = f"limit {limits.max_delta:g} of the mean |delta| of the skip probability"
    return f": {meaning[verdict.outcome]} ({limit}; flips: {flips})"


def _failure(failed: Sequence[str]) -> str:
    """What the names of the ``failed`` checks amount to."""
    if any(name not in _ABOUT_FILES for name in failed):
        return "the merged checkpoint decides differently from its QLoRA reference"
    if AUDIT_CHECK in failed:
        return "the merged checkpoint is not what its base, adapter and recipe make"
    return "the merged checkpoint is not as lora-merge wrote it"  # the audit contradicts more, or there was none


def _numbers(numbers: Mapping[str, Any], verdict: Verdict) -> Iterator[str]:
    drift, mass = numbers["drift"], numbers["label_mass"]
    about = numbers["prompts"]
    of = "" if about["scored"] == about["total"] else f", a sample of {about['total']} (seed {about['seed']})"
    repeated = "" if drift["different_prompts"] == drift["prompts"] else f", {drift['different_prompts']} different"
    yield _line("prompts", f"{about['scored']} of {about['source']}{of}{repeated}")
    mean, upper, sure = (drift[name] for name in ("mean_abs_delta", "mean_abs_delta_upper", "mean_abs_delta_guaranteed"))
    few = drift["different_prompts"] < MIN_PROMPTS  # the one bound is the other then
    assuming = f"{upper:.4f} (95 %{', without any assumption' if few else ''})"
    yield _line("mean |delta|", f"{mean:.4f}, at most {assuming}{'' if few else f', at most {sure:.4f} without any assumption'}")
    if numbers["noise_floors"]:
        floor = max(numbers["noise_floors"], key=lambda entry: float(entry["mean_abs_delta"]))
        yield _line("noise floor", f"{floor['mean_abs_delta']:.4f} ({floor['source']})")
    tail = " / ".join(f"{drift[name]:.4f}" for name in ("p95_abs_delta", "p99_abs_delta", "max_abs_delta"))
    yield _line("p95 / p99 / max", f"{tail}; RMS {drift['rms_delta']:.4f}, bias {drift['bias']:+.4f}")
    signed = "  ".join(f"{at}: {value:+.3f}" for at, value in drift["signed_percentiles"].items())
    yield _line("signed percentiles", signed)
    ways = ", ".join(f"{way} {count}" for way, count in drift["argmax_flips_each_way"].items() if count)
    kept = ", ".join(f"{way} {count}" for way, count in drift["threshold_flips_each_way"].items() if count)
    threshold = verdict.limits.skip_threshold
    yield _line("decision flips", f"{drift['argmax_flips']} by arg-max{f' ({ways})' if ways else ''}")
    yield _line("", f"{drift['threshold_flips']} at threshold {threshold:g}{f' ({kept})' if kept else ''}")
    parts = (f"{arm} {mass[arm]['mean']:.4f} (least {mass[arm]['min']:.4f})" for arm in ("reference", "merged"))
    yield _line("label mass", ", ".join(parts))
    if numbers["control"]:
        control = numbers["control"]
        yield _line(
            "bare base", f"mean |delta| {control['mean_abs_delta']:.4f} from the reference ({control['prompts']} prompts)"
        )
    if numbers["accuracy"]:
        accuracy = dict(numbers["accuracy"])
        prompts = accuracy.pop("prompts")
        yield _line("accuracy", ", ".join(f"{arm} {share:.3f}" for arm, share in accuracy.items()) + f" ({prompts} prompts)")
    if numbers["split"]:
        split = numbers["split"]
        yield _line("merge drift", f"{split['merge_drift']['mean_abs_delta']:.4f} (both sides in float32 arithmetic)")
        yield _line("engine drift", f"{split['engine_drift']['mean_abs_delta']:.4f} (merged checkpoint: engine against float32)")
        yield _line("reference's own", f"{split['reference_arithmetic']['mean_abs_delta']:.4f} (reference against float32)")
    for entry in numbers["slices"][:3]:
        if entry["errors"] >= 3:
            found = (
                f"{entry['field']}={entry['value']!r}: mean |delta| {entry['mean_abs_delta']:.4f} on {entry['prompts']} prompts"
            )
            yield _line("drifts most", found)
    yield _line("recipe from", str(numbers["recipe_origin"]))
    engine = numbers["arms"]["merged"]
    yield _line("engine", " ".join(str(engine[part]) for part in ("kind", "dtype", "device") if part in engine))


def _line(name: str, text: str) -> str:
    return f"  {name:<20}{text}"
