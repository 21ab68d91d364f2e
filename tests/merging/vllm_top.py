"""A process of its own for ``test_vllm_runs``: loads a checkpoint in vLLM and prints what it predicts after each prompt.

    python -m tests.merging.vllm_top CHECKPOINT

In one process (vLLM's own multiprocessing off) a load takes half the time.
"""

from __future__ import annotations

import json
import os
import sys

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPTS = [list(range(2, 22)), [2, 9, 7, 5, 3, 11, 13], [2, 150, 149]]
TOP = 5


def main() -> None:
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, max_logprobs=TOP)
    settings = SamplingParams(max_tokens=1, temperature=0, logprobs=TOP, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], settings, use_tqdm=False)
    print(json.dumps([{token: found.logprob for token, found in output.outputs[0].logprobs[0].items()} for output in outputs]))


if __name__ == "__main__":
    main()
