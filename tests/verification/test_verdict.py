"""Judging, in both directions, at the boundary of every limit and for every precondition.

Oracle of the bounds: tests/verification/test_statistics.py; here it is which side of a limit they fall on that counts.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lora_merge.engines.scores import DecisionScore
from tests.verification.builders import LABELS, OTHER_ID, QUIET_FLOOR, SKIP_ID, WRITE_ID, measurements, ordinary, scores
from verification import statistics
from verification.checks import Check, Outcome
from verification.errors import VerificationError
from verification.limits import Limits
from verification.measurement import DEQUANTIZED, Measurements, NoiseFloor
from verification.report import render
from verification.verdict import Verdict, judge

PASSED, WARNED, FAILED, INCONCLUSIVE = Outcome.PASSED, Outcome.WARNED, Outcome.FAILED, Outcome.INCONCLUSIVE


def check(verdict: Verdict, name: str) -> Check:
    found = [entry for entry in verdict.checks if entry.name == name]
    assert len(found) == 1, f"{name}: {[entry.name for entry in verdict.checks]}"
    return found[0]


def with_arm(source: Measurements, arm: str, new: list[DecisionScore]) -> Measurements:
    rows = tuple(dataclasses.replace(row, scores={**row.scores, arm: score}) for row, score in zip(source.rows, new, strict=True))
    return dataclasses.replace(source, rows=rows)


def test_a_right_merge_passes() -> None:
    verdict = judge(ordinary(), Limits(0.02))
    assert verdict.outcome is PASSED, verdict.reasons
    assert verdict.exit_code == 0
    assert verdict.reasons == ()
    assert check(verdict, "mean-delta").value == pytest.approx(0.008)


def test_the_wrong_base_fails() -> None:
    verdict = judge(ordinary(drift=0.14), Limits(0.02))
    assert (verdict.outcome, verdict.exit_code) == (FAILED, 1)
    assert "the mean itself is above the limit 0.02" in verdict.reasons[0]


def test_the_limit_is_held_against_the_bound_not_the_mean() -> None:
    source = ordinary(drift=0.008)
    bound = statistics.smaller_upper_bound(np.abs(_delta(source)))
    assert bound > 0.0081
    assert judge(source, Limits(bound)).outcome is PASSED
    just_below = judge(source, Limits(bound * (1 - 1e-9)))
    assert just_below.outcome is FAILED
    assert "the bound is above the limit" in just_below.reasons[0]
    assert "different prompts like these would settle it" in just_below.reasons[0]


def test_twenty_prompts_are_too_few_for_a_right_merge() -> None:
    verdict = judge(ordinary(20), Limits(0.02))
    assert (verdict.outcome, verdict.exit_code) == (INCONCLUSIVE, 3)
    assert "20 prompts): too few for the limit 0.02; about 300 different prompts like these would settle it" in verdict.reasons[0]


def test_twenty_prompts_are_enough_to_refuse_the_wrong_base() -> None:
    assert check(judge(ordinary(20, drift=0.2), Limits(0.02)), "mean-delta").outcome is FAILED


def test_fewer_than_300_prompts_pass_by_the_bound_without_assumptions() -> None:
    source = ordinary(299, drift=0.004)
    verdict = judge(source, Limits(0.02))
    assert verdict.outcome is PASSED, verdict.reasons
    found = check(verdict, "mean-delta")
    assert found.bound == statistics.guaranteed_upper_bound(np.abs(_delta(source)))
    assert "without assumptions" in found.detail
    assert check(judge(ordinary(300, drift=0.004), Limits(0.02)), "mean-delta").bound < found.bound


def test_repeated_prompts_are_no_more_evidence_than_one() -> None:
    twenty = ordinary(20, drift=0.004)
    rows = tuple(
        dataclasses.replace(
            row,
            id=f"{row.id}-{copy}",
            scores={arm: dataclasses.replace(s, id=f"{row.id}-{copy}") for arm, s in row.scores.items()},
        )
        for copy in range(20)
        for row in twenty.rows
    )
    verdict = judge(dataclasses.replace(twenty, rows=rows), Limits(0.02, max_p99_delta=0.5, max_bias=0.5, max_flip_rate=0.1))
    found = check(verdict, "mean-delta")
    assert "400 prompts, 20 different): too few" in found.detail
    assert found.bound == check(judge(twenty, Limits(0.02)), "mean-delta").bound
    for name in ("mean-delta", "p99-delta", "bias", "flip-rate-argmax", "flip-rate-threshold"):
        assert check(verdict, name).outcome is INCONCLUSIVE


def test_what_would_settle_it_counts_different_prompts() -> None:
    """2,000 times one prompt, and 1,000 prompts of which 700 repeat one. Oracle of the number: the bound itself, of as many like
    the different ones.
    """
    one = measurements({arm: scores(np.full(2000, value)) for arm, value in (("reference", 0.3), ("merged", 0.3), ("base", 0.7))})
    rows = tuple(dataclasses.replace(row, token_ids_sha256="ff" * 32) for row in one.rows)
    found = check(judge(dataclasses.replace(one, rows=rows), Limits(0.02)), "mean-delta")
    assert "2000 prompts, 1 different): too few" in found.detail
    assert found.detail.endswith("about 300 different prompts like these would settle it")
    source = ordinary(1000, drift=0.016, seed=2)
    rows = tuple(
        dataclasses.replace(row, token_ids_sha256="ff" * 32) if index >= 299 else row for index, row in enumerate(source.rows)
    )
    delta, limit = np.abs(_delta(source)), 0.0175
    assert statistics.smaller_upper_bound(delta) < limit < statistics.smaller_upper_bound(delta[:300])
    found = check(judge(dataclasses.replace(source, rows=rows), Limits(limit)), "mean-delta")
    said = re.search(r"about ([\d,]+) different prompts like these would settle it", found.detail)
    assert said is not None, found.detail
    moments = statistics.Moments.of(delta[:300])
    needed = int(said[1].replace(",", ""))
    assert needed > 300
    for size, holds in ((needed, True), (needed - 1, False)):
        assert (statistics._hall_bound(moments.with_largest_twice(size), 0.97) <= limit) is holds


def test_a_prompt_that_is_repeated_because_the_batch_repeats_it_weighs_as_often() -> None:
    """300 different prompts without drift, and one of them 300 times more, with much."""
    reference = np.full(600, 0.3)
    merged = reference + np.where(np.arange(600) >= 299, 0.1, 0.0)
    source = measurements({"reference": scores(reference), "merged": scores(merged), "base": scores(1 - reference)})
    rows = tuple(
        dataclasses.replace(row, token_ids_sha256="ff" * 32) if index >= 299 else row for index, row in enumerate(source.rows)
    )
    verdict = judge(dataclasses.replace(source, rows=rows), Limits(0.02))
    assert check(verdict, "mean-delta").outcome is FAILED
    assert check(verdict, "mean-delta").value == pytest.approx(0.1 * 301 / 600)


def test_the_report_shows_the_bound_that_was_judged() -> None:
    """300 different prompts, one of them 2,000 times more; and 40 prompts, for which only one bound holds."""
    source = ordinary(2300, drift=0.004)
    rows = tuple(
        dataclasses.replace(row, token_ids_sha256="ff" * 32) if index >= 299 else row for index, row in enumerate(source.rows)
    )
    for measured, line, about in (
        (dataclasses.replace(source, rows=rows), r"at most ([\d.]+) \(95 %\), at most ([\d.]+) without any assumption$", 300),
        (ordinary(40, drift=0.004), r"at most ([\d.]+) \(95 %, without any assumption\)$", 40),
    ):
        verdict = judge(measured, Limits(0.2))
        found, drift = check(verdict, "mean-delta"), verdict.numbers["drift"]
        assert drift["mean_abs_delta_upper"] == found.bound and drift["different_prompts"] == about
        delta = np.abs(_delta(measured))
        assert drift["mean_abs_delta_guaranteed"] == statistics.guaranteed_upper_bound(delta[:about])
        (shown,) = [text for text, _ in render(verdict) if text.startswith("  mean |delta| ")]
        bounds = re.search(line, shown)
        assert bounds is not None and bounds[1] == f"{found.bound:.4f}", shown
    assert any(
        text.endswith("2300 of prompts.jsonl, 300 different")
        for text, _ in render(judge(dataclasses.replace(source, rows=rows), Limits()))
    )


@pytest.mark.parametrize("size", [299, 300, 301, 400, 500])
def test_one_broken_prompt_is_no_worse_from_300_prompts_on(size: int) -> None:
    """There the bound is another one than before."""
    reference = np.where(np.arange(size) % 2, 0.999999, 0.000001)
    merged = np.where(np.arange(size) == 0, 1 - reference, reference)
    source = measurements({"reference": scores(reference), "merged": scores(merged), "base": scores(1 - reference)})
    assert check(judge(source, Limits(0.02)), "mean-delta").outcome is PASSED


def test_losing_label_mass_fails_although_the_conditional_probability_stays() -> None:
    source = ordinary()
    reference = source.arrays("reference").skip_probability
    verdict = judge(with_arm(source, "merged", scores(reference, mass=0.9)), Limits(0.02))
    assert check(verdict, "mean-delta").value == pytest.approx(0, abs=1e-12)
    assert check(verdict, "label-mass-loss").outcome is FAILED
    assert check(verdict, "label-mass-loss").value == pytest.approx(0.09)
    assert verdict.outcome is FAILED


def test_gaining_label_mass_does_not_fail() -> None:
    source = ordinary()
    reference = source.arrays("reference").skip_probability
    verdict = judge(with_arm(source, "merged", scores(reference, mass=0.999)), Limits(0.02))
    assert check(verdict, "label-mass-loss").value == pytest.approx(-0.009)
    assert verdict.outcome is PASSED


@pytest.mark.parametrize(("mass", "outcome"), [(0.9501, PASSED), (0.949, WARNED), (0.501, WARNED), (0.499, INCONCLUSIVE)])
def test_label_mass_of_the_reference(mass: float, outcome: Outcome) -> None:
    reference = ordinary().arrays("reference").skip_probability
    source = with_arm(with_arm(ordinary(), "reference", scores(reference, mass)), "merged", scores(reference, mass))
    verdict = judge(source, Limits(0.02))
    assert check(verdict, "label-mass").outcome is outcome
    assert verdict.outcome is outcome
    assert verdict.exit_code == {PASSED: 0, WARNED: 0, INCONCLUSIVE: 3}[outcome]


@pytest.mark.parametrize(
    ("spread", "outcome"), [(0.0, INCONCLUSIVE), (0.0009, INCONCLUSIVE), (0.0015, WARNED), (0.019, WARNED), (0.06, PASSED)]
)
def test_a_reference_that_says_the_same_of_every_prompt(spread: float, outcome: Outcome) -> None:
    """Half of the prompts lie ``spread`` above 0.3 and half below; the noise floor is 0.001, the limit 0.02."""
    reference = 0.3 + spread * np.where(np.arange(400) % 2, 1, -1)
    source = measurements({"reference": scores(reference), "merged": scores(reference), "base": scores(1 - reference)})
    verdict = judge(source, Limits(0.02))
    assert check(verdict, "reference-spread").outcome is outcome
    assert check(verdict, "reference-spread").value == pytest.approx(spread, abs=1e-12)
    assert verdict.outcome is outcome


def test_the_largest_noise_floor_counts_and_a_missing_one_is_said() -> None:
    kernels = NoiseFloor(DEQUANTIZED, 100, 0.015, 0.05, 3)
    source = _with_floors(ordinary(drift=0.001), (QUIET_FLOOR, kernels))
    assert check(judge(source, Limits(0.02)), "noise-floor").value == 0.015
    assert judge(source, Limits(0.015)).outcome is INCONCLUSIVE
    assert "not measured" not in check(judge(source, Limits(0.02)), "noise-floor").detail
    without = check(judge(_with_floors(source, (QUIET_FLOOR,)), Limits(0.02)), "noise-floor")
    assert without.outcome is PASSED
    assert f"not measured: {DEQUANTIZED}" in without.detail
    plain = dataclasses.replace(source.conditions, recipe=None, recipe_origin="reference", noise_floors=(QUIET_FLOOR,))
    assert "not measured" not in check(judge(dataclasses.replace(source, conditions=plain), Limits(0.02)), "noise-floor").detail


def test_a_limit_at_the_noise_floor_is_inconclusive() -> None:
    floors = (QUIET_FLOOR, NoiseFloor("merged in batches of 8 against 32", 400, 0.012, 0.05, 3))
    source = _with_floors(ordinary(drift=0.001), floors)
    assert judge(source, Limits(0.0121)).outcome is PASSED
    at_floor = judge(source, Limits(0.012))
    assert at_floor.outcome is INCONCLUSIVE
    assert "0.0120 (merged in batches of 8 against 32, 400 prompts); the limit 0.012 is not above it" in at_floor.reasons[0]


def test_without_a_noise_floor_nothing_is_concluded() -> None:
    assert check(judge(_with_floors(ordinary(), ()), Limits(0.02)), "noise-floor").outcome is INCONCLUSIVE


@pytest.mark.parametrize("floor", [QUIET_FLOOR, NoiseFloor("noise", 100, 0.001, 0.01, 0)])
def test_flips_surely_beyond_twice_the_floor_warn(floor: NoiseFloor) -> None:
    """Oracle: at twice the floor's rate, a flip is of the n prompts, not of the floor's m, with probability 2n / (2n + m)."""
    size = 1000
    share = 2 * size / (2 * size + floor.prompts)
    most = max(flips for flips in range(1, 200) if stats.binom.sf(flips - 1, flips + floor.flips, share) > 0.05)
    for flips, outcome in ((most, PASSED), (most + 1, WARNED)):
        verdict = judge(_with_floors(_with_flips(size, flips), (floor,)), Limits(0.02))
        assert check(verdict, "flips-against-floor").outcome is outcome
        assert check(verdict, "kept-against-floor").outcome is outcome, "the same prompts, the same threshold"
        assert verdict.outcome is outcome


def test_eight_percent_flips_do_not_pass_for_noise_that_flipped_none_of_100() -> None:
    verdict = judge(_with_floors(_with_flips(400, 32), (NoiseFloor("noise", 100, 0.001, 0.01, 0),)), Limits(0.02))
    assert check(verdict, "mean-delta").outcome is PASSED
    found = check(verdict, "flips-against-floor")
    assert (found.outcome, found.value) == (WARNED, None)
    assert found.detail.startswith(
        "32 of 400 decisions flip by arg-max; noise alone flips 0 of 100 (noise): surely more than 2 times"
    )


def test_texts_that_only_one_side_would_keep_warn_although_no_decision_flips() -> None:
    """Half of the prompts cross 0.4, which is the rule of generation; the floor counts what noise does there."""
    reference = np.where(np.arange(400) % 2, 0.405, 0.95)
    merged = np.where(np.arange(400) % 2, 0.395, 0.95)
    source = measurements({"reference": scores(reference), "merged": scores(merged), "base": scores(1 - reference)})
    still = NoiseFloor.between("still", scores(reference[:100]), scores(reference[:100]))
    noisy = NoiseFloor.between("noisy", scores(reference[:100]), scores(merged[:100]))
    for floor, threshold, outcome in ((still, 0.4, WARNED), (noisy, 0.4, PASSED), (still, 0.5, PASSED)):
        verdict = judge(_with_floors(source, (floor,)), Limits(0.02, skip_threshold=threshold))
        assert check(verdict, "flips-against-floor").outcome is PASSED
        assert check(verdict, "kept-against-floor").outcome is verdict.outcome is outcome
        flips = f"flips: 0 of 400 by arg-max, {0 if threshold == 0.5 else 200} at {threshold:g})"
        assert next(render(verdict))[0].endswith(flips)


def test_flips_of_a_floor_at_a_threshold() -> None:
    """At the hundredths around it, and by arg-max where a file from before does not say."""
    floor = NoiseFloor.between("noise", scores([0.405, 0.312, 0.2]), scores([0.395, 0.288, 0.2]))
    assert floor.kept_flips is not None and [at for at, flips in enumerate(floor.kept_flips, start=1) if flips] == [
        29,
        30,
        31,
        40,
    ]
    found = [floor.flips_at(at) for at in (0, 0.285, 0.29, 0.315, 0.32, 0.4, 0.403, 0.41, 1)]
    assert found == [0, 1, 1, 1, 0, 1, 1, 0, 0]
    assert dataclasses.replace(floor, kept_flips=None, flips=7).flips_at(0.4) == 7
    assert NoiseFloor.from_json(floor.to_json(), "floor") == floor
    before = {name: value for name, value in floor.to_json().items() if name != "kept_flips"}
    assert NoiseFloor.from_json(before, "floor").to_json() == before
    for broken, said in (([0] * 98, "are 98 numbers, expected 99"), ([4] + [0] * 98, "4 of 3 prompts flip")):
        with pytest.raises(VerificationError, match=said):
            NoiseFloor.from_json({**before, "kept_flips": broken}, "floor")


def test_an_argmax_outside_the_labels_is_a_flip() -> None:
    source = ordinary()
    merged = [row.scores["merged"] for row in source.rows]
    strayed = [dataclasses.replace(score, argmax=OTHER_ID, decision="other") for score in merged[:100]] + merged[100:]
    verdict = judge(with_arm(source, "merged", strayed), Limits(0.02))
    assert check(verdict, "flips-against-floor").outcome is WARNED
    each_way = verdict.numbers["drift"]["argmax_flips_each_way"]
    assert each_way["skip->other"] + each_way["write->other"] == 100
    assert verdict.numbers["drift"]["argmax_flips"] == 100


def test_an_adapter_that_does_not_move_the_base_is_inconclusive() -> None:
    source = ordinary()
    reference = source.arrays("reference").skip_probability
    verdict = judge(with_arm(source, "base", scores(reference + 0.019)), Limits(0.02))
    assert verdict.outcome is INCONCLUSIVE
    assert "moves the skip probability by 0.0190" in verdict.reasons[0]
    assert judge(with_arm(source, "base", scores(reference + 0.09)), Limits(0.02)).outcome is PASSED


def test_a_control_on_a_sample_is_enough() -> None:
    source = ordinary()
    sample = [row.scores["base"] for row in source.rows[:60]]
    arms = {arm: [row.scores[arm] for row in source.rows] for arm in ("reference", "merged")}
    verdict = judge(measurements({**arms, "base": sample}), Limits(0.02))
    assert verdict.outcome is PASSED, verdict.reasons
    assert verdict.numbers["control"]["prompts"] == 60


def test_without_a_control_it_is_a_warning() -> None:
    source = ordinary()
    arms = {arm: [row.scores[arm] for row in source.rows] for arm in ("reference", "merged")}
    verdict = judge(measurements(arms), Limits(0.02))
    assert (verdict.outcome, verdict.exit_code) == (WARNED, 0)
    assert check(verdict, "control").outcome is WARNED


@pytest.mark.parametrize(
    ("lost", "gained", "outcome"),
    [
        (0, 1, PASSED),
        (0, 0, WARNED),
        (10, 10, WARNED),
        (14, 6, WARNED),
        (15, 5, INCONCLUSIVE),
        (5, 0, INCONCLUSIVE),
        (4, 0, WARNED),
    ],
)
def test_a_reference_that_knows_no_more_than_the_bare_base(lost: int, gained: int, outcome: Outcome) -> None:
    """All other prompts both sides answer right. Oracle: 14 or more heads of 20 come in 5.8 % of all cases, 5 of 5 in 3.1 %."""
    assert stats.binom.sf(13, 20, 0.5) > 0.05 > stats.binom.sf(4, 5, 0.5)
    reference = np.where(np.arange(400) % 2, 0.9, 0.1)
    base = np.abs(reference - 0.2)  # the adapter moves it, and no decision
    base[: lost + gained] = 1 - base[: lost + gained]
    source = measurements({"reference": scores(reference), "merged": scores(reference), "base": scores(base)})
    answers = ["skip" if (index % 2 == 1) != (index < lost) else "write" for index in range(400)]
    verdict = judge(_with_expected(source, answers), Limits(0.02))
    assert check(verdict, "control").outcome is PASSED
    assert check(verdict, "accuracy").outcome is verdict.outcome is outcome


def test_a_base_that_knows_as_much_and_is_not_moved_is_inconclusive() -> None:
    reference = np.where(np.arange(400) % 2, 0.9, 0.1)
    source = measurements({arm: scores(reference) for arm in ("reference", "merged", "base")})
    verdict = judge(_with_expected(source, ["skip" if index % 2 else "write" for index in range(400)]), Limits(0.02))
    assert {check(verdict, name).outcome for name in ("control", "accuracy")} == {INCONCLUSIVE}
    assert "reference 1.000, merged 1.000, bare base 1.000" in check(verdict, "accuracy").detail


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (["yes"] * 400, "400 of 400 prompts have no `expected` that is 'skip' or 'write' (\"yes\" first)"),
        (["skip"] * 399 + [None], "1 of 400 prompts have no `expected` that is 'skip' or 'write' (null first)"),
        (["skip"] * 398 + [None, 1], "2 of 400 prompts have no `expected` that is 'skip' or 'write' (1 first)"),
    ],
)
def test_expected_answers_that_are_no_labels_are_not_silently_left_out(answers: list[Any], found: str) -> None:
    verdict = judge(_with_expected(ordinary(), answers), Limits(0.02))
    assert verdict.numbers["accuracy"] is None
    assert verdict.outcome is WARNED and check(verdict, "accuracy").detail.startswith(found)


def test_without_answers_there_is_no_check_of_them() -> None:
    for source in (ordinary(), _with_expected(ordinary(), [None] * 400)):
        verdict = judge(source, Limits(0.02))
        assert verdict.outcome is PASSED and not [entry for entry in verdict.checks if entry.name == "accuracy"]


@pytest.mark.parametrize("arm", ["reference", "merged", "base"])
@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_number_that_is_none_is_inconclusive(arm: str, broken: float) -> None:
    source = ordinary()
    arm_scores = [row.scores[arm] for row in source.rows]
    arm_scores[7] = DecisionScore("p7", broken, -1.0, WRITE_ID, "write")
    verdict = judge(with_arm(source, arm, arm_scores), Limits(0.02))
    assert verdict.outcome is INCONCLUSIVE
    assert f"arm {arm} has NaN or infinite scores for 1 of 400 prompts" in verdict.reasons[0]


def test_a_finding_from_before_scoring_counts() -> None:
    source = ordinary()
    for outcome in (WARNED, FAILED, INCONCLUSIVE):
        finding = Check("recipe-provenance", outcome, "the recipe was assumed")
        with_finding = dataclasses.replace(source, conditions=dataclasses.replace(source.conditions, findings=(finding,)))
        assert judge(with_finding, Limits(0.02)).outcome is outcome


def test_inconclusive_outweighs_failed() -> None:
    source = _with_floors(ordinary(drift=0.14), (NoiseFloor("noise", 400, 0.03, 0.1, 0),))
    verdict = judge(source, Limits(0.02))
    assert {FAILED, INCONCLUSIVE} <= {entry.outcome for entry in verdict.checks}
    assert verdict.outcome is INCONCLUSIVE


def test_p99_limit() -> None:
    source = ordinary()
    bound = statistics.quantile_upper_bound(np.abs(_delta(source)), 0.99)
    assert bound is not None
    assert judge(source, Limits(0.02, max_p99_delta=bound)).outcome is PASSED
    assert judge(source, Limits(0.02, max_p99_delta=bound * (1 - 1e-9))).outcome is FAILED
    assert check(judge(ordinary(298), Limits(0.02, max_p99_delta=0.9)), "p99-delta").outcome is INCONCLUSIVE


def test_absolute_limit() -> None:
    source = ordinary()
    largest = float(np.abs(_delta(source)).max())
    assert judge(source, Limits(0.02, max_abs_delta=largest)).outcome is PASSED
    assert judge(source, Limits(0.02, max_abs_delta=largest * (1 - 1e-9))).outcome is FAILED


@pytest.mark.parametrize("direction", [-1, 1])
def test_bias_limit(direction: int) -> None:
    source = ordinary()
    reference = source.arrays("reference").skip_probability
    spread = np.random.default_rng(0).normal(0.006, 0.003, 400) * direction
    shifted = with_arm(source, "merged", scores(reference + spread))
    assert judge(shifted, Limits(0.02)).outcome is PASSED
    assert check(judge(shifted, Limits(0.02, max_bias=0.007)), "bias").outcome is PASSED
    failed = check(judge(shifted, Limits(0.02, max_bias=0.006)), "bias")
    assert failed.outcome is FAILED
    assert np.sign(failed.value) == direction
    assert check(judge(ordinary(299), Limits(0.02, max_bias=0.5)), "bias").outcome is INCONCLUSIVE


def test_flip_rate_limit() -> None:
    source = _with_flips(1000, 3)
    bound = statistics.rate_bounds(3, 1000)[1]
    assert judge(source, Limits(0.02, max_flip_rate=bound)).outcome is PASSED
    verdict = judge(source, Limits(0.02, max_flip_rate=bound * (1 - 1e-9)))
    assert check(verdict, "flip-rate-argmax").outcome is FAILED
    assert check(verdict, "flip-rate-threshold").outcome is FAILED
    few = judge(ordinary(200), Limits(0.05, max_flip_rate=0.01))
    assert check(few, "flip-rate-argmax").outcome is INCONCLUSIVE  # 0 of 200 bounds the rate by 1.5 % only
    assert "at least 299 are needed" in check(few, "flip-rate-argmax").detail
    for rate in (1e-7, 1e-320):
        none = check(judge(ordinary(), Limits(0.02, max_flip_rate=rate)), "flip-rate-argmax")
        assert none.outcome is INCONCLUSIVE
        assert none.detail.endswith("not even 0 flips would pass; more than 10,000,000 are needed")


def test_flips_at_the_threshold_follow_the_threshold() -> None:
    reference = np.full(400, 0.30)
    source = measurements({"reference": scores(reference), "merged": scores(reference + 0.01), "base": scores(1 - reference)})
    assert judge(source, Limits(0.02, skip_threshold=0.5)).numbers["drift"]["threshold_flips"] == 0
    drift = judge(source, Limits(0.02, skip_threshold=0.305)).numbers["drift"]
    assert drift["threshold_flips_each_way"] == {"kept->dropped": 400, "dropped->kept": 0}
    assert drift["argmax_flips"] == 0


def test_numbers_against_arithmetic_written_out() -> None:
    source = measurements(
        {
            "reference": scores([0.25, 0.65, 0.95], mass=[0.9, 0.8, 1.0]),
            "merged": scores([0.35, 0.45, 0.95], mass=[0.9, 0.9, 0.7]),
        }
    )
    numbers = judge(source, Limits(0.02)).numbers
    drift = numbers["drift"]
    assert drift["mean_abs_delta"] == pytest.approx((0.1 + 0.2 + 0.0) / 3)
    assert drift["bias"] == pytest.approx((0.1 - 0.2 + 0.0) / 3)
    assert drift["rms_delta"] == pytest.approx(((0.01 + 0.04) / 3) ** 0.5)
    assert drift["max_abs_delta"] == pytest.approx(0.2)
    assert drift["signed_percentiles"]["50"] == pytest.approx(0.0, abs=1e-12)
    assert drift["argmax_flips_each_way"]["skip->write"] == 1
    assert drift["threshold_flips_each_way"] == {"kept->dropped": 0, "dropped->kept": 1}
    assert drift["mean_mass_loss"] == pytest.approx((0 - 0.1 + 0.3) / 3)
    assert numbers["label_mass"]["merged"]["min"] == pytest.approx(0.7)
    assert [(bucket["from"], bucket["prompts"]) for bucket in numbers["buckets"]] == [(0.2, 1), (0.6, 1), (0.9, 1)]


def test_the_slice_that_drives_the_drift_is_found() -> None:
    rng = np.random.default_rng(4)
    group = rng.integers(0, 4, 400)
    reference = rng.uniform(0.2, 0.4, 400)
    merged = reference + np.where(group == 2, 0.05, 0.002)
    fields = [{"shop": f"shop {kind}", "row": index} for index, kind in enumerate(group)]
    arms = {"reference": scores(reference), "merged": scores(merged)}
    slices = judge(measurements(arms, fields), Limits(0.02)).numbers["slices"]
    assert (slices[0]["field"], slices[0]["value"]) == ("shop", "shop 2")
    assert slices[0]["mean_abs_delta"] == pytest.approx(0.05)
    assert slices[0]["prompts"] == int((group == 2).sum())
    assert len(slices) == 1  # the other shops drift less than average, and "row" is different everywhere


def test_split_separates_merge_and_engine_drift() -> None:
    base = np.full(300, 0.4)
    arms: dict[str, Any] = {
        "reference": scores(base + 0.003),
        "merged": scores(base + 0.012),
        "reference_float32": scores(base),
        "merged_float32": scores(base + 0.002),
    }
    split = judge(measurements(arms), Limits(0.02)).numbers["split"]
    assert split["merge_drift"]["mean_abs_delta"] == pytest.approx(0.002)
    assert split["engine_drift"]["mean_abs_delta"] == pytest.approx(0.010)
    assert split["reference_arithmetic"]["mean_abs_delta"] == pytest.approx(0.003)


def test_judging_twice_gives_the_same_verdict() -> None:
    assert judge(ordinary(), Limits(0.02)).to_json() == judge(ordinary(), Limits(0.02)).to_json()


def test_an_unknown_limit_is_an_error() -> None:
    with pytest.raises(VerificationError, match="'max_p95_delta' is no limit"):
        Limits.from_mapping({"max_delta": 0.02, "max_p95_delta": 0.1})


@pytest.mark.parametrize(
    "values", [{"max_delta": 0.0}, {"max_delta": 1.0}, {"max_delta": None}, {"max_bias": -0.1}, {"skip_threshold": 1.5}]
)
def test_limits_outside_their_range_are_errors(values: dict[str, Any]) -> None:
    with pytest.raises(VerificationError, match="expected a number"):
        Limits.from_mapping(values)


def _delta(source: Measurements) -> np.ndarray:
    first, second = source.paired("reference", "merged")
    return second.skip_probability - first.skip_probability


def _with_floors(source: Measurements, floors: tuple[NoiseFloor, ...]) -> Measurements:
    return dataclasses.replace(source, conditions=dataclasses.replace(source.conditions, noise_floors=floors))


def _with_flips(size: int, flips: int) -> Measurements:
    """``flips`` prompts at 0.499 turn to 0.501; all others stay exactly, at 0.25 or at 0.75."""
    others = np.where(np.arange(size) % 2, 0.25, 0.75)
    reference = np.where(np.arange(size) < flips, 0.499, others)
    merged = np.where(np.arange(size) < flips, 0.501, others)
    return measurements({"reference": scores(reference), "merged": scores(merged), "base": scores(1 - reference)})


def test_the_headline_names_what_failed_and_no_limit_that_was_kept() -> None:
    """A weight that is not as planned, and a limit other than the usual one: 0.02 has nothing to do with either."""
    kept = "(limit 0.02 of the mean |delta| of the skip probability; flips: 0 of 400 by arg-max, 0 at 0.5)"
    about_files = dataclasses.replace(ordinary().conditions, findings=(Check("weights", FAILED, "3 of 12 tensors differ"),))
    for verdict, headline in (
        (judge(ordinary(), Limits(0.02)), f"PASSED: the merged checkpoint decides as its QLoRA reference did {kept}"),
        (
            judge(dataclasses.replace(ordinary(), conditions=about_files), Limits(0.02)),
            "FAILED: the merged checkpoint is not what its base, adapter and recipe make (weights)",
        ),
        (
            judge(ordinary(), Limits(0.02, max_abs_delta=1e-6)),
            "FAILED: the merged checkpoint decides differently from its QLoRA reference (abs-delta)",
        ),
    ):
        assert next(render(verdict)) == (headline, verdict.outcome)


def _with_expected(source: Measurements, expected: list[Any]) -> Measurements:
    rows = tuple(dataclasses.replace(row, fields={"expected": answer}) for row, answer in zip(source.rows, expected, strict=True))
    return dataclasses.replace(source, rows=rows)


def test_the_builders_decisions_are_the_labels() -> None:
    assert [LABELS.decision_of(token) for token in (SKIP_ID, WRITE_ID, OTHER_ID)] == ["skip", "write", "other"]
