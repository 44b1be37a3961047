"""Environment variables that harm a run, slow it or do nothing: what scripts/verify_fp8.py judges an environment by.

docs/multi_gpu.md explains these and the useful ones. Read in the sources of torch 2.13, accelerate 1.15 and the Python
part of Transformer Engine 2.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["harmful", "slower", "no effect"]
"""harmful: a run would be several times slower, hang or not be what was asked for. slower: it may be slower, or do
something else than meant.
"""


@dataclass(frozen=True)
class Rule:
    """A setting to speak of."""

    name: str
    """Regular expression of the whole name."""
    level: Level
    says: str
    """What it does, as the end of a sentence that begins with the setting."""
    values: str = ".*"
    """Regular expression that the whole value matches, in any case."""
    left_over: bool = False
    """Whether a launcher sets it for the processes it starts, so that it means something else in a shell."""

    def speaks_of(self, name: str) -> bool:
        """Whether it is about this variable, whatever its value."""
        return re.fullmatch(self.name, name) is not None


@dataclass(frozen=True)
class Finding:
    """A variable that is set to something worth a word."""

    name: str
    value: str
    level: Level
    says: str

    @property
    def mend(self) -> str:
        """The command that takes it out of the environment."""
        return f"unset {self.name}"


_ON = "1|true|yes|on"
_IN_A_LAUNCH = "makes a script take itself for one process of a launch that is not there"
_LEFT_OVER = "is left over from an accelerate launch and becomes an option of the next run"

RULES: tuple[Rule, ...] = (
    Rule("NVTE_(FP8_ALLREDUCE|APPLY_QK_LAYER_SCALING|FP8_DPA_BWD)", "no effect", "does nothing here"),
    Rule("NVTE_(FLASH|FUSED|UNFUSED)_ATTN", "slower", "forbids Transformer Engine a kind of attention", "0"),
    Rule("NVTE_BACKWARD_OVERRIDE", "harmful", "takes the backward pass out of fp8", ".+"),
    Rule(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "slower",
        "leaves Transformer Engine only kinds of attention that are deterministic, which for packed rows may be the "
        "slow one that needs much memory",
        "0",
    ),
    Rule(
        "NVTE_DEBUG(_LEVEL)?",
        "slower",
        "makes Transformer Engine print at every change of shape; for looking, not for training",
        "[12]",
    ),
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "slower",
        "is for tensor parallelism, which is not used here; on one GPU and on two it made no difference that could be "
        "told from chance, but it can make FSDP's exchanges wait behind compute",
        "1",
    ),
    Rule(
        "CUDA_LAUNCH_BLOCKING", "harmful", "makes the CPU wait for every kernel, so the GPU idles between them", "[1-9]"
    ),
    Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "harmful",
        "switches off torch's caching of GPU memory, so every tensor waits for the driver",
    ),
    Rule("NCCL_P2P_DISABLE", "slower", "keeps the GPUs of a host from talking directly, NVLink included", "1"),
    Rule("NCCL_IB_DISABLE", "slower", "leaves plain sockets between hosts, without InfiniBand or RoCE", "1"),
    Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", "harmful", "leaves the other processes hanging when one is lost", "0"),
    Rule("TORCH_DISTRIBUTED_DEBUG", "slower", "checks every exchange across processes first", "DETAIL"),
    Rule(
        "PYTORCH_CUDA_ALLOC_CONF",
        "slower",
        "is set without expandable_segments:True, so more memory is lost between blocks of many sizes",
        "(?!.*expandable_segments:True).*",
    ),
    Rule(
        "PYTORCH_ALLOC_CONF",
        "no effect",
        "is not read, because the scripts set PYTORCH_CUDA_ALLOC_CONF, which torch reads first",
    ),
    Rule(
        "GPU_NUM",
        "no effect",
        "is not read; torchrun takes --nproc_per_node, scripts/launch_multi_node.sh NPROC_PER_NODE",
    ),
    Rule("WORLD_SIZE|RANK|LOCAL_RANK", "harmful", _IN_A_LAUNCH, left_over=True),
    Rule("ACCELERATE_USE_CPU", "harmful", "makes Accelerate train on the CPU", _ON),
    Rule("ACCELERATE_DEBUG_MODE", "slower", "checks the shapes of every exchange first", _ON),
    Rule(
        "ACCELERATE_(MIXED_PRECISION|GRADIENT_ACCUMULATION_STEPS|USE_(?!CPU$).*|(FP8|DEEPSPEED|DYNAMO)_.*)|(FSDP|PARALLELISM_CONFIG)_.*",
        "slower",
        _LEFT_OVER,
        left_over=True,
    ),
)
"""The first that speaks of a variable and matches its value counts."""

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
            findings.append(
                Finding(
                    name, value, "harmful", "with the other one at 0 leaves Transformer Engine only its slow attention"
                )
            )
            continue
        for rule in RULES:
            if rule.speaks_of(name) and re.fullmatch(rule.values, value.strip(), re.IGNORECASE | re.DOTALL):
                findings.append(Finding(name, value, rule.level, rule.says))
                break
    return sorted(findings, key=lambda found: (get_args(Level).index(found.level), found.name))


def is_left_over(name: str) -> bool:
    """Whether a launcher set it for the processes it started; in a shell it has no place."""
    return name.startswith("ACCELERATE_") or any(rule.left_over and rule.speaks_of(name) for rule in RULES)
