"""Logits against transformers in float32, with attention and feed-forward shared by devices."""

from __future__ import annotations

import pytest

from tests.models.parity import check_against_golden, make_runner

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "devices", "tensor", "micro_batches"),
    [
        ("llama_bias", 2, 2, 2),  # all biases
        ("qwen3_moe_mixed", 4, 2, 2),  # dense and sparse layers
        pytest.param(
            "glm4_moe", 4, 2, 3, marks=slow
        ),  # shared experts; 43 tokens, which 2 devices do not divide
        pytest.param("qwen3_moe", 4, 4, 1, marks=slow),  # more devices than key/value heads
        pytest.param(
            "deepseek_v3", 4, 2, 2, marks=slow
        ),  # one key/value head, factors of each head
        pytest.param("gpt_oss", 4, 2, 2, marks=slow),  # sinks, biases of experts
        *[
            pytest.param(name, 2, 2, count, marks=slow)
            for name in (
                "deepseek_v3_fp8",
                "ernie4_5",
                "ernie4_5_moe",
                "gpt_oss_mxfp4",
                "llama",
                "mixtral",
                "qwen2_moe",
                "qwen3",
                "qwen3_moe",
            )
            for count in (1, 2)
        ],
        pytest.param("llama_bias", 8, 4, 2, marks=slow),
        pytest.param("qwen3_moe_mixed", 8, 2, 1, marks=slow),
    ],
)
def test_tensor_parallel(name, devices, tensor, micro_batches):
    runner = make_runner(name, devices=devices, tensor=tensor, micro_batches=micro_batches)
    check_against_golden(runner, name)


@slow
@pytest.mark.parametrize("name", [pytest.param("llama", marks=slow), "qwen3_moe"])
def test_tensor_parallel_scanned(name):
    runner = make_runner(name, devices=4, tensor=2, micro_batches=2, scanned=True)
    check_against_golden(runner, name)
