"""Starts CUDA in a thread of its own: its libraries take seconds to load, in which a merge can plan, copy and hash.

This module imports nothing heavy, so that the command line can begin here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

_starter = ThreadPoolExecutor(1, thread_name_prefix="cuda-start")
"""One thread, so that what was begun first is loaded first."""


def begin(quantizing: bool, own_process: bool = False) -> Future[str | None]:
    """Load torch, create the device's context and, where ``quantizing``, load bitsandbytes; what is missing, in words, or None.

    Args:
        own_process: whether this process does nothing but merge. Then bitsandbytes is loaded without torch's compiler, which it
            would use for kernels of other devices only, and which takes longer to load than all the rest.
    """
    return _starter.submit(what_is_missing, quantizing, own_process)


def what_is_missing(quantizing: bool, own_process: bool = False) -> str | None:
    """:func:`begin`, in this thread."""
    try:
        import torch

        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no CUDA device"
        if quantizing:
            with _without_compiler() if own_process else nullcontext():
                import bitsandbytes  # noqa: F401
        torch.empty(1, device="cuda")
    except ImportError as error:
        return f"{error.name or 'a library'} cannot be imported ({error})"
    except RuntimeError as error:
        return f"the device cannot be used ({str(error).splitlines()[0]})"
    return None


def is_running() -> bool:
    """Whether this process has started CUDA. Not while torch is only being loaded, maybe in another thread."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Meanwhile torch's decorators that compile a function, or keep it from being compiled, give back what they are given.

    bitsandbytes uses the one for its kernels of other devices and the other, through ``torch.library``, for all; both load the
    compiler, the second at the first call. A torch that names the second one otherwise is only slower.
    """
    import torch

    def unchanged(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
        return function if function is not None else lambda decorated: decorated

    original = {name: getattr(torch, name) for name in ("compile", "_disable_dynamo") if hasattr(torch, name)}
    for name in original:
        setattr(torch, name, unchanged)
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(torch, name, function)
