"""``RESULTS.run.json``: what a results file was made from, with which settings, and how it ended.

It is written before the first row. Resuming compares it with the run at hand, joining with those of the other shards, and
afterwards it says where the results came from.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_merge.generation.errors import GenerationError
from lora_merge.generation.files import replaced_file
from lora_merge.generation.shards import Shard
from lora_merge.readable import json_text

FORMAT = "lora-merge/generation"
VERSION = 1
_PARTS = ("settings", "model", "prompts", "engine", "gate", "shard", "tool")


@dataclass(frozen=True)
class RunRecord:
    """The record of one run.

    Attributes:
        settings: everything the user chose that can move a row.
        model: path and root digest of the checkpoint.
        prompts: :class:`~lora_merge.generation.intake.PromptsFacts`.
        engine: what the engine says of itself.
        gate: whether the run is gated, and by which certificate.
        shard: which part this is.
        tool: name and version of this program.
        result: how the run ended; None until it has.
    """

    settings: Mapping[str, Any]
    model: Mapping[str, Any]
    prompts: Mapping[str, Any]
    engine: Mapping[str, Any]
    gate: Mapping[str, Any]
    shard: Shard
    tool: str
    result: Mapping[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its end."""
        return self.result is not None

    @property
    def day(self) -> datetime.date | None:
        """The day that the chat template was told, where it asked for one: a run goes on with it."""
        date = self.prompts.get("date")
        try:
            return None if date is None else datetime.date.fromisoformat(date)
        except (TypeError, ValueError) as error:
            raise GenerationError(f"prompts.date of the record is {date!r}; expected a day such as 2026-11-30") from error

    def ended(self, result: Mapping[str, Any]) -> RunRecord:
        """The same run with its result."""
        return replace(self, result=result)

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "tool": self.tool,
            "shard": str(self.shard),
            "settings": dict(self.settings),
            "model": dict(self.model),
            "prompts": dict(self.prompts),
            "engine": dict(self.engine),
            "gate": dict(self.gate),
            "result": None if self.result is None else dict(self.result),
        }


def record_path(out: Path) -> Path:
    """Where the record of the results file ``out`` lies."""
    return out.with_name(f"{out.name}.run.json")


def quarantine_path(out: Path) -> Path:
    """Where the rows set aside from the results file ``out`` lie."""
    return out.with_name(f"{out.name}.quarantine.jsonl")


def write_record(record: RunRecord, out: Path) -> None:
    """Write the record of ``out``, complete or not at all."""
    with replaced_file(record_path(out)) as file:
        file.write(json_text(record.to_json(), ensure_ascii=False, indent=2, allow_nan=False).encode("utf-8") + b"\n")


def read_record(out: Path) -> RunRecord:
    """Read the record of ``out``; anything but one of this format raises :class:`GenerationError`."""
    path = record_path(out)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise GenerationError(
            f"{path}: no such file, so nothing says what {out.name} was made from; give another --out"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise GenerationError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    found = (value.get("format"), value.get("version")) if isinstance(value, dict) else (None, None)
    if found != (FORMAT, VERSION):
        raise GenerationError(f"{path}: format {found[0]!r} version {found[1]!r}; expected {FORMAT!r} version {VERSION}")
    if not {*_PARTS, "result"} <= set(value) or not all(isinstance(value[part], dict) for part in _PARTS[:5]):
        raise GenerationError(f"{path}: a part is missing or of another type than docs/generation-format.md says")
    return RunRecord(
        **{part: value[part] for part in _PARTS[:5]},
        shard=Shard.parse(str(value["shard"])),
        tool=str(value["tool"]),
        result=value["result"],
    )


def check_same_run(earlier: RunRecord, now: RunRecord, out: Path) -> None:
    """Make sure that ``now`` continues ``earlier``: same checkpoint, prompts, settings and engine.

    Where the files lie does not matter, what they hold does.

    Raises:
        GenerationError: names the first differences.
    """
    _refuse(list(_differences(_comparable(earlier), _comparable(now))), out)


def check_same_prompts(earlier: RunRecord, now: Mapping[str, Any], out: Path) -> None:
    """As :func:`check_same_run`, as soon as it is known what the prompts are ``now``."""
    _refuse(list(_differences(_without_path(earlier.prompts), _without_path(now), "prompts")), out)


def difference_of_shards(first: RunRecord, other: RunRecord) -> str | None:
    """The first thing in which two shards of one run must agree and do not, in words; None where they are of one run."""
    one, two = ({**_comparable(record), "shard": record.shard.count} for record in (first, other))
    for part in (one, two):
        engine = part["engine"] if first.engine and other.engine else {}  # a shard without prompts loads none
        part["engine"] = {name: engine.get(name) for name in ("kind", "versions", "dtype")}
    found = next(_differences(one, two), None)
    if found is None:
        return None
    name, there, here = found
    return f"{'number of shards' if name == 'shard' else name} is {_short(here)}, there {_short(there)}"


def _refuse(found: list[tuple[str, Any, Any]], out: Path) -> None:
    differences = [f"{name} was {_short(earlier)} and is {_short(now)}" for name, earlier, now in found]
    if differences:
        raise GenerationError(
            f"{out}: cannot be resumed, {' and '.join(differences[:3])}{' and more' if len(differences) > 3 else ''}; "
            "rows of two kinds must not mix: run as before, or give another --out"
        )


def _comparable(record: RunRecord) -> dict[str, Any]:
    """What must not change, without places on disk."""
    content = record.to_json()
    settings = {name: value for name, value in content["engine"].get("settings", {}).items() if name not in ("model", "adapter")}
    return {
        "shard": content["shard"],
        "settings": content["settings"],
        "model": {"root": content["model"].get("root")},
        "prompts": _without_path(content["prompts"]),
        "engine": {**content["engine"], "settings": settings},
        "gated": content["gate"].get("gated"),
        "tool": content["tool"],
    }


def _without_path(prompts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in prompts.items() if name != "path"}


def _differences(earlier: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, first and second value of everything that differs."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        for key in sorted({*earlier, *now}):
            yield from _differences(earlier.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif earlier != now:
        yield name, earlier, now


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:60]}..."
