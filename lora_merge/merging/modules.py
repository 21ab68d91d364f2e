"""Which modules of the base were quantized: transformers' own rule, replayed on a model without data."""

from __future__ import annotations

from typing import Any

from lora_merge.merging.checkpoint import Checkpoint
from lora_merge.merging.errors import MergeError
from lora_merge.merging.quantization import QuantRecipe


def quantized_tensors(base: Checkpoint, recipe: QuantRecipe, trust_remote_code: bool = False) -> frozenset[str]:
    """Names of the base's weight tensors that bitsandbytes quantized when the adapter was trained.

    Raises:
        MergeError: the architecture cannot be built, or a quantized module has no tensor in the base.
    """
    modules = recipe.quantized_modules
    if modules is None:
        modules = quantized_modules(base, recipe.skip_modules, trust_remote_code)
    if not modules:
        raise MergeError(
            f"base {base.folder.source}: no module of it would have been quantized under the recipe; "
            "a 4-bit base has at least one quantized linear layer"
        )
    tensors = base.tensors
    missing = [module for module in modules if f"{module}.weight" not in tensors]
    if missing:
        raise MergeError(
            f"base {base.folder.source}: module {missing[0]!r} was quantized in training but the base has no {missing[0]}.weight "
            f"({len(missing)} of {len(modules)} modules); the base and the recipe do not belong together"
        )
    return frozenset(f"{module}.weight" for module in modules)


def quantized_modules(base: Checkpoint, skip_modules: tuple[str, ...] | None, trust_remote_code: bool) -> tuple[str, ...]:
    """Names of the modules that transformers replaces by 4-bit ones when it loads ``base``.

    By default it leaves out tied weights' modules, the last module, the output embedding and what the architecture keeps in
    float32; a given ``skip_modules`` *replaces* the first three. Source: ``transformers/quantizers/base.py`` (the functions are
    called, not copied) and ``integrations/bitsandbytes.py``, ``replace_with_bnb_linear``, whose type test is repeated here.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = _model_without_data(base, trust_remote_code)
    skipped = HfQuantizer.get_modules_to_not_convert(
        model, list(skip_modules) if skip_modules is not None else None, model._keep_in_fp32_modules
    )
    return tuple(
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, skipped)
    )


def _model_without_data(base: Checkpoint, trust_remote_code: bool) -> Any:
    """The base's architecture on torch's meta device."""
    import torch
    import transformers

    config_path = base.folder.path
    if base.config.get("auto_map") and not trust_remote_code:
        raise MergeError(
            f"base {base.folder.source}: its architecture is Python code in the checkpoint (auto_map in config.json), which is "
            "not run unless you pass --trust-remote-code; read that code first"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(config_path, trust_remote_code=trust_remote_code, local_files_only=True)
        names = base.config.get("architectures") or [None]
        with torch.device("meta"):
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
