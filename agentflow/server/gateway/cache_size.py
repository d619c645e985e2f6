"""The size of a server's cache in tokens, from the metrics of vLLM, SGLang, or agentflow."""

from __future__ import annotations

import re
from collections import Counter

_VLLM = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_BLOCKS = re.compile(rb'(?:^|,)(block_size|num_gpu_blocks)="(\d{1,12})"')
_SGLANG = re.compile(rb"^sglang:max_total_num_tokens(?:\{.*\})? ([0-9.e+]{1,24})$", re.MULTILINE)
_OWN = re.compile(rb'^agentflow_kv_tokens\{model="(.*)",state="\w+"\} ([0-9.e+]{1,24})$', re.MULTILINE)


def shown_cache_tokens(metrics: bytes) -> int | None:
    """The size of the cache in metrics for Prometheus; None if they do not have it. The engines of a vLLM
    server are added up; of several models of an agentflow server, the largest cache counts.

    >>> shown_cache_tokens(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0')
    1600
    """
    engines = [dict(_BLOCKS.findall(labels)) for labels in _VLLM.findall(metrics)]
    sizes = [int(one[b"block_size"]) * int(one[b"num_gpu_blocks"]) for one in engines if len(one) == 2]
    found = [sum(sizes), *map(_number, _SGLANG.findall(metrics))]
    models: Counter[bytes] = Counter()
    for model, value in _OWN.findall(metrics):
        models[model] += _number(value)
    return max([*found, *models.values()]) or None


def _number(value: bytes) -> int:
    try:
        return min(int(float(value)), 10**12)
    except (ValueError, OverflowError):
        return 0
