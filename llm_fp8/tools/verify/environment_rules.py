"""Environment variables that harm a run, slow it or do nothing.

docs/multi_gpu.md explains these and the useful ones. Read in the sources of torch 2.13, accelerate 1.15 and the Python
part of Transformer Engine 2.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from llm_fp8.tools.verify.result import Problems, Result, Setup

Level = Literal["harmful", "slower", "no effect"]
"""harmful: a run is several times slower, hangs or is not what was asked for. slower: it may be slower, or do something
else than intended.
"""


@dataclass(frozen=True)
class Rule:
    """A setting that the check reports."""

    name: str
    """Regular expression of the whole name."""
    level: Level
    says: str
    """What it does, as the end of a sentence that begins with the setting."""
    values: str = ".*"
    """Regular expression of the whole value, in any case."""

    def speaks_of(self, name: str) -> bool:
        """Whether the rule is about this variable, whatever its value."""
        return re.fullmatch(self.name, name) is not None


class Finding(NamedTuple):
    """A variable with a setting that a rule speaks of."""

    name: str
    value: str
    level: Level
    says: str


_ON = "1|true|yes|on"
_LAUNCH = "WORLD_SIZE|RANK|LOCAL_RANK"
_ACCELERATE_OPTIONS = (
    "ACCELERATE_(MIXED_PRECISION|GRADIENT_ACCUMULATION_STEPS|USE_(?!CPU$).*|(FP8|DEEPSPEED|DYNAMO)_.*)"
    "|(FSDP|PARALLELISM_CONFIG)_.*"
)
_CONNECTIONS = (
    "is for tensor parallelism, which is not used here; on one GPU and on two it made no difference that could be told "
    "from chance, but it can make FSDP's all-gathers wait behind compute"
)
_FRAGMENTING = "(?!.*expandable_segments:True).*"

RULES: tuple[Rule, ...] = (
    Rule("NVTE_(FP8_ALLREDUCE|APPLY_QK_LAYER_SCALING|FP8_DPA_BWD)", "no effect", "does nothing here"),
    Rule("NVTE_(FLASH|FUSED|UNFUSED)_ATTN", "slower", "forbids Transformer Engine a kind of attention", "0"),
    Rule("NVTE_BACKWARD_OVERRIDE", "harmful", "takes the backward pass out of fp8", ".+"),
    Rule("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "slower", "may leave packed sequences only the slow attention", "0"),
    Rule("NVTE_DEBUG(_LEVEL)?", "slower", "makes Transformer Engine print at every change of shape", "[12]"),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", "slower", _CONNECTIONS, "1"),
    Rule("CUDA_LAUNCH_BLOCKING", "harmful", "makes the CPU wait for every kernel, so the GPU idles", "[1-9]"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", "harmful", "makes every tensor wait for the driver to allocate memory"),
    Rule("NCCL_P2P_DISABLE", "slower", "keeps the GPUs of a host from communicating directly, NVLink included", "1"),
    Rule("NCCL_IB_DISABLE", "slower", "leaves plain sockets between hosts, without InfiniBand or RoCE", "1"),
    Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", "harmful", "leaves the other processes hanging when one is lost", "0"),
    Rule("TORCH_DISTRIBUTED_DEBUG", "slower", "checks every collective across processes first", "DETAIL"),
    Rule("PYTORCH_CUDA_ALLOC_CONF", "slower", "lacks expandable_segments:True against fragmentation", _FRAGMENTING),
    Rule("PYTORCH_ALLOC_CONF", "no effect", "is not read: the scripts set PYTORCH_CUDA_ALLOC_CONF, which comes first"),
    Rule("GPU_NUM", "no effect", "is not read; torchrun takes --nproc_per_node, launch_multi_node.sh NPROC_PER_NODE"),
    Rule(_LAUNCH, "harmful", "makes a script take itself for a process of a launch that is not there"),
    Rule("ACCELERATE_USE_CPU", "harmful", "makes Accelerate train on the CPU", _ON),
    Rule("ACCELERATE_DEBUG_MODE", "slower", "checks the shapes of every collective first", _ON),
    Rule(_ACCELERATE_OPTIONS, "slower", "is left over from accelerate launch and sets an option of the next run"),
)
"""For each variable the first rule that matches its name and value counts."""

_FAST_ATTENTION = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN")


def judge(environ: Mapping[str, str]) -> list[Finding]:
    """The variables of `environ`, a shell's, that a run should not start with, the worst first.

    Attention variables are judged together: cuDNN's and flash-attn's attention both forbidden is harmful, one of them
    is slower at most.
    """
    slow_attention = all(environ.get(name) == "0" for name in _FAST_ATTENTION)
    findings = []
    for name, value in environ.items():
        if slow_attention and name in _FAST_ATTENTION:
            says = "with the other one at 0 leaves Transformer Engine only its slow attention"
            findings.append(Finding(name, value, "harmful", says))
            continue
        for rule in RULES:
            if rule.speaks_of(name) and re.fullmatch(rule.values, value.strip(), re.IGNORECASE | re.DOTALL):
                findings.append(Finding(name, value, rule.level, rule.says))
                break
    return sorted(findings, key=lambda found: (get_args(Level).index(found.level), found.name))


def is_left_over(name: str) -> bool:
    """Whether a launcher set the variable for the processes it started; it should not be in a shell."""
    return re.fullmatch(f"{_LAUNCH}|{_ACCELERATE_OPTIONS}|ACCELERATE_.*", name) is not None


def check_variables(setup: Setup) -> Result:
    """A harmful variable of the user's environment fails; one that slows or has no effect is a warning."""
    problems, findings = Problems(), judge(setup.environ)
    for found in findings:
        report = problems.fail if found.level == "harmful" else problems.warn
        report(f"{found.name}={found.value} {found.says}", f"unset {found.name}")
    facts = {found.name: {"value": found.value, "level": found.level} for found in findings}
    return problems.result("" if findings else "none that is harmful or has no effect", facts=facts)
