"""The reference file (docs/reference-format.md): written in one way, and read strictly."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.prompts import token_ids_digest
from lora_merge.engines.scores import DecisionScore
from lora_merge.merging.digests import is_digest, root_digest
from lora_merge.merging.errors import MergeError
from lora_merge.merging.quantization import QuantRecipe
from verification.checks import is_number
from verification.drift_file import ORIGINS
from verification.errors import VerificationError
from verification.json_readers import day, or_null
from verification.measurement import NoiseFloor
from verification.strict_json import canonical, expect_keys, strict_loads
from verification.whole_file import write_whole

FORMAT = "lora-merge/reference"
VERSION = 3

_HEADER = {
    "format",
    "version",
    "model",
    "adapter",
    "recipe",
    "recipe_origin",
    "dtypes",
    "environment",
    "labels",
    "prefill",
    "prompts",
    "noise_floors",
}
_HEADER_2 = _HEADER - {"recipe_origin"}
"""Of version 2, which was taken for recorded at training, whoever recorded it."""
_HEADERS = {1: _HEADER_2 - {"noise_floors"} | {"noise_floor"}, 2: _HEADER_2, VERSION: _HEADER}
"""By version; version 1 knew one noise floor, ``batch_shape``."""
_ROW = {"id", "token_ids_sha256", "log_p_skip", "log_p_write", "argmax", "skip_probability", "label_mass"}
FLOORS = ("batch_shape", "dequantized")
_FLOOR = or_null(NoiseFloor.from_json)
_ROUNDING = 1e-9
_LONGEST_HEADER = 1 << 24
"""Bytes; it lists the quantized modules."""


@dataclass(frozen=True, repr=False)
class Reference:
    """A recorded reference, as the file says it.

    Attributes:
        model: ``{"name", "revision", "type"}`` of the base: hub id or folder as it was loaded, commit or null, model type.
        adapter: ``{"files": {name: SHA-256}, "root", "identity"}`` of the adapter that was live, or null where none was named;
            files recorded earlier lack ``identity``.
        recipe: how the base was quantized, read from the live layers; null for a model without 4-bit layers.
        recipe_origin: who says that training had it so: ``reference`` where the trained model itself was recorded; else, as in
            :class:`~verification.measurement.Conditions`, who said so when the model was loaded to be recorded.
        dtypes: ``{"embedding", "adapter", "compute"}``, each a dtype name or null.
        environment: library versions, device, attention, batch size.
        labels: the decision labels and their token ids.
        prefill: text between prompt and decision.
        scores: one a prompt, in the order of recording.
        token_ids_sha256: prompt id -> digest of the token ids that were scored.
        noise_floors: by name (:data:`FLOORS`), each null when that was not measured. ``batch_shape``: how far the same model
            moved in another batch shape. ``dequantized``: how far it lies from its dequantized base with the unmerged adapter.
        sha256: of the file's bytes; None for one that was not read from a file.
        date: the day, as ``2026-11-30``, that the chat template wrote into the prompts; None where it writes none.
    """

    model: Mapping[str, Any]
    adapter: Mapping[str, Any] | None
    recipe: QuantRecipe | None
    recipe_origin: str
    dtypes: Mapping[str, Any]
    environment: Mapping[str, Any]
    labels: DecisionLabels
    prefill: str
    scores: tuple[DecisionScore, ...]
    token_ids_sha256: Mapping[str, str]
    noise_floors: Mapping[str, NoiseFloor | None]
    sha256: str | None = None
    date: str | None = None

    def __repr__(self) -> str:
        """One line; every prompt in it would fill the screen of a notebook."""
        recipe = "no 4-bit layers" if self.recipe is None else self.recipe.describe()
        adapter = "no adapter named" if self.adapter is None else f"adapter {self.adapter['root'][:12]}"
        return (
            f"Reference({len(self.scores)} prompts; base {self.model['name'] or 'without a name'}, {recipe}; {adapter}; "
            f"recorded on {self.environment['device']})"
        )

    @property
    def measured_floors(self) -> tuple[NoiseFloor, ...]:
        """The noise floors that were measured."""
        return tuple(floor for floor in self.noise_floors.values() if floor is not None)

    @property
    def token_ids_digest(self) -> str:
        """One digest of all token ids, whatever the order of the prompts."""
        return token_ids_digest(self.token_ids_sha256)

    def header(self) -> dict[str, Any]:
        """The first line of the file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": dict(self.model),
            "adapter": None if self.adapter is None else dict(self.adapter),
            "recipe": None if self.recipe is None else self.recipe.to_json(),
            "recipe_origin": self.recipe_origin,
            "dtypes": dict(self.dtypes),
            "environment": dict(self.environment),
            "labels": self.labels.to_json(),
            "prefill": self.prefill,
            "prompts": {"count": len(self.scores), "token_ids_sha256": self.token_ids_digest},
            "noise_floors": {
                name: None if (floor := self.noise_floors.get(name)) is None else floor.to_json() for name in FLOORS
            },
            **({} if self.date is None else {"date": self.date}),
        }


def read_reference(path: str | os.PathLike[str]) -> Reference:
    """Read what :func:`write_reference` wrote, or an earlier version of it.

    Raises:
        VerificationError: the file cannot be read, is cut short, or a line is not as the format says; the message names the line.
    """
    try:
        data = Path(path).read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.endswith("\n"):
        raise VerificationError(f"{path}: its last line is cut short or it is empty; record the reference again")
    lines = text[:-1].split("\n")
    try:
        header = _read_header(strict_loads(lines[0], f"{path} line 1"), f"{path} line 1")
        labels = DecisionLabels.from_json(header["labels"])
        recipe = None if header["recipe"] is None else QuantRecipe.from_json(header["recipe"])
        rows = [
            _read_row(strict_loads(line, f"{path} line {number}"), labels, f"{path} line {number}")
            for number, line in enumerate(lines[1:], start=2)
        ]
    except (EngineError, MergeError) as error:
        raise VerificationError(f"{path}: {error}") from error
    digests = {score.id: digest for score, digest in rows}
    count = header["prompts"]["count"]
    if len(rows) != count or len(digests) != count:
        raise VerificationError(f"{path}: holds {len(rows)} prompts with {len(digests)} different ids; its header says {count}")
    reference = Reference(
        model=header["model"],
        adapter=header["adapter"],
        recipe=recipe,
        recipe_origin=header.get("recipe_origin", "reference"),
        dtypes=header["dtypes"],
        environment=header["environment"],
        labels=labels,
        prefill=header["prefill"],
        scores=tuple(score for score, _ in rows),
        token_ids_sha256=digests,
        noise_floors=_read_floors(header, f"{path} line 1"),
        sha256=hashlib.sha256(data).hexdigest(),
        date=header.get("date"),
    )
    if reference.token_ids_digest != header["prompts"]["token_ids_sha256"]:
        raise VerificationError(f"{path}: the token ids of its prompts do not add up to the digest in its header; it was changed")
    return reference


def no_target(target: str | os.PathLike[str], prompts: object = None) -> str | None:
    """Why no reference may be written to ``target``, in one sentence; None where one may.

    A reference may be recorded again. Anything else that lies there is somebody's work, the ``prompts`` (a path, or whatever
    else they come as) above all.
    """
    path = Path(target)
    if path.is_dir():
        return f"{path}: is a folder; expected the name of a file to record the reference in"
    if not path.parent.is_dir():
        return f"{path}: cannot be written, there is no folder {path.parent}"
    if not path.exists():
        return None
    if isinstance(prompts, (str, os.PathLike)) and Path(prompts).exists() and path.samefile(prompts):
        return f"{path}: is the prompt file, which the reference would replace; choose another name"
    return None if _is_reference(path) else f"{path}: exists and is no reference to record again; choose another name"


def _is_reference(path: Path) -> bool:
    """Whether the first line says so; what follows may be broken."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(_LONGEST_HEADER))
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def write_reference(reference: Reference, target: Path) -> None:
    """Write ``reference`` to ``target``, which appears complete or not at all.

    Raises:
        VerificationError: it cannot be written.
    """
    lines = [canonical(reference.header())]
    lines += [
        canonical(
            {
                "id": score.id,
                "token_ids_sha256": reference.token_ids_sha256[score.id],
                "log_p_skip": score.log_p_skip,
                "log_p_write": score.log_p_write,
                "argmax": score.argmax,
                "skip_probability": score.skip_probability,
                "label_mass": score.label_mass,
            }
        )
        for score in reference.scores
    ]
    try:
        write_whole(target, ("\n".join(lines) + "\n").encode("ascii"))
    except OSError as error:
        raise VerificationError(f"{target}: cannot be written: {error.strerror or error}") from error


def _read_header(value: Any, where: str) -> Mapping[str, Any]:
    version: Any = value.get("version") if isinstance(value, Mapping) else VERSION
    if isinstance(value, Mapping) and (value.get("format") != FORMAT or type(version) is not int or version not in _HEADERS):
        raise VerificationError(
            f"{where}: format {value.get('format')!r} version {version!r}; expected {FORMAT!r} version 1 to {VERSION}"
        )
    header = expect_keys(value, _HEADERS[version], where, frozenset({"date"}))
    if "date" in header:
        day(header["date"], f"{where}: date")
    if header.get("recipe_origin", "reference") not in ORIGINS:
        raise VerificationError(f"{where}: recipe_origin is {header['recipe_origin']!r}; expected one of {', '.join(ORIGINS)}")
    expect_keys(header["model"], {"name", "revision", "type"}, f"{where}: model")
    expect_keys(header["dtypes"], {"embedding", "adapter", "compute"}, f"{where}: dtypes")
    expect_keys(header["environment"], {"versions", "device", "attention", "batch_size"}, f"{where}: environment")
    prompts = expect_keys(header["prompts"], {"count", "token_ids_sha256"}, f"{where}: prompts")
    if type(prompts["count"]) is not int or prompts["count"] < 1 or not isinstance(header["prefill"], str):
        raise VerificationError(f"{where}: expected a count of prompts from 1 and a prefill string")
    if header["adapter"] is not None:
        adapter = expect_keys(header["adapter"], {"files", "root"}, f"{where}: adapter", frozenset({"identity"}))
        files = adapter["files"]
        if "identity" in adapter and not is_digest(adapter["identity"]):
            raise VerificationError(f"{where}: the adapter's identity is no SHA-256")
        good = isinstance(files, Mapping) and files and all(is_digest(digest) for digest in files.values())
        if not good or root_digest(files) != adapter["root"]:
            raise VerificationError(f"{where}: the adapter's root is not that of its files")
    return header


def _read_floors(header: Mapping[str, Any], where: str) -> dict[str, NoiseFloor | None]:
    if header["version"] == 1:
        return {"batch_shape": _FLOOR(header["noise_floor"], f"{where}: noise_floor"), "dequantized": None}
    floors = expect_keys(header["noise_floors"], set(FLOORS), f"{where}: noise_floors")
    return {name: _FLOOR(floors[name], f"{where}: noise_floors: {name}") for name in FLOORS}


def _read_row(value: Any, labels: DecisionLabels, where: str) -> tuple[DecisionScore, str]:
    """One score and the digest of its token ids; the derived numbers in the row must follow from the log-probabilities."""
    row = expect_keys(value, _ROW, where)
    numbers = [row[name] for name in ("log_p_skip", "log_p_write", "skip_probability", "label_mass")]
    if not (isinstance(row["id"], str) and row["id"] and is_digest(row["token_ids_sha256"])):
        raise VerificationError(f"{where}: expected an id and the SHA-256 of its token ids")
    if not all(is_number(number) for number in numbers) or type(row["argmax"]) is not int or max(numbers[:2]) > _ROUNDING:
        raise VerificationError(f"{where}: expected log-probabilities up to 0, two numbers in [0, 1] and a token id")
    score = DecisionScore.from_log_probabilities(row["id"], numbers[0], numbers[1], row["argmax"], labels)
    for name, derived in (("skip_probability", score.skip_probability), ("label_mass", score.label_mass)):
        if abs(row[name] - derived) > _ROUNDING:
            raise VerificationError(f"{where}: {name} is {row[name]!r}; its log-probabilities give {derived!r}")
    return score, row["token_ids_sha256"]
