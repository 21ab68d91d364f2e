"""The prompts of a run as token ids, made by the tokenizer that generation will use, and the proof that the reference got the
same.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_merge.engines.errors import EngineError
from lora_merge.engines.labels import DecisionLabels, resolve_labels
from lora_merge.engines.model_files import load_config, load_tokenizer, max_positions, vocabulary_rows
from lora_merge.engines.prompts import DEFAULT_PREFILL, Prompt, read_prompt_rows, today, token_ids_digest, tokenize
from lora_merge.merging.checkpoint import weights_elsewhere
from lora_merge.merging.folders import read_json
from lora_merge.merging.safetensors_file import TensorInfo, read_header
from lora_merge.merging.side_files import TIE_FLAG
from lora_merge.merging.tying import same_values
from verification.checks import Check, Outcome
from verification.errors import Inconclusive
from verification.measurement import match_token_ids
from verification.reference_file import Reference
from verification.sampling import sample_of
from verification.sources import Sources
from verification.tokenizers import reference_tokenizer
from verification.unrecorded import unrecorded_findings

_CONFIG = "the configuration of a merged checkpoint"
_STATE = ".quant_state.bitsandbytes__"
"""In the name of what bitsandbytes stores beside each 4-bit weight; beside an 8-bit one it is ``SCB``."""


@dataclass(frozen=True)
class DecisionOptions:
    """How the decision is read.

    Attributes:
        prefill, skip_label, write_label: None for those of the recorded reference, else the usual ones.
        num_prompts: score a seeded sample of this size; None for all prompts.
        seed: of the sample.
    """

    prefill: str | None = None
    skip_label: str | None = None
    write_label: str | None = None
    num_prompts: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Prepared:
    """Prompts ready to score.

    Attributes:
        prompts: in the order of their file.
        labels, prefill: how the decision is read.
        about: the ``prompts`` part of :class:`~verification.measurement.Conditions`.
        findings: what was checked of the prompts.
    """

    prompts: tuple[Prompt, ...]
    labels: DecisionLabels
    prefill: str
    about: dict[str, Any]
    findings: tuple[Check, ...]


def prepare(
    prompts: str | os.PathLike[str],
    merged: Path,
    sources: Sources,
    reference: Reference | None,
    options: DecisionOptions,
    *,
    trust_remote_code: bool = False,
) -> Prepared:
    """Tokenize the prompt file with the merged checkpoint's tokenizer, and make sure that every arm reads the same ids.

    Raises:
        EngineError: a prompt is malformed, too long, holds a token that the model has no row for, or has no single BOS where the
            tokenizer wants one; a label is no single token after the prefill.
        Inconclusive: the reference was given other ids, prompts, labels or another prefill.
        MergeError: the checkpoint's configuration or the headers of its weights cannot be read.
    """
    read_json(merged / "config.json", _CONFIG)  # a broken one is no fault of the tokenizer, which is looked for by it
    tokenizer = load_tokenizer(merged, trust_remote_code=trust_remote_code)
    prefill = _agreed("prefill", options.prefill, None if reference is None else reference.prefill, DEFAULT_PREFILL)
    limit = max_positions(merged)
    recorded = None if reference is None else reference.date
    date = today() if recorded is None else datetime.date.fromisoformat(recorded)
    made = tokenize(
        read_prompt_rows(Path(prompts)),
        tokenizer,
        prefill=prefill,
        max_length=None if limit is None else limit - 1,
        vocabulary=vocabulary_rows(merged),
        date=date,
    )
    known = None if reference is None else reference.labels
    labels = resolve_labels(
        tokenizer,
        made,
        prefill=prefill,
        skip=_agreed("skip label", options.skip_label, None if known is None else known.skip.text, "skip"),
        write=_agreed("write label", options.write_label, None if known is None else known.write.text, "write"),
    )
    if known is not None and known != labels:
        raise Inconclusive(
            f"the reference read the labels as tokens {known.skip.token_id} and {known.write.token_id}, the merged checkpoint's "
            f"tokenizer gives {labels.skip.token_id} and {labels.write.token_id}: another tokenizer or library version"
        )
    chosen = _sample(made, options)
    if reference is not None:
        # All of them, so that no sample can be of prompts that were picked for it.
        match_token_ids(made, reference.token_ids_sha256, recorded)
        findings: tuple[Check, ...] = (
            Check("token-ids", Outcome.PASSED, f"the reference answered these very {len(made)} prompts"),
        )
    else:
        findings = tuple(_tokenizer_findings(chosen, sources, prompts, prefill, trust_remote_code, date))
    about = {
        "source": Path(prompts).name,
        "total": len(made),
        "scored": len(chosen),
        "seed": options.seed if len(chosen) < len(made) else None,
        "token_ids_sha256": token_ids_digest(chosen),
        **({} if (written := next((prompt.date for prompt in chosen if prompt.date), None)) is None else {"date": written}),
    }
    beside = (
        *unrecorded_findings(merged, tokenizer, sources, trust_remote_code=trust_remote_code),
        *tied_head_findings(merged, trust_remote_code=trust_remote_code),
        *_file_findings(merged),
    )
    return Prepared(tuple(chosen), labels, prefill, about, (*findings, *beside))


def tied_head_findings(folder: Path, *, trust_remote_code: bool = False) -> Iterator[Check]:
    """With tied embeddings in the configuration a head of other values may not lie in the files: engines disagree on which one
    to use.

    Where config.json does not say, as the original one of Gemma 3 does not, its class does.
    """
    config = read_json(folder / "config.json", _CONFIG)
    text_config = config.get("text_config")
    tied = (text_config if isinstance(text_config, dict) else {}).get(TIE_FLAG, config.get(TIE_FLAG))
    what = "config.json ties the head to the embedding"
    if tied is None:
        with contextlib.suppress(EngineError):  # then the engine says so
            tied = getattr(load_config(folder, trust_remote_code=trust_remote_code), TIE_FLAG, False)
        what = "the class in config.json ties the head to the embedding, unless told otherwise"
    if not tied:
        return
    found = {}
    for tensor in _tensors(folder):
        kind = next((kind for kind in ("lm_head.weight", "embed_tokens.weight") if tensor.name.endswith(kind)), None)
        if kind is not None:
            found[kind] = tensor
    if len(found) < 2:
        return
    if same_values(*found.values()):
        yield Check("tied-head", Outcome.PASSED, f"{what}, and the head in the files is the same")
    else:
        yield Check(
            "tied-head", Outcome.INCONCLUSIVE, f"{what}, but the files hold another head: engines disagree on which to use"
        )


def _tensors(folder: Path) -> Iterator[TensorInfo]:
    """The tensors of every safetensors file; raises :class:`MergeError`."""
    for path in sorted(folder.glob("*.safetensors")):
        yield from read_header(path).tensors


def _file_findings(folder: Path) -> Iterator[Check]:
    """What makes engines load different weights from one folder: another file of weights that Transformers is told to load, an
    adapter in it, which Transformers puts on top of what was merged and vLLM does not, or a quantization that the files do not
    have, which a merge script left in the configuration: some engines quantize the weights then, some fail.
    """
    config = read_json(folder / "config.json", _CONFIG)
    if reason := weights_elsewhere(config):
        yield Check("weights-file", Outcome.INCONCLUSIVE, f"{folder}: {reason}")
    if (folder / "adapter_config.json").is_file():
        reason = f"{folder} holds adapter_config.json too: Transformers would put that adapter on top of the merged weights"
        yield Check("adapter-files", Outcome.INCONCLUSIVE, f"{reason}, vLLM would not; move the adapter to a folder of its own")
    stored = config.get("quantization_config")
    by_bitsandbytes = isinstance(stored, dict) and (
        stored.get("quant_method") == "bitsandbytes" or stored.get("load_in_4bit") or stored.get("load_in_8bit")
    )
    if by_bitsandbytes and not any(tensor.name.endswith(".SCB") or _STATE in tensor.name for tensor in _tensors(folder)):
        reason = "config.json has a quantization_config of bitsandbytes, but the files hold no weights that it quantized"
        yield Check(
            "quantization-config", Outcome.INCONCLUSIVE, f"{folder}: {reason}; take quantization_config out of config.json"
        )


def _agreed(what: str, given: str | None, recorded: str | None, usual: str) -> str:
    """What was given, else what the reference was recorded with, else the usual; a contradiction cannot be measured."""
    if given is not None and recorded is not None and given != recorded:
        raise Inconclusive(f"{what} {given!r} was given, the reference was recorded with {recorded!r}; nothing can be compared")
    return next(value for value in (given, recorded, usual) if value is not None)


def _sample(prompts: Sequence[Prompt], options: DecisionOptions) -> list[Prompt]:
    return list(prompts) if options.num_prompts is None else sample_of(prompts, options.num_prompts, options.seed)


def _tokenizer_findings(
    chosen: Sequence[Prompt],
    sources: Sources,
    prompts: str | os.PathLike[str],
    prefill: str,
    trust_remote_code: bool,
    date: datetime.date | None = None,
) -> Iterator[Check]:
    """The reference's own tokenizer, beside its adapter or its base, must make the same ids of these prompts."""
    found = reference_tokenizer(sources, trust_remote_code=trust_remote_code)
    if found is None:
        yield Check("token-ids", Outcome.WARNED, "neither adapter nor base has a tokenizer, so the ids cannot be compared")
        return
    tokenizer, folder = found
    others = tokenize(read_prompt_rows(Path(prompts)), tokenizer, prefill=prefill, date=date)
    theirs = {prompt.id: prompt.token_ids for prompt in others}
    changed = [prompt for prompt in chosen if theirs[prompt.id] != prompt.token_ids]
    if changed:
        first = changed[0]
        yield Check(
            "token-ids",
            Outcome.INCONCLUSIVE,
            f"the merged checkpoint's tokenizer makes other ids of {len(changed)} of {len(chosen)} prompts than the one in "
            f"{folder}: it was swapped. {_first_difference(first.id, first.token_ids, theirs[first.id])}",
        )
    else:
        yield Check("token-ids", Outcome.PASSED, f"the tokenizers of the merged checkpoint and of {folder} make the same ids")


def _first_difference(prompt: str, merged: Sequence[int], other: Sequence[int]) -> str:
    """Where two tokenizations of ``prompt`` part, in one sentence."""
    place = next((at for at, (first, second) in enumerate(zip(merged, other, strict=False)) if first != second), None)
    if place is None:
        place = min(len(merged), len(other))
    here, there = (f"{ids[place]}" if place < len(ids) else "the end" for ids in (merged, other))
    return f"{prompt!r} has {len(merged)} tokens, and {len(other)} there; they part at token {place}: {here}, and {there} there"
