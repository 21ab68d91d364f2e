"""Whether vLLM runs the checkpoint that it was given, and what of its configuration and environment decides how it computes.

vLLM reads some three hundred environment variables. Two of them put other weights, or another way through them, in the place of
what was asked for, and are refused. Of the others those are told that can move a number.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lora_merge.engines.errors import EngineError
from lora_merge.engines.model_files import load_config

_REFUSED = {
    "VLLM_MODEL_REDIRECT_PATH": "vLLM would load another checkpoint than the one that it is given",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "vLLM would choose experts by a simulation instead of the checkpoint's router",
}
_MOVES_NOTHING = re.compile(
    r"VLLM_(BUILD|DOCKER|IMAGE|TARGET|MAIN|USE_PRECOMPILED|SKIP_PRECOMPILED)\w*"  # read when vLLM is built
    r"|VLLM_(LOG|CONFIGURE_LOGGING|DISABLE_LOG|USAGE|DEBUG|TRACE|NVTX|CUSTOM_SCOPES|PROCESS_NAME|GC_DEBUG)\w*"  # told to people
    r"|VLLM_(DP|RAY|LOOPBACK|NIXL|P2P|EC|MOONCAKE|SERVER|HTTP|API)_\w*|VLLM_PORT"  # which processes, and where
    r"|VLLM_\w*(TIMEOUT|_DIR|CACHE_PATH|COMPILE_CACHE)\w*"  # how long to wait, where to keep things
)
"""Variables that vLLM leaves among :func:`vllm.envs.compile_factors` although they move no number."""
_set_by_vllm: dict[str, str] = {}


def refuse_redirection() -> None:
    """Raises :class:`EngineError` when the environment has vLLM run anything but the checkpoint that it is given."""
    for name, effect in _REFUSED.items():
        if os.environ.get(name):
            raise EngineError(f"environment variable {name} is set: {effect}; unset it")


def asked_dtype(path: str | Path, dtype: str, trust_remote_code: bool = False) -> str:
    """What to ask vLLM for: its own ``auto`` means a 16-bit type where a checkpoint is in float32, ours the checkpoint's own."""
    if dtype != "auto" or not Path(path).is_dir():
        return dtype
    config = load_config(path, trust_remote_code=trust_remote_code)
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return "float32" if str(own).removeprefix("torch.") == "float32" else dtype


def check_loaded(path: str | Path, config: Any) -> None:
    """Make sure that vLLM took weights, tokenizer and configuration from the folder ``path``. ``config``: its ``vllm_config``.

    Of a hub id nothing is known: vLLM may put the folder of its cache in its place.

    Raises:
        EngineError: it took one of them from elsewhere, or made the weights up.
    """
    model = config.model_config
    if config.load_config.load_format == "dummy":
        raise EngineError(f"vLLM made up weights instead of loading those of {path} (load_format is dummy)")
    if not Path(path).is_dir():
        return
    places = {"checkpoint": model.model, "tokenizer": model.tokenizer, "configuration": model.hf_config_path}
    for what, found in places.items():
        if found is not None and Path(found).resolve() != Path(path).resolve():
            raise EngineError(f"vLLM took the {what} of {found} instead of that of {path}; nothing was run")


def effective_settings(config: Any) -> dict[str, Any]:
    """What ``config``, vLLM's ``vllm_config``, says that is used, whatever was asked for; JSON-ready.

    Trust in the checkpoint's own Python code counts where there is any.
    """
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    overrides = model.hf_overrides
    return {
        "model": str(model.model),
        "adapter": None if config.lora_config is None else "as requests ask for",
        "quantization": _plain(model.quantization),
        "load_format": _plain(config.load_config.load_format),
        "hf_overrides": _plain(overrides) if overrides else None,
        "generation_config": model.generation_config,
        "trust_remote_code": bool(model.trust_remote_code and getattr(model.hf_config, "auto_map", None)),
        "seed": model.seed,
        "enforce_eager": model.enforce_eager,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "disable_hybrid_kv_cache_manager": scheduler.disable_hybrid_kv_cache_manager,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "block_size": cache.block_size,
        "kv_cache_dtype": _plain(cache.cache_dtype),
        "enable_prefix_caching": cache.enable_prefix_caching,
    }


def moving_environment() -> dict[str, Any] | None:
    """Environment variables of vLLM that can move a number and say something else than its default; None where there are none.

    Source: ``vllm.envs.compile_factors()``, what vLLM itself takes a compiled graph to hang on.
    """
    from vllm import envs

    with _without([name for name, value in _set_by_vllm.items() if os.environ.get(name) == value]):
        now = envs.compile_factors()
    with _without([name for name in os.environ if name.startswith("VLLM_")]):
        usual = envs.compile_factors()
    names = (name for name in now if name.startswith("VLLM_") and not _MOVES_NOTHING.fullmatch(name))
    return {name: _plain(now[name]) for name in names if now[name] != usual.get(name)} or None


@contextlib.contextmanager
def noting_what_vllm_sets() -> Iterator[None]:
    """While an engine is made, vLLM sets some variables itself; they are nobody's choice, and no later engine is to tell them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        _set_by_vllm.update({name: value for name, value in changed.items() if name.startswith("VLLM_")})


@contextlib.contextmanager
def _without(names: Collection[str]) -> Iterator[None]:
    taken = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(taken)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
