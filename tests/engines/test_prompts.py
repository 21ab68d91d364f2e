"""Token ids: one BOS, the prefill where it belongs, and digests. Oracle: the tokenizer itself, called by hand."""

from __future__ import annotations

import datetime
import hashlib

import pytest

from lora_merge.engines.errors import EngineError
from lora_merge.engines.prompts import (
    DEFAULT_PREFILL,
    BadRow,
    Prompt,
    decode_continuation,
    encode,
    rows_from_mappings,
    token_ids_digest,
    token_ids_sha256,
    tokenize,
    tokenize_rows,
    wants_bos,
)
from tests.engines.builders import make_tokenizer

BOS = 2


def one(tokenizer, **row):
    options = {name: row.pop(name) for name in ("prefill", "max_length", "bos") if name in row}
    return tokenize(rows_from_mappings([{"id": "a", **row}]), tokenizer, **options)[0]


def test_plain_text_gets_prefill_and_one_bos(tokenizer):
    prompt = one(tokenizer, prompt="leek and tofu", dish="soup")
    assert list(prompt.token_ids) == tokenizer("leek and tofu" + DEFAULT_PREFILL)["input_ids"]
    assert prompt.token_ids.count(BOS) == 1 and prompt.fields == {"dish": "soup"}


def test_a_bos_already_in_the_text_is_not_doubled(tokenizer):
    assert one(tokenizer, prompt="<bos>leek").token_ids == one(tokenizer, prompt="leek").token_ids


def test_a_doubled_bos_is_refused_by_name(tokenizer):
    with pytest.raises(EngineError, match=r"prompt 'a'.*found 2 BOS tokens.*exactly one"):
        one(tokenizer, prompt="<bos><bos>leek")
    ids = [BOS, *tokenizer("leek" + DEFAULT_PREFILL)["input_ids"]]
    with pytest.raises(EngineError, match="found 2 BOS tokens"):
        one(tokenizer, prompt_token_ids=ids)


def test_a_missing_or_misplaced_bos_is_refused(tokenizer):
    ids = encode(tokenizer, "leek" + DEFAULT_PREFILL)
    with pytest.raises(EngineError, match="found 0 BOS tokens"):
        one(tokenizer, prompt_token_ids=ids)
    with pytest.raises(EngineError, match=r"BOS .* at position 1"):
        one(tokenizer, prompt_token_ids=[ids[0], BOS, *ids[1:]])


def test_a_bos_inside_the_text_is_refused(tokenizer):
    with pytest.raises(EngineError, match="found 2 BOS tokens"):
        one(tokenizer, prompt="leek <bos> tofu")


def test_a_tokenizer_without_bos_adds_none():
    tokenizer = make_tokenizer(bos=False)
    assert not wants_bos(tokenizer)
    assert list(one(tokenizer, prompt="leek").token_ids) == encode(tokenizer, "leek" + DEFAULT_PREFILL)


def test_owning_a_bos_is_not_wanting_it_but_never_two():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = make_tokenizer(bos=False).backend_tokenizer.post_processor
    tokenizer.chat_template = None
    assert tokenizer("a")["input_ids"][0] != BOS
    assert not wants_bos(tokenizer)
    with pytest.raises(EngineError, match="begins with two BOS"):
        one(tokenizer, prompt="<bos><bos>leek")
    assert one(tokenizer, prompt="leek", bos=True).token_ids[0] == BOS


def test_a_conversation_goes_through_the_template_and_has_its_bos_once(tokenizer):
    prompt = one(tokenizer, messages=[{"role": "user", "content": "leek"}])
    expected = "<bos><turn>user\nleek\n<turn>model\n" + DEFAULT_PREFILL
    assert list(prompt.token_ids) == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert prompt.text == expected


CHATML = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}<|im_start|>"


def test_a_conversation_has_no_bos_where_its_template_writes_none():
    """As trainers and vLLM's chat read it: the template's own ids. A plain prompt of the same tokenizer has one all the same."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    chat = [{"role": "user", "content": "leek"}]
    ids = encode(tokenizer, tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + DEFAULT_PREFILL)
    assert BOS not in ids
    assert list(one(tokenizer, messages=chat).token_ids) == ids
    assert list(one(tokenizer, prompt_token_ids=ids).token_ids) == ids
    assert list(one(tokenizer, prompt_token_ids=[BOS, *ids]).token_ids) == [BOS, *ids]
    assert one(tokenizer, prompt="leek").token_ids[0] == BOS
    with pytest.raises(EngineError, match=r"BOS .* at position 1"):
        one(tokenizer, prompt_token_ids=[ids[0], BOS, *ids[1:]])
    with pytest.raises(EngineError, match="found 0 BOS"):
        one(tokenizer, messages=chat, bos=True)


@pytest.mark.parametrize("template", ["<bos>" + CHATML, "{% if first %}{{ bos_token }}{% endif %}" + CHATML])
def test_ready_made_ids_without_the_bos_that_the_template_writes_are_refused(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(EngineError, match="found 0 BOS"):
        one(tokenizer, prompt_token_ids=encode(tokenizer, "leek" + DEFAULT_PREFILL))


def test_a_gemma_template_that_lost_its_bos_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    type(tokenizer).__name__, before = "GemmaTokenizer", type(tokenizer).__name__
    try:
        with pytest.raises(EngineError, match="found 0 BOS"):
            one(tokenizer, messages=[{"role": "user", "content": "leek"}])
    finally:
        type(tokenizer).__name__ = before


def test_a_template_that_writes_two_bos_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    with pytest.raises(EngineError, match="found 2 BOS"):
        one(tokenizer, messages=[{"role": "user", "content": "leek"}])


def test_a_template_that_refuses_is_a_reason():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(EngineError, match=r"chat template refuses.*no system role"):
        one(tokenizer, messages=[{"role": "user", "content": "leek"}])
    tokenizer.chat_template = None
    with pytest.raises(EngineError, match="no chat template"):
        one(tokenizer, messages=[{"role": "user", "content": "leek"}])


def test_a_prompt_that_ends_with_the_prefill_is_refused_and_an_empty_prefill_takes_it(tokenizer):
    with pytest.raises(EngineError, match='already ends with the prefill; pass --prefill ""'):
        one(tokenizer, prompt="leek" + DEFAULT_PREFILL)
    assert one(tokenizer, prompt="leek" + DEFAULT_PREFILL, prefill="").token_ids == one(tokenizer, prompt="leek").token_ids


def test_ready_made_ids_are_taken_as_they_are_and_checked(tokenizer):
    ids = list(one(tokenizer, prompt="leek").token_ids)
    assert list(one(tokenizer, prompt_token_ids=ids).token_ids) == ids
    with pytest.raises(EngineError, match="expected the prefill"):
        one(tokenizer, prompt_token_ids=ids[:-1])
    with pytest.raises(EngineError, match="another tokenizer"):
        one(tokenizer, prompt_token_ids=[BOS, len(tokenizer), *ids[1:]])


def test_a_prompt_that_is_too_long_is_refused(tokenizer):
    length = len(one(tokenizer, prompt="leek").token_ids)
    assert one(tokenizer, prompt="leek", max_length=length)
    with pytest.raises(EngineError, match=f"has {length} tokens; the model has room for {length - 1}"):
        one(tokenizer, prompt="leek", max_length=length - 1)


def test_bad_rows_stay_in_their_place(tokenizer):
    rows = rows_from_mappings([{"id": str(index), "prompt": "leek " * (index + 1)} for index in range(2500)])
    mixed = [BadRow(9, "broken"), *rows]
    found = list(tokenize_rows(mixed, tokenizer, max_length=40))
    assert found[0] == mixed[0]
    assert [item.id for item in found[1:]] == [row.id for row in rows]
    assert isinstance(found[-1], BadRow) and "tokens" in found[-1].reason
    # Oracle: rows encoded one at a time, across the borders of the chunks.
    for index in (0, 1, 5):
        assert list(found[index + 1].token_ids) == tokenizer(rows[index].prompt + DEFAULT_PREFILL)["input_ids"]


def test_the_digest_is_sha256_over_little_endian_words():
    prompt = Prompt("a", (1, 258))
    assert token_ids_sha256(prompt) == hashlib.sha256(b"\x01\x00\x00\x00\x02\x01\x00\x00").hexdigest()


def test_the_digest_of_a_set_ignores_order_and_sees_ids_and_tokens():
    first, second = Prompt("a", (1, 2)), Prompt("b", (3,))
    whole = token_ids_digest([first, second])
    assert whole == token_ids_digest([second, first])
    assert whole == token_ids_digest({"b": token_ids_sha256(second), "a": token_ids_sha256(first)})
    others = [[first], [Prompt("b", (1, 2)), Prompt("a", (3,))], [first, Prompt("b", (4,))]]
    assert len({whole, *map(token_ids_digest, others)}) == 4


def test_another_tokenizer_gives_another_digest(tokenizer):
    rows = rows_from_mappings([{"id": "a", "prompt": "leek and tofu"}])
    other = make_tokenizer(size=300)
    assert token_ids_digest(tokenize(rows, tokenizer)) != token_ids_digest(tokenize(rows, other))


def test_a_continuation_is_what_the_whole_text_gains(tokenizer):
    before, after = encode(tokenizer, 'leek {"decision": "write'), encode(tokenizer, '", "text": "국 좋다"}')
    assert decode_continuation(tokenizer, before, [*after, 1]) == '", "text": "국 좋다"}'


def test_a_template_that_asks_for_the_date_gets_the_one_it_is_told() -> None:
    """Oracle: the text with the date written out. Llama 3.2's template asks so; one that does not gets nothing, and says none."""
    tokenizer = make_tokenizer()
    dated = "{{ bos_token }}{{ strftime_now('%d %b %Y %H:%M') }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rows = [{"id": "a", "messages": [{"role": "user", "content": "milk"}]}, {"id": "b", "prompt": "milk"}]
    day = datetime.date(2026, 1, 31)
    for template, date, text in (
        (dated, "2026-01-31", "31 Jan 2026 00:00milk"),
        ("{{ bos_token }}{{ messages[0]['content'] }}", None, "milk"),
    ):
        tokenizer.chat_template = template
        chat, plain = tokenize(rows_from_mappings(rows), tokenizer, date=day)
        assert (chat.date, plain.date) == (date, None)
        assert chat.text == tokenizer.bos_token + text + DEFAULT_PREFILL
    tokenizer.chat_template = dated
    (chat, _), today = tokenize(rows_from_mappings(rows), tokenizer), datetime.date.today()
    assert chat.date in (today.isoformat(), (today - datetime.timedelta(1)).isoformat())
