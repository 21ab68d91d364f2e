"""Peak memory of a process with its children and of its GPU, and what else the machine was busy with."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

from lora_merge.generation.orphans import descendants

_INTERVAL = 0.25


def host_peak(pid: int) -> int:
    """Sum of the peak resident sizes of process ``pid`` and everything it started, in bytes.

    Shared pages count once a process, so it is an upper bound where workers share memory.
    """
    total = 0
    for process in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, IndexError, ValueError):
            status = Path(f"/proc/{process}/status").read_text()
            total += int(status.split("VmHWM:")[1].split()[0]) * 1024
    return total


def reset_host_peak() -> None:
    """Let the peak of this process start again from what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


class MemoryWatch:
    """Watches a process from outside while it lives: ``host`` and ``device`` are the peaks in bytes.

    ``device`` counts what appeared on the GPUs since the watch began; None where nobody tells (:func:`device_used`). What else
    runs on the same GPUs would count as well.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = device_used()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.host = 0
        self.device: int | None = None if self._before is None else 0

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self.host = max(self.host, host_peak(self._pid))
            used = None if self._before is None else device_used()
            if used is not None and self._before is not None and self.device is not None:
                self.device = max(self.device, used - self._before)


class OtherLoad:
    """How busy other processes kept the machine while ours, which must have been waited for, ran."""

    def __init__(self) -> None:
        self._before = _busy_seconds(), _own_seconds(), time.monotonic()

    def share(self) -> float | None:
        """Of the processor time there was, in [0, 1]; None where the system does not tell."""
        busy, own, began = self._before
        now = _busy_seconds()
        if now is None or busy is None:
            return None
        cores, wall = os.cpu_count() or 1, time.monotonic() - began
        return min(max((now - busy - (_own_seconds() - own)) / (cores * wall), 0.0), 1.0)


def _busy_seconds() -> float | None:
    """Processor time of all processes since boot, less what was idle or waited for the disk."""
    try:
        user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:8])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def device_used() -> int | None:
    """Memory in use on all NVIDIA GPUs, in bytes; None without one, or where NVML or nvidia-ml-py is missing.

    NVML is asked within this process. Starting ``nvidia-smi`` for every look would open and close the driver as often, beside the
    process whose time is taken.
    """
    devices = _devices()
    if not devices:
        return None
    import pynvml

    try:
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(device).used) for device in devices)
    except pynvml.NVMLError:
        return None


@functools.cache
def _devices() -> tuple[Any, ...]:
    """NVML's handles of all GPUs; NVML stays open until this process ends."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
        return tuple(pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
