"""Whose processor the output has, and its chat template. Oracle: transformers, loading the output."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers

from lora_merge.merging.api import merge
from lora_merge.merging.errors import MergeError
from tests.merging.tokenizer_places import BASE_TEMPLATE, TRAINED_TEMPLATE, tokenizer


def test_processor_of_the_adapter(place):
    """Version 5 saves one file, which wins over those of version 4; so neither stays beside the other."""
    small, large = ({"height": size, "width": size} for size in (32, 48))
    transformers.CLIPImageProcessor(size=large, crop_size=large).save_pretrained(place.base)
    (place.base / "processor_config.json").write_text(json.dumps({"processor_class": "CLIPProcessor", "image_seq_length": 4}))
    nested = {**transformers.CLIPImageProcessor(size=small, crop_size=small).to_dict()}
    (place.adapter / "processor_config.json").write_text(
        json.dumps({"processor_class": "CLIPProcessor", "image_processor": nested})
    )
    result = place.run()
    assert result.exit_code == 0, result.stderr
    assert (
        f"processor: from {place.adapter}; differs from the base's in preprocessor_config.json, processor_config.json"
        in result.stderr
    )
    loaded = transformers.CLIPImageProcessor.from_pretrained(place.out)
    assert dict(loaded.size) == small and not (place.out / "preprocessor_config.json").exists()

    (place.base / "processor_config.json").write_text(json.dumps({"image_processor": nested, "image_seq_length": 4}))
    (place.base / "preprocessor_config.json").unlink()
    (place.adapter / "processor_config.json").unlink()
    transformers.CLIPImageProcessor(size=large, crop_size=large).save_pretrained(place.adapter)
    with pytest.raises(MergeError, match=r"holds preprocessor_config\.json, a part of a processor that is not the base's"):
        merge(place.base, place.adapter, place.root / "mixed")
    (place.base / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    out = merge(place.base, place.adapter, place.root / "other").out
    assert (
        dict(transformers.CLIPImageProcessor.from_pretrained(out).size) == large and not (out / "processor_config.json").exists()
    )


def test_a_template_where_no_processor_looks(place):
    """transformers 4 left a tokenizer's template in tokenizer_config.json, and a processor's in a file. Oracle: its loading."""
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(), tokenizer=tokenizer(("<image>",)), chat_template=BASE_TEMPLATE
    )
    processor.save_pretrained(place.base)
    tokenizer(("<image>",)).save_pretrained(place.adapter)
    config = json.loads((place.adapter / "tokenizer_config.json").read_text())
    (place.adapter / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TRAINED_TEMPLATE}))
    (warning,) = place.warnings()
    assert f"the tokenizer beside {place.adapter} has its chat template in tokenizer_config.json" in warning
    loaded = transformers.LlavaProcessor.from_pretrained(place.out)
    assert loaded.chat_template is None and loaded.tokenizer.chat_template == TRAINED_TEMPLATE
    shutil.rmtree(place.out)
    (place.adapter / "chat_template.jinja").write_text(TRAINED_TEMPLATE)
    assert place.warnings() == []
    assert transformers.LlavaProcessor.from_pretrained(place.out).chat_template == TRAINED_TEMPLATE


def test_processor_of_the_base(place):
    transformers.CLIPImageProcessor().save_pretrained(place.base)
    (place.base / "video_preprocessor_config.json").write_text('{"fps": 2}')
    out = merge(place.base, place.adapter, place.out).out
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (out / name).read_bytes() == (place.base / name).read_bytes()
    shutil.copy(place.base / "preprocessor_config.json", place.adapter)
    merge(place.base, place.adapter, place.root / "same")
    (place.adapter / "preprocessor_config.json").write_text("{}")
    with pytest.raises(MergeError, match="a part of a processor"):
        merge(place.base, place.adapter, place.root / "part")
