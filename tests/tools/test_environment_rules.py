"""The table of environment variables: what is judged, and that the documentation shows the same table."""

from __future__ import annotations

import pytest

from llm_fp8.tools.verify.environment_rules import RULES, is_left_over, judge
from tests.support.documented_variables import documented_variables


def test_the_documentation_and_the_rules_agree():
    """What is judged is explained; what the table advises against is judged."""
    variables = documented_variables()
    assert len(variables) > 30
    for rule in RULES:
        assert any(rule.speaks_of(name) for name in variables), rule
    for name, acts in variables.items():
        if acts in ("no", "do not set", "slower", "refused", "as options", "as an option", "set by launchers"):
            assert any(rule.speaks_of(name) for rule in RULES), name


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"NVTE_FP8_ALLREDUCE": "1"}, [("NVTE_FP8_ALLREDUCE", "no effect")]),
        ({"NVTE_APPLY_QK_LAYER_SCALING": "1"}, [("NVTE_APPLY_QK_LAYER_SCALING", "no effect")]),
        ({"NVTE_FP8_DPA_BWD": "1"}, [("NVTE_FP8_DPA_BWD", "no effect")]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, [("CUDA_DEVICE_MAX_CONNECTIONS", "slower")]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, []),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, [("CUDA_LAUNCH_BLOCKING", "harmful")]),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, []),
        ({"NVTE_FUSED_ATTN": "0"}, [("NVTE_FUSED_ATTN", "slower")]),
        ({"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"}, [("NVTE_FLASH_ATTN", "slower")]),
        (
            {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"},
            [("NVTE_FLASH_ATTN", "harmful"), ("NVTE_FUSED_ATTN", "harmful")],
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, [("PYTORCH_CUDA_ALLOC_CONF", "slower")]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, []),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, [("PYTORCH_ALLOC_CONF", "no effect")]),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, [("TORCH_NCCL_ASYNC_ERROR_HANDLING", "harmful")]),
        ({"ACCELERATE_FP8_BACKEND": "TE"}, [("ACCELERATE_FP8_BACKEND", "slower")]),
        ({"ACCELERATE_USE_FSDP": "true"}, [("ACCELERATE_USE_FSDP", "slower")]),
        ({"ACCELERATE_USE_CPU": "true"}, [("ACCELERATE_USE_CPU", "harmful")]),
        ({"ACCELERATE_USE_CPU": "false", "ACCELERATE_CPU_AFFINITY": "1"}, []),
        ({"WORLD_SIZE": "8"}, [("WORLD_SIZE", "harmful")]),
        ({"GPU_NUM": "8"}, [("GPU_NUM", "no effect")]),
        ({"NVTE_BACKWARD_OVERRIDE": "dequantized"}, [("NVTE_BACKWARD_OVERRIDE", "harmful")]),
        ({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, []),
        ({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, [("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "slower")]),
        ({"PATH": "/bin", "HF_HOME": "/data", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "8"}, []),
    ],
)
def test_judgement(environ, expected):
    found = judge(environ)
    assert [(finding.name, finding.level) for finding in found] == expected
    assert all(finding.says for finding in found)


def test_the_verifier_says_of_connections_what_was_measured():
    (found,) = judge({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert "on one GPU and on two it made no difference that could be told from chance" in found.says


def test_the_worst_comes_first():
    environ = {"NVTE_FP8_ALLREDUCE": "1", "NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    assert [finding.level for finding in judge(environ)] == ["harmful", "slower", "no effect"]


def test_left_overs():
    assert all(
        map(is_left_over, ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "FSDP_VERSION"))
    )
    assert not any(map(is_left_over, ("PATH", "NVTE_FUSED_ATTN", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS")))
