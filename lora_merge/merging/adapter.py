"""Reads a PEFT adapter folder into typed pieces. Every key of the file gets a meaning, or reading fails.

Sources: PEFT 0.21, ``tuners/lora/layer.py`` and ``utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lora_merge.merging.adapter_settings import LoraSettings, read_settings
from lora_merge.merging.dtypes import FLOATING, INTEGERS, widen
from lora_merge.merging.errors import MergeError
from lora_merge.merging.folders import ModelFolder, adapters_within, read_json
from lora_merge.merging.pickle_reader import read_pickled_tensors
from lora_merge.merging.safetensors_file import TensorInfo, read_header, read_tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

_PREFIX = "base_model.model."
# Wrappers that training frameworks leave in names, around the whole or inside; no module of a model is called like this.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Older files keep the adapter's name, which is "default" unless somebody chose another.
_ADAPTER_NAME = r"(\.default)?"
_PARTS = {
    "a": re.compile(rf"(?P<module>.+)\.lora_A{_ADAPTER_NAME}\.weight"),
    "b": re.compile(rf"(?P<module>.+)\.lora_B{_ADAPTER_NAME}\.weight"),
    "bias": re.compile(rf"(?P<module>.+)\.lora_B{_ADAPTER_NAME}\.bias"),
    "embedding_a": re.compile(rf"(?P<module>.+)\.lora_embedding_A{_ADAPTER_NAME}"),
    "embedding_b": re.compile(rf"(?P<module>.+)\.lora_embedding_B{_ADAPTER_NAME}"),
    "magnitude": re.compile(rf"(?P<module>.+)\.lora_magnitude_vector{_ADAPTER_NAME}(\.weight)?"),
    "token_rows": re.compile(rf"(?P<module>.+)\.token_adapter\.trainable_tokens_delta{_ADAPTER_NAME}"),
}
# The layer under trained token rows, stored when it was resized.
_UNDER_TOKENS = re.compile(r"\.token_adapter(?=\.base_layer\.weight$)")
_REPLACED = re.compile(r"(?P<module>.+?)(\.(?P<how>base_layer|original_module))?\.(?P<parameter>[^.]+)")
_SAVED_MODULE = re.compile(r"\.modules_to_save(\.default)?(?=\.)")
_TOWER_CLASS = re.compile(r".+(?P<tower>Text|Vision|Audio)(Model|Transformer)")
# Of the task types of PEFT, those whose classes have a head of their own.
_TASK_CLASSES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}


@dataclass(frozen=True)
class LowRankPair:
    """One module's update: ``delta = scaling * B @ A``.

    Attributes:
        module: the module's path in the model that was trained, such as ``model.layers.0.mlp.up_proj``; wrappers of nested
            parameters and of attention blocks (``base_layer``) still in it.
        a: (rank, in_features); for an embedding (rank, vocabulary); for a convolution (rank, in, kernel...).
        b: (out_features, rank); for an embedding (hidden, rank); for a convolution (out, rank, 1...).
        embedding: whether the halves are those of an embedding.
        bias: (out_features,), added to the module's bias times the scaling (``lora_bias``).
        magnitude: DoRA's norms, one for every output.
    """

    module: str
    a: TensorInfo
    b: TensorInfo
    embedding: bool = False
    bias: TensorInfo | None = None
    magnitude: TensorInfo | None = None

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(tensor for tensor in (self.a, self.b, self.bias, self.magnitude) if tensor is not None)


@dataclass(frozen=True)
class Replacement:
    """A whole tensor that takes the place of the base's.

    Attributes:
        module: the module's path in the trained model.
        parameter: ``weight``, ``bias``...
        tensor: the new values.
        trained: whether it was trained by itself (``modules_to_save``, a bias); otherwise it is the layer under an adapter, or an
            embedding that was resized, stored for safety: what tied weights shared.
    """

    module: str
    parameter: str
    tensor: TensorInfo
    trained: bool


@dataclass(frozen=True)
class TokenRows:
    """Rows of an embedding or head that were trained by themselves: ``values`` (tokens, hidden) replace rows ``indices``."""

    module: str
    values: TensorInfo
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Adapter:
    """A PEFT LoRA adapter: its configuration and its pieces, each kind ordered by module.

    Attributes:
        folder: where it lies.
        weights_file: the name of the file that holds its tensors.
        settings: its configuration.
    """

    folder: ModelFolder
    weights_file: str
    settings: LoraSettings
    pairs: tuple[LowRankPair, ...]
    replacements: tuple[Replacement, ...]
    token_rows: tuple[TokenRows, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.settings.config

    @property
    def named_base(self) -> str | None:
        """The base that the adapter says it was trained on."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def task_class(self) -> str | None:
        """How the classes of the task that it was trained for end, where that is one with a head of its own."""
        return _TASK_CLASSES.get(str(self.config.get("task_type")))

    @property
    def tower(self) -> str | None:
        """Where a full model keeps the tower whose own class was trained (``SiglipVisionModel``): ``vision_model``..."""
        mapping = self.config.get("auto_mapping")
        match = _TOWER_CLASS.fullmatch(str(mapping.get("base_model_class"))) if isinstance(mapping, dict) else None
        return f"{match['tower'].lower()}_model" if match else None

    @property
    def files(self) -> tuple[str, str]:
        """The files that make the adapter what it is."""
        return (CONFIG_FILE, self.weights_file)


@dataclass
class _Sorted:
    """The tensors of a file by what their keys mean."""

    parts: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)
    frozen: dict[str, TensorInfo] = field(default_factory=dict)


def read_adapter(folder: ModelFolder, *, base_is_residual: bool = False) -> Adapter:
    """Read and check the adapter in ``folder``.

    Args:
        base_is_residual: see :func:`~lora_merge.merging.adapter_settings.read_settings`.

    Raises:
        MergeError: no adapter there, a kind that cannot be merged, absurd settings, a key without a meaning, a missing half, a
        shape
            or rank that contradicts the configuration, a NaN or infinite value.
    """
    if not (folder.path / CONFIG_FILE).is_file() and (elsewhere := adapters_within(folder.path)):
        raise MergeError(f"{folder.path / CONFIG_FILE}: no such file; {elsewhere}")
    config = read_json(folder.path / CONFIG_FILE, "the adapter's configuration")
    settings = read_settings(config, str(folder.path / CONFIG_FILE), base_is_residual=base_is_residual)
    weights, tensors = _read_tensors(folder.path)
    if not tensors:
        raise MergeError(f"{weights}: holds no tensors; was the adapter saved before training, or sharded by a distributed run?")
    found = _sort(tensors, settings, weights)
    pairs = tuple(_pair(module, parts, settings) for module, parts in sorted(found.parts.items()) if "token_rows" not in parts)
    rows = tuple(_token_rows(module, parts, settings) for module, parts in sorted(found.parts.items()) if "token_rows" in parts)
    _check_complete(settings, found, rows)
    return Adapter(folder, weights.name, settings, pairs, tuple(found.replacements), rows)


def is_saved_module(module: str, names: tuple[str, ...]) -> bool:
    """Whether ``module`` or a module around it is one of ``names``, as PEFT matches ``modules_to_save``: ``norm`` is
    ``layernorm`` too."""
    paths = [module[: match.start()] for match in re.finditer(r"\.", module)] + [module]
    return any(path.endswith(name) for path in paths for name in names)


def _read_tensors(folder: Path) -> tuple[Path, tuple[TensorInfo, ...]]:
    weights, pickle = folder / WEIGHTS_FILE, folder / PICKLE_FILE
    if weights.is_file():
        return weights, read_header(weights).tensors
    if pickle.is_file():
        return pickle, read_pickled_tensors(pickle)
    raise MergeError(f"{weights}: no such file; expected the adapter's tensors")


def _check_values(tensor: TensorInfo) -> None:
    if tensor.dtype.name not in FLOATING:
        raise MergeError(f"{tensor.path}: {tensor.name!r} is of type {tensor.dtype.name}; expected one of {', '.join(FLOATING)}")
    values = widen(read_tensor(tensor), tensor.dtype)
    if not np.isfinite(values).all():
        place = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
        raise MergeError(
            f"{tensor.path}: {tensor.name!r} is {values[tuple(place)]} at {place}; the adapter is damaged, train or save it again"
        )


def _sort(tensors: tuple[TensorInfo, ...], settings: LoraSettings, weights: Path) -> _Sorted:
    found = _Sorted()
    for tensor in tensors:
        name = _WRAPPERS.sub("", tensor.name)
        if not name.startswith(_PREFIX):
            raise _meaningless(tensor, weights)
        path = name.removeprefix(_PREFIX)
        for part, pattern in _PARTS.items():
            if match := pattern.fullmatch(path):
                parts = found.parts.setdefault(match["module"], {})
                if part in parts:
                    raise MergeError(f"{weights}: {parts[part].name!r} and {tensor.name!r} are both the {part} of one module")
                _check_values(tensor)
                parts[part] = tensor
                break
        else:
            _sort_replacement(path, tensor, settings, weights, found)
    return found


def _sort_replacement(path: str, tensor: TensorInfo, settings: LoraSettings, weights: Path, found: _Sorted) -> None:
    path, saved = _SAVED_MODULE.subn("", _UNDER_TOKENS.sub("", path))
    match = _REPLACED.fullmatch(path)
    if match is None or any(mark in path for mark in ("lora_", "token_adapter")):
        raise _meaningless(tensor, weights)
    module, how, parameter = match["module"], match["how"] or "", match["parameter"]
    if how == "original_module":
        # The layer as it was before training, which older versions stored beside the trained one.
        found.frozen[f"{module}.{parameter}"] = tensor
        return
    trained = bool(saved) or is_saved_module(module, settings.names("modules_to_save"))
    # A module that was saved whole can hold counters, such as the batches that a batch norm has seen.
    if not (trained and tensor.dtype.name in INTEGERS):
        _check_values(tensor)
    if not trained and parameter == "bias" and settings.config.get("bias", "none") != "none":
        trained = True
    if not trained and how != "base_layer" and parameter != "weight":
        raise _meaningless(tensor, weights)
    for other in found.replacements:
        if (other.module, other.parameter) == (module, parameter):
            # PEFT stores a saved and resized module under both its old and its new key.
            if other.tensor.shape == tensor.shape and np.array_equal(read_tensor(other.tensor), read_tensor(tensor)):
                return
            raise MergeError(f"{weights}: {other.tensor.name!r} and {tensor.name!r} replace the same tensor by different values")
    found.replacements.append(Replacement(module, parameter, tensor, trained))


def _meaningless(tensor: TensorInfo, weights: Path) -> MergeError:
    return MergeError(
        f"{weights}: tensor {tensor.name!r} has no meaning in a LoRA adapter with these settings (expected "
        f"{_PREFIX}MODULE.lora_A.weight and the like); nothing was merged, since leaving it out would change the model"
    )


def _pair(module: str, parts: Mapping[str, TensorInfo], settings: LoraSettings) -> LowRankPair:
    embedding = "embedding_a" in parts or "embedding_b" in parts
    names = ("embedding_a", "embedding_b") if embedding else ("a", "b")
    for name, other in (names, names[::-1]):
        if name not in parts:
            tensor = parts.get(other) or next(iter(parts.values()))
            raise MergeError(
                f"{tensor.path}: {tensor.name!r} has no lora_{name[:-1]}{name[-1].upper()} beside it; the adapter is incomplete"
            )
    a, b = parts[names[0]], parts[names[1]]
    if extra := sorted(set(parts) - {*names, "bias", "magnitude"}):
        raise MergeError(
            f"{a.path}: module {module!r} has both {a.name!r} and {parts[extra[0]].name!r}; it can be of one kind only"
        )
    if min(len(a.shape), len(b.shape)) < 2:
        raise MergeError(
            f"{a.path}: {a.name!r} and {b.name!r} have shapes {list(a.shape)} and {list(b.shape)}; expected matrices: "
            "a distributed run may have saved shards without gathering them"
        )
    dora, lora_bias = bool(settings.config.get("use_dora")), bool(settings.config.get("lora_bias"))
    if dora != ("magnitude" in parts):
        missing = "has no lora_magnitude_vector beside it" if dora else "has a lora_magnitude_vector beside it"
        raise MergeError(
            f"{a.path}: {a.name!r} {missing}, but use_dora is {str(dora).lower()}; the adapter is incomplete or mixed up"
        )
    if not embedding and lora_bias != ("bias" in parts):
        missing = "has no bias" if lora_bias else "has a bias"
        raise MergeError(
            f"{b.path}: {b.name!r} {missing}, but lora_bias is {str(lora_bias).lower()}; the adapter is incomplete or mixed up"
        )
    return LowRankPair(module, a, b, embedding, parts.get("bias"), parts.get("magnitude"))


def _token_rows(module: str, parts: Mapping[str, TensorInfo], settings: LoraSettings) -> TokenRows:
    values = parts["token_rows"]
    if len(parts) > 1:
        raise MergeError(
            f"{values.path}: module {module!r} has trained token rows and a low-rank update; it can have one of them only"
        )
    rows = [rows for name, rows in settings.trainable_tokens.items() if module == name or module.endswith(f".{name}")]
    if not rows and len(settings.trainable_tokens) == 1:
        # A plain list means the input embedding, whatever the architecture calls it.
        rows = list(settings.trainable_tokens.values()) if isinstance(settings.config["trainable_token_indices"], list) else []
    if len(rows) != 1:
        raise MergeError(f"{settings.where}: trainable_token_indices do not say which rows {values.name!r} replaces")
    if len(values.shape) != 2 or values.shape[0] != len(rows[0]):
        raise MergeError(
            f"{values.path}: {values.name!r} has shape {list(values.shape)}, but {settings.where} names {len(rows[0])} rows; "
            "expected one line a row"
        )
    return TokenRows(module, values, rows[0])


def _check_complete(settings: LoraSettings, found: _Sorted, rows: tuple[TokenRows, ...]) -> None:
    """Raise where a piece lacks another, or rows have no tensor. What of the base is missing, ``completeness`` looks for."""
    for name, tensor in found.frozen.items():
        if name not in {f"{replacement.module}.{replacement.parameter}" for replacement in found.replacements}:
            raise MergeError(
                f"{tensor.path}: {tensor.name!r} has no trained tensor beside it (modules_to_save); the adapter is incomplete"
            )
    if settings.trainable_tokens and not rows:
        raise MergeError(
            f"{settings.where}: trainable_token_indices names rows of {next(iter(settings.trainable_tokens))!r}, but the adapter "
            "holds no trainable_tokens_delta; it is incomplete"
        )
