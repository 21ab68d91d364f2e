"""The tokenizer that a reference reads its prompts by, and in what another one differs from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_merge.engines.model_files import load_tokenizer
from lora_merge.merging.tokenizer_files import TEMPLATE, choose_tokenizer
from verification.sources import Sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "a"


def reference_tokenizer(sources: Sources, *, trust_remote_code: bool = False) -> tuple[PreTrainedTokenizerBase, Path] | None:
    """The tokenizer of base and adapter by the rule of a merge, and the folder that it is in; None where neither has one.

    Raises:
        MergeError: an adapter's folder holds a part of a tokenizer only.
        EngineError: it does not load.
    """
    folders = [folder for folder in (sources.base, sources.adapter) if folder is not None]
    chosen = choose_tokenizer(folders[0], folders[1:]) if folders else None
    if chosen is None or not chosen.files:
        return None
    template = chosen.files[TEMPLATE] if chosen.what == "chat template" else None
    folder = folders[0].path if template is not None or chosen.folder is None else chosen.folder.path
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    if template is not None:
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer, folder


def differences(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> Iterator[str]:
    """What of two tokenizers is not the same, as far as ids and texts can show it; how the files say it does not matter.

    Padding and truncation do not count: engines are given the token ids of whole prompts. So the padding token does not either,
    which many training runs set.
    """
    if ours.get_vocab() != theirs.get_vocab():
        yield "vocabulary"
    elif _pipeline(ours) != _pipeline(theirs):
        yield "way of splitting text"
    if _specials(ours) != _specials(theirs) or ours(_PROBE)["input_ids"] != theirs(_PROBE)["input_ids"]:
        yield "special tokens"
    if (ours.chat_template or None) != (theirs.chat_template or None):
        yield "chat template"
    if _cleans_up(ours) != _cleans_up(theirs):
        yield "way of joining tokens"


def _pipeline(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Everything between text and ids: of the tokenizers library its whole state, of others the bytes of their vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        path = getattr(tokenizer, "vocab_file", None)
        return Path(path).read_bytes() if path is not None and Path(path).is_file() else None
    state = json.loads(backend.to_str())
    return {name: value for name, value in state.items() if name not in ("padding", "truncation")}


def _specials(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """The ids that begin, end or stand for unknown text, and all that a text is freed of."""
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, getattr(tokenizer, "unk_token_id", None))
    return *named, frozenset(tokenizer.all_special_ids) - ({tokenizer.pad_token_id} - {*named})


def _cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
