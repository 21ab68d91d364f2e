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
