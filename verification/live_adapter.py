"""Is the adapter inside a live model the one in a folder? A reference names an adapter by its digests, so it has to be."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from lora_merge.merging.adapter_settings import LoraSettings
from lora_merge.merging.digests import ADAPTER_WEIGHTS
from lora_merge.merging.folders import adapters_within, read_json
from verification.errors import VerificationError

if TYPE_CHECKING:
    from torch import Tensor, nn

_MOVING_PARTS = re.compile(r"\b(?:base_model|language_model|model)\.")
"""Name parts that libraries insert and drop between releases."""


def expect_unmerged(model: nn.Module) -> None:
    """A merged adapter is another function: the sum is rounded, and in 4-bit layers quantized again.

    Raises:
        VerificationError: some adapter of PEFT's is merged into its layers; names the first.
    """
    merged = next((name for name, module in model.named_modules() if getattr(module, "merged_adapters", None)), None)
    if merged is not None:
        raise VerificationError(
            f"the adapter is merged into the live model ({merged}), and taking it out again does not bring 4-bit weights back; "
            "load base and adapter again, then record"
        )


def check_live_adapter(model: nn.Module, adapter_dir: str | os.PathLike[str]) -> None:
    """Compare every tensor of the saved adapter with the live one, exactly, in the live one's dtype, and what is done with them.

    The dtype may be wider in memory (PEFT loads a bfloat16 adapter as float32); the values may not differ. Embedding and
    head are compared as well where the file holds them: in a merge they take the place of the base's.

    Raises:
        VerificationError: the model carries no adapter, several, or one that is switched off, the folder holds none, or a tensor,
            a rank, a scaling or a kind of layer differs; names it.
        MergeError: the saved configuration cannot be read, or its patterns contradict each other.
    """
    from peft import get_peft_model_state_dict

    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    active = _active_adapters(model)
    if len(active) != 1:
        raise VerificationError(f"adapters {active} are active; expected exactly one to compare with {adapter_dir}")
    silent = next((name for name, module in model.named_modules() if getattr(module, "disable_adapters", False) is True), None)
    if silent is not None:
        raise VerificationError(f"the adapter is switched off in the live model ({silent}); enable it, then record")
    path, tensors = _saved_tensors(Path(adapter_dir))
    saved = _by_stable_name(tensors)
    live = _by_stable_name(get_peft_model_state_dict(model, adapter_name=active[0], save_embedding_layers=False))
    everything = live
    if set(saved) - set(live):  # embedding and head, which PEFT stores in full where the vocabulary was resized or is adapted
        everything = _by_stable_name(get_peft_model_state_dict(model, adapter_name=active[0], save_embedding_layers=True))
    for name, tensor in saved.items():
        if name not in everything:
            raise VerificationError(f"{path}: the live model has no tensor {name}; it carries another adapter")
        _expect_equal(name, everything[name], tensor, path)
    missing = sorted(set(live) - set(saved))
    if missing:
        raise VerificationError(f"{path}: lacks {missing[0]}, which the live adapter has; save the adapter again")
    _check_settings(model, active[0], Path(adapter_dir) / "adapter_config.json")


def _active_adapters(model: Any) -> list[str]:
    """Of a model of PEFT's, or of Transformers with an adapter added (``add_adapter``), which answers in a method."""
    from peft import PeftModel

    if isinstance(model, PeftModel):
        return list(model.active_adapters)
    if getattr(model, "_hf_peft_config_loaded", False):
        return list(model.active_adapters())
    raise VerificationError(
        f"{type(model).__name__} carries no PEFT adapter; give the adapted model (after merge_and_unload() load base and adapter "
        "again), or leave adapter_dir out"
    )


def _check_settings(model: Any, adapter: str, path: Path) -> None:
    """What the saved configuration makes of the tensors must be what the live layers make of them.

    The layers are asked and not the live configuration, which nobody reads once they are made.
    """
    from peft.tuners.lora import LoraLayer

    from lora_merge.engines.live_model import unwrapped

    config = read_json(path, "the adapter's configuration")
    kind = str(getattr(model.peft_config[adapter].peft_type, "value", model.peft_config[adapter].peft_type))
    if config.get("peft_type") != kind:
        raise VerificationError(f"{path}: peft_type is {config.get('peft_type')!r}, the live adapter is of type {kind}")
    if kind != "LORA":
        return
    settings = LoraSettings(config, str(path), residual=False)
    for module, layer in unwrapped(model).named_modules():
        if not isinstance(layer, LoraLayer) or adapter not in layer.scaling:
            continue
        # PEFT's patterns name a parameter by its module, whatever is wrapped around that.
        parts = (module.replace(".base_layer", ""), getattr(layer, "parameter_name", None))
        name = ".".join(part for part in parts if part)
        rank, saved = layer.r[adapter], settings.ranks(name)
        if rank not in saved:
            raise _other_setting(path, name, "rank", saved[0], rank)
        scaling = settings.scaling(name, rank)
        if not math.isclose(scaling, layer.scaling[adapter], rel_tol=1e-9):
            raise _other_setting(path, name, "scaling", scaling, layer.scaling[adapter])
        for flag in ("use_dora", "lora_bias"):
            live = getattr(layer, flag, {}).get(adapter)
            if live is not None and bool(live) != bool(config.get(flag)):
                raise _other_setting(path, name, flag, bool(config.get(flag)), bool(live))


def _other_setting(path: Path, module: str, what: str, saved: object, live: object) -> VerificationError:
    return VerificationError(
        f"{path}: gives {module} {what} {saved}, in the live model it is {live}; save the adapter as it is, or record with the "
        "saved one loaded"
    )


def _saved_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file that counts, as for whoever reads the adapter, and its tensors by name."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found = [folder / name for name in ADAPTER_WEIGHTS if (folder / name).is_file()]
    if not found:
        raise VerificationError(
            f"{folder / ADAPTER_WEIGHTS[0]}: no such file; {adapters_within(folder) or 'save the adapter there first'}"
        )
    path = found[0]
    try:
        if path.suffix == ".safetensors":
            return path, load_file(path)
        return path, torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError, UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200]
        raise VerificationError(f"{path}: cannot be read: {reason}; save the adapter again") from error


def _by_stable_name(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {_MOVING_PARTS.sub("", name): tensor for name, tensor in tensors.items()}
    return named if len(named) == len(tensors) else tensors


def _expect_equal(name: str, live: Tensor, saved: Tensor, path: Path) -> None:
    if live.shape != saved.shape:
        raise VerificationError(f"{path}: {name} has shape {tuple(saved.shape)}, the live one {tuple(live.shape)}")
    difference = (live.detach().double().cpu() - saved.double()).abs().max().item() if live.numel() else 0.0
    if difference != 0:
        raise VerificationError(
            f"{path}: {name} differs from the live adapter by up to {difference:.3g}; record the reference with the adapter "
            "as it is saved: after a cast, load it back into the model first"
        )
