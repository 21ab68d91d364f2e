"""Rank and alpha patterns that match one module twice. PEFT takes the first in the order of the training script, and saves them
sorted. Oracle: the live, unmerged model, float32."""

from __future__ import annotations

import pytest

from lora_merge.merging.api import MergeOptions, merge
from lora_merge.merging.errors import MergeError
from tests.merging.kinds import Kind, answer, load, save_base, train

QV = {"target_modules": ["q_proj", "v_proj"]}
WIDE, NARROW = "v_proj", "layers.0.self_attn.v_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("patterns") / "base", "llama")


@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {WIDE: 2, NARROW: 6}},
        {"rank_pattern": {NARROW: 6, WIDE: 2}},
        {"rank_pattern": {WIDE: 2, NARROW: 6}, "use_rslora": True},
        {"alpha_pattern": {WIDE: 5, NARROW: 5.0}},
    ],
)
def test_what_the_file_still_tells_is_merged(settings, base, tmp_path):
    """The tensors are of the rank that was trained; alphas that are equal have no order."""
    live = train(load(base, "llama"), Kind({**QV, **settings}))
    live.save_pretrained(tmp_path / "adapter")
    expected = answer(live, "llama")
    out = merge(base, tmp_path / "adapter", tmp_path / "out", MergeOptions(dtype="float32")).out
    assert (answer(load(out, "llama", None), "llama") - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("order", [(WIDE, NARROW), (NARROW, WIDE)])
def test_alphas_whose_order_is_lost_are_refused(order, base, tmp_path):
    values = {WIDE: 5, NARROW: 50}
    train(load(base, "llama"), Kind({**QV, "alpha_pattern": {key: values[key] for key in order}})).save_pretrained(tmp_path / "a")
    with pytest.raises(MergeError, match=r"'layers.0.self_attn.v_proj' \(50\) and 'v_proj' \(5\) both match 'model\.layers\.0"):
        merge(base, tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rank_that_no_pattern_names_is_refused(base, tmp_path):
    train(load(base, "llama"), Kind({**QV, "rank_pattern": {WIDE: 3}})).save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(file.read_text().replace('"v_proj": 3', '"v_proj": 2, "self_attn.v_proj": 6'))
    with pytest.raises(MergeError, match=r"of rank 3 and 3, the configuration says 2 or 6"):
        merge(base, tmp_path / "a", tmp_path / "out")
