"""Measurements made to order: every test states the probabilities it wants and gets exactly those."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lora_merge.engines.labels import DecisionLabels, Label
from lora_merge.engines.prompts import token_ids_digest
from lora_merge.engines.scores import DecisionScore
from lora_merge.merging.digests import root_digest
from verification.checks import Check, Outcome
from verification.measurement import Conditions, Measurement, Measurements, NoiseFloor

SKIP_ID, WRITE_ID, OTHER_ID = 11, 22, 33
LABELS = DecisionLabels(Label("skip", SKIP_ID), Label("write", WRITE_ID))
QUIET_FLOOR = NoiseFloor("reference in batches of 8 against 32", 400, 0.001, 0.01, 1)
FILES = {"model.safetensors": "ef" * 32, "config.json": "01" * 32}
ENGINE = {"kind": "transformers", "versions": {"fake": "1"}, "dtype": "bfloat16", "device": "cpu", "settings": {"batch_size": 8}}
SOURCES = {"base": "org/base", "adapter": "org/adapter", "recorded": False}
SETTLED = tuple(Check(name, Outcome.PASSED, "as it should be") for name in ("recipe-provenance", "token-ids", "weights"))
"""The checks that every run makes before it scores."""


def scores(skip: ArrayLike, mass: ArrayLike | float = 0.99, argmax: Sequence[int] | None = None) -> list[DecisionScore]:
    """Scores with these skip probabilities (n,) and label masses; the arg-max is the likelier label unless it is given."""
    skip = np.asarray(skip, dtype=np.float64)
    mass = np.broadcast_to(np.asarray(mass, dtype=np.float64), skip.shape)
    tokens = [SKIP_ID if p > 0.5 else WRITE_ID for p in skip] if argmax is None else argmax
    with np.errstate(divide="ignore"):
        log_skip, log_write = np.log(skip * mass), np.log((1 - skip) * mass)
    return [
        DecisionScore(f"p{index}", float(log_skip[index]), float(log_write[index]), token, LABELS.decision_of(token))
        for index, token in enumerate(tokens)
    ]


def conditions(**changes: Any) -> Conditions:
    """Conditions of an ordinary live run, with ``changes``."""
    usual = Conditions(
        labels=LABELS,
        prefill='{"decision": "',
        prompts={"source": "prompts.jsonl", "total": 400, "scored": 400, "seed": None, "token_ids_sha256": "cd" * 32},
        arms={
            "reference": {**ENGINE, **SOURCES},
            "merged": {**ENGINE, "kind": "vllm"},
            "base": {**ENGINE, **SOURCES, "adapter": None},
        },
        recipe={"quant_type": "nf4"},
        recipe_origin="adapter",
        merged_files=FILES,
        merged_root=root_digest(FILES),
        noise_floors=(QUIET_FLOOR,),
        findings=SETTLED,
    )
    return dataclasses.replace(usual, **changes)


def measurements(
    arms: Mapping[str, Sequence[DecisionScore]],
    fields: Sequence[Mapping[str, Any]] | None = None,
    floors: Sequence[NoiseFloor] = (QUIET_FLOOR,),
    findings: Sequence[Check] = SETTLED,
) -> Measurements:
    """Measurements of these arms; an arm may be shorter than the reference, like a control on a sample."""
    size = len(arms["reference"])
    rows = tuple(
        Measurement(
            f"p{index}",
            f"{index:064x}",
            {arm: scored[index] for arm, scored in arms.items() if index < len(scored)},
            fields[index] if fields is not None else {},
        )
        for index in range(size)
    )
    digest = token_ids_digest({row.id: row.token_ids_sha256 for row in rows})
    about = {"source": "prompts.jsonl", "total": size, "scored": size, "seed": None, "token_ids_sha256": digest}
    facts = {arm: conditions().arms.get(arm, ENGINE) for arm in arms}
    return Measurements(conditions(prompts=about, arms=facts, noise_floors=tuple(floors), findings=tuple(findings)), rows)


def ordinary(size: int = 400, drift: float = 0.008, seed: int = 0) -> Measurements:
    """A right merge: mean |drift| exactly ``drift`` and no flip; from 0.05 on a wrong one that pulls towards 0.5.

    The adapter moves the base by 0.6 on average.
    """
    rng = np.random.default_rng(seed)
    reference = np.where(rng.random(size) < 0.5, rng.uniform(0.1, 0.3, size), rng.uniform(0.7, 0.9, size))
    wrong = drift >= 0.05
    delta = rng.exponential(1.0, size).clip(0, 2 if wrong else 4)
    delta *= drift / delta.mean()
    direction = np.sign(0.5 - reference) if wrong else rng.choice([-1, 1], size)
    return measurements(
        {"reference": scores(reference), "merged": scores(reference + delta * direction), "base": scores(1 - reference)}
    )
