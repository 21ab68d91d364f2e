"""``drift.jsonl``: the measurements as a file, so that a verdict can be judged again without a model (docs/drift-format.md).

The first line is the header: format, version and the conditions. Then one line a prompt. Reading is strict: an unknown key, a
missing one, a number that is none, or a prompt too few is an error, because a gate that skips what it does not understand is
none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.scores import DecisionScore
from verification.checks import Check, is_number
from verification.errors import VerificationError
from verification.measurement import ARMS, Conditions, Measurement, Measurements, NoiseFloor
from verification.strict_json import canonical, expect_keys, strict_loads
from verification.whole_file import write_whole

FORMAT = "lora-merge/drift"
VERSION = 2
ORIGINS = ("reference", "adapter", "base", "flags", "manifest", "assumed")

_HEADER = {
    "format",
    "version",
    "labels",
    "prefill",
    "prompts",
    "arms",
    "recipe",
    "recipe_origin",
    "merged",
    "noise_floors",
    "findings",
}
_PROMPTS = {"source", "total", "scored", "seed", "token_ids_sha256"}
_FLOOR = {"source", "prompts", "mean_abs_delta", "max_abs_delta", "flips"}
_ROOT = "root_with_manifest"
"""The merge manifest has a root digest too, of all files but itself."""
_SCORE = {"log_p_skip", "log_p_write", "argmax"}


def write_measurements(measurements: Measurements, path: str | os.PathLike[str]) -> str:
    """Write ``measurements`` to ``path``, which appears complete or not at all. The same measurements give the same bytes.

    Returns their hexadecimal SHA-256: of what was written, whatever another run may put there a moment later.
    """
    lines = [canonical(_header(measurements.conditions))]
    lines += [canonical(_row(row)) for row in measurements.rows]
    content = ("\n".join(lines) + "\n").encode("ascii")
    write_whole(path, content)
    return hashlib.sha256(content).hexdigest()


def read_measurements(path: str | os.PathLike[str]) -> Measurements:
    """Read what :func:`write_measurements` wrote.

    Raises:
        VerificationError: the file cannot be read, or a line is not as the format says; the message names file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise VerificationError(f"{path}: is empty; expected a {FORMAT} header")
    try:
        conditions = _read_header(strict_loads(lines[0], f"{path} line 1"), f"{path} line 1")
        rows = tuple(
            _read_row(strict_loads(line, f"{path} line {number}"), conditions.labels, f"{path} line {number}")
            for number, line in enumerate(lines[1:], start=2)
        )
    except EngineError as error:
        raise VerificationError(f"{path}: {error}") from error
    ids = {row.id for row in rows}
    if len(ids) != len(rows) or len(rows) != conditions.prompts["scored"] or not rows:
        raise VerificationError(
            f"{path}: holds {len(rows)} prompts with {len(ids)} different ids; its header says {conditions.prompts['scored']}"
        )
    return Measurements(conditions, rows)


def _header(conditions: Conditions) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "labels": conditions.labels.to_json(),
        "prefill": conditions.prefill,
        "prompts": dict(conditions.prompts),
        "arms": {arm: dict(facts) for arm, facts in conditions.arms.items()},
        "recipe": conditions.recipe,
        "recipe_origin": conditions.recipe_origin,
        "merged": {"files": dict(conditions.merged_files), _ROOT: conditions.merged_root},
        "noise_floors": [floor.to_json() for floor in conditions.noise_floors],
        "findings": [finding.to_json() for finding in conditions.findings],
    }


def _row(row: Measurement) -> dict[str, Any]:
    scores = {
        arm: {"log_p_skip": score.log_p_skip, "log_p_write": score.log_p_write, "argmax": score.argmax}
        for arm, score in row.scores.items()
    }
    return {"id": row.id, "token_ids_sha256": row.token_ids_sha256, "fields": dict(row.fields), "scores": scores}


def _read_header(value: Any, where: str) -> Conditions:
    if isinstance(value, Mapping) and (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        raise VerificationError(
            f"{where}: format {value.get('format')!r} version {value.get('version')!r}; expected {FORMAT!r} version {VERSION}"
        )
    header = expect_keys(value, _HEADER, where)
    prompts = expect_keys(header["prompts"], _PROMPTS, f"{where}: prompts")
    merged = expect_keys(header["merged"], {"files", _ROOT}, f"{where}: merged")
    floors = header["noise_floors"]
    well_typed = (
        isinstance(header["prefill"], str)
        and isinstance(header["arms"], Mapping)
        and all(isinstance(facts, Mapping) for facts in header["arms"].values())
        and (header["recipe"] is None or isinstance(header["recipe"], Mapping))
        and header["recipe_origin"] in ORIGINS
        and isinstance(merged["files"], Mapping)
        and isinstance(floors, list)
        and isinstance(header["findings"], list)
        and all(type(prompts[name]) is int for name in ("total", "scored"))
    )
    if not well_typed:
        raise VerificationError(f"{where}: a part of the header has another type than docs/drift-format.md says")
    return Conditions(
        labels=DecisionLabels.from_json(header["labels"]),
        prefill=header["prefill"],
        prompts=prompts,
        arms=header["arms"],
        recipe=header["recipe"],
        recipe_origin=header["recipe_origin"],
        merged_files=merged["files"],
        merged_root=merged[_ROOT],
        noise_floors=tuple(_read_floor(floor, f"{where}: noise floor") for floor in floors),
        findings=tuple(Check.from_json(finding) for finding in header["findings"]),
    )


def _read_floor(value: Any, where: str) -> NoiseFloor:
    floor = expect_keys(value, _FLOOR, where)
    counts = all(type(floor[name]) is int and floor[name] >= 0 for name in ("prompts", "flips")) and floor["prompts"] >= 1
    numbers = all(is_number(floor[name]) and 0 <= floor[name] <= 1 for name in ("mean_abs_delta", "max_abs_delta"))
    if not (counts and numbers and isinstance(floor["source"], str)):
        raise VerificationError(f"{where} {floor!r}: expected a source, counts from 0 and deltas in [0, 1]")
    return NoiseFloor(**floor)


def _read_row(value: Any, labels: DecisionLabels, where: str) -> Measurement:
    row = expect_keys(value, {"id", "token_ids_sha256", "fields", "scores"}, where)
    scores = expect_keys(row["scores"], {"reference", "merged"}, f"{where}: scores", frozenset(ARMS))
    if not isinstance(row["id"], str) or not isinstance(row["token_ids_sha256"], str) or not isinstance(row["fields"], Mapping):
        raise VerificationError(f"{where}: id and token_ids_sha256 must be strings, fields an object")
    return Measurement(
        id=row["id"],
        token_ids_sha256=row["token_ids_sha256"],
        scores={arm: _read_score(row["id"], score, labels, f"{where}: {arm}") for arm, score in scores.items()},
        fields=row["fields"],
    )


def _read_score(id: str, value: Any, labels: DecisionLabels, where: str) -> DecisionScore:
    score = expect_keys(value, _SCORE, where)
    skip, write, argmax = score["log_p_skip"], score["log_p_write"], score["argmax"]
    if not (is_number(skip) and is_number(write) and skip <= 1e-6 and write <= 1e-6 and type(argmax) is int):
        raise VerificationError(
            f"{where}: log-probabilities {skip!r} and {write!r}, argmax {argmax!r}; expected numbers up to 0 and a token id"
        )
    return DecisionScore.from_log_probabilities(id, skip, write, argmax, labels)
