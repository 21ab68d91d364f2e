"""The compiled loops of ``loops.py`` and ``fused.py``, loaded when the first one is called.

numba takes half a second to load, which planning and a merge on a card can do without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
TripArguments = tuple[int, int, Floats, Floats, Floats, Floats]
"""trip, block_size, inverses, scales, levels, bounds of ``merge_to_bf16``."""
UpdateArguments = tuple[Doubles, Doubles, Floats, Floats, float, Floats]
"""b, a, b32, a32, scaling, a_norms of ``merge_to_bf16``."""

NO_TRIP, NF4_TRIP, FP4_TRIP = 0, 1, 2
NOT_FINITE = -1


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        from lora_merge.merging import fused, loops

        for module in (loops, fused):
            if hasattr(module, name):
                globals()[name] = found = getattr(module, name)
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
