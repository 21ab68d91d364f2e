"""The QLoRA reference, recorded at the source: what the trained model itself decides, before anything is merged.

:func:`record_reference` takes the live model at the end of training, scores prompts and writes one small JSON Lines file
(docs/reference-format.md). A merged checkpoint is later held against that file, on any machine, without the 4-bit base.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_merge.console import Progress, no_progress
from lora_merge.engines.batching import equal_length_batches
from lora_merge.engines.labels import DecisionLabels, resolve_labels
from lora_merge.engines.prompts import (
    DEFAULT_PREFILL,
    Prompt,
    read_prompt_rows,
    rows_from_mappings,
    token_ids_sha256,
    tokenize,
)
from lora_merge.engines.scores import DecisionScore
from lora_merge.merging.digests import adapter_digests, adapter_identity, root_digest
from verification.dequantized import dequantized_floor, score_dequantized
from verification.errors import VerificationError
from verification.measurement import NoiseFloor
from verification.reference_file import Reference as Reference
from verification.reference_file import no_target, write_reference
from verification.reference_file import read_reference as read_reference
from verification.sampling import SAMPLE, sample_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def record_reference(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | Iterable[Prompt],
    out_path: str | os.PathLike[str],
    *,
    adapter_dir: str | os.PathLike[str] | None = None,
    prefill: str = DEFAULT_PREFILL,
    skip_label: str = "skip",
    write_label: str = "write",
    batch_size: int = 32,
    second_batch_size: int | None = 8,
    dequantized_sample: int = SAMPLE,
    progress: Progress = no_progress,
) -> Reference:
    """Score ``prompts`` with the live model and write the reference to ``out_path``, which appears complete or not at all.

    Call it at the end of training with the model as it is: PEFT's, ``trainer.model`` of TRL, or Unsloth's. It is scored in
    evaluation mode without gradients, in batches of one length without padding, and left in the mode it was in. Recording the
    same model twice in the same batch size gives the same bytes.

    On CPUs with AVX512-BF16 bitsandbytes repacks 4-bit weights at the first forward in evaluation mode, after which the model
    can neither be trained further nor have its weights read: record last there. Layers under DoRA, whose norms would be of other
    weights then, are scored without that.

    Args:
        model: the trained model, adapter unmerged.
        tokenizer: the one it was trained with.
        prompts: path of a JSON Lines prompt file, its rows as dictionaries, or prompts that are already tokenized.
        out_path: the file to write.
        adapter_dir: the saved adapter. Its digests go into the header, and its tensors, ranks
            and scalings must be those of the live model.
        prefill: appended to every prompt that is not already tokenized; what stands before the decision.
        skip_label, write_label: the two answers, each one token after the prefill.
        batch_size: prompts a batch. Batches that the device's memory cannot hold are halved, and the file says to what.
        second_batch_size: another batch size, scored too, to measure how far the numbers move by themselves; None to leave out.
        dequantized_sample: prompts that are also scored with the base dequantized and the adapter unmerged, to measure how far
            bitsandbytes' kernels move the numbers; 0 to leave out. Left out too where bitsandbytes has repacked its weights.
        progress: told of prompts scored.

    Raises:
        EngineError: a prompt, the BOS or a label is not as it must be; or the model has DoRA on 4-bit layers that are repacked.
        NonFiniteScore: the model overflowed; nothing is written.
        VerificationError: ``model`` or ``tokenizer`` is something else; the live adapter is merged, or not the one in
            ``adapter_dir``; or ``out_path`` cannot be written, or holds something else than a reference, the prompts even.
        MergeError: the 4-bit layers do not agree on one recipe, or the adapter folder cannot be read.
    """
    _expect_live(model, tokenizer)
    if reason := no_target(out_path, prompts):
        raise VerificationError(reason)
    made = _as_prompts(prompts, tokenizer, prefill)
    reference = score_reference(
        model,
        made,
        resolve_labels(tokenizer, made, prefill=prefill, skip=skip_label, write=write_label),
        adapter_dir=adapter_dir,
        prefill=prefill,
        batch_size=batch_size,
        second_batch_size=second_batch_size,
        dequantized_sample=dequantized_sample,
        progress=progress,
    )
    write_reference(reference, Path(out_path))
    if adapter_dir is not None and (lost := _lost_of_tokenizer(tokenizer, Path(adapter_dir))):
        warnings.warn(
            f"adapter {adapter_dir} holds no tokenizer, and the {lost} of this one is not that of {tokenizer.name_or_path}, "
            "which a merge would take: save it there too (tokenizer.save_pretrained)",
            stacklevel=2,
        )
    return reference


def _lost_of_tokenizer(tokenizer: PreTrainedTokenizerBase, adapter_dir: Path) -> str | None:
    """What the tokenizer of the training has that a merge without it would not; None where it is saved, or not known."""
    from transformers import AutoTokenizer

    name = getattr(tokenizer, "name_or_path", None)
    if (adapter_dir / "tokenizer_config.json").is_file() or not name:
        return None
    try:
        original = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, ImportError):  # moved since, or loaded by code of its own
        return None
    if tokenizer.chat_template != original.chat_template:
        return "chat template"
    return "vocabulary" if len(tokenizer) != len(original) else None


def score_reference(
    model: nn.Module,
    made: Sequence[Prompt],
    labels: DecisionLabels,
    *,
    adapter_dir: str | os.PathLike[str] | None,
    prefill: str,
    batch_size: int = 32,
    second_batch_size: int | None,
    dequantized_sample: int = SAMPLE,
    progress: Progress,
) -> Reference:
    """What :func:`record_reference` writes, of prompts and labels that are tokenized; arguments and errors as there."""
    from lora_merge.engines.live_model import dora_layers
    from lora_merge.engines.transformers_engine import TransformersEngine
    from lora_merge.merging.recipes import recipe_of
    from verification.live_adapter import check_live_adapter, expect_unmerged

    expect_unmerged(model)
    dora_layers(model)  # before the adapter is read from the model, which unpacks what was repacked, in fewer digits
    _expect_room(model, made)
    adapter = None
    if adapter_dir is not None:
        check_live_adapter(model, adapter_dir)
        files = adapter_digests(adapter_dir)
        adapter = {"files": files, "root": root_digest(files), "identity": adapter_identity(adapter_dir, files)}
    recipe = recipe_of(model)  # before any forward: a repacked layer no longer tells
    engine = TransformersEngine.from_model(model, batch_size=batch_size)
    described = engine.describe()
    sample = sample_of(made, dequantized_sample)
    dequantized = score_dequantized(model, sample, labels, batch_size, progress) if sample else None
    scores = engine.score(made, labels, progress=progress)
    fitted = engine.score_fit or batch_size
    return Reference(
        model=_base_facts(model),
        adapter=adapter,
        recipe=recipe,
        recipe_origin="reference",
        dtypes=_dtypes(model, described["dtype"]),
        environment={
            "versions": described["versions"],
            "device": described["device"],
            "attention": described["settings"]["attention"],
            "batch_size": fitted,
        },
        labels=labels,
        prefill=prefill,
        scores=tuple(scores),
        token_ids_sha256={prompt.id: token_ids_sha256(prompt) for prompt in made},
        noise_floors={
            "batch_shape": _batch_shape_floor(model, made, labels, scores, fitted, second_batch_size, progress),
            "dequantized": dequantized_floor(scores, dequantized),
        },
        date=next((prompt.date for prompt in made if prompt.date is not None), None),
    )


def _expect_live(model: object, tokenizer: object) -> None:
    """The names of both are an easy mistake, and so is a processor."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise VerificationError(f"model is a {type(model).__name__}; expected the trained model itself")
    if not callable(tokenizer) or not hasattr(tokenizer, "bos_token_id"):
        raise VerificationError(
            f"tokenizer is a {type(tokenizer).__name__}; expected the one of the training run (of a processor, its .tokenizer)"
        )


def _as_prompts(
    prompts: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | Iterable[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    prefill: str,
) -> list[Prompt]:
    if isinstance(prompts, (str, os.PathLike)):
        made = tokenize(read_prompt_rows(Path(prompts)), tokenizer, prefill=prefill)
    else:
        items = list(prompts)
        ready = [item for item in items if isinstance(item, Prompt)]
        rows = [item for item in items if isinstance(item, Mapping)]
        if len(ready) == len(items):
            made = ready
        elif len(rows) == len(items):
            made = tokenize(rows_from_mappings(rows), tokenizer, prefill=prefill)
        else:
            kinds = sorted({type(item).__name__ for item in items})
            raise VerificationError(
                f"prompts hold {', '.join(kinds)}; expected a path, dictionaries, or Prompt objects throughout"
            )
    if not made:
        raise VerificationError("there are no prompts; nothing can be recorded")
    if len({prompt.id for prompt in made}) != len(made):
        raise VerificationError("prompt ids occur twice; expected each once")
    return made


def _expect_room(model: nn.Module, prompts: Sequence[Prompt]) -> None:
    """Past its positions a model still answers, and wrongly."""
    from lora_merge.engines.live_model import LiveModel

    limit = getattr(LiveModel(model).text_config, "max_position_embeddings", None)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if limit is not None and len(longest.token_ids) > limit:
        raise VerificationError(f"prompt {longest.id!r} has {len(longest.token_ids)} tokens; the model has positions for {limit}")


def _batch_shape_floor(
    model: nn.Module,
    prompts: Sequence[Prompt],
    labels: DecisionLabels,
    scores: list[DecisionScore],
    batch_size: int,
    second: int | None,
    progress: Progress,
) -> NoiseFloor | None:
    """None also when the other size makes the same batches of these prompts: that would be a floor of nothing."""
    from lora_merge.engines.transformers_engine import TransformersEngine

    if second is None or equal_length_batches(prompts, batch_size) == equal_length_batches(prompts, second):
        return None
    again = TransformersEngine.from_model(model, batch_size=second).score(prompts, labels, progress=progress)
    return NoiseFloor.between(f"the reference in batches of {batch_size} and of {second}", scores, again)


def _base_facts(model: nn.Module) -> dict[str, Any]:
    from lora_merge.engines.live_model import unwrapped

    config: Any = unwrapped(model).config
    return {
        "name": str(getattr(config, "_name_or_path", "") or ""),
        "revision": getattr(config, "_commit_hash", None),
        "type": str(getattr(config, "model_type", "")),
    }


def _dtypes(model: nn.Module, embedding: str) -> dict[str, str | None]:
    """What the model calculates in: its embedding, the adapter's weights, and the 4-bit layers' compute dtype."""
    adapter = next((parameter.dtype for name, parameter in model.named_parameters() if "lora_" in name), None)
    quantized = (module for module in model.modules() if type(module).__module__.startswith("bitsandbytes"))
    compute = next((layer.compute_dtype for layer in quantized if hasattr(layer, "compute_dtype")), None)
    return {
        "embedding": embedding,
        "adapter": None if adapter is None else str(adapter).removeprefix("torch."),
        "compute": None if compute is None else str(compute).removeprefix("torch."),
    }
