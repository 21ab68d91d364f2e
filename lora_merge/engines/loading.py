"""Loading causal language models through Transformers, with refusals that say what to do."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from lora_merge.engines.errors import EngineError
from lora_merge.engines.model_files import brief
from lora_merge.engines.vocabulary import check_vocabulary, fit_vocabulary, resize_vocabulary, tables

DTYPES = ("auto", "bfloat16", "float32", "float16")


def resolve_device(device: str) -> torch.device:
    """``auto`` as CUDA where there is one, else the CPU; ``cpu``, ``cuda`` or ``cuda:1`` by its name.

    Raises:
        EngineError: another name, or a CUDA device that is not there.
    """
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise EngineError(f"device {device!r} is unknown; expected auto, cpu or cuda") from error
    if resolved.type not in ("cpu", "cuda"):
        raise EngineError(f"device {device!r} cannot be used; expected auto, cpu or cuda")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"device {device!r} was asked for and torch {torch.__version__} sees no CUDA device; use --device cpu")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"device {device!r} was asked for and torch sees {torch.cuda.device_count()}, counted from cuda:0")
    return resolved


def load_causal_model(
    path: str | Path,
    *,
    dtype: str,
    device: torch.device,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    bnb_config: Mapping[str, Any] | None = None,
    quantized: bool = False,
    least_vocabulary: int = 0,
) -> nn.Module:
    """The causal language model at ``path`` in evaluation mode on ``device``.

    ``quantized``: through bitsandbytes in 4 bit, by ``bnb_config`` or, when that is None, by what the checkpoint itself stores.
    ``least_vocabulary``: tokens that it shall have rows for, more than its own where tokens were added before training; new rows
    are the mean of the others. Raises :class:`EngineError` when it cannot be loaded so.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    if dtype not in DTYPES:
        raise EngineError(f"dtype {dtype!r} is unknown; expected one of {', '.join(DTYPES)}")
    try:
        config = AutoConfig.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code)
        _refuse_overflowing_dtype(config, dtype)
        stored = getattr(config, "quantization_config", None)
        if quantized and (stored is None) == (bnb_config is None):
            found = (
                "has no quantization of its own and none was given"
                if stored is None
                else "is already quantized and another was given"
            )
            raise EngineError(f"{path} {found}; expected exactly one of the two")
        arguments: dict[str, Any] = {
            "dtype": dtype,
            "device_map": {"": device},
            "revision": revision,
            "trust_remote_code": trust_remote_code,
        }
        if attn_implementation is not None:
            arguments["attn_implementation"] = attn_implementation
        if bnb_config is not None:
            arguments["quantization_config"] = BitsAndBytesConfig(**bnb_config)
        model = AutoModelForCausalLM.from_pretrained(str(path), **arguments)
    except EngineError:
        raise
    # A model's class runs its own code on a configuration from outside, and so do the libraries under it.
    except Exception as error:
        raise EngineError(f"{path} does not load as a causal language model: {brief(error)}") from error
    kinds = {type(module).__name__ for module in model.modules()} if quantized else set()
    if quantized and "Linear8bitLt" in kinds:
        raise EngineError(
            f"{path} is in 8 bit, and a base is loaded anew in 4 bit only: record a reference at the end of training, and verify "
            "with it and --no-control"
        )
    if quantized and "Linear4bit" not in kinds:
        raise EngineError(
            f"{path} did not load in 4 bit; expected a bitsandbytes 4-bit model: check load_in_4bit in its settings"
        )
    if model.get_input_embeddings().weight.shape[0] < least_vocabulary:
        resize_vocabulary(model, least_vocabulary)
    return model.eval()


def load_adapter(model: nn.Module, adapter: str | Path, *, base_is_residual: bool = False) -> nn.Module:
    """``model`` with the PEFT adapter of the folder on top, unmerged and frozen.

    A vocabulary that was resized before training is resized here too: see :mod:`~lora_merge.engines.vocabulary`.

    ``base_is_residual``: the initialization that the adapter names (PiSSA, OLoRA, LoftQ, ...) has changed this model already.
    PEFT initializes before it loads, and would change it once more.

    Raises :class:`EngineError` when it does not load, when a part of the model's adapter got no tensor from the folder, or when a
    tensor of the folder found no place: PEFT only warns of the first and says nothing of the second.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors import SafetensorError

    try:
        stored = _AdapterFile(Path(adapter))
        shapes = stored.shapes()
        vocabulary = tables(model, shapes)
        fit_vocabulary(model, shapes, adapter)
        config = PeftConfig.from_pretrained(str(adapter))
        if base_is_residual:
            config.init_lora_weights = True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(model, str(adapter), is_trainable=False, config=config).eval()
        check_vocabulary(model, vocabulary, stored.tensors([name for table in vocabulary for name in table.stored]), adapter)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, TypeError, UnpicklingError, SafetensorError) as error:
        raise EngineError(f"adapter {adapter} does not load on {type(model).__name__}: {brief(error)}") from error
    missing = [str(item.message) for item in caught if "missing adapter keys" in str(item.message)]
    if missing:
        raise EngineError(
            f"adapter {adapter} does not fit {type(model).__name__}: {missing[0][:300]}; is this the base it was trained on?"
        )
    halves = {name for name in shapes if "lora_" in name}
    placed = {name for name in get_peft_model_state_dict(adapted, save_embedding_layers=False) if "lora_" in name}
    if len(halves) > len(placed):
        lost = ", ".join(sorted(halves - placed)[:3])
        raise EngineError(
            f"adapter {adapter}: {len(halves) - len(placed)} of its tensors have no place in the model, such as {lost}"
        )
    return adapted


class _AdapterFile:
    """The tensors in a folder's adapter file, whichever of PEFT's two it is; none where there is no file."""

    def __init__(self, folder: Path) -> None:
        self._safetensors = folder / "adapter_model.safetensors"
        self._pickle = folder / "adapter_model.bin"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by name."""
        from safetensors import safe_open

        if self._safetensors.is_file():
            with safe_open(self._safetensors, "pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
        return {name: tuple(tensor.shape) for name, tensor in self._unpickled("meta").items()}

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Those called ``names``."""
        from safetensors import safe_open

        if not names:
            return {}
        if self._safetensors.is_file():
            with safe_open(self._safetensors, "pt") as file:
                return {name: file.get_tensor(name) for name in names}
        return {name: tensor for name, tensor in self._unpickled("cpu").items() if name in names}

    def _unpickled(self, device: str) -> dict[str, Tensor]:
        if not self._pickle.is_file():
            return {}
        tensors: dict[str, Tensor] = torch.load(self._pickle, map_location=device, weights_only=True)
        return tensors


def _refuse_overflowing_dtype(config: Any, dtype: str) -> None:
    stored = str(getattr(config, "dtype", "")).removeprefix("torch.")
    effective = stored if dtype == "auto" else dtype
    if effective == "float16" and str(getattr(config, "model_type", "")).startswith("gemma3"):
        raise EngineError("float16 overflows on Gemma 3 and gives NaN; use bfloat16 or float32")
