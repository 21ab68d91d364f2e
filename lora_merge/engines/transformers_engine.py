"""The Transformers engine: a checkpoint, a 4-bit base with its unmerged adapter, or a model that is already in memory.

Scoring runs in batches of one length, without padding and without a mask, because a padded batch can lose its label mass in
an attention kernel. Attention is Transformers' default unless another is asked for: on Gemma 3 270M in bfloat16 the skip
probability lies 0.0074 from float32 (mean |Δ|, 96 prompts on a CPU) with ``sdpa``, 0.0080 with a shared prefix too, and 0.019
with ``eager``. Writing sorts by length, fills up what is left over and keeps the flawed kernel out (see
:meth:`LiveModel.reading <lora_merge.engines.live_model.LiveModel.reading>`).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lora_merge.console import Progress, no_progress
from lora_merge.engines.batching import batch_cost, common_prefix_length, equal_length_batches, sorted_batches
from lora_merge.engines.errors import EngineError
from lora_merge.engines.fitting import run_fitting
from lora_merge.engines.greedy import TokenCounts, greedy_batch, shareable_prefix
from lora_merge.engines.labels import DecisionLabels
from lora_merge.engines.live_model import LiveModel, SharedPrefix, unwrapped
from lora_merge.engines.loading import load_adapter, load_causal_model, resolve_device
from lora_merge.engines.model_files import id_union, library_versions, load_tokenizer
from lora_merge.engines.own_code import runs_own_code
from lora_merge.engines.prompts import Prompt, check_ids, decode_continuation
from lora_merge.engines.protocol import Completion, GenerationLimits
from lora_merge.engines.scores import DecisionScore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCORE_BATCH = 32
WRITE_BATCH = 128
GPU_SCORE_BATCH = 1024
"""Prompts at once on a GPU, where they fit: a step of a small model takes about as long as launching it. On an H200 Gemma 3 270M
decides 575 prompts a second at 32 at once, 5,600 to 8,400 at 1,024 and 6,900 to 10,000 at 2,048; a model of 4B's size 1,870 to
1,910 and 1,930 to 1,980 (docs/results/gpu-probes.json)."""
GPU_WRITE_BATCH = 2048
"""Texts at once on a GPU, where they fit. On an H200 a model of Gemma 3 4B's size writes 4,096 texts in 40.5 s at 256 at once,
13.2 at 1,024, 10.5 at 2,048 and 10.1 at 4,096, for which torch hands out 12, 26, 44 and 79 GB (docs/results/gpu.md)."""
_WORTH_SHARING = 8
"""Fewer shared ids than this over all prompts, and each batch looks for its own shared beginning."""


class TransformersEngine:
    """See the module. Make one with :meth:`from_checkpoint`, :meth:`from_quantized` or :meth:`from_model`.

    ``token_counts`` holds what the last :meth:`generate` computed, waste included, but for batches that did not fit.
    ``score_fit`` and ``write_fit`` are the least sizes to which batches had to be halved so far; None where none had to be. Each
    call tries the whole size again: what it gives must not hang on the calls before it, or a run that was resumed or divided
    would make other batches.
    """

    name = "transformers"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        end_ids: tuple[int, ...],
        source: Mapping[str, Any],
        batch_size: int = SCORE_BATCH,
        write_batch_size: int = WRITE_BATCH,
        share_prefix: bool = False,
        never_trained: bool = False,
    ) -> None:
        if batch_size < 1 or write_batch_size < 1:
            raise EngineError(f"batch sizes are {batch_size} and {write_batch_size}; expected at least 1")
        self._model: LiveModel | None = LiveModel(model, never_trained=never_trained)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.write_batch_size = write_batch_size
        self.share_prefix = share_prefix and self._model.has_plain_cache
        self.token_counts = TokenCounts()
        self.score_fit: int | None = None
        self.write_fit: int | None = None
        self._end_ids = end_ids
        self._source = dict(source)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        adapter: str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        attn_implementation: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        batch_size: int = SCORE_BATCH,
        write_batch_size: int = WRITE_BATCH,
        share_prefix: bool = True,
        least_vocabulary: int = 0,
    ) -> TransformersEngine:
        """A 16-bit or float32 checkpoint, with ``adapter`` (a PEFT folder) unmerged on top where one is given.

        ``dtype``: ``auto`` for the checkpoint's own, ``bfloat16``, ``float32`` or ``float16`` (refused for Gemma 3, which
        overflows). ``attn_implementation``: Transformers' name, None for its default. ``share_prefix``: compute the ids that
        all prompts begin with once; exact but for rounding. ``least_vocabulary``: see
        :func:`~lora_merge.engines.loading.load_causal_model`.
        """
        place = resolve_device(device)
        model = load_causal_model(
            path,
            dtype=dtype,
            device=place,
            attn_implementation=attn_implementation,
            revision=revision,
            trust_remote_code=trust_remote_code,
            least_vocabulary=least_vocabulary,
        )
        tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
        if adapter is not None:
            model = load_adapter(model, adapter)
        return cls(
            model,
            tokenizer,
            end_ids=_model_end_ids(model, tokenizer),
            source={"model": str(path), "adapter": None if adapter is None else str(adapter), "quantization": None},
            batch_size=batch_size,
            write_batch_size=write_batch_size,
            share_prefix=share_prefix,
            never_trained=True,
        )

    @classmethod
    def from_quantized(
        cls,
        base: str | Path,
        adapter: str | Path | None = None,
        bnb_config: Mapping[str, Any] | None = None,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        attn_implementation: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        batch_size: int = SCORE_BATCH,
        write_batch_size: int = WRITE_BATCH,
        least_vocabulary: int = 0,
    ) -> TransformersEngine:
        """The 4-bit base through bitsandbytes, with the unmerged ``adapter`` where one is given: the QLoRA reference.

        ``bnb_config``: arguments of ``transformers.BitsAndBytesConfig``; None for a base that is already a bitsandbytes
        checkpoint. ``dtype``: of the modules that are not quantized, bfloat16 as a fresh load for QLoRA has them. No prefix
        is shared: bitsandbytes chooses its kernel by the shape of the batch. ``least_vocabulary``: see
        :func:`~lora_merge.engines.loading.load_causal_model`.

        On CPUs with AVX512-BF16 bitsandbytes repacks its weights at the first forward, so do not read weights from this model
        after it has scored.
        """
        place = resolve_device(device)
        model = load_causal_model(
            base,
            dtype=dtype,
            device=place,
            attn_implementation=attn_implementation,
            revision=revision,
            trust_remote_code=trust_remote_code,
            bnb_config=bnb_config,
            quantized=True,
            least_vocabulary=least_vocabulary,
        )
        tokenizer = load_tokenizer(base, revision=revision, trust_remote_code=trust_remote_code)
        if adapter is not None:
            model = load_adapter(model, adapter)
        recipe = {name: str(value) for name, value in bnb_config.items()} if bnb_config is not None else "stored in the base"
        return cls(
            model,
            tokenizer,
            end_ids=_model_end_ids(model, tokenizer),
            source={"model": str(base), "adapter": None if adapter is None else str(adapter), "quantization": recipe},
            batch_size=batch_size,
            write_batch_size=write_batch_size,
            share_prefix=False,
        )

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int = SCORE_BATCH,
        write_batch_size: int = WRITE_BATCH,
        share_prefix: bool = False,
    ) -> TransformersEngine:
        """A model in memory, also in the middle of training: its mode and gradients are as before after every call.

        ``tokenizer`` is needed for :meth:`generate` only. Closing lets go of the model and leaves it to its owner.
        """
        return cls(
            model,
            tokenizer,
            end_ids=_model_end_ids(model, tokenizer),
            source={"model": "in memory", "adapter": None, "quantization": None},
            batch_size=batch_size,
            write_batch_size=write_batch_size,
            share_prefix=share_prefix,
        )

    def score(
        self, prompts: Sequence[Prompt], labels: DecisionLabels, *, progress: Progress = no_progress
    ) -> list[DecisionScore]:
        """See :class:`~lora_merge.engines.protocol.Engine`; the normalizer over the vocabulary is summed in float64."""
        model = self._live()
        check_ids(prompts, model.vocabulary)
        scores: list[DecisionScore | None] = [None] * len(prompts)
        prefix = SharedPrefix(model)
        sharing = self.share_prefix and model.is_plain(max(_lengths(prompts), default=0))
        shared = common_prefix_length(prompts) if sharing else 0

        def score(positions: list[int], tell: Progress) -> None:
            batch = [prompts[position] for position in positions]
            known = common_prefix_length(batch) if sharing and shared < _WORTH_SHARING else shared
            ids = model.ids_tensor([prompt.token_ids[known:] for prompt in batch])
            logits, _ = model.last_logits(ids, cache=prefix.cache_for(batch[0].token_ids[:known], len(batch)))
            for position, found in zip(positions, _scores(batch, logits, labels), strict=True):
                scores[position] = found
            tell(len(batch))

        with model.reading():
            batches = equal_length_batches(prompts, self.batch_size)
            most = run_fitting(batches, score, _lengths(prompts), progress)
        if most < max(map(len, batches), default=1):
            self.score_fit = _at_most(most, self.score_fit)
        return [score for score in scores if score is not None]

    def generate(
        self, prompts: Sequence[Prompt], limits: GenerationLimits, *, progress: Progress = no_progress
    ) -> list[Completion]:
        """See :class:`~lora_merge.engines.protocol.Engine`. No field of a generation config is applied.

        Batches of similar length (:func:`~lora_merge.engines.batching.sorted_batches`), at most ``write_batch_size`` rows; a row
        that has ended leaves its batch. A batch that the device's memory cannot hold is halved.
        """
        model, tokenizer = self._live(), self.tokenizer
        if tokenizer is None:
            raise EngineError("generate needs a tokenizer to decode with; give one to TransformersEngine.from_model")
        check_ids(prompts, model.vocabulary)
        stop_ids = frozenset(self._end_ids) | frozenset(limits.stop_token_ids)
        completions: list[Completion | None] = [None] * len(prompts)
        counts = TokenCounts()
        prefix = SharedPrefix(model)
        everywhere = common_prefix_length(prompts)

        def write(positions: list[int], tell: Progress) -> None:
            nonlocal counts
            batch = [prompts[position] for position in positions]
            shared = shareable_prefix(model, batch, limits.max_new_tokens) if self.share_prefix else 0
            if everywhere >= _WORTH_SHARING:
                shared = min(shared, everywhere)
            written, cost = greedy_batch(model, batch, limits.max_new_tokens, stop_ids, prefix, shared, tell)
            counts += cost
            for position, prompt, ids in zip(positions, batch, written, strict=True):
                completions[position] = _completion(tokenizer, prompt, ids, stop_ids)

        with model.reading():
            batches = self._writing_batches(model, prompts, limits.max_new_tokens, everywhere)
            most = run_fitting(batches, write, _lengths(prompts), progress)
        if most < max(map(len, batches), default=1):
            self.write_fit = _at_most(most, self.write_fit)
        self.token_counts = counts + TokenCounts(shared=prefix.computed_tokens)
        return [completion for completion in completions if completion is not None]

    def _writing_batches(
        self, model: LiveModel, prompts: Sequence[Prompt], max_new_tokens: int, everywhere: int
    ) -> list[list[int]]:
        """Positions of ``prompts``, which all begin with ``everywhere`` common ids. Recorded settings alone decide."""
        if not model.is_plain(max(_lengths(prompts), default=0) + max_new_tokens):
            return equal_length_batches(prompts, self.write_batch_size)
        return sorted_batches(
            prompts,
            self.write_batch_size,
            batch_cost(model.device.type, max_new_tokens, model.layers, model.parameters),
            shared=everywhere if self.share_prefix else 0,
            shares_up_to=None if model.sliding_window is None else model.sliding_window - max_new_tokens,
        )

    def describe(self) -> dict[str, Any]:
        """See :class:`~lora_merge.engines.protocol.Engine`. The batch sizes are those to which batches were halved so far."""
        model = self._live()
        return {
            "kind": self.name,
            "versions": library_versions("torch", "transformers", "peft", "bitsandbytes"),
            "dtype": _dtype_name(model),
            "device": device_name(model.device),
            "settings": {
                **self._source,
                "trust_remote_code": runs_own_code(unwrapped(model.module), self.tokenizer),
                "attention": str(getattr(model.text_config, "_attn_implementation", None)),
                "batch_size": _at_most(self.batch_size, self.score_fit),
                "write_batch_size": _at_most(self.write_batch_size, self.write_fit),
                "share_prefix": self.share_prefix,
                "end_ids": list(self._end_ids),
            },
        }

    def close(self) -> None:
        """See :class:`~lora_merge.engines.protocol.Engine`."""
        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _live(self) -> LiveModel:
        if self._model is None:
            raise EngineError("the engine is closed; open it again")
        return self._model


def usual_batches(device: str) -> tuple[int, int]:
    """Prompts that are decided and texts that are written at once on a device, unless the user says otherwise."""
    return (GPU_SCORE_BATCH, GPU_WRITE_BATCH) if resolve_device(device).type == "cuda" else (SCORE_BATCH, WRITE_BATCH)


def _at_most(asked: int, fit: int | None) -> int:
    return asked if fit is None else min(asked, fit)


def _lengths(prompts: Sequence[Prompt]) -> list[int]:
    return [len(prompt.token_ids) for prompt in prompts]


def device_name(device: torch.device) -> str:
    """The GPU's own name for a CUDA device, else ``cpu`` (or whatever the device type is)."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


def _scores(batch: Sequence[Prompt], logits: Tensor, labels: DecisionLabels) -> list[DecisionScore]:
    """One score a row of ``logits`` (batch, vocabulary)."""
    vocabulary = logits.shape[-1]
    for label in (labels.skip, labels.write):
        if not 0 <= label.token_id < vocabulary:
            raise EngineError(
                f"label {label.text!r} is token {label.token_id}; the model has {vocabulary}: another tokenizer's label"
            )
    exact = logits.double()
    columns = torch.tensor([labels.skip.token_id, labels.write.token_id], device=logits.device)
    log_probabilities = (exact[:, columns] - exact.logsumexp(dim=-1, keepdim=True)).tolist()
    likeliest = exact.argmax(dim=-1).tolist()
    return [
        DecisionScore.from_log_probabilities(prompt.id, skip, write, token, labels)
        for prompt, (skip, write), token in zip(batch, log_probabilities, likeliest, strict=True)
    ]


def _completion(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, ids: Sequence[int], stop_ids: frozenset[int]) -> Completion:
    text = decode_continuation(tokenizer, prompt.token_ids, ids)
    return Completion(prompt.id, tuple(ids), text, "stop" if ids[-1] in stop_ids else "length")


def _model_end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The end-of-sequence ids of a loaded model: of its generation config, else of its config, and the tokenizer's."""
    base = unwrapped(model)
    stated = getattr(getattr(base, "generation_config", None), "eos_token_id", None)
    config = getattr(base, "config", None)
    stated = stated if stated is not None else getattr(config, "eos_token_id", None)
    return id_union(stated, tokenizer.eos_token_id if tokenizer is not None else None)


def _dtype_name(model: LiveModel) -> str:
    """The dtype of the input embedding, which no quantization touches."""
    return str(unwrapped(model.module).get_input_embeddings().weight.dtype).removeprefix("torch.")
