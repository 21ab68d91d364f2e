"""A checkpoint without a merge manifest: whether what stands beside its weights is what base and adapter say.

A manifest names every file by its digest. Without one the weights are audited all the same, but another tokenizer, chat template
or end of text shows in no measured prompt that does not happen to use it. So these are compared with what the merge would have
written, by what they do and not by their bytes: tools other than lora-merge save the same tokenizer and configuration in other
words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_merge.engines.errors import EngineError
from lora_merge.engines.model_files import end_ids, load_config
from lora_merge.merging.errors import MergeError
from verification.checks import Check, Outcome
from verification.merged_files import WRITTEN_CHECK, listed
from verification.sources import Sources
from verification.tokenizers import differences, reference_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_MANIFEST = "there is no merge manifest"
_OWN_CHECKS = ("tie_word_embeddings", "vocab_size", "quantization_config")
"""What other checks answer for."""
_NO_MATTER = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "id2label", "label2id")
_NO_MATTER_WITHIN = ("_token_id", "dropout", "initializer", "attn_implementation", "output_", "return_dict", "router_aux_loss")
"""Parts of the names of settings that do not change what a trained model says of a text. Ids that end one are compared by
themselves.
"""


def unrecorded_findings(
    merged: Path, tokenizer: PreTrainedTokenizerBase, sources: Sources, *, trust_remote_code: bool = False
) -> Iterator[Check]:
    """Tokenizer, chat template, ends of a text and configuration of ``merged`` against base and adapter; nothing with a manifest.

    ``tokenizer``: the one in ``merged``.
    """
    if sources.manifest is not None:
        return
    absent = [role for role, folder in (("base", sources.base), ("adapter", sources.adapter)) if folder is None]
    if absent:
        reason = f"{_NO_MANIFEST}, and no {' and no '.join(absent)} on this machine"
        yield Check(WRITTEN_CHECK, Outcome.WARNED, f"{reason}: configuration and tokenizer were not compared with theirs")
        return
    try:
        differing = list(_differences(merged, tokenizer, sources, trust_remote_code))
    except (EngineError, MergeError) as error:
        reason = f"{_NO_MANIFEST}, and configuration and tokenizer could not be compared with those of base and adapter: {error}"
        yield Check(WRITTEN_CHECK, Outcome.WARNED, reason)
        return
    compared = f"{_NO_MANIFEST}; compared with base and adapter, the checkpoint has"
    if differing:
        yield Check(WRITTEN_CHECK, Outcome.WARNED, f"{compared} another {listed(differing)}: take theirs unless that is meant")
    else:
        found = "the same tokenizer, chat template, configuration and ids that end a text"
        yield Check(WRITTEN_CHECK, Outcome.PASSED, f"{compared} {found}")


def _differences(merged: Path, tokenizer: PreTrainedTokenizerBase, sources: Sources, trust_remote_code: bool) -> Iterator[str]:
    assert sources.base is not None
    found = reference_tokenizer(sources, trust_remote_code=trust_remote_code)
    if found is None:
        raise EngineError("neither of them has a tokenizer")
    theirs, _ = found
    yield from differences(tokenizer, theirs)
    ends, wanted = end_ids(merged, tokenizer), end_ids(sources.base.path, theirs)
    if ends != wanted:
        yield f"set of ids that end a text ({_ids(ends)} instead of {_ids(wanted)})"
    ours, base = (
        load_config(folder, trust_remote_code=trust_remote_code).get_text_config() for folder in (merged, sources.base.path)
    )
    yield from (f"{name} in config.json" for name in _changed(ours.to_dict(), base.to_dict()))


def _changed(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """The settings that both configurations have, with different values.

    The class gives every setting that it knows a value, so what only one of them has is read by nothing.
    """
    for name in sorted(ours.keys() & theirs.keys()):
        if name in (*_OWN_CHECKS, *_NO_MATTER) or name.startswith("_") or any(part in name for part in _NO_MATTER_WITHIN):
            continue
        if ours[name] != theirs[name]:
            yield name


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "none"
