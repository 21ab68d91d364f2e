"""QLoRA with tokens added before training: the reference is recorded at its end, or loaded later, and holds a merge to account.

Oracle: the model in training itself, by a plain forward of one prompt at a time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_merge.engines.labels import Label
from lora_merge.engines.prompts import read_prompt_rows, tokenize
from lora_merge.merging.api import MergeOptions, merge
from tests.verification.test_verify import outcomes, verify
from tests.verification.tiny_qlora import PREFILL, leave, train_model
from verification.drift_file import read_measurements
from verification.errors import VerificationError
from verification.live_adapter import check_live_adapter
from verification.reference import Reference, read_reference

ADDED = ("<then>", "<last>", "<skip>", "<write>")
FORM = "{} <then> {} <last> {}"
KINDS: dict[str, dict[str, Any]] = {
    "projections only": {},
    "projections only, tied": {"tied": True},
    "embedding and head saved": {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}},
    "token rows": {"lora": {"trainable_token_indices": [372, 373]}},
}


@dataclass(frozen=True)
class Run:
    """What one run left in ``folder``, with the merges ``merged`` and ``naive``; the model; and what it ``said`` before anything
    was recorded: skip probabilities in training mode, (prompts,).
    """

    folder: Path
    model: Any
    said: np.ndarray


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("resized")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, tokenizer = train_model(folder, added=ADDED, form=FORM, steps=120, **KINDS[request.param])
    skip, write = (tokenizer(PREFILL + word, add_special_tokens=False)["input_ids"][-1] for word in ("skip", "write"))
    said = []
    with torch.no_grad():
        for prompt in tokenize(read_prompt_rows(folder / "prompts.jsonl"), tokenizer, prefill=PREFILL):
            assert {372, 373} <= set(prompt.token_ids)  # two of those that were added
            logits = model(torch.tensor([prompt.token_ids])).logits[0, -1].double()
            said.append(torch.sigmoid(logits[skip] - logits[write]).item())
    leave(folder, model, tokenizer)
    merge(folder / "base", folder / "adapter", folder / "merged", MergeOptions(from_4bit=True))
    merge(folder / "base", folder / "adapter", folder / "naive")
    torch.set_num_threads(threads)
    return Run(folder, model, np.array(said))


def far(reference: Reference, run: Run) -> float:
    """Mean distance of a reference's skip probabilities from what training said."""
    return float(np.abs(np.array([score.skip_probability for score in reference.scores]) - run.said).mean())


def drift(verdict: dict[str, Any]) -> float:
    return float(verdict["numbers"]["drift"]["mean_abs_delta"])


def noise(verdict: dict[str, Any]) -> float:
    return max(float(floor["mean_abs_delta"]) for floor in verdict["numbers"]["noise_floors"])


def test_a_recorded_reference_is_what_training_says(run: Run) -> None:
    assert run.said.std() > 0.1
    # In evaluation mode bitsandbytes has another kernel on some processors.
    assert far(read_reference(run.folder / "reference.jsonl"), run) < 0.01


def test_the_right_merge_passes_and_the_wrong_one_fails(run: Run) -> None:
    right, wrong = verify(run.folder, exit_code=0), verify(run.folder, merged="naive", exit_code=1)
    assert right["outcome"] == "PASSED", right["reasons"]
    rows = read_measurements(run.folder / "merged-report" / "drift.jsonl").rows
    assert np.abs(np.array([row.scores["merged"].skip_probability for row in rows]) - run.said).mean() < 0.01
    assert drift(right) < 2 * noise(right)
    assert drift(wrong) > 5 * noise(wrong)
    assert outcomes(wrong)["mean-delta"] == "FAILED"


def test_a_live_reference_is_what_training_says(run: Run) -> None:
    right = verify(run.folder, "--record-reference", run.folder / "again.jsonl", reference=False, exit_code=0)
    assert right["outcome"] == "PASSED", right["reasons"]
    again = read_reference(run.folder / "again.jsonl")
    assert again.adapter == read_reference(run.folder / "reference.jsonl").adapter
    assert far(again, run) < 0.01
    assert drift(right) < 2 * noise(right)
    wrong = verify(run.folder, reference=False, merged="naive", exit_code=1)
    assert outcomes(wrong)["mean-delta"] == "FAILED"


def test_labels_that_were_added_are_recorded(tmp_path: Path) -> None:
    """The base's tokenizer does not know them; an adapter that was trained for others leaves them no mass."""
    model, tokenizer = train_model(tmp_path, added=ADDED, form=FORM, steps=1)
    leave(tmp_path, model, tokenizer)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", MergeOptions(from_4bit=True))
    words = ("--skip-label", "<skip>", "--write-label", "<write>")
    verdict = verify(tmp_path, "--record-reference", tmp_path / "again.jsonl", *words, reference=False, exit_code=3)
    assert outcomes(verdict)["label-mass"] == "INCONCLUSIVE"
    labels = read_reference(tmp_path / "again.jsonl").labels
    assert [labels.skip, labels.write] == [Label("<skip>", 374), Label("<write>", 375)]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_another_embedding_or_head_is_refused(suffix: str, run: Run, tmp_path: Path) -> None:
    """As whole tensors or as rows: every tensor of the file that is no low-rank half."""
    shutil.copytree(run.folder / "adapter", tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    save = save_file if suffix == ".safetensors" else torch.save
    file = tmp_path / "adapter" / f"adapter_model{suffix}"
    save(tensors, file)
    check_live_adapter(run.model, tmp_path / "adapter")
    tables = [name for name in tensors if "lora_" not in name]
    assert len(tables) >= 2
    for name in tables:
        other = tensors[name].clone()
        other[-1, 0] += 0.5
        save({**tensors, name: other}, file)
        with pytest.raises(VerificationError, match=r"differs from the live adapter by up to 0\."):
            check_live_adapter(run.model, tmp_path / "adapter")


def test_an_adapter_saved_as_bin_is_recorded_and_verified(tmp_path: Path) -> None:
    model, tokenizer = train_model(tmp_path, added=ADDED, form=FORM, steps=120)
    leave(tmp_path, model, tokenizer, safetensors=False)
    assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", MergeOptions(from_4bit=True))
    assert verify(tmp_path, exit_code=0)["outcome"] == "PASSED"
    live = verify(tmp_path, "--record-reference", tmp_path / "again.jsonl", reference=False, exit_code=0)
    assert live["outcome"] == "PASSED"
    files = read_reference(tmp_path / "again.jsonl").adapter
    assert files == read_reference(tmp_path / "reference.jsonl").adapter
    assert set(files["files"]) == {"adapter_config.json", "adapter_model.bin"}


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_damaged_adapter_file_is_one_line(name: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"no tensors")
    with pytest.raises(VerificationError, match=rf"{name}: cannot be read: .*; save the adapter again"):
        check_live_adapter(run.model, tmp_path)
