"""``drift.jsonl``: the measurements as a file, so that a verdict can be judged again without a model (docs/drift-format.md).

The first line is the header: format, version and the conditions. Then one line a prompt. Reading is strict: an unknown key, a
missing one, a value of another type or range, or parts that contradict each other are an error, because a gate that skips what it
does not understand is none. What may stand where is said in :mod:`verification.drift_format`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.scores import DecisionScore
from verification.drift_format import FORMAT, HEADER, ROOT, ROW, VERSION, contradiction
from verification.drift_format import ORIGINS as ORIGINS
from verification.errors import VerificationError
from verification.measurement import Conditions, Measurement, Measurements
from verification.strict_json import canonical, strict_loads
from verification.whole_file import write_whole


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
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text:
        raise VerificationError(f"{path}: is empty; expected a {FORMAT} header")
    lines = text.removesuffix("\n").split("\n")
    conditions = _read_header(strict_loads(lines[0], f"{path} line 1"), f"{path} line 1")
    rows = tuple(
        _read_row(strict_loads(line, f"{path} line {number}"), conditions.labels, f"{path} line {number}")
        for number, line in enumerate(lines[1:], start=2)
    )
    measurements = Measurements(conditions, rows)
    if said := contradiction(measurements):
        raise VerificationError(f"{path}: {said}")
    return measurements


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
        "merged": {"files": dict(conditions.merged_files), ROOT: conditions.merged_root},
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
    version = (value.get("format"), value.get("version")) if isinstance(value, Mapping) else (FORMAT, VERSION)
    if version != (FORMAT, VERSION) or type(version[1]) is not int:
        raise VerificationError(f"{where}: format {version[0]!r} version {version[1]!r}; expected {FORMAT!r} version {VERSION}")
    header = HEADER(value, where)
    same = ("labels", "prefill", "prompts", "arms", "recipe", "recipe_origin", "noise_floors", "findings")
    return Conditions(
        **{name: header[name] for name in same},
        merged_files=header["merged"]["files"],
        merged_root=header["merged"][ROOT],
    )


def _read_row(value: Any, labels: DecisionLabels, where: str) -> Measurement:
    row = ROW(value, where)
    scores = {
        arm: DecisionScore.from_log_probabilities(row["id"], **score, labels=labels) for arm, score in row["scores"].items()
    }
    return Measurement(**{**row, "scores": scores})
