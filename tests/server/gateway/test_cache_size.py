"""The sizes of caches in the metrics of servers."""

from __future__ import annotations

import pytest

from agentflow.server.gateway.cache_size import shown_cache_tokens

VLLM = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",mamba_block_size="32",num_gpu_blocks="573"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100",num_gpu_blocks_override="9"} 1.0
vllm:num_requests_running{engine="0"} 2.0
"""
SGLANG = b"""sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 471258.0
sglang:max_total_num_tokens{model_name="m",tp_rank="1"} 471258.0
"""
OWN = b"""agentflow_kv_tokens{model="a",state="free"} 100.0
agentflow_kv_tokens{model="a",state="cached"} 20.0
agentflow_kv_tokens{model="a",state="in_use"} 3.0
agentflow_kv_tokens{model="b",state="free"} 7.0
"""


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (VLLM, 16 * 673),
        (SGLANG, 471_258),
        (OWN, 123),
        (b"", None),
        (b"<html>", None),
        (b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0', None),
        (b"sglang:max_total_num_tokens +inf", None),
        (b"sglang:max_total_num_tokens 1e400", None),
        (b"sglang:max_total_num_tokens 1e+300", 10**12),
    ],
)
def test_the_size_that_metrics_show(metrics: bytes, expected: int | None) -> None:
    assert shown_cache_tokens(metrics) == expected
