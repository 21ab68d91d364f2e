"""Which prompts are measured when not all of them need be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_merge.engines.prompts import Prompt

SAMPLE = 100
"""Prompts of the control and of each noise floor: enough to tell, few enough for a CPU."""


def sample_of(prompts: Sequence[Prompt], size: int = SAMPLE, seed: int = 0) -> list[Prompt]:
    """A seeded sample of ``size`` prompts without repetition, in their order; all of them when there are no more."""
    if size >= len(prompts):
        return list(prompts)
    places = np.sort(np.random.default_rng(seed).choice(len(prompts), size, replace=False))
    return [prompts[int(place)] for place in places]
