"""Environment variables that guides to fp8 training name, and others that silently break or slow a run.

docs/multi_gpu.md explains these and useful ones. The rules were read in the sources of torch 2.13, accelerate 1.15 and
the Python part of Transformer Engine 2.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from llm_fp8.tools.verify.result import Result, Setup


class Rule(NamedTuple):
    """A setting that the check reports. `name` and `value` are regular expressions for the whole name and the whole
    value in any case; in a finding they are the name and the value. `level` is harmful (a run is several times slower,
    hangs or is not as requested), slower, or no effect. `effect` ends a sentence that begins with the setting.
    """

    name: str
    value: str
    level: str
    effect: str


_LAUNCH = "WORLD_SIZE|RANK|LOCAL_RANK"
_ACCELERATE = (
    "ACCELERATE_(MIXED_PRECISION|GRADIENT_ACCUMULATION_STEPS|USE_.*|(FP8|DEEPSPEED|DYNAMO)_.*)"
    "|(FSDP|PARALLELISM_CONFIG)_.*"
)
"""Variables that a launcher sets for its processes; they should not be in a shell."""

RULES: tuple[Rule, ...] = (
    Rule("NVTE_(FP8_ALLREDUCE|APPLY_QK_LAYER_SCALING|FP8_DPA_BWD)", ".*", "no effect", "does nothing here"),
    Rule("NVTE_(FLASH|FUSED|UNFUSED)_ATTN", "0", "slower", "forbids Transformer Engine a kind of attention"),
    Rule("NVTE_BACKWARD_OVERRIDE", ".+", "harmful", "takes the backward pass out of fp8"),
    Rule("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", "slower", "may leave packed sequences only the slow attention"),
    Rule("NVTE_DEBUG(_LEVEL)?", "[12]", "slower", "makes Transformer Engine print at every change of shape"),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", "1", "slower", "can make FSDP's all-gathers wait until compute ends"),
    Rule("CUDA_LAUNCH_BLOCKING", "[1-9]", "harmful", "makes the CPU wait for every kernel, so the GPU idles"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", ".*", "harmful", "makes every tensor wait for the driver"),
    Rule("NCCL_P2P_DISABLE", "1", "slower", "keeps GPUs of a host from communicating directly, NVLink included"),
    Rule("NCCL_IB_DISABLE", "1", "slower", "leaves plain sockets between hosts, without InfiniBand or RoCE"),
    Rule("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "slower", "checks every collective across processes first"),
    Rule("GPU_NUM", ".*", "no effect", "is not read; torchrun takes --nproc_per_node"),
    Rule(_LAUNCH, ".*", "harmful", "makes a script take itself for a process of a launch"),
    Rule("ACCELERATE_USE_CPU", "1|true|yes|on", "harmful", "makes Accelerate train on the CPU"),
    Rule(_ACCELERATE, ".*", "slower", "is left over from accelerate launch and sets an option of the next run"),
)
"""The first rule that matches a variable's name and value counts."""


def judge(environ: Mapping[str, str]) -> list[Rule]:
    """The variables in a shell's `environ` with which a run should not start, harmful ones first."""
    findings = []
    for name, value in environ.items():
        matching = (rule for rule in RULES if re.fullmatch(rule.name, name))
        rule = next((rule for rule in matching if re.fullmatch(rule.value, value.strip(), re.I | re.S)), None)
        if rule is not None:
            findings.append(rule._replace(name=name, value=value))
    return sorted(findings, key=lambda found: (found.level, found.name))


def is_left_over(name: str) -> bool:
    """Whether a launcher sets this variable for its processes."""
    return re.fullmatch(f"{_LAUNCH}|{_ACCELERATE}", name) is not None


def check_variables(setup: Setup) -> Result:
    """Fail for harmful variables in the user's environment; warn of variables that slow or have no effect."""
    result = Result()
    for found in judge(setup.environ):
        report = result.fail if found.level == "harmful" else result.warn
        report(f"{found.name}={found.value} {found.effect}", f"unset {found.name}")
        result.facts[found.name] = {"value": found.value, "level": found.level}
    if not result.facts:
        result.summary = "none that is harmful or has no effect"
    return result
