"""Float64 arithmetic written out, and rounding by integers: what a merged weight has to be."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, through the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def rounded(exact: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Float64 ``exact`` rounded once to ``dtype``: the nearer of the two neighbours, the even one in a tie."""
    if dtype == torch.float32:
        return torch.from_numpy(exact.astype(np.float32))
    if dtype == torch.float16:
        return torch.from_numpy(exact.astype(np.float16))
    assert dtype == torch.bfloat16
    # The two bfloat16 around the value, from the float32 below it in magnitude, compared in float64.
    magnitude = np.abs(exact)
    below32 = magnitude.astype(np.float32)
    below32 = np.where(below32.astype(np.float64) > magnitude, np.nextafter(below32, np.float32(0)), below32)
    low = (below32.view(np.uint32) >> 16).astype(np.uint32)
    value = lambda pattern: (pattern << 16).astype(np.uint32).view(np.float32).astype(np.float64)  # noqa: E731
    to_low, to_high = magnitude - value(low), value(low + 1) - magnitude
    up = (to_high < to_low) | ((to_high == to_low) & (low % 2 == 1))
    pattern = (low + up).astype(np.uint16) | (np.signbit(exact).astype(np.uint16) << 15)
    return torch.from_numpy(pattern.view(np.int16).copy()).view(torch.bfloat16)


def delta(adapter: Path, tensor_name: str) -> np.ndarray | None:
    """``scaling * B @ A`` of one base tensor in float64, read through the safetensors library; None without an update."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    module = tensor_name.removesuffix(".weight")
    key = f"base_model.model.{module}.lora_"
    if f"{key}A.weight" not in tensors:
        return None

    def setting(pattern: str, default: float) -> float:
        return next((v for k, v in config[pattern].items() if re.match(rf"(.*\.)?({k})$", module)), default)

    rank = setting("rank_pattern", config["r"])
    alpha = setting("alpha_pattern", config["lora_alpha"])
    scaling = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
    return scaling * (tensors[f"{key}B.weight"].double().numpy() @ tensors[f"{key}A.weight"].double().numpy())


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Equal element for element; -0.0 counts as 0.0."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    differ = (found != expected).sum().item()
    assert differ == 0, f"{name}: {differ} of {found.numel()} elements differ"


def prefixed(adapter: Path) -> dict[str, np.ndarray]:
    """An adapter's tensors in float64, without PEFT's prefix."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor.double().numpy() for name, tensor in tensors.items()}


def scaling_of(config: dict, path: str) -> float:
    """alpha / r, or alpha / sqrt(r) for rsLoRA, under the patterns."""

    def setting(pattern: str, default: float) -> float:
        return next((v for k, v in (config[pattern] or {}).items() if re.match(rf"(.*\.)?({k})$", path)), default)

    rank, alpha = setting("rank_pattern", config["r"]), setting("alpha_pattern", config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def adapted(weight: np.ndarray, path: str, adapter: Path, *, stored_transposed: bool = False) -> np.ndarray:
    """A layer's weight under LoRA or DoRA, float64: the papers' formulas on (out, in), whatever way round it is stored."""
    tensors, config = prefixed(adapter), json.loads((adapter / "adapter_config.json").read_text())
    scaling = scaling_of(config, path)
    if f"{path}.lora_embedding_A" in tensors:
        a, b, turned = tensors[f"{path}.lora_embedding_A"], tensors[f"{path}.lora_embedding_B"], True
    else:
        a, b, turned = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"], stored_transposed
    shape = weight.shape
    flat = weight.T if turned else weight.reshape(len(weight), -1)
    total = flat + scaling * (b.reshape(len(b), -1) @ a.reshape(len(a), -1))
    if f"{path}.lora_magnitude_vector" in tensors:
        magnitude = tensors[f"{path}.lora_magnitude_vector"].reshape(-1)
        total = magnitude[:, None] / np.linalg.norm(total, axis=1)[:, None] * total
    return total.T if turned else total.reshape(shape)


def assert_rounded_once(found: torch.Tensor, exact: np.ndarray, name: str, allowed: float = 0.0) -> None:
    """``found`` is ``exact`` rounded once. ``allowed``: share of elements on a rounding boundary that another order of float64
    sums
    may move by one unit in the last place (norms and products of several terms)."""
    expected = rounded(exact, found.dtype)
    assert found.shape == expected.shape, name
    differ = found != expected
    assert differ.double().mean() <= allowed, f"{name}: {int(differ.sum())} of {found.numel()} elements differ"
    if allowed:
        assert ((found.double() - expected.double()).abs() <= 2.0**-7 * expected.double().abs())[differ].all(), name
