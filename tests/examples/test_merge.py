"""Both merges of the real adapter into the real base: what changes, what does not, how long, how much memory."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

# The same inputs give the same bytes on every machine: these are the weights that every merge of the shipped adapter has.
EXPECTED = {
    "original-weights": "ed7fb4bad4bdbb9b602dafb61f69e7cdec33dc5119e6cd7bedbfa4e536456304",
    "from-4bit": "1c69ebe3dfe6dd75be3b37a37730a3bbb1059583a9311e128377f4f91d8716ee",
}

# A process tells its own peak: what it inherits from its parent at birth does not count.
MERGE = """
from lora_merge.merging.cli import main
main(standalone_mode=False)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("method", EXPECTED)
def test_merge_of_the_shipped_adapter(method: str, base: Path, grocery: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--base", str(base), "--adapter", str(grocery / "adapter"), "--out", str(out), "--quiet"]
    arguments += ["--from-4bit"] if method == "from-4bit" else []
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", MERGE, *arguments], capture_output=True, text=True, check=True)
    peak = int(done.stdout.split()[-2])
    print(f"\n{method}: {time.perf_counter() - start:.1f} s, peak memory (VmHWM) {peak / 1024:.0f} MiB")
    assert peak * 1024 < 2**30

    manifest = json.loads((out / "merge_manifest.json").read_text())
    assert manifest["method"] == method
    assert manifest["recipe"] is None or manifest["recipe"]["assumed"] is False
    changed = 0
    with safe_open(base / "model.safetensors", "np") as before, safe_open(out / "model.safetensors", "np") as after:
        assert list(before.keys()) == list(after.keys())
    old, new = tensor_bytes(base / "model.safetensors"), tensor_bytes(out / "model.safetensors")
    for name, content in old.items():
        linear = name.endswith("_proj.weight")
        assert (new[name] != content) == linear, f"{name}: linear layers change, every other tensor keeps its bytes"
        changed += linear
    assert changed == 126
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() == EXPECTED[method]


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """Digest of the raw bytes of every tensor, read by the offsets in the header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]).digest()
        for name, entry in header.items()
    }
