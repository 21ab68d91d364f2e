"""What ``drift.jsonl`` may hold (docs/drift-format.md): the readers of its parts, and what the parts must say of each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.prompts import token_ids_digest
from lora_merge.merging.digests import root_digest
from lora_merge.merging.quantization import QuantRecipe
from verification.checks import Check
from verification.errors import VerificationError
from verification.json_readers import (
    anything,
    day,
    digest,
    filled_text,
    flag,
    listed,
    mapping,
    number,
    one_of,
    or_null,
    record,
    refuse,
    text,
    via,
    whole,
)
from verification.measurement import LONGEST_FIELD, Measurements, NoiseFloor, is_slice_value

FORMAT = "lora-merge/drift"
VERSION = 2
ORIGINS = ("reference", "adapter", "base", "flags", "manifest", "assumed")
"""Who can vouch for a recipe."""
SETTLED_BEFORE = ("recipe-provenance", "token-ids", "weights")
"""The checks that every run makes before it scores, whatever it is given."""
ROOT = "root_with_manifest"
"""The merge manifest has a root digest too, of all files but itself."""

_LARGEST_TOKEN_ID = 2**32 - 1
_ROUNDING = 1e-6
"""Of a log-probability; engines take it in float32 at worst."""
_MASS_ROUNDING = 1e-5


def _slice_value(value: Any, where: str) -> Any:
    expected = f"true, false, a whole number, null or a text of at most {LONGEST_FIELD} characters"
    return value if is_slice_value(value) else refuse(where, value, expected)


def _labels(value: Any, where: str) -> DecisionLabels:
    labels = via(DecisionLabels.from_json)(record({"skip": _LABEL, "write": _LABEL})(value, where), where)
    if labels.skip.text == labels.write.text:
        raise VerificationError(f"{where}: skip and write are both {labels.skip.text!r}")
    return labels


def _recipe(value: Any, where: str) -> dict[str, Any]:
    """As it stands; :class:`QuantRecipe` is asked whether it is one."""
    via(QuantRecipe.from_json)(value, where)
    return dict(value)


def _files(value: Any, where: str) -> dict[str, str]:
    files = mapping(digest, filled=True)(value, where)
    for name in ("", "."):  # the certificate calls the folder "."
        if name in files:
            raise VerificationError(f"{where}: {name!r} is no file's name")
    return files


def _score(value: Any, where: str) -> dict[str, Any]:
    score = _SCORE(value, where)
    mass = math.exp(score["log_p_skip"]) + math.exp(score["log_p_write"])
    if mass > 1 + _MASS_ROUNDING:
        raise VerificationError(f"{where}: both labels together have the probability {mass:.6g}, expected at most 1")
    return score


_TOKEN_ID = whole(0, _LARGEST_TOKEN_ID)
_LABEL = record({"text": filled_text, "token_id": _TOKEN_ID})
_LOG_P = number(None, 0, rounding=_ROUNDING)
_SCORE = record({"log_p_skip": _LOG_P, "log_p_write": _LOG_P, "argmax": _TOKEN_ID})
_ARM = record(
    {"kind": text, "versions": mapping(text), "dtype": or_null(text), "device": text, "settings": mapping(anything)},
    {"base": or_null(text), "adapter": or_null(text), "recorded": flag, "sha256": digest},
)
_SAMPLED_ARMS = ("base", "reference_float32", "merged_float32")

HEADER = record(
    {
        "format": one_of(FORMAT),
        "version": whole(VERSION, VERSION),
        "labels": _labels,
        "prefill": text,
        "prompts": record(
            {"source": text, "total": whole(1), "scored": whole(1), "seed": or_null(whole(0)), "token_ids_sha256": digest},
            {"date": day},
        ),
        "arms": record({"reference": _ARM, "merged": _ARM}, dict.fromkeys(_SAMPLED_ARMS, _ARM)),
        "recipe": or_null(_recipe),
        "recipe_origin": one_of(*ORIGINS),
        "merged": record({"files": _files, ROOT: digest}),
        "noise_floors": listed(NoiseFloor.from_json),
        "findings": listed(via(Check.from_json)),
    }
)
"""The first line."""

ROW = record(
    {
        "id": filled_text,
        "token_ids_sha256": digest,
        "fields": mapping(_slice_value),
        "scores": record({"reference": _score, "merged": _score}, dict.fromkeys(_SAMPLED_ARMS, _score)),
    }
)
"""Every other line."""


def contradiction(measurements: Measurements) -> str | None:
    """The first thing that parts of a file, each of them well-formed, say against each other; None where they agree."""
    return next((said for said in (rule(measurements) for rule in _RULES) if said is not None), None)


def _count(measurements: Measurements) -> str | None:
    rows, scored = measurements.rows, measurements.conditions.prompts["scored"]
    ids = {row.id for row in rows}
    if len(ids) == len(rows) == scored:
        return None
    return f"holds {len(rows)} prompts with {len(ids)} different ids; its header says {scored}"


def _sample(measurements: Measurements) -> str | None:
    scored, total, seed = (measurements.conditions.prompts[name] for name in ("scored", "total", "seed"))
    if scored > total:
        return f"prompts: scored is {scored} of a total of {total}"
    if seed is None and scored < total:
        return f"prompts: seed is null, but {scored} of {total} prompts were scored; expected the seed of the sample"
    if seed is not None and scored == total:
        return f"prompts: seed is {seed}, but all {total} prompts were scored; expected null"
    return None


def _token_ids(measurements: Measurements) -> str | None:
    found = token_ids_digest({row.id: row.token_ids_sha256 for row in measurements.rows})
    if found == measurements.conditions.prompts["token_ids_sha256"]:
        return None
    return "the token ids of its prompts do not add up to the digest in its header; it was changed"


def _arms(measurements: Measurements) -> str | None:
    described, scored = set(measurements.conditions.arms), {arm for row in measurements.rows for arm in row.scores}
    for arm in sorted(scored - described):
        return f"arm {arm} is scored but not in its header"
    for arm in sorted(described - scored):
        return f"arm {arm} is in its header but nowhere scored"
    return None


def _float32_arms(measurements: Measurements) -> str | None:
    pair = ("reference_float32", "merged_float32")
    alone = next((row.id for row in measurements.rows if len(set(pair) & set(row.scores)) == 1), None)
    return None if alone is None else f"arms {pair[0]} and {pair[1]} are not of the same prompts, {alone!r} first"


def _root(measurements: Measurements) -> str | None:
    conditions = measurements.conditions
    return None if root_digest(conditions.merged_files) == conditions.merged_root else f"merged: {ROOT} is not that of its files"


def _settled(measurements: Measurements) -> str | None:
    made = {finding.name for finding in measurements.conditions.findings}
    absent = next((name for name in SETTLED_BEFORE if name not in made), None)
    return None if absent is None else f"findings lack {absent!r}, which every run checks before it scores"


_RULES: tuple[Callable[[Measurements], str | None], ...] = (_count, _sample, _token_ids, _arms, _float32_arms, _root, _settled)
