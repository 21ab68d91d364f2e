"""What machine this is: times of two machines are not to be compared."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import lora_merge


def machine() -> dict[str, Any]:
    """What this machine is, as far as the standard library and torch know."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "gpus": gpus,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "tool": f"lora-merge {lora_merge.__version__}",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
