"""One causal language model of Transformers, wrapped or plain, as a function from token ids to the next token's logits.

Everything that differs between models is found out here, once: whether the forward can skip the logits of all positions but
the last, whether positions can be given, and whether the key-value cache is of the plain kind that can be shared and padded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lora_merge.engines.errors import EngineError
from lora_merge.engines.grouped_attention import grouped_steps
from lora_merge.engines.plain_cache import has_plain_cache, turning_length


def unwrapped(model: Any) -> Any:
    """The Transformers model inside a PEFT wrapper; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def dora_layers(model: nn.Module) -> list[nn.Module]:
    """The 4-bit layers that DoRA takes norms of, which it does anew in every forward, from the dequantized weight.

    On CPUs with AVX512-BF16 bitsandbytes repacks a 4-bit layer at its first forward in evaluation mode, and dequantizing the
    repacked codes gives other weights without an error. PEFT's norms are of those then: another function than the trained one.
    A layer in training mode is not repacked, and calculates as it did in training; it has nothing else that this mode changes.

    Raises:
        EngineError: one is repacked already.
    """
    found = []
    for name, module in model.named_modules():
        layer = getattr(module, "base_layer", None)
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is None or not getattr(module, "lora_magnitude_vector", None):
            continue
        if getattr(state, "packing_format_for_cpu", False):
            raise EngineError(
                f"{name} has DoRA on a 4-bit layer that bitsandbytes has repacked, as it does on this processor at a forward in "
                "evaluation mode: PEFT takes DoRA's norms of other weights then; load base and adapter again, and score that"
            )
        found.append(layer)
    return found


class LiveModel:
    """A loaded model, read-only: training mode, dropout and gradients are as before after every call.

    ``never_trained``: nobody else holds the model, so that torch may leave out what a later backward pass would ask for. That
    takes an eighth off a step of a small model, whose time is the host's.
    """

    def __init__(self, model: nn.Module, *, never_trained: bool = False) -> None:
        self.module = model
        self._gradless = torch.inference_mode if never_trained else torch.no_grad
        base = unwrapped(model)
        self.config: Any = getattr(base, "config", None)
        if self.config is None or not hasattr(self.config, "get_text_config"):
            raise EngineError(f"{type(base).__name__} has no Transformers configuration; expected a causal language model")
        self.text_config = self.config.get_text_config()
        parameters = inspect.signature(base.forward).parameters
        self._keeps_last = "logits_to_keep" in parameters
        # transformers 5.24 renamed it and stops reading the old name in 5.40. State-space models say cache_params.
        names = [name for name in ("cache", "past_key_values", "cache_params") if name in parameters]
        self._cache_name = names[0] if names else "past_key_values"
        self.has_plain_cache = has_plain_cache(self.text_config, parameters)
        """Whether the cache may be cut to fewer rows, and where :meth:`is_plain` be repeated over a batch and padded."""
        self.turning_length = turning_length(self.text_config)
        embedding = base.get_input_embeddings()
        self.device: torch.device = embedding.weight.device
        # Not of the weight's shape, which is empty where a trainer keeps the weight in parts.
        self.vocabulary: int | None = getattr(embedding, "num_embeddings", None)

    def is_plain(self, longest: int) -> bool:
        """Whether a text's keys and values do not hang on what is computed beside it, of texts of at most ``longest`` tokens."""
        return self.has_plain_cache and (self.turning_length is None or longest < self.turning_length)

    @property
    def layers(self) -> int:
        """Layers of the text model; 1 where its configuration does not say."""
        return int(getattr(self.text_config, "num_hidden_layers", None) or 1)

    @functools.cached_property
    def parameters(self) -> int:
        """Numbers in its weights, at least 1; of a quantized layer, the bytes that are stored."""
        return max(1, sum(int(weight.numel()) for weight in self.module.parameters()))

    @property
    def sliding_window(self) -> int | None:
        """Positions that a sliding layer sees; None when every layer sees all."""
        layer_types = getattr(self.text_config, "layer_types", None)
        window = getattr(self.text_config, "sliding_window", None)
        if layer_types is not None:
            return window if "sliding_attention" in layer_types else None
        return window if getattr(self.text_config, "use_sliding_window", True) else None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Evaluation mode, no gradients, no attention kernel that is known to misread masks; all restored afterwards.

        On CUDA, attention runs in the flash kernel, which takes no mask, or in plain arithmetic: the memory-efficient kernel
        has lost the label mass of masked float32 batches. Steps of writing have a mask where a row is padded; they go through
        :func:`~lora_merge.engines.grouped_attention.grouped_steps`. 4-bit layers under DoRA calculate as in training: see
        :func:`dora_layers`.

        Raises:
            EngineError: one of these is repacked already.
        """
        under_dora = dora_layers(self.module)
        modes = [(module, module.training) for module in self.module.modules()]
        logits_wanted = os.environ.get("UNSLOTH_RETURN_LOGITS")
        try:
            if "unsloth" in sys.modules:  # its forward returns no logits otherwise
                os.environ["UNSLOTH_RETURN_LOGITS"] = "1"
            self.module.eval()
            for layer in under_dora:
                layer.training = True
            with self._gradless(), _attention_on(self.device), _folding_head(self.module):
                yield
        finally:
            for module, training in modes:
                module.training = training
            if logits_wanted is None:
                os.environ.pop("UNSLOTH_RETURN_LOGITS", None)
            else:
                os.environ["UNSLOTH_RETURN_LOGITS"] = logits_wanted

    def last_logits(
        self,
        ids: Tensor,
        *,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, Any]:
        """Logits of the token after each row, ``(batch, vocabulary)`` in the model's dtype, and the cache where ``use_cache``.

        ``ids``: ``(batch, new tokens)``. ``attention_mask``: ``(batch, cached + new tokens)``, 1 for real ones; None when all
        are. ``position_ids``: ``(batch, new tokens)``; None counts on from the cache.
        """
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": use_cache}
        if self._keeps_last:
            arguments["logits_to_keep"] = 1
        if cache is not None:
            arguments[self._cache_name] = cache
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        if position_ids is not None:
            arguments["position_ids"] = position_ids
        output = self.module(**arguments)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[0] != ids.shape[0]:
            raise EngineError(f"{type(self.module).__name__} returned no logits of shape (batch, tokens, vocabulary)")
        if not use_cache:
            return logits[:, -1, :], None
        held = getattr(output, self._cache_name, None)
        if held is None:
            raise EngineError(
                f"{type(unwrapped(self.module)).__name__} gives back no cache that a text could be continued from; "
                "write with vLLM (--engine vllm)"
            )
        return logits[:, -1, :], held

    def ids_tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Rows of one length as an integer tensor on the model's device."""
        return torch.tensor([list(row) for row in rows], dtype=torch.long, device=self.device)


@contextlib.contextmanager
def _folding_head(model: Any) -> Iterator[None]:
    """Meanwhile a linear head gets its rows as one matrix, and any other its input in one piece.

    A model that is asked for its last position gives the head a slice. If the head's weight is frozen, as all are under PEFT,
    torch then makes a product of its own for each row, on a CPU each with a copy of the weight, and so it does with a single row
    in one piece. 8 rows of 25 tokens take Gemma 3 270M 5.8 s on two cores, as a matrix 0.18 s, for the same bits
    (benchmarks/frozen_head.py).
    """
    find = getattr(unwrapped(model), "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, nn.Module):
        yield
        return
    shapes: list[torch.Size] = []

    def flatten(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        shapes.clear()  # of a forward that failed
        states = given[0] if given else None
        if not isinstance(states, Tensor) or states.dim() < 3:
            return given
        if type(module) is not nn.Linear:
            return (states.contiguous(), *given[1:])
        shapes.append(states.shape)
        return (states.flatten(0, -2), *given[1:])

    def restore(module: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        return output.unflatten(0, shapes.pop()[:-1]) if shapes else output

    hooks = [head.register_forward_pre_hook(flatten), head.register_forward_hook(restore)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _attention_on(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), grouped_steps():
        yield


class SharedPrefix:
    """The keys and values of ids that many prompts begin with, computed once and lent to each batch."""

    def __init__(self, model: LiveModel) -> None:
        self._model = model
        self._ids: tuple[int, ...] = ()
        self._cache: Any = None
        self.computed_tokens = 0

    def cache_for(self, prefix: tuple[int, ...], batch: int) -> Any:
        """A cache of ``batch`` rows that holds ``prefix``; the caller may extend it. None when ``prefix`` is empty."""
        if not prefix:
            return None
        if prefix != self._ids:
            _, self._cache = self._model.last_logits(self._model.ids_tensor([prefix]), use_cache=True)
            self._ids = prefix
            self.computed_tokens += len(prefix)
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(batch)
        return cache
