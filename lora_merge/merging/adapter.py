"""Reads a PEFT adapter folder into typed pieces. Every key of the file gets a meaning, or reading fails.

Sources: PEFT 0.21 (``tuners/lora/config.py``, ``tuners/lora/layer.py``, ``utils/save_and_load.py``); the rank and alpha patterns
follow ``tuners/tuners_utils.get_pattern_key``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_merge.merging.dtypes import FLOATING, widen
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder, read_json
from lora_merge.merging.safetensors_file import TensorInfo, read_header, read_tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 65536
_PREFIX = "base_model.model."
_LORA_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>A|B)\.weight")

# Settings that change nothing about what the stored tensors mean.
_NEUTRAL = frozenset(
    [
        "alora_invocation_tokens",
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "parent_library",
    ]
)
# Settings that, switched on, mean more than a plain low-rank update.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias on lora_B",
    "modules_to_save": "fully trained modules",
    "trainable_token_indices": "trained token rows",
    "target_parameters": "adapters on fused parameters",
    "layer_replication": "replicated layers, which have no counterpart among the base's tensors",
    "alora_invocation_tokens": "an activated LoRA (aLoRA), which acts on part of the sequence only and cannot be merged",
    "arrow_config": "Arrow routing, which chooses adapters per token and cannot be merged",
    "use_qalora": "QA-LoRA",
}
# Initializations that also change the base: the adapter belongs to a residual base, not to the one it names.
_RESIDUAL_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True)
class LowRankPair:
    """One module's update: ``delta = scaling * B @ A``.

    Attributes:
        module: the module's path in the model that was trained, such as ``model.layers.0.mlp.up_proj``.
        a: (rank, in_features).
        b: (out_features, rank).
        scaling: ``alpha / rank``, or ``alpha / sqrt(rank)`` for rsLoRA.
    """

    module: str
    a: TensorInfo
    b: TensorInfo
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA adapter: its configuration and its pieces, ordered by module."""

    folder: ModelFolder
    config: Mapping[str, Any]
    pairs: tuple[LowRankPair, ...]

    @property
    def named_base(self) -> str | None:
        """The base that the adapter says it was trained on."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None


def read_adapter(folder: ModelFolder) -> Adapter:
    """Read and check the adapter in ``folder``.

    Raises:
        MergeError: no adapter there, a kind that this version does not merge, absurd settings, a key without a meaning, a missing
            half, a shape or rank that contradicts the configuration, a NaN or infinite value.
    """
    path = folder.path
    config = read_json(path / CONFIG_FILE, "the adapter's configuration")
    _check_kind(config, str(path / CONFIG_FILE))
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        pickle = path / "adapter_model.bin"
        if pickle.is_file():
            raise MergeError(
                f"{pickle}: a pickle, which executes code when it is loaded; save the adapter as {WEIGHTS_FILE} with PEFT"
            )
        raise MergeError(f"{weights}: no such file; expected the adapter's tensors")
    halves: dict[str, dict[str, TensorInfo]] = {}
    for tensor in read_header(weights).tensors:
        match = _LORA_KEY.fullmatch(tensor.name)
        if match is None:
            raise MergeError(
                f"{weights}: tensor {tensor.name!r} is no part of a plain LoRA (expected {_PREFIX}MODULE.lora_A.weight or "
                "lora_B.weight); nothing was merged, since leaving it out would change the model"
            )
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    if not halves:
        raise MergeError(f"{weights}: holds no tensors; was the adapter saved before training, or sharded by a distributed run?")
    pairs = tuple(_pair(module, halves[module], config) for module in sorted(halves))
    _check_patterns(config, tuple(halves), str(path / CONFIG_FILE))
    for pair in pairs:
        _check_finite(pair.a)
        _check_finite(pair.b)
    return Adapter(folder, config, pairs)


def _check_kind(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise MergeError(f"{where}: peft_type is {kind!r}; this version merges LORA only")
    for name, meaning in _REFUSED.items():
        if config.get(name):
            raise MergeError(f"{where}: {name} is set: {meaning}; this version merges plain LoRA on linear layers only")
    if config.get("bias", "none") != "none":
        raise MergeError(
            f"{where}: bias is {config['bias']!r}: trained biases; this version merges plain LoRA on linear layers only"
        )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_RESIDUAL_INITS):
        raise MergeError(
            f"{where}: init_lora_weights is {init!r}, which also changes the base: this adapter belongs to the residual base it "
            "was trained with; convert it to a plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )
    for name, value in config.items():
        if name not in _NEUTRAL and name not in _REFUSED and value not in (None, False, 0, "", [], {}):
            raise MergeError(
                f"{where}: unknown setting {name} = {value!r}; merging without knowing what it does could change the model"
            )
    _rank(config.get("r"), f"{where}: r")
    _alpha(config.get("lora_alpha", 8), f"{where}: lora_alpha")
    for name, check in (("rank_pattern", _rank), ("alpha_pattern", _alpha)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise MergeError(f"{where}: {name} is a {type(pattern).__name__}, expected an object")
        for key, value in pattern.items():
            check(value, f"{where}: {name}[{key!r}]")
            _module_pattern(key, f"{where}: {name}")


def _rank(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise MergeError(f"{what} is {value!r}; expected a rank from 1 to {MAX_RANK}")
    return value


def _alpha(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise MergeError(f"{what} is {value!r}; expected a finite number")
    return float(value)


def _module_pattern(key: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise MergeError(f"{where} key {key!r} is no regular expression: {error}") from error


def _matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that matches ``module``, as PEFT looks it up."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _check_patterns(config: Mapping[str, Any], modules: tuple[str, ...], where: str) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        for key in config.get(name) or {}:
            matcher = _module_pattern(key, f"{where}: {name}")
            if not any(matcher.match(module) for module in modules):
                raise MergeError(f"{where}: {name} key {key!r} matches none of the adapter's {len(modules)} modules")


def _pair(module: str, halves: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> LowRankPair:
    for half, other in (("A", "B"), ("B", "A")):
        if half not in halves:
            tensor = halves[other]
            raise MergeError(f"{tensor.path}: {tensor.name!r} has no lora_{half} beside it; the adapter is incomplete")
    a, b = halves["A"], halves["B"]
    for tensor in (a, b):
        if tensor.dtype.name not in FLOATING:
            raise MergeError(
                f"{tensor.path}: {tensor.name!r} is of type {tensor.dtype.name}; expected one of {', '.join(FLOATING)}"
            )
        if len(tensor.shape) != 2:
            raise MergeError(
                f"{tensor.path}: {tensor.name!r} has shape {list(tensor.shape)}; this version merges linear layers only"
            )
    rank = _rank(_matching(config.get("rank_pattern") or {}, module, config["r"]), "r")
    if a.shape[0] != rank or b.shape[1] != rank:
        raise MergeError(
            f"{a.path}: {module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are of rank {a.shape[0]} and {b.shape[1]}, "
            f"the configuration says {rank}"
        )
    alpha = _alpha(_matching(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", 8)), "lora_alpha")
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LowRankPair(module, a, b, scaling)


def _check_finite(tensor: TensorInfo) -> None:
    values = widen(read_tensor(tensor), tensor.dtype)
    if not np.isfinite(values).all():
        place = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
        raise MergeError(
            f"{tensor.path}: {tensor.name!r} is {values[tuple(place)]} at {place}; the adapter is damaged, train or save it again"
        )
