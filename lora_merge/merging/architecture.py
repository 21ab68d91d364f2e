"""What only the model's class knows: which layers are stored transposed, how experts are laid out, what a convolution does.

The class is built on torch's meta device, without data, and only when a question needs it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.errors import MergeError
from lora_merge.merging.names import neutral

CONV1D_MODELS = frozenset(["clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"])
"""Model types whose linear layers are transformers' ``Conv1D``, stored (in_features, out_features)."""


@dataclass(frozen=True)
class Architecture:
    """The base's model class; every question builds it on first use."""

    base: Checkpoint
    trust_remote_code: bool = False

    @cached_property
    def model(self) -> Any:
        """The model on the meta device."""
        return _model_without_data(self.base, self.trust_remote_code)

    def model_under(self, config: Mapping[str, Any]) -> Any:
        """The same class under another configuration, as config.json has it, on the meta device."""
        return _model_without_data(self.base, self.trust_remote_code, config)

    @cached_property
    def model_types(self) -> frozenset[str]:
        """The model types that the base's configuration names, its parts' included; answered without building."""
        return frozenset(model_types(self.base.config))

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """The weights that the class ties: tensor -> the one that it is tied to, by the class's names."""
        known = getattr(self.model, "all_tied_weights_keys", None)
        if known is None:
            raise MergeError(
                f"base {self.base.folder.source}: its class {type(self.model).__name__} does not tell which weights it ties, as "
                "those of transformers do"
            )
        ties: dict[str, str] = dict(known)
        return {target: ties.get(source, source) for target, source in ties.items()}

    @cached_property
    def embedding(self) -> str | None:
        """The class's name of the input embedding's weight; None without one."""
        return self._weight_of(self.model.get_input_embeddings)

    @cached_property
    def head(self) -> str | None:
        """The class's name of the output head's weight; None without one."""
        return self._weight_of(self.model.get_output_embeddings)

    def file_name(self, name: str) -> str:
        """What ``save_pretrained`` calls the tensor ``name`` of the class in a file: models keep the names of the hub there."""
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        (found,) = revert_weight_conversion(self.model, {name: torch.empty(1)})
        return str(found)

    def computes_with(self, setting: str) -> bool:
        """Whether a forward pass of the model asks the configuration for ``setting``."""
        for kind in {type(module) for module in self.model.modules()}:
            try:
                if setting in inspect.getsource(kind.forward):
                    return True
            except (OSError, TypeError) as error:
                raise MergeError(
                    f"base {self.base.folder.source}: what {kind.__name__} of its class does with {setting} cannot be read: "
                    f"{error}"
                ) from error
        return False

    def _weight_of(self, get: Any) -> str | None:
        try:
            weight = getattr(get(), "weight", None)
        except NotImplementedError:
            # A class without an embedding, such as one for pictures.
            return None
        return next((name for name, parameter in self.model.named_parameters() if parameter is weight), None)

    @cached_property
    def _modules(self) -> dict[str, Any]:
        return {neutral(name): module for name, module in self.model.named_modules()}

    def module(self, path: str) -> Any:
        """The module that is called ``path`` in some version of the model, or None."""
        return self._modules.get(neutral(path))

    @cached_property
    def joins_experts(self) -> bool:
        """Whether transformers puts the layers of single experts together for this class, as its earlier version had them."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        patterns = (getattr(rule, "source_patterns", ()) for rule in get_model_conversion_mapping(self.model))
        listed = ([found] if isinstance(found, str) else found for found in patterns)
        return any(".experts.*." in pattern for found in listed for pattern in found)

    @property
    def has_transposed_layers(self) -> bool:
        """Whether any layer may be a ``Conv1D``; answered without building."""
        return not CONV1D_MODELS.isdisjoint(self.model_types)

    def is_transposed_layer(self, path: str) -> bool:
        """Whether the layer stores its weight (in_features, out_features)."""
        from transformers.pytorch_utils import Conv1D

        return isinstance(self.module(path), Conv1D)

    def check_convolution(self, path: str, where: str) -> None:
        """Raise unless adding a kernel to the convolution's is the same as running both."""
        module = self.module(path)
        if module is None or not hasattr(module, "dilation"):
            raise MergeError(
                f"{where}: {path!r} has the tensors of a convolution, which the base's architecture does not have there"
            )
        if any(size != 1 for size in module.dilation) or module.padding_mode != "zeros" or module.groups != 1:
            raise MergeError(
                f"{where}: convolution {path!r} has dilation {module.dilation}, padding {module.padding_mode!r} and "
                f"{module.groups} groups; PEFT adapts it by a convolution without them, which no one kernel computes"
            )


def model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """The model types that a configuration names, its parts' included."""
    for key, value in config.items():
        if key == "model_type" and isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from model_types(value)


def _model_without_data(base: Checkpoint, trust_remote_code: bool, changed: Mapping[str, Any] | None = None) -> Any:
    """The base's architecture on torch's meta device, under a ``changed`` configuration if one is given."""
    import torch
    import transformers
    from transformers.initialization import no_tie_weights

    config_path = base.folder.path
    if base.config.get("auto_map") and not trust_remote_code:
        raise MergeError(
            f"base {base.folder.source}: its architecture is Python code in the checkpoint (auto_map in config.json), which is "
            "not run unless you pass --trust-remote-code; read that code first"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(config_path, trust_remote_code=trust_remote_code, local_files_only=True)
        if changed is not None:
            with TemporaryDirectory() as folder:
                # Through a file, since reading one decodes what JSON does not have.
                (Path(folder) / "config.json").write_text(json.dumps(changed), encoding="utf-8")
                config = type(config).from_pretrained(folder, local_files_only=True)
        names = base.config.get("architectures") or [None]
        # Tied weights stay apart, as from_pretrained builds a model: what it finds last in it is then the head, which is not
        # quantized, and not the layer before it.
        with no_tie_weights(), torch.device("meta"):
            architecture = getattr(transformers, names[0], None) if isinstance(names[0], str) else None
            if architecture is not None and not base.config.get("auto_map"):
                return architecture(config)
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    # Building an architecture runs its own code on a configuration from outside, which can fail in any way.
    except Exception as error:
        raise MergeError(
            f"base {base.folder.source}: transformers {transformers.__version__} cannot build its architecture "
            f"({base.config.get('architectures') or base.config.get('model_type')}): {type(error).__name__}: {error}"
        ) from error
