"""Reads, tokenizes and checks every prompt before a model loads, and sets aside what cannot be scored.

What passes is spooled to disk; what does not goes to the quarantine file with its line and the reason. Every line of the prompt
file ends up in exactly one of the two, and for a sharded run in exactly one shard.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_merge.console import Progress, no_progress
from lora_merge.engines.labels import DEFAULT_SAMPLE
from lora_merge.engines.prompts import BadRow, Prompt, iter_prompt_rows, tokenize_rows
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.files import PendingFile, ScannedFile
from lora_merge.generation.shards import Shard
from lora_merge.generation.spool import PromptSpool, spool_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptsFacts:
    """What is known of a prompt file once it has been taken in: the same for every shard of it.

    Attributes:
        path: as it was given.
        sha256: of its bytes.
        tokens_sha256: of the accepted prompts (id, token ids, fields) and the quarantined lines, in order; it moves when another
            tokenizer, prefill or library version makes other ids of the same bytes.
        rows: lines of the file, empty ones at its end not counted.
        accepted: prompts that passed, over all shards.
        quarantined: lines that did not, over all shards.
        date: the day that the chat template was told, as ``2026-11-30``, where it asks for one; else None.
    """

    path: str
    sha256: str
    tokens_sha256: str
    rows: int
    accepted: int
    quarantined: int
    date: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Every attribute by name."""
        return dict(vars(self))


@dataclass
class Trouble:
    """Lines that were set aside for one kind of reason.

    Attributes:
        line: the first of them.
        reason: the reason of that one; numbers and names in it are its own.
        lines: how many there are.
    """

    line: int
    reason: str
    lines: int = 1

    def __str__(self) -> str:
        return f"line {self.line}{f' and {self.lines - 1} more' if self.lines > 1 else ''}: {self.reason}"


@dataclass(frozen=True)
class Intake:
    """One finished intake.

    Attributes:
        facts: of the whole file.
        spool: the accepted prompts of this shard.
        aside: the lines set aside that are counted to this shard, until :meth:`set_aside`.
        quarantined: how many these are.
        troubles: why lines were set aside, over the whole file, the most frequent kind of reason first.
        sample: accepted prompts evenly spread over the whole file, to check labels after.
        longest: tokens of the longest accepted prompt of the whole file.
    """

    facts: PromptsFacts
    spool: PromptSpool
    aside: PendingFile
    quarantined: int
    troubles: tuple[Trouble, ...]
    sample: tuple[Prompt, ...]
    longest: int

    def set_aside(self) -> None:
        """Give the quarantine its name, or remove an old one where this shard has none."""
        if self.quarantined:
            self.aside.keep()
        else:
            self.aside.path.unlink(missing_ok=True)


def take_in(
    prompts: ScannedFile,
    tokenizer: PreTrainedTokenizerBase,
    *,
    spool: PromptSpool,
    aside: PendingFile,
    prefill: str,
    max_length: int | None,
    vocabulary: int | None,
    chunk_size: int,
    shard: Shard,
    date: datetime.date | None = None,
    progress: Progress = no_progress,
) -> Intake:
    """Take in the prompt file that :func:`scan` has looked at.

    ``spool`` and ``aside`` get a line each accepted prompt and each bad row. ``max_length``: most tokens of a prompt.
    ``vocabulary``: rows of the model's embedding. ``date``: the day that a chat template is told which asks for one; None for
    today. ``progress`` is told of lines.

    Raises:
        GenerationError: the file holds no rows at all, is another than before, or the quarantine cannot be written.
        EngineError: the file cannot be read.
    """
    tally, bytes_read = _Tally(), hashlib.sha256()
    rows = iter_prompt_rows(prompts.path, bytes_read.update)
    for item in tokenize_rows(rows, tokenizer, prefill=prefill, max_length=max_length, vocabulary=vocabulary, date=date):
        line = spool_line(item) if isinstance(item, Prompt) else _aside_line(item)
        mine = shard.takes(tally.accepted // chunk_size)
        tally.add(item, line)
        if isinstance(item, Prompt):
            if mine:
                spool.append(line)
        elif mine:
            aside.write(line)
            tally.quarantined_here += 1
        progress(1)
    spool.flush()
    if bytes_read.hexdigest() != prompts.sha256:
        raise GenerationError(f"prompt file {prompts.path} changed while it was read; let nobody write to it")
    if tally.rows == 0:
        raise GenerationError(f"prompt file {prompts.path} holds no rows; expected one JSON object a line")
    facts = PromptsFacts(
        str(prompts.path),
        prompts.sha256,
        tally.digest.hexdigest(),
        tally.rows,
        tally.accepted,
        tally.rows - tally.accepted,
        tally.date,
    )
    troubles = tuple(sorted(tally.troubles.values(), key=lambda trouble: -trouble.lines))
    return Intake(facts, spool, aside, tally.quarantined_here, troubles, tuple(tally.sample.prompts), tally.longest)


def _aside_line(row: BadRow) -> bytes:
    return json.dumps(vars(row), ensure_ascii=False).encode("utf-8") + b"\n"


class EvenSample:
    """At least ``size`` and at most twice as many of the prompts seen, evenly spread, without knowing how many will come."""

    def __init__(self, size: int = DEFAULT_SAMPLE) -> None:
        self._size = size
        self._stride = 1
        self._seen = 0
        self.prompts: list[Prompt] = []

    def add(self, prompt: Prompt) -> None:
        """See one more prompt."""
        if self._seen % self._stride == 0:
            self.prompts.append(prompt)
            if len(self.prompts) >= 2 * self._size:
                self.prompts = self.prompts[::2]
                self._stride *= 2
        self._seen += 1


@dataclass
class _Tally:
    rows: int = 0
    accepted: int = 0
    quarantined_here: int = 0
    longest: int = 0
    date: str | None = None
    troubles: dict[str, Trouble] = field(default_factory=dict)
    sample: EvenSample = field(default_factory=EvenSample)
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, item: Prompt | BadRow, line: bytes) -> None:
        self.rows += 1
        self.digest.update(line)
        if isinstance(item, Prompt):
            self.accepted += 1
            self.longest = max(self.longest, len(item.token_ids))
            self.date = self.date or item.date
            self.sample.add(item)
        else:
            known = self.troubles.setdefault(_kind(item.reason), Trouble(item.line, item.reason, 0))
            known.lines += 1


def _kind(reason: str) -> str:
    """The part of a reason that rows of one trouble share: names, numbers and whatever follows them vary."""
    words: list[str] = []
    for word in reason.replace(":", " ").replace(";", " ").split():
        if any(character.isdigit() or character in "'\"[{" for character in word):
            break
        words.append(word)
    return " ".join(words) or reason
