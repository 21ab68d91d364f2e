"""The two phases on a real, tiny model, and what a run leaves behind."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lora_merge.engines import transformers_engine
from lora_merge.engines.labels import resolve_labels
from lora_merge.engines.model_files import load_tokenizer
from lora_merge.engines.prompts import encode, read_prompts
from lora_merge.engines.protocol import Completion, GenerationLimits
from lora_merge.engines.scores import DecisionScore
from lora_merge.engines.transformers_engine import TransformersEngine
from lora_merge.generation.answers import read_answer
from lora_merge.generation.api import generate_gated
from lora_merge.generation.errors import GenerationError
from lora_merge.generation.options import EngineOptions, GateOptions, GenerateOptions
from lora_merge.generation.phases import Phases
from lora_merge.generation.record import quarantine_path, read_record
from lora_merge.generation.shards import Shard
from tests.generation.builders import make_prompts, read_rows, write_lines
from tests.generation.fakes import FakeEngine, chance, open_fake

TOKENS = 12


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", make_prompts(120))


def generate(checkpoint, prompts, out, threshold=0.3, *, open_engine=None, say=lambda text: None, phases=None, **options):
    settings = GenerateOptions(threshold, max_tokens=TOKENS, **options)
    rest = {} if open_engine is None else {"open_engine": open_engine}
    return generate_gated(checkpoint, prompts, out, settings, say=say, phases=phases, **rest)


@pytest.fixture(scope="module")
def two_phase(pristine, many, tmp_path_factory):
    result = generate(pristine, many, tmp_path_factory.mktemp("out") / "r.jsonl", chunk_size=50)
    return result, read_rows(result.out)


def test_two_phases_do_the_work_of_one(pristine, many, two_phase):
    """Oracle: the same engine writing decision and text in one go, as the process before did."""
    _, rows = two_phase
    with_engine = TransformersEngine.from_checkpoint(pristine, dtype="float32", device="cpu")
    prompts = read_prompts(str(many), with_engine.tokenizer)
    labels = resolve_labels(with_engine.tokenizer, prompts)
    one_shot = with_engine.generate(prompts, GenerationLimits(1 + TOKENS))
    assert [row["id"] for row in rows] == [prompt.id for prompt in prompts]
    assert [row["decision"] for row in rows] == [labels.decision_of(whole.token_ids[0]) for whole in one_shot]
    written = 0
    for row, whole in zip(rows, one_shot, strict=True):
        if row["text_status"] is None:
            continue
        written += 1
        expected = read_answer('{"decision": "' + whole.text)
        assert (row["text"], row["text_status"], row["raw"]) == (expected.text, expected.status, expected.raw)
        assert row["text_tokens"] == len(whole.token_ids) - 1
        assert row["finish_reason"] == whole.finish_reason
    assert written > 10


def test_the_threshold_acts_before_writing(pristine, many, two_phase, tmp_path):
    """Writing everything and dropping afterwards keeps the same texts, and costs more tokens."""
    _, rows = two_phase
    result = generate(pristine, many, tmp_path / "all.jsonl", chunk_size=50, write_all=True)
    dropped_later = read_rows(result.out)
    for row, other in zip(rows, dropped_later, strict=True):
        assert row["kept"] == other["kept"] == (row["decision"] == "write" and row["skip_probability"] <= 0.3)
        assert (row["text_status"] is not None) == row["kept"]
        assert (other["text_status"] is not None) == (row["decision"] == "write")
        if row["kept"]:
            assert (row["text"], row["raw"]) == (other["text"], other["raw"])
    wrote, kept = (sum(row["text_tokens"] for row in found) for found in (dropped_later, rows))
    print(f"threshold before writing: {kept} tokens instead of {wrote}, {wrote - kept} saved")
    assert 0 < kept < wrote


def test_other_is_counted_and_never_written(two_phase):
    result, rows = two_phase
    others = [row for row in rows if row["decision"] == "other"]
    counts = result.record.result["counts"]
    assert counts["other"] == len(others) > 10
    assert any(row["skip_probability"] <= 0.3 for row in others)  # the threshold alone would have kept these
    assert not any(row["kept"] or row["text_status"] for row in others)
    assert counts["skip"] + counts["write"] + counts["other"] == counts["rows"] == 120
    assert counts["kept"] + counts["above_threshold"] == counts["write"]


class Elsewhere(FakeEngine):
    """Prompts that the adapter was not trained for: the labels hold a quarter of the probability, no text is JSON."""

    def score(self, prompts, labels, **rest):
        quarter = math.log(0.25)
        return [
            DecisionScore.from_log_probabilities(prompt.id, quarter - 9, quarter, labels.write.token_id, labels)
            for prompt in prompts
        ]

    def generate(self, prompts, limits, **rest):
        return [Completion(prompt.id, (7, 8), "and then", "length") for prompt in prompts]


def test_prompts_of_another_kind_are_said_once_and_early(checkpoint, many, tmp_path):
    said = []
    generate(checkpoint, many, tmp_path / "r.jsonl", open_engine=lambda *_: Elsewhere(), say=said.append, chunk_size=50)
    doubts = [text for text in said if text.startswith("warning: ")]
    assert len(doubts) == 2
    assert "the two labels hold 0.250 of the probability on average of 50 prompts so far" in doubts[0]
    assert "120 of 120 texts are no JSON with the text key (120 were cut off at the limit)" in doubts[1]
    said.clear()
    generate(checkpoint, many, tmp_path / "usual.jsonl", open_engine=open_fake, say=said.append)
    assert not [text for text in said if text.startswith("warning: ")]


def test_rows_that_cannot_be_used_are_set_aside_and_all_rows_add_up(checkpoint, tmp_path):
    rows = make_prompts(200)
    rows[7:7] = [{"id": "bad", "prompt": ""}, b"{"]
    prompts = write_lines(tmp_path / "p.jsonl", rows)
    said = []
    result = generate(checkpoint, prompts, tmp_path / "r.jsonl", open_engine=open_fake, say=said.append)
    assert result.quarantine == quarantine_path(tmp_path / "r.jsonl")
    assert [row["line"] for row in read_rows(result.quarantine)] == [8, 9]
    assert len(read_rows(result.out)) == 200
    assert (result.record.result["input_rows"], result.record.result["quarantined"]) == (202, 2)
    assert any(text.startswith("warning: 2 of 202 rows") for text in said)


def test_too_many_of_them_stop_the_run_before_a_model_loads(checkpoint, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [*make_prompts(98), b"", b"{"])
    with pytest.raises(GenerationError, match=r"2 of 100 rows .* that is 2\.0%, above --max-quarantine 1\.0%"):
        generate(checkpoint, prompts, tmp_path / "r.jsonl", open_engine=None)
    assert len(read_rows(quarantine_path(tmp_path / "r.jsonl"))) == 2  # to see why
    assert not (tmp_path / "r.jsonl").exists()
    generate(checkpoint, prompts, tmp_path / "r.jsonl", open_engine=open_fake, max_quarantine=0.02)


def test_nothing_but_bad_rows_is_refused_whatever_is_allowed(checkpoint, tmp_path):
    prompts = write_lines(tmp_path / "p.jsonl", [b"{"])
    with pytest.raises(GenerationError, match="no prompt is left"):
        generate(checkpoint, prompts, tmp_path / "r.jsonl", open_engine=open_fake, max_quarantine=1.0)


def test_room_is_left_for_what_will_be_written(checkpoint, tmp_path):
    """The checkpoint has 160 positions; a prompt, the decision and 12 tokens must fit."""
    prefill = encode(load_tokenizer(checkpoint), '{"decision": "')
    for length, fits in ((160 - 1 - TOKENS, True), (160 - TOKENS, False)):
        ids = [2, *[9] * (length - 1 - len(prefill)), *prefill]
        prompts = write_lines(tmp_path / "p.jsonl", [{"id": "a", "prompt_token_ids": ids}])
        out = tmp_path / f"{length}.jsonl"
        if fits:
            result = generate(checkpoint, prompts, out, open_engine=open_fake)
            assert read_rows(result.out)[0]["prompt_tokens"] == length
        else:
            with pytest.raises(GenerationError, match="it has"):
                generate(checkpoint, prompts, out, open_engine=open_fake)
            assert "the model has room for 147" in read_rows(quarantine_path(out))[0]["reason"]


def test_no_room_at_all_is_said(checkpoint, prompts, tmp_path):
    with pytest.raises(GenerationError, match="no room is left for a prompt"):
        generate(checkpoint, prompts, tmp_path / "r.jsonl", engine=EngineOptions(max_model_len=TOKENS + 1))


def test_order_fields_and_broken_texts_survive(checkpoint, tmp_path):
    inputs = make_prompts(90)
    prompts = write_lines(tmp_path / "p.jsonl", inputs)
    result = generate(checkpoint, prompts, tmp_path / "r.jsonl", 0.4, open_engine=open_fake, chunk_size=7)
    rows = read_rows(result.out)
    assert [row["id"] for row in rows] == [given["id"] for given in inputs]
    assert [row["fields"] for row in rows] == [{"dish": given["dish"], "id_of_dish": given["id_of_dish"]} for given in inputs]
    broken = [row for row in rows if row["text_status"] == "broken"]
    assert {row["id"] for row in broken} == {row["id"] for row in rows if row["kept"] and chance(row["id"], "broken") < 0.1}
    assert broken and all(row["text"] is None and row["id"] in row["raw"] for row in broken)
    fine = [row for row in rows if row["text_status"] == "ok"]
    assert fine and all(row["text"] == f"함께 담아 보세요 {row['id']}" for row in fine)


def test_phases_are_watched_and_summed(checkpoint, prompts, tmp_path):
    phases = Phases()
    result = generate(checkpoint, prompts, tmp_path / "r.jsonl", 0.5, open_engine=open_fake, phases=phases, chunk_size=16)
    assert phases.decide.done == phases.decide.total == 40
    assert phases.write.done == phases.write.total == result.record.result["counts"]["written"] > 0
    assert phases.tokenize.done == 40
    assert phases.check.done == phases.check.total
    assert set(result.record.result["phases"]) == {"check", "tokenize", "restore", "load", "decide", "write", "save"}


def test_the_record_says_what_the_results_are(checkpoint, prompts, tmp_path):
    result = generate(checkpoint, prompts, tmp_path / "r.jsonl", 0.25, open_engine=open_fake)
    record = read_record(result.out)
    assert record == result.record
    assert record.settings["skip_threshold"] == 0.25
    assert record.settings["max_tokens"] == TOKENS
    assert record.prompts["accepted"] == 40
    assert record.engine["kind"] == "transformers"
    assert record.is_complete
    summary = json.loads(json.dumps(result.to_json()))
    assert summary["counts"]["rows"] == 40 and summary["gated"] is True


@pytest.mark.parametrize("fault", ["order", "short", "texts"])
def test_an_engine_that_mixes_up_its_prompts_saves_nothing(checkpoint, prompts, tmp_path, fault):
    class Mixed(FakeEngine):
        def score(self, prompts, labels, *, progress):
            scores = super().score(prompts, labels, progress=progress)
            return {"order": scores[::-1], "short": scores[:-1]}.get(fault, scores)

        def generate(self, prompts, limits, *, progress):
            return super().generate(prompts, limits, progress=progress)[::-1]

    with pytest.raises(GenerationError, match="or in another order; nothing was saved"):
        generate(checkpoint, prompts, tmp_path / "r.jsonl", 0.5, open_engine=lambda model, settled: Mixed())
    assert not (tmp_path / "r.jsonl").exists()
    assert not (tmp_path / "r.jsonl.run.json").exists()


def test_the_engine_is_closed_whatever_happens(checkpoint, prompts, tmp_path):
    class Failing(FakeEngine):
        def generate(self, prompts, limits, *, progress):
            raise RuntimeError("out of luck")

    engine = Failing()
    with pytest.raises(RuntimeError, match="out of luck"):
        generate(checkpoint, prompts, tmp_path / "r.jsonl", 0.5, open_engine=lambda model, settled: engine)
    assert engine.is_closed


@pytest.mark.parametrize("shard", ["1/1", "2/2"])
@pytest.mark.parametrize(
    ("given", "on_gpu", "expected"),
    [(None, True, (1024, 2048)), (None, False, (32, 128)), (7, True, (1024, 7)), (0, False, (32, 0))],
)
def test_the_engine_is_opened_for_the_prompts_and_the_device(
    given, on_gpu, expected, shard, checkpoint, many, tmp_path, monkeypatch
):
    """Every shard by the longest prompt of the whole file, so that all of them run alike. The engine refuses a batch of 0."""
    monkeypatch.setattr(transformers_engine, "resolve_device", lambda device: torch.device("cuda" if on_gpu else "cpu"))
    seen = []

    def opened(model, settled):
        seen.append(settled)
        return open_fake(model, settled)

    engine = EngineOptions(engine="hf", batch_size=given)
    generate(checkpoint, many, tmp_path / "r.jsonl", open_engine=opened, engine=engine, shard=Shard.parse(shard), chunk_size=60)
    longest = max(len(prompt.token_ids) for prompt in read_prompts(str(many), load_tokenizer(checkpoint)))
    assert seen[0].longest == longest + 1 + TOKENS
    assert seen[0].hf_options() == {"batch_size": expected[0], "write_batch_size": expected[1]}
    assert seen[0].vllm_options()["longest"] == seen[0].longest


def test_a_prompt_that_the_model_cannot_embed_is_set_aside_and_the_others_get_their_rows(checkpoint, tmp_path):
    """One in the middle of the second chunk, whose token the tokenizer knows and the model does not."""
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image {number}>" for number in range(420)]})
    tokenizer.save_pretrained(checkpoint)
    rows = make_prompts(20)
    rows[12]["prompt"] += tokenizer.convert_ids_to_tokens(420)
    path = write_lines(tmp_path / "p.jsonl", rows)
    gate = GateOptions(allow_ungated=True)
    result = generate(checkpoint, path, tmp_path / "r.jsonl", chunk_size=8, gate=gate, max_quarantine=0.05)
    assert [row["id"] for row in read_rows(result.out)] == [row["id"] for row in rows if row is not rows[12]]
    (aside,) = read_rows(quarantine_path(result.out))
    assert aside["line"] == 13 and "token 420 ('<image " in aside["reason"]
