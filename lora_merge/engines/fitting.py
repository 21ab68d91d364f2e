"""Runs batches on a device whose memory may be too small for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from lora_merge.console import Progress
from lora_merge.engines.errors import EngineError


def run_fitting(
    batches: Sequence[list[int]], run: Callable[[list[int], Progress], None], lengths: Sequence[int], progress: Progress
) -> int:
    """``run`` every batch; one that the device's memory cannot hold is halved, and so are those after it, until they fit.

    Args:
        batches: positions of prompts.
        run: computes one batch and tells its ``progress`` of prompts that are done; what it did not finish is done again.
        lengths: tokens of each prompt, for the refusal.

    Returns:
        The size that batches were halved to; that of the largest where none was.

    Raises:
        EngineError: a single prompt does not fit.
    """
    waiting = deque(batches)
    most = max(map(len, batches), default=1)
    while waiting:
        batch = waiting.popleft()
        if len(batch) > most:
            waiting.extendleft((batch[most:], batch[:most]))
            continue
        told = 0.0

        def tell(advance: float) -> None:
            nonlocal told
            told += advance
            progress(advance)

        try:
            run(batch, tell)
        except torch.OutOfMemoryError as error:
            if len(batch) == 1:
                raise EngineError(
                    f"the device's memory is full with one prompt of {lengths[batch[0]]} tokens; free some or use another device"
                ) from error
            progress(-told)
            most = (len(batch) + 1) // 2
            waiting.appendleft(batch)
        else:
            continue
        # Not while the exception is handled: its frames hold what has to be freed.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return most
