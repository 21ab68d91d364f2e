"""Batches that a device cannot hold. Oracle: the same engine on a device that can."""

from __future__ import annotations

import pytest
import torch

from lora_merge.engines.errors import EngineError
from lora_merge.engines.fitting import run_fitting
from lora_merge.engines.protocol import GenerationLimits
from lora_merge.engines.transformers_engine import TransformersEngine, usual_batches


class SmallDevice:
    """Runs at most ``rows`` at once and remembers what it was asked to."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.asked: list[int] = []
        self.done: list[int] = []

    def run(self, batch, tell):
        self.asked.append(len(batch))
        tell(1)  # some prompts end before memory does
        if len(batch) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        tell(len(batch) - 1)
        self.done += batch


@pytest.mark.parametrize(("rows", "asked", "most"), [(9, [5, 4, 1], 5), (4, [5, 3, 2, 3, 1, 1], 3), (1, [5, 3, 2, *10 * [1]], 1)])
def test_batches_are_halved_until_they_fit_and_stay_small(rows, asked, most):
    device, told = SmallDevice(rows), []
    assert run_fitting([[0, 1, 2, 3, 4], [5, 6, 7, 8], [9]], device.run, [7] * 10, told.append) == most
    assert device.done == list(range(10))
    assert device.asked == asked
    assert sum(told) == 10


def test_a_prompt_that_does_not_fit_alone_is_refused():
    with pytest.raises(EngineError, match="memory is full with one prompt of 8 tokens"):
        run_fitting([[0, 1]], SmallDevice(0).run, [8, 9], lambda advance: None)


def test_an_engine_on_a_small_device_gives_what_a_large_one_gives(model, tokenizer, prompts, labels, monkeypatch):
    """Scores to rounding of another batch shape, texts token for token; memory runs out in the middle of a batch too."""
    engine = TransformersEngine.from_model(model, tokenizer, batch_size=64, write_batch_size=64)
    limits = GenerationLimits(max_new_tokens=6)
    scores, texts = engine.score(prompts, labels), engine.generate(prompts, limits)
    through = type(engine._live()).last_logits
    calls = []

    def small(live, ids, **settings):
        calls.append(len(ids))
        if len(ids) > 3 and len(calls) % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        return through(live, ids, **settings)

    monkeypatch.setattr(type(engine._live()), "last_logits", small)
    told: list[float] = []
    again = engine.score(prompts, labels, progress=told.append)
    assert [score.skip_probability for score in again] == pytest.approx([score.skip_probability for score in scores], abs=1e-6)
    assert sum(told) == len(prompts)
    assert engine.generate(prompts, limits) == texts
    assert max(calls) > 3, "some batch was too large"


def test_what_did_not_fit_is_known_and_tried_again_by_the_next_call(model, tokenizer, prompts, labels, monkeypatch):
    """A chunk of a resumed or divided run has to make the batches that it makes in an undivided one."""
    engine = TransformersEngine.from_model(model, tokenizer, batch_size=64, write_batch_size=64)
    limits = GenerationLimits(max_new_tokens=2)
    engine.score(prompts, labels)
    engine.generate(prompts, limits)
    assert (engine.score_fit, engine.write_fit) == (None, None)
    through = type(engine._live()).last_logits
    asked: list[int] = []

    def small(live, ids, **settings):
        asked.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        return through(live, ids, **settings)

    monkeypatch.setattr(type(engine._live()), "last_logits", small)
    for work in (lambda: engine.score(prompts, labels), lambda: engine.generate(prompts, limits)):
        asked.clear()
        work()
        first = list(asked)
        assert max(first) > 2
        asked.clear()
        work()
        assert asked == first
    assert engine.score_fit in (1, 2) and engine.write_fit in (1, 2)
    settings = engine.describe()["settings"]
    assert (settings["batch_size"], settings["write_batch_size"]) == (engine.score_fit, engine.write_fit)


def test_a_cpu_has_the_small_batches():
    assert usual_batches("cpu") == (32, 128)
    if torch.cuda.is_available():
        assert usual_batches("cuda") == (1024, 2048)
