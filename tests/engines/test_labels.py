"""Labels after the real prefill. Oracle: the tokenizer, called by hand on the whole text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import DecisionLabels, Label, resolve_labels
from lora_merge.engines.prompts import DEFAULT_PREFILL, rows_from_mappings, tokenize
from tests.engines.builders import make_tokenizer


def make_prompts(tokenizer, prefill=DEFAULT_PREFILL):
    return tokenize(
        rows_from_mappings([{"id": "a", "prompt": "leek"}, {"id": "b", "prompt": "tofu"}]), tokenizer, prefill=prefill
    )


def test_labels_are_the_tokens_that_follow_the_prefill(tokenizer):
    labels = resolve_labels(tokenizer, make_prompts(tokenizer))
    for label, text in ((labels.skip, "skip"), (labels.write, "write")):
        assert tokenizer("leek" + DEFAULT_PREFILL + text, add_special_tokens=False)["input_ids"][-1] == label.token_id
        assert tokenizer.decode([label.token_id]) == text
    assert [labels.decision_of(token) for token in (labels.skip.token_id, labels.write.token_id, 0)] == ["skip", "write", "other"]


def test_a_split_label_is_refused_with_the_ids_found():
    tokenizer = make_tokenizer(answers=("skip", "go"))
    ids = tokenizer("write", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    with pytest.raises(EngineError, match=rf"'write' is {len(ids)} tokens after the prefill: \[{ids[0]}, "):
        resolve_labels(tokenizer, make_prompts(tokenizer))


def test_a_label_that_swallows_the_end_of_the_prefill_is_refused(tokenizer):
    prefill = '{"decision": "s'
    with pytest.raises(EngineError, match="'kip' changes the tokens of the text before it"):
        resolve_labels(tokenizer, make_prompts(tokenizer, prefill), prefill=prefill, skip="kip")


def test_labels_must_differ_and_be_ordinary(tokenizer):
    prompts = make_prompts(tokenizer)
    with pytest.raises(EngineError, match="both token"):
        resolve_labels(tokenizer, prompts, write="skip")
    with pytest.raises(EngineError, match="special token"):
        resolve_labels(tokenizer, prompts, skip="<eos>")
    with pytest.raises(EngineError, match="empty"):
        resolve_labels(tokenizer, prompts, skip="")


def test_a_label_that_melts_into_the_closing_quote_is_refused():
    merges = [("s", "k"), ("i", "p"), ("sk", "ip"), ("skip", '"'), ("w", "r"), ("i", "t"), ("wr", "it"), ("writ", "e")]
    pieces = [*sorted(set('{"decision": "skip write}')), *(left + right for left, right in merges)]
    model = models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    with pytest.raises(EngineError, match=r"label 'skip' is token .* in 'skip\"'"):
        resolve_labels(tokenizer, [])


def test_every_prompt_of_the_sample_is_asked(tokenizer):
    """A prompt whose end changes under a label is found although the prefill alone is fine."""
    prompts = [*make_prompts(tokenizer), SimpleNamespace(id="odd", text='leek {"decision": "s', token_ids=(1,))]
    with pytest.raises(EngineError, match=r"'kip' changes.*prompt 'odd'"):
        resolve_labels(tokenizer, prompts[2:], prefill="", skip="kip")


def test_ready_made_ids_are_checked_through_their_text(tokenizer):
    from_text = make_prompts(tokenizer)
    from_ids = tokenize(rows_from_mappings([{"id": "a", "prompt_token_ids": list(from_text[0].token_ids)}]), tokenizer)
    assert resolve_labels(tokenizer, from_ids) == resolve_labels(tokenizer, from_text)
    assert resolve_labels(tokenizer, from_ids, prefill="") == resolve_labels(tokenizer, from_text)


def test_what_cannot_be_checked_is_refused(tokenizer):
    with pytest.raises(EngineError, match="cannot be checked"):
        resolve_labels(tokenizer, [], prefill="")


def test_labels_travel_as_json():
    labels = DecisionLabels(Label("skip", 3), Label("write", 4))
    assert DecisionLabels.from_json(labels.to_json()) == labels
    for broken in (
        {},
        {"skip": {"text": "skip", "token_id": 3}},
        {**labels.to_json(), "write": {"text": "write", "token_id": "4"}},
    ):
        with pytest.raises(EngineError, match="expected"):
            DecisionLabels.from_json(broken)
