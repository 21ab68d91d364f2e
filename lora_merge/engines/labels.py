"""The two decision labels as token ids, checked where they will be read: right after the real prefill.

``write`` is one token on its own and may still be two after ``{"decision": "``, or the prefill's last token may change when a
label follows it; tokenizers also differ between library versions. So nothing is taken from the label alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lora_merge.engines.errors import EngineError
from lora_merge.engines.prompts import DEFAULT_PREFILL, Prompt, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SAMPLE = 64


@dataclass(frozen=True)
class Label:
    """One answer: its text and the id of the single token that stands for it at the decision."""

    text: str
    token_id: int


@dataclass(frozen=True)
class DecisionLabels:
    """The two answers of the decision token; their token ids are distinct."""

    skip: Label
    write: Label

    def __post_init__(self) -> None:
        if self.skip.token_id == self.write.token_id:
            raise EngineError(
                f"labels {self.skip.text!r} and {self.write.text!r} are both token {self.skip.token_id} after the prefill; "
                "expected two distinct tokens: choose other labels"
            )

    def decision_of(self, token_id: int) -> Literal["skip", "write", "other"]:
        """What ``token_id`` means as a decision."""
        if token_id == self.skip.token_id:
            return "skip"
        return "write" if token_id == self.write.token_id else "other"

    def to_json(self) -> dict[str, dict[str, Any]]:
        """``{"skip": {"text", "token_id"}, "write": {...}}``."""
        return {
            "skip": {"text": self.skip.text, "token_id": self.skip.token_id},
            "write": {"text": self.write.text, "token_id": self.write.token_id},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DecisionLabels:
        """The inverse of :meth:`to_json`; raises :class:`EngineError` when a part is missing or of another type."""
        return cls(_label_from_json(value, "skip"), _label_from_json(value, "write"))


def _label_from_json(value: Mapping[str, Any], name: str) -> Label:
    label = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(label, Mapping) or not isinstance(label.get("text"), str) or type(label.get("token_id")) is not int:
        raise EngineError(f'label {name!r} is {label!r}; expected {{"text": string, "token_id": integer}}')
    return Label(label["text"], label["token_id"])


def resolve_labels(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    prefill: str = DEFAULT_PREFILL,
    skip: str = "skip",
    write: str = "write",
    sample: int = DEFAULT_SAMPLE,
) -> DecisionLabels:
    """The token ids of both labels as they follow ``prefill``.

    Checked after the prefill itself and after up to ``sample`` of ``prompts``, evenly spread: with the label appended, the
    ids of the prompt stay as they are and exactly one id follows, the same after every prompt. A prompt that came as token
    ids is checked through its decoded text where that text encodes back to the same ids, and through its prefill otherwise.

    Raises :class:`EngineError` that names the label and shows the ids found.
    """
    skip_label = _resolve(tokenizer, _spread(prompts, sample), prefill, skip)
    write_label = _resolve(tokenizer, _spread(prompts, sample), prefill, write)
    return DecisionLabels(skip_label, write_label)


def _spread(prompts: Sequence[Prompt], sample: int) -> list[Prompt]:
    """Up to ``sample`` prompts, evenly spread, the first and the last among them."""
    if len(prompts) <= sample:
        return list(prompts)
    step = (len(prompts) - 1) / max(sample - 1, 1)
    return [prompts[round(index * step)] for index in range(sample)]


def _resolve(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    prefill: str,
    label: str,
) -> Label:
    """The one token of ``label`` after the prefill and after each of ``prompts``."""
    if not label:
        raise EngineError("a label is empty; expected a word such as skip or write")
    places = [("the prefill", prefill)] if prefill else []
    places += [(f"prompt {prompt.id!r}", text) for prompt in prompts if (text := _text_of(tokenizer, prompt)) is not None]
    if not places:
        raise EngineError(
            f"label {label!r} cannot be checked: there is no prefill, and no prompt's ids decode to a text that encodes back"
        )
    found = {_label_token(tokenizer, where, text, label): where for where, text in places}
    if len(found) != 1:
        shown = ", ".join(f"{token} after {where}" for token, where in found.items())
        raise EngineError(f"label {label!r} is not the same token everywhere: {shown}; expected one token")
    return Label(label, next(iter(found)))


def _text_of(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | None:
    """The text of a prompt; for one that came as ids, their decoding when it encodes back to the same ids."""
    if prompt.text is not None:
        return prompt.text
    text = str(tokenizer.decode(list(prompt.token_ids)))
    return text if encode(tokenizer, text) == list(prompt.token_ids) else None


def _label_token(tokenizer: PreTrainedTokenizerBase, where: str, text: str, label: str) -> int:
    """The id that ``label`` adds to ``text``, alone and with the closing quote that follows it when the prefill opened one."""
    before = encode(tokenizer, text)
    endings = (label, label + '"') if text.endswith('"') else (label,)
    for ending in endings:
        after = encode(tokenizer, text + ending)
        if after[: len(before)] != before:
            raise EngineError(
                f"label {ending!r} changes the tokens of the text before it: {where} ends in {before[-3:]} alone and in "
                f"{after[max(len(before) - 3, 0) :]} with the label; expected the same beginning: choose another prefill or label"
            )
        added = after[len(before) :]
        if ending == label and len(added) != 1:
            raise EngineError(
                f"label {label!r} is {len(added)} tokens after {where}: {added}; expected exactly one. Is this the tokenizer "
                "(and the library version) that the adapter was trained with?"
            )
        if ending == label:
            token = added[0]
        elif added[:1] != [token]:
            raise EngineError(
                f"label {label!r} is token {token} alone but {added} in {ending!r} after {where}; choose another label"
            )
    if token in tokenizer.all_special_ids:
        raise EngineError(f"label {label!r} is the special token {token} after {where}; expected an ordinary token")
    return int(token)
