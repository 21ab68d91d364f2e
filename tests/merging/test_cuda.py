"""The device's arithmetic: torch and bitsandbytes in place of the processor's kernels.

Run on a torch CPU device everywhere, and on CUDA as well where there is a card. Oracles: bitsandbytes on that device, float64
arithmetic rounded once, and the processor's kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from lora_merge.merging import cuda, cuda_start, devices
from lora_merge.merging.api import MergeOptions, merge, plan_merge
from lora_merge.merging.binding import bind
from lora_merge.merging.cuda import TorchDevice, rounded_once
from lora_merge.merging.devices import StartingDevice, choose_device
from lora_merge.merging.dtypes import BY_TORCH_NAME, round_float64
from lora_merge.merging.errors import MergeError
from lora_merge.merging.writer import write_plan
from tests.merging.oracle import assert_same_bits, delta, load_folder, rounded

SINGLE = {"quant_type": "nf4", "double_quant": False, "block_size": 64, "quant_dtype": "bfloat16"}
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TorchDevice:
    monkeypatch.setattr(cuda, "BLOCK_ELEMENTS", 1000)  # so that tiny tensors have many blocks
    return TorchDevice(torch.device(request.param))


def merged_on(device: TorchDevice, plan, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    written = write_plan(plan, folder, jobs=2, binder=device.bind)
    assert set(written.output) >= {shard.file for shard in plan.shards}
    return load_folder(folder)


def merged_on_processor(plan, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    write_plan(plan, folder, jobs=2, binder=bind)
    return load_folder(folder)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_sums_equal_float64_arithmetic_rounded_once(architecture, sharded, dtype, device, bases, adapters, tmp_path):
    base, adapter = bases(architecture, sharded), adapters(architecture)
    found = merged_on(device, plan_merge(base, adapter, MergeOptions(dtype=dtype)), tmp_path / "out")
    for name, weight in load_folder(base).items():
        update = delta(adapter, name)
        exact = weight.double().numpy() + (0 if update is None else update)
        assert_same_bits(found[name], rounded(exact, getattr(torch, dtype) if dtype else weight.dtype), name)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_dtype", ["bfloat16", "float16", "float32"])
def test_round_trip_is_the_library_s_on_that_device(quant_type, double_quant, quant_dtype, device, bases, adapters, tmp_path):
    base, adapter = bases("llama"), adapters("llama", target_modules=["q_proj", "down_proj"])
    recipe = {"quant_type": quant_type, "double_quant": double_quant, "block_size": 64, "quant_dtype": quant_dtype}
    plan = plan_merge(base, adapter, MergeOptions(from_4bit=True, recipe=recipe))
    quantized = {tensor.name for tensor in plan.tensors if any("round trip" in str(op.to_json()) for op in tensor.operations)}
    assert len(quantized) == 14
    found = merged_on(device, plan, tmp_path / "out")
    for name, weight in load_folder(base).items():
        if name in quantized:
            there = weight.to(device.device, getattr(torch, quant_dtype))
            packed, state = quantize_4bit(there, blocksize=64, compress_statistics=double_quant, quant_type=quant_type)
            exact = dequantize_4bit(packed, state).cpu().double().numpy()
            update = delta(adapter, name)
            weight = rounded(exact if update is None else exact + update, weight.dtype)
        assert_same_bits(found[name], weight, name)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"use_dora": True}),
        ("qwen2", {"bias": "lora_only"}),
        ("qwen2", {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
        ("gemma3", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("llama", {"modules_to_save": ["lm_head"]}),
    ],
)
def test_what_the_device_leaves_to_the_processor_comes_out_alike(architecture, settings, device, bases, adapters, tmp_path):
    """NF4 without double quantization, where the library's CPU code, its CUDA code and the kernels agree to the last bit."""
    plan = plan_merge(bases(architecture), adapters(architecture, **settings), MergeOptions(from_4bit=True, recipe=SINGLE))
    expected = merged_on_processor(plan, tmp_path / "processor")
    found = merged_on(device, plan, tmp_path / "device")
    assert list(found) == list(expected)
    for name, weight in expected.items():
        assert_same_bits(found[name], weight, name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_float64_is_rounded_once(dtype):
    """Ties, what lies a hair beside them, subnormals and overflow, against the processor's rounding."""
    carried = torch.randint(0, 1 << 16, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    some = carried.view(torch.bfloat16 if dtype != "float16" else torch.float16).double()
    some = some[some.isfinite()]
    step = torch.tensor(2.0 ** (-8 if dtype == "bfloat16" else -11), dtype=torch.float64)
    halfway = some * (1 + step)
    hair = 2.0**-40
    values = torch.cat([some, halfway, halfway * (1 + hair), halfway * (1 - hair), some * 2.0**-30, some * 2.0**60])
    found = rounded_once(values, getattr(torch, dtype))
    expected = round_float64(values.numpy(), BY_TORCH_NAME[dtype])
    bits = found.view(torch.uint16 if dtype != "float32" else torch.uint32).numpy()
    np.testing.assert_array_equal(bits, expected.view(bits.dtype))
    if dtype != "float32":
        assert (values.to(getattr(torch, dtype)) != found).any(), "torch's own two roundings must be seen here"


@pytest.mark.parametrize("from_4bit", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(from_4bit, value, device, bases, adapters, tmp_path):
    plan = plan_merge(bases("llama"), adapters("llama"), MergeOptions(from_4bit=from_4bit, recipe=SINGLE if from_4bit else {}))
    tensor = next(tensor for tensor in plan.tensors if "q_proj" in tensor.name)
    broken = torch.zeros(tensor.shape, dtype=torch.bfloat16)
    broken[3, 5] = value
    data = broken.view(torch.uint16).numpy()

    def read_rows(start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        np.copyto(out, data[start:stop])
        return out

    with pytest.raises(MergeError, match=r"q_proj.*not finite|q_proj.*NaN or infinite") as refusal:
        device.bind(tensor.source, tensor.dtype, tensor.operations, read_rows)
    assert ("[3, 5]" in str(refusal.value)) != from_4bit
    assert ("rows 3 to 3" in str(refusal.value)) == from_4bit


def test_a_sum_that_overflows_is_refused(device, bases, adapters, tmp_path):
    plan = plan_merge(bases("llama"), adapters("llama"), MergeOptions(weights=(1e9,), dtype="float16"))
    with pytest.raises(MergeError, match=r"merged value at .* is not finite in float16"):
        merged_on(device, plan, tmp_path / "out")


def test_full_device_memory_is_one_line(device, bases, adapters, monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(cuda, "_round_trip", full)
    plan = plan_merge(bases("llama"), adapters("llama"), MergeOptions(from_4bit=True, recipe=SINGLE))
    with pytest.raises(MergeError, match=r"_proj.weight: the memory of c\w+ is full; free some or merge with --device cpu"):
        merged_on(device, plan, tmp_path / "out")


def tensors_of(plan):
    return [(tensor.source, tensor.operations) for tensor in plan.tensors]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_cuda_without_a_card_is_refused_and_auto_takes_the_processor(bases, adapters, tmp_path):
    base, adapter = bases("llama"), adapters("llama")
    with pytest.raises(MergeError, match=r"--device cuda: torch .* finds no CUDA device; merge with --device cpu"):
        merge(base, adapter, tmp_path / "out", MergeOptions(device="cuda"))
    assert not (tmp_path / "out").exists()
    result = merge(base, adapter, tmp_path / "out", MergeOptions(from_4bit=True))
    assert json.loads((result.out / "merge_manifest.json").read_text())["environment"]["device"] == "cpu"


def test_an_unknown_device_is_refused(bases, adapters):
    with pytest.raises(MergeError, match="device 'tpu': expected one of auto, cpu, cuda"):
        choose_device("tpu", tensors_of(plan_merge(bases("llama"), adapters("llama"))))


@pytest.mark.parametrize(
    ("requested", "from_4bit", "running", "free", "expected"),
    [
        ("auto", True, True, 1 << 40, "cuda"),
        ("auto", True, False, 1 << 40, None),
        ("auto", True, True, 1 << 10, None),
        ("auto", False, True, 1 << 40, None),
        ("cuda", False, True, 1 << 10, "cuda"),
        ("cuda", False, False, 1 << 10, "starting"),
        ("cpu", True, True, 1 << 40, None),
    ],
)
def test_auto_is_cuda_where_it_runs_already(requested, from_4bit, running, free, expected, bases, adapters, monkeypatch):
    """And only for a round trip, and where there is room."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: running)
    monkeypatch.setattr(devices, "what_is_missing", lambda quantizing: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    options = MergeOptions(from_4bit=from_4bit, recipe=SINGLE if from_4bit else {})
    chosen = choose_device(requested, tensors_of(plan_merge(bases("llama"), adapters("llama"), options)))
    kinds = {None: type(None), "cuda": TorchDevice, "starting": StartingDevice}
    assert type(chosen) is kinds[expected]


def test_a_starting_device_is_waited_for_by_the_first_round_trip(bases, adapters, tmp_path, monkeypatch):
    """Until it has started the processor takes what has none; the result is the processor's."""
    monkeypatch.setattr(devices, "_current_device", lambda missing: TorchDevice(torch.device("cpu")))
    options = MergeOptions(
        from_4bit=True, recipe={**SINGLE, "quantized_modules": ["model.layers.1.self_attn.q_proj"]}, dtype="float32"
    )
    plan = plan_merge(bases("llama"), adapters("llama", target_modules=["v_proj"]), options)
    started: Future[str | None] = Future()
    starting, done, waited = StartingDevice(started), [], threading.Event()

    def binder(source, *arguments):
        if cuda.split_trip(arguments[1])[0] is not None:
            waited.set()
        bound = starting.bind(source, *arguments)
        done.append(source.name)
        return bound

    def start() -> None:
        assert waited.wait(60)
        time.sleep(0.05)
        assert any("v_proj" in name for name in done) and not any("layers.1.self_attn.q_proj" in name for name in done)
        started.set_result(None)

    folder = tmp_path / "out"
    folder.mkdir()
    with ThreadPoolExecutor(1) as other:
        checking = other.submit(start)
        write_plan(plan, folder, jobs=2, binder=binder)
        checking.result()
    expected = merged_on_processor(plan, tmp_path / "processor")
    for name, weight in load_folder(folder).items():
        assert_same_bits(weight, expected[name], name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_device_that_cannot_start_leaves_nothing_behind(bases, adapters, tmp_path):
    """The command begins early and does not wait; the refusal is the same line."""
    command = [sys.executable, "-m", "lora_merge.merging", "--device", "cuda", "--from-4bit", "--out", tmp_path / "out"]
    command += ["--base", bases("llama"), "--adapter", adapters("llama")]
    merged = subprocess.run(command, capture_output=True, text=True, check=False)
    assert merged.returncode == 1
    assert "--device cuda: torch" in merged.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_another_thread_is_still_loading_runs_no_cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # as it stands there while it is being loaded
    assert not cuda_start.is_running()
    monkeypatch.delitem(sys.modules, "torch")
    assert not cuda_start.is_running()


def test_bitsandbytes_loads_without_the_compiler():
    """In a process of its own, since here it is loaded; it gives what it gives with the compiler."""
    program = """
import sys, torch
from lora_merge.merging.cuda_start import _without_compiler
with _without_compiler():
    import bitsandbytes
assert torch.compile.__module__ == "torch" and torch._disable_dynamo.__module__ == "torch._compile"
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
torch.save(dequantize_4bit(*quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")), sys.argv[1])
assert not [name for name in sys.modules if name.startswith(("torch._dynamo.convert_frame", "torch._inductor.compile_fx"))]
"""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        subprocess.run([sys.executable, "-c", program, file.name], check=True, timeout=120)
        found = torch.load(file.name)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(found, dequantize_4bit(packed, state))


def test_parts_of_a_stack_are_quantized_each_by_itself(device):
    """A fused tensor of three layers, double quantization: each has a mean of its own. Oracle: the library, layer by layer."""
    from lora_merge.merging.operations import RoundTrip
    from lora_merge.merging.quantization import QuantRecipe
    from lora_merge.merging.safetensors_file import TensorInfo

    weight = torch.randn(3 * 16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[16:32] *= 100
    source = TensorInfo("experts", Path("x"), BY_TORCH_NAME["bfloat16"], (3, 16, 64), 0, weight.numel() * 2)
    data = weight.view(torch.uint16).numpy()

    def read_rows(start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        np.copyto(out, data[start:stop])
        return out

    bound = device.bind(source, source.dtype, (RoundTrip(QuantRecipe(), parts=3),), read_rows)
    found = np.concatenate([bound.compute(read_rows, *block) for block in bound.blocks])
    expected = []
    for layer in weight.chunk(3):
        packed, state = quantize_4bit(
            layer.contiguous().to(device.device), blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        expected.append(dequantize_4bit(packed, state).cpu().reshape(layer.shape))
    np.testing.assert_array_equal(found, torch.cat(expected).view(torch.uint16).numpy())
    with pytest.raises(MergeError, match="5 parts do not end"):
        RoundTrip(QuantRecipe(), parts=5).check_parts(replace(source, shape=(5, 7, 3)), 105)
