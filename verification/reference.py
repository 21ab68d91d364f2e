"""The QLoRA reference, recorded at the source: what the trained model itself decides, before anything is merged.

:func:`record_reference` takes the live model at the end of training, scores prompts and writes one small JSON Lines file
(docs/reference-format.md). A merged checkpoint is later held against that file, on any machine, without the 4-bit base.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_merge.console import Progress, no_progress
from lora_merge.engines.batching import equal_length_batches
from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import DecisionLabels, resolve_labels
from lora_merge.engines.prompts import (
    DEFAULT_PREFILL,
    Prompt,
    read_prompt_rows,
    rows_from_mappings,
    token_ids_digest,
    token_ids_sha256,
    tokenize,
)
from lora_merge.engines.scores import DecisionScore
from lora_merge.merging.digests import adapter_digests, root_digest
from lora_merge.merging.errors import MergeError
from lora_merge.merging.quantization import QuantRecipe
from verification.checks import is_number
from verification.errors import VerificationError
from verification.measurement import NoiseFloor
from verification.strict_json import canonical, expect_keys, strict_loads

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

FORMAT = "lora-merge/reference"
VERSION = 1

_HEADER = {
    "format",
    "version",
    "model",
    "adapter",
    "recipe",
    "dtypes",
    "environment",
    "labels",
    "prefill",
    "prompts",
    "noise_floor",
}
_ROW = {"id", "token_ids_sha256", "log_p_skip", "log_p_write", "argmax", "skip_probability", "label_mass"}
_FLOOR = {"source", "prompts", "mean_abs_delta", "max_abs_delta", "flips"}
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Reference:
    """A recorded reference, as the file says it.

    Attributes:
        model: ``{"name", "revision", "type"}`` of the base: hub id or folder as it was loaded, commit or null, model type.
        adapter: ``{"files": {name: SHA-256}, "root"}`` of the adapter that was live, or null where none was named.
        recipe: how the base was quantized, read from the live layers; null for a model without 4-bit layers.
        dtypes: ``{"embedding", "adapter", "compute"}``, each a dtype name or null.
        environment: library versions, device, attention, batch size.
        labels: the decision labels and their token ids.
        prefill: text between prompt and decision.
        scores: one a prompt, in the order of recording.
        token_ids_sha256: prompt id -> digest of the token ids that were scored.
        noise_floor: how far the same model moved in another batch shape; null when that was not measured.
    """

    model: Mapping[str, Any]
    adapter: Mapping[str, Any] | None
    recipe: QuantRecipe | None
    dtypes: Mapping[str, Any]
    environment: Mapping[str, Any]
    labels: DecisionLabels
    prefill: str
    scores: tuple[DecisionScore, ...]
    token_ids_sha256: Mapping[str, str]
    noise_floor: NoiseFloor | None

    @property
    def token_ids_digest(self) -> str:
        """One digest of all token ids, whatever the order of the prompts."""
        return token_ids_digest(self.token_ids_sha256)

    def header(self) -> dict[str, Any]:
        """The first line of the file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": dict(self.model),
            "adapter": None if self.adapter is None else dict(self.adapter),
            "recipe": None if self.recipe is None else self.recipe.to_json(),
            "dtypes": dict(self.dtypes),
            "environment": dict(self.environment),
            "labels": self.labels.to_json(),
            "prefill": self.prefill,
            "prompts": {"count": len(self.scores), "token_ids_sha256": self.token_ids_digest},
            "noise_floor": None if self.noise_floor is None else self.noise_floor.to_json(),
        }


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
    progress: Progress = no_progress,
) -> Reference:
    """Score ``prompts`` with the live model and write the reference to ``out_path``, which appears complete or not at all.

    Call it at the end of training with the model as it is: PEFT's, ``trainer.model`` of TRL, or Unsloth's. It is scored in
    evaluation mode without gradients, in batches of one length without padding, and left in the mode it was in. Recording the
    same model twice in the same batch size gives the same bytes.

    On CPUs with AVX512-BF16 bitsandbytes repacks 4-bit weights at the first forward in evaluation mode, after which the model
    can neither be trained further nor have its weights read: record last there.

    Args:
        model: the trained model, adapter unmerged.
        tokenizer: the one it was trained with.
        prompts: path of a JSON Lines prompt file, its rows as dictionaries, or prompts that are already tokenized.
        out_path: the file to write.
        adapter_dir: the saved adapter. Its digests go into the header, and its tensors must be those of the live model.
        prefill: appended to every prompt that is not already tokenized; what stands before the decision.
        skip_label, write_label: the two answers, each one token after the prefill.
        batch_size: prompts a batch.
        second_batch_size: another batch size, scored too, to measure how far the numbers move by themselves; None to leave out.
        progress: told of prompts scored.

    Raises:
        EngineError: a prompt, the BOS or a label is not as it must be.
        NonFiniteScore: the model overflowed; nothing is written.
        VerificationError: the live adapter is not the one in ``adapter_dir``, or the file cannot be written.
        MergeError: the 4-bit layers do not agree on one recipe, or the adapter folder cannot be read.
    """
    from lora_merge.engines.transformers_engine import TransformersEngine
    from lora_merge.merging.recipes import recipe_of
    from verification.live_adapter import check_live_adapter

    made = _as_prompts(prompts, tokenizer, prefill)
    _expect_room(model, made)
    labels = resolve_labels(tokenizer, made, prefill=prefill, skip=skip_label, write=write_label)
    adapter = None
    if adapter_dir is not None:
        check_live_adapter(model, adapter_dir)
        files = adapter_digests(adapter_dir)
        adapter = {"files": files, "root": root_digest(files)}
    recipe = recipe_of(model)  # before any forward: a repacked layer no longer tells
    engine = TransformersEngine.from_model(model, tokenizer, batch_size=batch_size)
    described = engine.describe()
    scores = engine.score(made, labels, progress=progress)
    reference = Reference(
        model=_base_facts(model),
        adapter=adapter,
        recipe=recipe,
        dtypes=_dtypes(model, described["dtype"]),
        environment={
            "versions": described["versions"],
            "device": described["device"],
            "attention": described["settings"]["attention"],
            "batch_size": batch_size,
        },
        labels=labels,
        prefill=prefill,
        scores=tuple(scores),
        token_ids_sha256={prompt.id: token_ids_sha256(prompt) for prompt in made},
        noise_floor=_noise_floor(model, made, labels, scores, batch_size, second_batch_size, progress),
    )
    _write(reference, Path(out_path))
    return reference


def read_reference(path: str | os.PathLike[str]) -> Reference:
    """Read what :func:`record_reference` wrote.

    Raises:
        VerificationError: the file cannot be read, is cut short, or a line is not as the format says; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{path}: cannot be read: {error}") from error
    if not text.endswith("\n"):
        raise VerificationError(f"{path}: its last line is cut short or it is empty; record the reference again")
    lines = text[:-1].split("\n")
    try:
        header = _read_header(strict_loads(lines[0], f"{path} line 1"), f"{path} line 1")
        labels = DecisionLabels.from_json(header["labels"])
        recipe = None if header["recipe"] is None else QuantRecipe.from_json(header["recipe"])
        rows = [
            _read_row(strict_loads(line, f"{path} line {number}"), labels, f"{path} line {number}")
            for number, line in enumerate(lines[1:], start=2)
        ]
    except (EngineError, MergeError) as error:
        raise VerificationError(f"{path}: {error}") from error
    digests = {score.id: digest for score, digest in rows}
    count = header["prompts"]["count"]
    if len(rows) != count or len(digests) != count:
        raise VerificationError(f"{path}: holds {len(rows)} prompts with {len(digests)} different ids; its header says {count}")
    reference = Reference(
        model=header["model"],
        adapter=header["adapter"],
        recipe=recipe,
        dtypes=header["dtypes"],
        environment=header["environment"],
        labels=labels,
        prefill=header["prefill"],
        scores=tuple(score for score, _ in rows),
        token_ids_sha256=digests,
        noise_floor=_read_floor(header["noise_floor"], f"{path} line 1: noise_floor"),
    )
    if reference.token_ids_digest != header["prompts"]["token_ids_sha256"]:
        raise VerificationError(f"{path}: the token ids of its prompts do not add up to the digest in its header; it was changed")
    return reference


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


def _expect_room(model: nn.Module, prompts: list[Prompt]) -> None:
    """Past its positions a model still answers, and wrongly."""
    from lora_merge.engines.live_model import LiveModel

    limit = getattr(LiveModel(model).text_config, "max_position_embeddings", None)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if limit is not None and len(longest.token_ids) > limit:
        raise VerificationError(f"prompt {longest.id!r} has {len(longest.token_ids)} tokens; the model has positions for {limit}")


def _noise_floor(
    model: nn.Module,
    prompts: list[Prompt],
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


def _write(reference: Reference, target: Path) -> None:
    lines = [canonical(reference.header())]
    lines += [
        canonical(
            {
                "id": score.id,
                "token_ids_sha256": reference.token_ids_sha256[score.id],
                "log_p_skip": score.log_p_skip,
                "log_p_write": score.log_p_write,
                "argmax": score.argmax,
                "skip_probability": score.skip_probability,
                "label_mass": score.label_mass,
            }
        )
        for score in reference.scores
    ]
    partial = target.with_name(f".{target.name}.partial")
    try:
        with open(partial, "w", encoding="ascii", newline="\n") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise VerificationError(f"{target}: cannot be written: {error.strerror or error}") from error


def _read_header(value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping) and (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        raise VerificationError(
            f"{where}: format {value.get('format')!r} version {value.get('version')!r}; expected {FORMAT!r} version {VERSION}"
        )
    header = expect_keys(value, _HEADER, where)
    expect_keys(header["model"], {"name", "revision", "type"}, f"{where}: model")
    expect_keys(header["dtypes"], {"embedding", "adapter", "compute"}, f"{where}: dtypes")
    expect_keys(header["environment"], {"versions", "device", "attention", "batch_size"}, f"{where}: environment")
    prompts = expect_keys(header["prompts"], {"count", "token_ids_sha256"}, f"{where}: prompts")
    if type(prompts["count"]) is not int or prompts["count"] < 1 or not isinstance(header["prefill"], str):
        raise VerificationError(f"{where}: expected a count of prompts from 1 and a prefill string")
    if header["adapter"] is not None:
        adapter = expect_keys(header["adapter"], {"files", "root"}, f"{where}: adapter")
        files = adapter["files"]
        good = (
            isinstance(files, Mapping)
            and files
            and all(isinstance(digest, str) and _is_digest(digest) for digest in files.values())
        )
        if not good or root_digest(files) != adapter["root"]:
            raise VerificationError(f"{where}: the adapter's root is not that of its files")
    return header


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _read_floor(value: Any, where: str) -> NoiseFloor | None:
    if value is None:
        return None
    floor = expect_keys(value, _FLOOR, where)
    counts = all(type(floor[name]) is int and floor[name] >= 0 for name in ("prompts", "flips"))
    numbers = all(is_number(floor[name]) and 0 <= floor[name] <= 1 for name in ("mean_abs_delta", "max_abs_delta"))
    if not (counts and numbers and isinstance(floor["source"], str)):
        raise VerificationError(f"{where} is {floor!r}; expected a source, counts from 0 and deltas in [0, 1]")
    return NoiseFloor(**floor)


def _read_row(value: Any, labels: DecisionLabels, where: str) -> tuple[DecisionScore, str]:
    """One score and the digest of its token ids; the derived numbers in the row must follow from the log-probabilities."""
    row = expect_keys(value, _ROW, where)
    numbers = [row[name] for name in ("log_p_skip", "log_p_write", "skip_probability", "label_mass")]
    if not (
        isinstance(row["id"], str)
        and row["id"]
        and isinstance(row["token_ids_sha256"], str)
        and _is_digest(row["token_ids_sha256"])
    ):
        raise VerificationError(f"{where}: expected an id and the SHA-256 of its token ids")
    if not all(is_number(number) for number in numbers) or type(row["argmax"]) is not int or max(numbers[:2]) > _ROUNDING:
        raise VerificationError(f"{where}: expected log-probabilities up to 0, two numbers in [0, 1] and a token id")
    score = DecisionScore.from_log_probabilities(row["id"], numbers[0], numbers[1], row["argmax"], labels)
    for name, derived in (("skip_probability", score.skip_probability), ("label_mass", score.label_mass)):
        if abs(row[name] - derived) > _ROUNDING:
            raise VerificationError(f"{where}: {name} is {row[name]!r}; its log-probabilities give {derived!r}")
    return score, row["token_ids_sha256"]
