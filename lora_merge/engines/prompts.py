"""Prompts as token ids: made once, hashed, and shared by every engine.

Plain text becomes ``text + prefill`` with exactly one BOS where the tokenizer wants one; a conversation goes through the
tokenizer's chat template, which holds its own BOS, and the prefill begins the assistant's turn. Both are encoded without
added special tokens, so no EOS slips in before the decision. Ids that come ready-made are only checked. A template that writes
the date into its prompts (Llama 3.2's does) gets the one that it is told, so that the same prompts can be made on another day.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_merge.engines.errors import EngineError
from lora_merge.engines.prompt_file import (
    BadRow,
    PromptRow,
    iter_prompt_rows,
    read_prompt_rows,
    rows_from_mappings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DEFAULT_PREFILL",
    "BadRow",
    "Prompt",
    "PromptRow",
    "check_ids",
    "decode_continuation",
    "encode",
    "iter_prompt_rows",
    "read_prompt_rows",
    "read_prompts",
    "rows_from_mappings",
    "today",
    "token_ids_digest",
    "token_ids_sha256",
    "tokenize",
    "tokenize_rows",
    "wants_bos",
]

DEFAULT_PREFILL = '{"decision": "'
_CHUNK = 1024
_DECODE_CONTEXT = 8


@dataclass(frozen=True)
class Prompt:
    """One prompt as every engine reads it.

    ``token_ids``: the final ids, BOS and prefill included; the next token is the decision. ``fields``: what passes through
    from its row. ``text``: what the ids were encoded from, without a BOS that was put before it; None when the row brought
    ids. ``line``: the row's line in its file. ``date``: the day, as ``2026-11-30``, that a chat template which asks for it was
    told; None where none asked.
    """

    id: str
    token_ids: tuple[int, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = field(default=None, compare=False, repr=False)
    line: int = field(default=0, compare=False)
    date: str | None = field(default=None, compare=False)


def read_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefill: str = DEFAULT_PREFILL,
    max_length: int | None = None,
) -> list[Prompt]:
    """The prompts of a JSON Lines file, strictly: :func:`read_prompt_rows`, then :func:`tokenize`."""
    return tokenize(read_prompt_rows(path), tokenizer, prefill=prefill, max_length=max_length)


def tokenize(
    rows: Iterable[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefill: str = DEFAULT_PREFILL,
    max_length: int | None = None,
    vocabulary: int | None = None,
    bos: bool | None = None,
    date: datetime.date | None = None,
) -> list[Prompt]:
    """``rows`` as prompts; the first that is no good raises :class:`EngineError` with its id and the reason.

    Arguments as in :func:`tokenize_rows`.
    """
    prompts = []
    how: dict[str, Any] = {"prefill": prefill, "max_length": max_length, "vocabulary": vocabulary, "bos": bos, "date": date}
    for item in tokenize_rows(rows, tokenizer, **how):
        if isinstance(item, BadRow):
            raise EngineError(f"prompt {item.id!r} (line {item.line}): {item.reason}")
        prompts.append(item)
    return prompts


def tokenize_rows(
    rows: Iterable[PromptRow | BadRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefill: str = DEFAULT_PREFILL,
    max_length: int | None = None,
    vocabulary: int | None = None,
    bos: bool | None = None,
    date: datetime.date | None = None,
) -> Iterator[Prompt | BadRow]:
    """Each row as a prompt, or as a bad row with the reason; bad rows pass through. Order is kept and memory is bounded.

    ``prefill``: appended to ``prompt`` and after the chat template of ``messages``. ``max_length``: most tokens a prompt may
    have, so the model's positions less what will be written. ``vocabulary``: rows of the model's embedding
    (:func:`~lora_merge.engines.model_files.vocabulary_rows`), which the tokenizer may know more tokens than. ``bos``:
    whether every prompt must have exactly one BOS, at its beginning; None asks :func:`wants_bos`, and leaves it to the author
    of conversations and of ready-made ids where the tokenizer's chat template writes none: training and serving then had none.
    ``date``: of which day, at midnight, a chat template that asks for the date is told; None for today.
    """
    begins = wants_bos(tokenizer) if bos is None else bos
    encoder = _Encoder(
        tokenizer, prefill, max_length, vocabulary, begins, bos is None and _template_without_bos(tokenizer), date or today()
    )
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, _CHUNK)):
        yield from encoder.encode_chunk(chunk)


def today() -> datetime.date:
    """The day that prompts are of which nobody says another one of."""
    return datetime.date.today()


def wants_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts of this tokenizer begin with a BOS.

    They do when encoding adds one, when ``add_bos_token`` says so, when the chat template writes ``bos_token``, and for every
    Gemma tokenizer: conversions of it have lost the setting, and Gemma without its BOS is a different model. Having a
    ``bos_token`` is not enough: GPT-2 and SmolLM2 have one and start no prompt with it.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return False
    return (
        list(tokenizer("a")["input_ids"])[:1] == [bos]
        or getattr(tokenizer, "add_bos_token", None) is True
        or "bos_token" in str(tokenizer.chat_template or "")
        or type(tokenizer).__name__.startswith("Gemma")
    )


def _template_without_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether there is a chat template that writes no BOS, such as ChatML's; of a Gemma tokenizer it has lost it."""
    template = str(tokenizer.chat_template or "")
    writes = "bos_token" in template or str(tokenizer.bos_token) in template
    return bool(template) and not writes and not type(tokenizer).__name__.startswith("Gemma")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of ``text`` with no special token added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def decode_continuation(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
    """The text that ``new_ids`` add after ``prompt_ids``, special tokens left out.

    Decoded together with the end of the prompt where possible, because some tokenizers drop a space at the beginning of what they
    decode.
    """
    context = list(prompt_ids[-_DECODE_CONTEXT:])
    before = str(tokenizer.decode(context, skip_special_tokens=True))
    whole = str(tokenizer.decode([*context, *new_ids], skip_special_tokens=True))
    if whole.startswith(before):
        return whole[len(before) :]
    return str(tokenizer.decode(list(new_ids), skip_special_tokens=True))


def check_ids(prompts: Iterable[Prompt], vocabulary: int | None) -> None:
    """Refuse an id that the model has no row for, before an engine sees it: ``vocabulary`` is how many it has, None unknown.

    In Transformers it would be an IndexError, and on CUDA the end of the process; vLLM takes a row that no checkpoint has.

    Raises:
        EngineError: naming the first such prompt.
    """
    if vocabulary is None:
        return
    for prompt in prompts:
        highest = max(prompt.token_ids)
        if highest >= vocabulary:
            raise EngineError(
                f"prompt {prompt.id!r} has token {highest}; the model has {vocabulary}, counted from 0: another tokenizer's ids"
            )


def token_ids_sha256(prompt: Prompt) -> str:
    """Hex SHA-256 over the prompt's ids as little-endian unsigned 32-bit integers."""
    return hashlib.sha256(struct.pack(f"<{len(prompt.token_ids)}I", *prompt.token_ids)).hexdigest()


def token_ids_digest(prompts: Iterable[Prompt] | Mapping[str, str]) -> str:
    """One hex SHA-256 for a whole set of prompts (or ``{id: token_ids_sha256}``), whatever its order.

    Over one line a prompt, ``["id", "token_ids_sha256"]`` as compact ASCII JSON and a line feed, sorted by line.
    """
    pairs = prompts.items() if isinstance(prompts, Mapping) else ((prompt.id, token_ids_sha256(prompt)) for prompt in prompts)
    lines = sorted(json.dumps(pair, separators=(",", ":")) + "\n" for pair in pairs)
    return hashlib.sha256("".join(lines).encode("ascii")).hexdigest()


@dataclass(frozen=True)
class _Encoder:
    tokenizer: PreTrainedTokenizerBase
    prefill: str
    max_length: int | None
    vocabulary: int | None
    bos: bool
    may_lack_bos: bool
    date: datetime.date

    def encode_chunk(self, rows: Sequence[PromptRow | BadRow]) -> Iterator[Prompt | BadRow]:
        """One pass over the tokenizer for a whole chunk: the fast tokenizers encode it in parallel."""
        texts = [self._text(row) for row in rows]
        plain = [text for text in texts if isinstance(text, str)]
        encoded = iter(self.tokenizer(plain, add_special_tokens=False, verbose=False)["input_ids"] if plain else ())
        for row, text in zip(rows, texts, strict=True):
            if isinstance(row, BadRow):
                yield row
            elif isinstance(text, BadRow):
                yield text
            else:
                yield self._prompt(
                    row,
                    text,
                    next(encoded) if text is not None else row.prompt_token_ids or (),
                )

    def _text(self, row: PromptRow | BadRow) -> str | BadRow | None:
        """The whole text of a row; None when it brings ids."""
        if isinstance(row, BadRow) or row.prompt_token_ids is not None:
            return None
        text = row.prompt if row.prompt is not None else self._render(row)
        if isinstance(text, BadRow):
            return text
        if self.prefill and text.endswith(self.prefill):
            return _bad(
                row,
                'the prompt already ends with the prefill; pass --prefill "" or take it out of the prompt',
            )
        return text + self.prefill

    def _render(self, row: PromptRow) -> str | BadRow:
        if not self.tokenizer.chat_template:
            return _bad(
                row,
                "it has messages and the tokenizer has no chat template; give prompt or a tokenizer with a template",
            )
        try:
            messages = [dict(message) for message in row.messages or ()]
            clock = {"strftime_now": self._strftime} if self._asks_for_the_date(row) else {}  # in place of transformers' own
            rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **clock)
        except Exception as error:  # a template is a program of the model's author: it raises whatever it likes
            return _bad(row, f"the chat template refuses its messages: {error}")
        return str(rendered)

    def _asks_for_the_date(self, row: PromptRow) -> bool:
        return row.messages is not None and "strftime_now" in str(self.tokenizer.chat_template or "")

    def _strftime(self, format: str) -> str:
        return datetime.datetime.combine(self.date, datetime.time.min).strftime(format)

    def _prompt(self, row: PromptRow, text: str | None, ids: Sequence[int]) -> Prompt | BadRow:
        bos = self.tokenizer.bos_token_id
        if self.bos and row.prompt is not None and bos is not None and list(ids[:1]) != [bos]:
            ids = [bos, *ids]
        reason = self._bos_problem(row, ids) or self._length_problem(ids)
        reason = reason or (None if text else self._foreign_ids_problem(ids)) or self._row_problem(ids)
        date = self.date.isoformat() if self._asks_for_the_date(row) else None
        return _bad(row, reason) if reason else Prompt(row.id, tuple(ids), row.fields, text, row.line, date)

    def _bos_problem(self, row: PromptRow, ids: Sequence[int]) -> str | None:
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return None
        count = sum(1 for token in ids if token == bos)
        if count == 0 and row.prompt is None and self.may_lack_bos:
            return None
        if self.bos and (count != 1 or ids[0] != bos):
            place = f"{count} BOS tokens (id {bos})" if count != 1 else f"its BOS (id {bos}) at position {list(ids).index(bos)}"
            return f"found {place}, first ids {list(ids[:4])}; expected exactly one, at the beginning"
        if not self.bos and list(ids[:2]) == [bos, bos]:
            return f"it begins with two BOS tokens (id {bos}); expected at most one"
        return None

    def _length_problem(self, ids: Sequence[int]) -> str | None:
        if self.max_length is not None and len(ids) > self.max_length:
            return f"it has {len(ids)} tokens; the model has room for {self.max_length}"
        return None

    def _row_problem(self, ids: Sequence[int]) -> str | None:
        if self.vocabulary is None or max(ids, default=0) < self.vocabulary:
            return None
        token = next(token for token in ids if token >= self.vocabulary)
        return (
            f"it holds token {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}), which the model has no row for: its "
            f"embedding has {self.vocabulary}, counted from 0"
        )

    def _foreign_ids_problem(self, ids: Sequence[int]) -> str | None:
        """What is wrong with ids that came ready-made: outside the vocabulary, or not ending where the decision is read."""
        size = len(self.tokenizer)
        if max(ids) >= size:
            return f"prompt_token_ids holds {max(ids)}; the tokenizer has {size} tokens, so the ids are another tokenizer's"
        if not self.prefill:
            return None
        tail = self.tokenizer.decode(list(ids)[-len(self.prefill.encode()) - 1 :])
        if not str(tail).endswith(self.prefill):
            return f"its ids end in {str(tail)[-40:]!r}; expected the prefill {self.prefill!r}, which ready-made ids must include"
        return None


def _bad(row: PromptRow, reason: str) -> BadRow:
    return BadRow(row.line, reason, row.id, row.text)
