"""The vLLM engine, one real engine for the whole file. Oracle: the Transformers engine, float32 in both.

The checkpoint asks for repetition_penalty 1.7 and its prompts outgrow the sliding window.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
from types import SimpleNamespace

import pytest

from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import DecisionLabels, Label
from lora_merge.engines.prompts import Prompt
from lora_merge.engines.protocol import Engine, GenerationLimits
from lora_merge.engines.transformers_engine import TransformersEngine

vllm_engine = pytest.importorskip("lora_merge.engines.vllm_engine")
vllm_settings = pytest.importorskip("lora_merge.engines.vllm_settings")
pytest.importorskip("vllm")


MIXED = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def vllm(gemma_folder):
    before = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    engine = vllm_engine.VllmEngine(gemma_folder, max_model_len=128)
    assert "TORCHDYNAMO_DISABLE" not in os.environ or "TORCHDYNAMO_DISABLE" in before
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def transformers(gemma_folder):
    return TransformersEngine.from_checkpoint(gemma_folder, device="cpu")


def test_no_collection_goes_through_the_objects_of_the_libraries(vllm):
    """First in the file: another engine that closes sees to the collection of all."""
    assert gc.get_freeze_count() > 100_000


def test_scores_are_those_of_transformers(vllm, transformers, prompts, labels):
    steps = []
    found = vllm.score(prompts, labels, progress=steps.append)
    assert sum(steps) == len(prompts) and len(steps) > 1
    assert {score.decision for score in found} == {score.decision for score in transformers.score(prompts, labels)}
    for prompt, ours, theirs in zip(prompts, found, transformers.score(prompts, labels), strict=True):
        assert ours.id == prompt.id
        assert ours.log_p_skip == pytest.approx(theirs.log_p_skip, abs=1e-3)
        assert ours.log_p_write == pytest.approx(theirs.log_p_write, abs=1e-3)
        assert ours.skip_probability == pytest.approx(theirs.skip_probability, abs=1e-3)
        assert ours.argmax == theirs.argmax


def test_one_group_of_layers_gives_the_same_scores(transformers, gemma_folder, prompts, labels):
    """Also of prompts that outgrow the window of 12: keeping more than the window does not attend to more."""
    engine = vllm_engine.VllmEngine(gemma_folder, dtype="float32", max_model_len=128, disable_hybrid_kv_cache_manager=True)
    with contextlib.closing(engine):
        assert max(len(prompt.token_ids) for prompt in prompts) > 12
        for ours, theirs in zip(engine.score(prompts, labels), transformers.score(prompts, labels), strict=True):
            assert ours.skip_probability == pytest.approx(theirs.skip_probability, abs=1e-3)


@pytest.mark.parametrize(
    ("on_cpu", "longest", "layers", "given", "expected"),
    [
        (False, 12, MIXED, None, (True, 12)),
        (False, 12, MIXED, 128, (True, 12)),
        (False, 8, MIXED, 10, (True, 10)),
        (False, 13, MIXED, None, (None, None)),
        (False, 13, MIXED, 128, (None, 128)),
        (False, None, MIXED, None, (None, None)),
        (False, 12, 3 * ["full_attention"], None, (None, None)),
        (False, 12, [*MIXED[1:], "linear_attention"], None, (None, None)),
        (False, 12, None, None, (None, None)),
        (True, 12, MIXED, 128, (None, 128)),
    ],
)
def test_layers_are_one_group_where_the_window_holds_every_sequence(
    on_cpu, longest, layers, given, expected, gemma_folder, tmp_path, monkeypatch
):
    """On a GPU, and only for the two kinds of layers that vLLM can treat alike. Then no layer has to have room for more tokens
    than the window: vLLM's ``max_memory_usage_bytes`` of full attention is that of ``max_model_len``, and it refuses to start
    where that does not fit."""
    seen = []

    class Llm:
        def __init__(self, **arguments: object) -> None:
            seen.append((arguments.get("disable_hybrid_kv_cache_manager"), arguments.get("max_model_len")))
            raise ValueError("far enough")

    folder = tmp_path / "model"
    shutil.copytree(gemma_folder, folder)
    config = json.loads((folder / "config.json").read_text()) | {"layer_types": layers, "sliding_window": 12}
    (folder / "config.json").write_text(json.dumps(config))
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: on_cpu))
    monkeypatch.setattr(vllm_engine, "_import_vllm", lambda: SimpleNamespace(__version__="0", LLM=Llm, platforms=platforms))
    with pytest.raises(EngineError, match="far enough"):
        vllm_engine.VllmEngine(folder, longest=longest, max_model_len=given)
    assert seen == [expected]


@pytest.mark.parametrize(("on_cpu", "given", "expected"), [(False, None, "spawn"), (False, "fork", "fork"), (True, None, None)])
def test_on_a_gpu_the_engine_s_process_is_spawned(on_cpu, given, expected, gemma_folder, monkeypatch):
    """A forked one cannot use CUDA once torch.cuda.is_available() was called, which our own commands do before they open it."""
    name, seen = "VLLM_WORKER_MULTIPROC_METHOD", []

    class Llm:
        def __init__(self, **_: object) -> None:
            seen.append(os.environ.get(name))
            raise ValueError("far enough")

    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    platforms = SimpleNamespace(current_platform=platform)
    monkeypatch.setattr(vllm_engine, "_import_vllm", lambda: SimpleNamespace(__version__="0", LLM=Llm, platforms=platforms))
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    with pytest.raises(EngineError, match="far enough"):
        vllm_engine.VllmEngine(gemma_folder)
    assert seen == [expected] and os.environ.get(name) == given


def test_a_label_of_any_rank_is_exact(vllm, transformers, prompts, labels):
    """The likeliest token as one label and an unlikely one as the other: the ids are asked for, not the top ranks."""
    best = transformers.score(prompts[:1], labels)[0].argmax
    ranked = DecisionLabels(Label("best", best), labels.write if labels.write.token_id != best else labels.skip)
    ours, theirs = vllm.score(prompts[:1], ranked)[0], transformers.score(prompts[:1], ranked)[0]
    assert ours.decision == theirs.decision == "skip"
    assert (ours.log_p_skip, ours.log_p_write) == pytest.approx((theirs.log_p_skip, theirs.log_p_write), abs=1e-3)


def test_texts_are_those_of_transformers_and_the_generation_config_is_not_applied(vllm, transformers, prompts):
    everything = transformers.generate(prompts, GenerationLimits(20))
    assert vllm.generate(prompts, GenerationLimits(20)) == everything
    stop = everything[0].token_ids[6]
    limits = GenerationLimits(20, stop_token_ids=(stop,))
    stopped = vllm.generate(prompts, limits)
    assert stopped == transformers.generate(prompts, limits)
    assert stopped[0].finish_reason == "stop" and stopped[0].token_ids[-1] == stop
    assert "length" in {completion.finish_reason for completion in stopped}


def test_two_phases_write_what_one_does(vllm, prompts, labels):
    """Oracle: the same engine deciding and writing in one go, as ``vllm-one-shot`` of the benchmark does."""
    whole = vllm.generate(prompts, GenerationLimits(13))
    decided = vllm.score(prompts, labels)
    assert [score.argmax for score in decided] == [completion.token_ids[0] for completion in whole]
    going_on = [index for index, completion in enumerate(whole) if len(completion.token_ids) > 1]
    assert len(going_on) > len(prompts) // 2
    continued = [Prompt(prompts[index].id, (*prompts[index].token_ids, decided[index].argmax)) for index in going_on]
    written = vllm.generate(continued, GenerationLimits(12))
    assert [text.token_ids for text in written] == [whole[index].token_ids[1:] for index in going_on]


def test_prompts_can_be_forgotten(vllm, labels):
    """Oracle: vLLM's own count of prompt tokens that it took from its cache; blocks are of 32."""
    from vllm import SamplingParams

    prompt = Prompt("long", (2, *range(5, 90)))

    def cached() -> int:
        request = {"prompt_token_ids": list(prompt.token_ids)}
        return vllm._live().generate(request, SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens

    before = vllm.score([prompt], labels)
    assert cached() >= 32
    vllm.forget()
    assert cached() == 0
    assert vllm.score([prompt], labels)[0].skip_probability == pytest.approx(before[0].skip_probability, abs=1e-6)


def test_a_prompt_without_room_is_refused_before_anything_runs(vllm, labels):
    with pytest.raises(EngineError, match=r"prompt 'long' has 128 tokens.*room for 128"):
        vllm.score([Prompt("long", (2,) + (5,) * 127)], labels)


def test_a_token_without_a_row_is_refused(vllm, labels):
    """vLLM pads its embedding to a multiple of 64 rows, and would take one that no checkpoint has."""
    with pytest.raises(EngineError, match="prompt 'strange' has token 420; the model has 420, counted from 0"):
        vllm.score([Prompt("strange", (2, 420))], labels)


def test_it_says_what_it_is(vllm):
    assert isinstance(vllm, Engine)
    described = vllm.describe()
    assert described["kind"] == "vllm" and described["dtype"] == "float32"
    settings = described["settings"]
    assert settings["max_model_len"] == 128
    assert settings["end_ids"] == [1, 106]
    assert settings["generation_config"] == "vllm"
    if described["device"] == "cpu":
        assert settings["block_size"] == 32
    assert "dtype" not in settings  # the one that was asked for; the one that is used stands above
    assert settings["environment"] is None  # what vLLM set for itself while it loaded is nobody's choice
    assert vllm_settings.moving_environment() is None
    assert settings["tensor_parallel_size"] == 1 and settings["kv_cache_dtype"] == "auto"  # nobody gave them


def test_it_runs_the_checkpoint_that_it_was_given(vllm, gemma_folder):
    """Oracle: vLLM's own configuration, which a redirection or another argument changes."""
    settings = vllm.describe()["settings"]
    assert settings["model"] == vllm._live().llm_engine.vllm_config.model_config.model == str(gemma_folder)
    assert (settings["adapter"], settings["quantization"], settings["load_format"]) == (None, None, "auto")


def test_trust_counts_where_there_is_code_to_trust(vllm, monkeypatch):
    config = vllm._live().llm_engine.vllm_config
    monkeypatch.setattr(config.model_config, "trust_remote_code", True)
    assert vllm.describe()["settings"]["trust_remote_code"] is False
    monkeypatch.setattr(config.model_config.hf_config, "auto_map", {"AutoModelForCausalLM": "modeling.Own"}, raising=False)
    assert vllm.describe()["settings"]["trust_remote_code"] is True


def test_an_environment_that_puts_another_model_in_its_place_is_refused(gemma_folder, tmp_path, monkeypatch):
    """VLLM_MODEL_REDIRECT_PATH: vLLM 0.32's ModelConfig takes the folder that is written there, and says so in its log only."""
    redirects = tmp_path / "map.txt"
    redirects.write_text(f"{gemma_folder} {tmp_path / 'another'}\n")
    monkeypatch.setenv("VLLM_MODEL_REDIRECT_PATH", str(redirects))
    monkeypatch.setattr(vllm_engine, "_import_vllm", lambda: pytest.fail("was imported"))
    with pytest.raises(EngineError, match=r"VLLM_MODEL_REDIRECT_PATH is set: vLLM would load another checkpoint.*; unset it"):
        vllm_engine.VllmEngine(gemma_folder)
    monkeypatch.delenv("VLLM_MODEL_REDIRECT_PATH")
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    with pytest.raises(EngineError, match="choose experts by a simulation"):
        vllm_engine.VllmEngine(gemma_folder)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("model_config", "model", "other", "took the checkpoint of .*other instead of that of .*given; nothing was run"),
        ("model_config", "tokenizer", "other", "took the tokenizer of .*other"),
        ("model_config", "hf_config_path", "other", "took the configuration of .*other"),
        ("load_config", "load_format", "dummy", "made up weights instead of loading those of .*given"),
    ],
)
def test_an_engine_that_loaded_something_else_is_closed_and_refused(
    part, name, value, message, gemma_folder, tmp_path, monkeypatch
):
    given, ended = tmp_path / "given", []
    given.symlink_to(gemma_folder)  # a name that is written otherwise is not another folder
    model = SimpleNamespace(model=str(gemma_folder), tokenizer=str(given), hf_config_path=None)
    config = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto"))
    vllm_settings.check_loaded(given, config)
    setattr(getattr(config, part), name, value if name == "load_format" else str(tmp_path / value))

    class Llm:
        def __init__(self, **_: object) -> None:
            core = SimpleNamespace(shutdown=lambda: ended.append(True))
            self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=core)

    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setattr(vllm_engine, "_import_vllm", lambda: SimpleNamespace(__version__="0", LLM=Llm, platforms=platforms))
    with pytest.raises(EngineError, match=message):
        vllm_engine.VllmEngine(given)
    assert ended == [True]


def test_variables_that_can_move_a_number_are_told(monkeypatch):
    """Where they say something else than the default. Oracle: vLLM's ``envs``, which reads them."""
    from vllm import envs

    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    assert vllm_settings.moving_environment() is None
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "5",
        "VLLM_USAGE_SOURCE": "image",
        "VLLM_BUILD_COMMIT": "abc",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_BATCH_INVARIANT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    assert vllm_settings.moving_environment() is None
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "medium")
    assert vllm_settings.moving_environment() == {"VLLM_CPU_ATTN_SPLIT_KV": False, "VLLM_FLOAT32_MATMUL_PRECISION": "medium"}
    assert envs.environment_variables["VLLM_CPU_ATTN_SPLIT_KV"]() is False
    assert os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "0"


def test_an_engine_that_dies_is_one_line(vllm, prompts, labels, monkeypatch):
    from vllm.v1.engine.exceptions import EngineDeadError

    def dead(*_: object, **__: object) -> None:
        raise EngineDeadError

    monkeypatch.setattr(vllm._live(), "generate", dead)
    with pytest.raises(EngineError, match="engine process ended while it worked"):
        vllm.score(prompts, labels)


def test_no_prompts_are_no_work(vllm, labels):
    assert vllm.score([], labels) == []
    assert vllm.generate([], GenerationLimits(4)) == []


def test_a_closed_engine_says_so(vllm, prompts, labels):
    """Last in the file: the engine is gone afterwards."""
    vllm.close()
    assert gc.get_freeze_count() == 0
    vllm.close()
    with pytest.raises(EngineError, match="closed"):
        vllm.score(prompts, labels)


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "auto"),
        ("float16", "auto", "auto"),
        (None, "auto", "auto"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_auto_is_the_checkpoint_s_own_type(own, asked, expected, gemma_folder, tmp_path):
    """vLLM's own word for it means a 16-bit type where a checkpoint is in float32; Transformers takes that as it is."""
    folder = shutil.copytree(gemma_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": own}))
    assert vllm_settings.asked_dtype(folder, asked) == expected
    assert vllm_settings.asked_dtype("org/model", "auto") == "auto"  # vLLM itself finds out what a hub id is
