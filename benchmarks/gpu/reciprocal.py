"""CUDA's approximate reciprocal, the instruction that bitsandbytes' kernels scale with. Needs triton and a device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + place, mask=place < count, other=1.0)
    result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(target + place, result, mask=place < count)


def cuda_reciprocal(values: torch.Tensor) -> torch.Tensor:
    """``rcp.approx.ftz.f32`` of float32 ``values`` (n,) on the device."""
    out = torch.empty_like(values)
    _kernel[(triton.cdiv(values.numel(), 1024),)](values, out, values.numel(), BLOCK=1024)
    return out
