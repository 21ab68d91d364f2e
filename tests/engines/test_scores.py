"""Numbers of one decision. Oracle: the definitions in exact decimal arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import pytest

from lora_merge.engines.errors import EngineError, NonFiniteScore
from lora_merge.engines.labels import DecisionLabels, Label
from lora_merge.engines.scores import DecisionScore

LABELS = DecisionLabels(Label("skip", 5), Label("write", 6))


def make(skip: float, write: float, argmax: int = 5) -> DecisionScore:
    return DecisionScore.from_log_probabilities("a", skip, write, argmax, LABELS)


@pytest.mark.parametrize(
    ("skip", "write"), [(-0.5, -1.0), (-1.0, -0.5), (-700.0, -701.5), (-1e-9, -40.0), (-40.0, -1e-9), (-2, -2)]
)
def test_probability_and_mass_are_their_definitions(skip, write):
    getcontext().prec = 60
    p_skip, p_write = Decimal(skip).exp(), Decimal(write).exp()
    score = make(skip, write)
    assert score.skip_probability == pytest.approx(float(p_skip / (p_skip + p_write)), rel=1e-14)
    assert score.label_mass == pytest.approx(float(p_skip + p_write), rel=1e-14)


def test_a_huge_difference_neither_overflows_nor_leaves_the_unit_interval():
    assert make(-0.0, -5000.0).skip_probability == 1.0
    assert make(-5000.0, -0.0).skip_probability == 0.0


@pytest.mark.parametrize(("argmax", "decision"), [(5, "skip"), (6, "write"), (0, "other")])
def test_the_decision_is_the_arg_max_over_the_whole_vocabulary(argmax, decision):
    assert make(-3.0, -4.0, argmax).decision == decision


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_number_that_is_none_is_refused_by_name(value, place):
    pair = [-1.0, -1.0]
    pair[place] = value
    with pytest.raises(NonFiniteScore, match="prompt 'a'"):
        make(*pair)
    assert issubclass(NonFiniteScore, EngineError)
