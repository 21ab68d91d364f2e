"""What an adapter's configuration says: rank and scaling of every module, and every reason not to merge.

Sources: PEFT 0.21, ``tuners/lora/config.py``; the rank and alpha patterns follow ``utils/other.get_pattern_key``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_merge.merging.errors import MergeError

MAX_RANK = 65536

# Settings that change nothing about what the stored tensors mean, or whose meaning is read elsewhere in this package.
# merge_weights is of PEFT before 0.3: whether evaluation folds the update into the weight first, which gives the same numbers.
_UNDERSTOOD = frozenset(
    """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform
    loftq_config lora_alpha lora_bias lora_dropout lora_ga_config megatron_config megatron_core merge_weights modules_to_save
    parent_library peft_type peft_version qalora_group_size r rank_pattern revision runtime_config target_modules
    target_parameters task_type trainable_token_indices use_dora use_rslora
    """.split()
)
# Settings that, switched on, make the trained function something that no set of merged weights computes.
_REFUSED = {
    "layer_replication": "replicated layers share base tensors but are adapted one by one, so that they have no counterpart in "
    "the base",
    "alora_invocation_tokens": "an activated LoRA (aLoRA) acts only on the tokens after its invocation; merged weights act on "
    "all",
    "arrow_config": "Arrow routing chooses among adapters for every token; merged weights cannot choose",
    "use_qalora": "QA-LoRA pools its inputs in groups for a GPTQ base whose zero points it changes; that base is not a "
    "checkpoint we merge",
    "use_bdlora": "block-diagonal LoRA halves have another layout that is not read",
    "kasa_config": "KaSA also truncates the base's singular values, so that the base alone does not give the trained weights",
    "monteclora_config": "MonteCLoRA samples its weights; there is no one set of merged weights",
    "velora_config": "VeLoRA's projections are not read",
}
_OTHER_METHODS = {
    "ADALORA": "AdaLoRA keeps singular values of its own in lora_E",
    "BOFT": "BOFT rotates the base's weights",
    "IA3": "IA3 rescales activations",
    "LOHA": "LoHa multiplies two low-rank products element by element",
    "LOKR": "LoKr takes Kronecker products",
    "MULTITASK_PROMPT_TUNING": "prompt tuning adds virtual tokens and changes no weight",
    "OFT": "OFT rotates the base's weights",
    "P_TUNING": "prompt tuning adds virtual tokens and changes no weight",
    "PREFIX_TUNING": "prefix tuning adds keys and values and changes no weight",
    "ADAPTION_PROMPT": "adaption prompts add virtual tokens and change no weight",
    "PROMPT_TUNING": "prompt tuning adds virtual tokens and changes no weight",
    "VERA": "VeRA derives its matrices from a random seed",
    "XLORA": "X-LoRA mixes adapters by a classifier for every token; merged weights cannot",
}
# Initializations that also change the base: the adapter belongs to a residual base, not to the one it names.
RESIDUAL_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True)
class LoraSettings:
    """The configuration of a LoRA adapter, checked.

    Attributes:
        config: ``adapter_config.json``.
        where: its path, for errors.
        residual: whether the adapter belongs to a residual base, which the user says is the one given.
    """

    config: Mapping[str, Any]
    where: str
    residual: bool

    def ranks(self, path: str) -> tuple[int, ...]:
        """The ranks that the configuration allows at ``path``: a module, or a parameter for ``target_parameters``.

        More than one where several keys of ``rank_pattern`` match: see :func:`_matching`. The tensors tell which it was.
        """
        found = _matching(self._pattern("rank_pattern"), path) or {"r": self.config["r"]}
        return tuple(dict.fromkeys(_rank(value, f"{self.where}: r") for value in found.values()))

    def scaling(self, path: str, rank: int) -> float:
        """``alpha / rank``, or ``alpha / sqrt(rank)`` for rsLoRA.

        Raises:
            MergeError: several keys of ``alpha_pattern`` match ``path`` with different values. No tensor tells which it was.
        """
        found = _matching(self._pattern("alpha_pattern"), path) or {"lora_alpha": self.config.get("lora_alpha", 8)}
        (key, first), *others = found.items()
        for other, value in others:
            if value != first:
                raise MergeError(
                    f"{self.where}: alpha_pattern keys {key!r} ({first}) and {other!r} ({value}) both match {path!r}; training "
                    "used the one that came first, but PEFT saves them sorted: leave only the one that the training script had "
                    "first to match this module"
                )
        alpha = _alpha(first, f"{self.where}: lora_alpha")
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def check_patterns(self, paths: tuple[str, ...]) -> None:
        """Raise where a pattern matches none of ``paths``: then it was meant for modules that the adapter lacks."""
        for name in ("rank_pattern", "alpha_pattern"):
            for key in self._pattern(name):
                matcher = _module_pattern(key, f"{self.where}: {name}")
                if not any(matcher.match(path) for path in paths):
                    raise MergeError(f"{self.where}: {name} key {key!r} matches none of the adapter's {len(paths)} modules")

    def names(self, setting: str) -> tuple[str, ...]:
        """The value of a setting that is a list of names, or ()."""
        value = self.config.get(setting) or []
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise MergeError(f"{self.where}: {setting} is {value!r}; expected a list of names")
        return tuple(value)

    @property
    def trainable_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """Rows trained, by the end of the module's name; ``embed_tokens`` stands for the input embedding, as in PEFT."""
        value = self.config.get("trainable_token_indices") or {}
        if isinstance(value, list):
            value = {"embed_tokens": value}
        if not isinstance(value, dict) or not all(
            isinstance(rows, list) and all(type(row) is int and row >= 0 for row in rows) for rows in value.values()
        ):
            raise MergeError(
                f"{self.where}: trainable_token_indices is {value!r}; expected row numbers, or such a list by module"
            )
        for name, rows in value.items():
            if len(set(rows)) != len(rows):
                raise MergeError(f"{self.where}: trainable_token_indices of {name} names a row twice")
        return {name: tuple(rows) for name, rows in value.items()}

    def _pattern(self, name: str) -> Mapping[str, Any]:
        return self.config.get(name) or {}


def read_settings(config: Mapping[str, Any], where: str, *, base_is_residual: bool = False) -> LoraSettings:
    """Check ``adapter_config.json``.

    Args:
        base_is_residual: the user's word that the base given is the residual base which the adapter was trained with.

    Raises:
        MergeError: another method, a setting that cannot be merged or is not known, an absurd value.
    """
    _check_method(config, where)
    init = config.get("init_lora_weights", True)
    residual = isinstance(init, str) and init.lower().startswith(RESIDUAL_INITS)
    if residual and not base_is_residual:
        raise MergeError(
            f"{where}: init_lora_weights is {init!r}, which also changes the base: this adapter belongs to the residual base it "
            "was trained with; give that one and --base-is-residual (docs/adapters.md tells how to get it). A conversion by "
            "PEFT's path_initial_model_for_weight_conversion is right only where that base was not quantized in training"
        )
    if base_is_residual and not residual:
        raise MergeError(f"{where}: --base-is-residual was given, but init_lora_weights is {init!r}, which has no residual base")
    _check_values(config, where)
    return LoraSettings(config, where, residual)


def _check_method(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        reason = _OTHER_METHODS.get(kind) if isinstance(kind, str) else None
        raise MergeError(f"{where}: peft_type is {kind!r}; expected LORA{f': {reason}' if reason else ''}")
    for name, reason in _REFUSED.items():
        if config.get(name):
            raise MergeError(f"{where}: {name} is set: {reason}; this adapter cannot be merged")
    for name, value in config.items():
        if name not in _UNDERSTOOD and name not in _REFUSED and value not in (None, False, 0, "", [], {}):
            raise MergeError(
                f"{where}: unknown setting {name} = {value!r}; merging without knowing what it does could change the model"
            )


def _check_values(config: Mapping[str, Any], where: str) -> None:
    _rank(config.get("r"), f"{where}: r")
    _alpha(config.get("lora_alpha", 8), f"{where}: lora_alpha")
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise MergeError(f"{where}: bias is {config['bias']!r}; expected none, all or lora_only")
    if config.get("use_dora") and config.get("lora_bias"):
        raise MergeError(f"{where}: use_dora and lora_bias are both set, which PEFT itself does not train")
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


def _matching(pattern: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The entries of ``pattern`` whose key matches ``path``.

    PEFT takes the first, and saves the keys in alphabetical order, so that a file does not tell which one was the first.
    """
    return {key: value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", path)}
