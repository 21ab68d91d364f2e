"""Joins the results of all shards into the file that one run would have written."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lora_merge.errors import no_file
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.files import PendingFile, scan
from lora_merge.generation.record import (
    RunRecord,
    difference_of_shards,
    quarantine_path,
    read_record,
    record_path,
    write_record,
)
from lora_merge.generation.rows import Tally
from lora_merge.generation.run import GenerateResult
from lora_merge.generation.shards import Shard, chunk_count


def join_results(parts: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> GenerateResult:
    """Join the results files ``parts``, one a shard and in any order, into ``out``, which appears complete or not at all.

    Every shard must be there once and have come to its end, and all must be of one run: same checkpoint, prompts, settings and
    engine. Every row is read; their number and their ids must be those of the prompts.

    Raises:
        GenerationError: a shard is missing, there twice, unfinished, changed since, or of another run.
    """
    target = Path(out)
    for taken in (target, record_path(target), quarantine_path(target)):
        if taken.exists():
            raise GenerationError(f"{taken}: exists already; give another --out")
    shards = _ordered([Path(part) for part in parts])
    for path, record in shards:
        _check_whole(path, record)
    tally = Tally()
    with contextlib.ExitStack() as stack:
        results, aside = (
            stack.enter_context(contextlib.closing(PendingFile(path))) for path in (target, quarantine_path(target))
        )
        readers = [stack.enter_context(open(path, "rb")) for path, _ in shards]
        for line in _merged(readers, shards[0][1]):
            tally.add(json.loads(line))
            results.write(line)
        set_aside = _quarantined([path for path, record in shards if record.result and record.result["quarantined"]])
        for line in set_aside:
            aside.write(line)
        record = _joined_record(shards, tally, len(set_aside), results, aside)
        stack.callback(_remove_unless, record_path(target), (target, quarantine_path(target)))
        if set_aside:
            aside.keep()
        results.keep()
        write_record(record, target)
    return GenerateResult(target, record, quarantine_path(target) if set_aside else None)


def _remove_unless(last: Path, others: Sequence[Path]) -> None:
    """Take back ``others`` where the ``last`` file could not be written too: this call has made them."""
    if not last.exists():
        for path in others:
            path.unlink(missing_ok=True)


def _ordered(paths: Sequence[Path]) -> list[tuple[Path, RunRecord]]:
    """The shards by index, once they are known to be all of one run."""
    found: dict[int, tuple[Path, RunRecord]] = {}
    for path in paths:
        if reason := no_file(path, "the results file of a shard"):
            raise GenerationError(reason)
        record = read_record(path)
        if record.shard.index in found:
            other = found[record.shard.index]
            if record.shard.count != other[1].shard.count:
                raise GenerationError(
                    f"{path}: is shard {record.shard}, but {other[0]} is shard {other[1].shard}; "
                    "expected the shards of one division"
                )
            raise GenerationError(
                f"{path}: is shard {record.shard}, and so is {found[record.shard.index][0]}; give each shard once"
            )
        found[record.shard.index] = (path, record)
    if not found:
        raise GenerationError("no results file was given; expected one a shard")
    first_path, first = found[min(found)]
    for path, record in found.values():
        difference = difference_of_shards(first, record)
        if difference is not None:
            raise GenerationError(f"{path}: is of another run than {first_path}: {difference}; nothing was joined")
    missing = [str(Shard(index, first.shard.count)) for index in range(1, first.shard.count + 1) if index not in found]
    if missing:
        raise GenerationError(f"shard {', '.join(missing)} is missing; nothing was joined")
    return [found[index] for index in sorted(found)]


def _check_whole(path: Path, record: RunRecord) -> None:
    if record.result is None:
        raise GenerationError(f"{path}: shard {record.shard} has not come to its end; finish it with --resume")
    if scan(path).sha256 != record.result["sha256"]:
        raise GenerationError(f"{path}: is not what shard {record.shard} wrote; the file was changed")
    if record.result["quarantined"]:
        aside = quarantine_path(path)
        if scan(aside).sha256 != record.result["quarantine_sha256"]:
            raise GenerationError(f"{aside}: is not what shard {record.shard} set aside; the file was changed")


def _merged(readers: Sequence[IO[bytes]], record: RunRecord) -> Iterator[bytes]:
    """The lines of all shards in the order of the prompts; each exactly once."""
    size, accepted = int(record.settings["chunk_size"]), int(record.prompts["accepted"])
    seen: set[str] = set()
    for chunk in range(chunk_count(accepted, size)):
        reader = readers[chunk % len(readers)]
        for _ in range(min(size, accepted - chunk * size)):
            line = reader.readline()
            if not line:
                raise GenerationError(f"{reader.name}: ends before its last chunk; nothing was joined")
            id = json.loads(line)["id"]
            if id in seen:
                raise GenerationError(f"{reader.name}: prompt {id!r} is there twice; nothing was joined")
            seen.add(id)
            yield line
    for reader in readers:
        if reader.readline():
            raise GenerationError(f"{reader.name}: holds more rows than its share of the prompts; nothing was joined")


def _quarantined(paths: Sequence[Path]) -> list[bytes]:
    """The rows set aside by all shards, by their line in the prompt file."""
    lines = [line for path in paths for line in quarantine_path(path).read_bytes().splitlines(keepends=True)]
    return sorted(lines, key=lambda line: int(json.loads(line)["line"]))


def _joined_record(
    shards: Sequence[tuple[Path, RunRecord]], tally: Tally, quarantined: int, results: PendingFile, aside: PendingFile
) -> RunRecord:
    first = shards[0][1]
    if quarantined != first.prompts["quarantined"] or tally.rows + quarantined != first.prompts["rows"]:
        raise GenerationError(
            f"{results.path}: {tally.rows} rows and {quarantined} set aside are not the {first.prompts['rows']} of the prompts"
        )
    result: dict[str, Any] = {
        "input_rows": first.prompts["rows"],
        "quarantined": quarantined,
        "counts": tally.to_json(),
        "sha256": results.sha256,
        "quarantine_sha256": aside.sha256 if quarantined else None,
        "resumed_rows": 0,
        "phases": {},
        "joined": [{"file": str(path), **(record.result or {})} for path, record in shards],
    }
    return replace(first, shard=Shard(), result=result)
