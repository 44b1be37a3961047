"""Environment variables that guides recommend, what they do with these scripts, and which settings are worth a word.

`VARIABLES` is the one table: docs/multi_gpu.md shows its rows (`markdown_table`), scripts/verify_fp8.py judges an environment by it (`judge`).
Read in the sources of torch 2.13, accelerate 1.15 and the Python part of Transformer Engine 2.20.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["harmful", "slower", "no effect"]
"""harmful: a run would be several times slower, hang or not be what was asked for. slower: it may be slower, or do something else than meant."""


@dataclass(frozen=True)
class Rule:
    """A setting to speak of."""

    level: Level
    says: str
    """What it does, as the end of a sentence that begins with the setting."""
    values: str = ".*"
    """Regular expression that the whole value matches, in any case."""
    names: tuple[str, ...] = ()
    """The variables of the row that it is about; empty: all."""
    only_outside_a_launch: bool = False
    """Whether a launcher sets it for the processes it starts, where it means what it says."""


@dataclass(frozen=True)
class Variable:
    """A row of the table."""

    names: tuple[str, ...]
    """As the table shows them; NAME=VALUE where it speaks of that value, `*` for any ending."""
    acts: str
    does: str
    rules: tuple[Rule, ...] = ()
    """The first that matches a value counts."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The names without values."""
        return tuple(name.partition("=")[0] for part in self.names for name in part.split())


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
_DOES_NOTHING = Rule("no effect", "does nothing here")
_LEFT_OVER = Rule(
    "slower", "is left over from an accelerate launch and becomes an option of the next run", only_outside_a_launch=True
)

VARIABLES: tuple[Variable, ...] = (
    Variable(("NVTE_FP8_ALLREDUCE",), "no", "TE 2.20's Python code does not read it.", (_DOES_NOTHING,)),
    Variable(
        ("NVTE_APPLY_QK_LAYER_SCALING",),
        "no",
        "An fp16 trick of TE's unfused attention; without effect in bf16 and fp8 runs and with fused attention.",
        (_DOES_NOTHING,),
    ),
    Variable(
        ("NVTE_FP8_DPA_BWD",),
        "no",
        "Whether the backward pass of fp8 attention is in fp8; attention here is in bf16.",
        (_DOES_NOTHING,),
    ),
    Variable(
        ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"),
        "with `--use_te`",
        "0 forbids TE that kind of attention (flash-attn, cuDNN, plain). Leave them unset: forbidding both fast ones leaves the slow one. The run says which is in use.",
        (Rule("slower", "forbids Transformer Engine a kind of attention; both fast ones forbidden leave the slow one", "0"),),
    ),
    Variable(
        ("NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2",),
        "with `--use_te`",
        "TE prints which attention it chose and why.",
        (Rule("slower", "makes Transformer Engine print at every change of shape; for looking, not for training", "[12]"),),
    ),
    Variable(
        ("CUDA_DEVICE_MAX_CONNECTIONS=1",),
        "do not set",
        "Orders kernels and exchanges of tensor parallelism; TE asks for it only there, and there is none here. A single queue can make FSDP's exchanges wait behind compute.",
        (Rule("slower", "is for tensor parallelism, and can make FSDP's exchanges wait behind compute", "1"),),
    ),
    Variable(
        ("CUDA_LAUNCH_BLOCKING=1",),
        "do not set",
        "The CPU waits for every kernel, so the GPU idles between them. For finding the kernel that fails.",
        (Rule("harmful", "makes the CPU wait for every kernel, so the GPU idles between them", "[1-9]"),),
    ),
    Variable(
        ("PYTORCH_NO_CUDA_MEMORY_CACHING=1",),
        "do not set",
        "Every tensor is allocated by the driver, which waits for the GPU. For memory checkers.",
        (Rule("harmful", "switches off torch's caching of GPU memory, so every tensor waits for the driver"),),
    ),
    Variable(
        ("NCCL_P2P_DISABLE=1",),
        "slower",
        "No direct traffic between the GPUs of a host, NVLink included. A workaround for broken machines and some consumer GPUs (accelerate launch sets it for those).",
        (Rule("slower", "keeps the GPUs of a host from talking directly, NVLink included", "1"),),
    ),
    Variable(
        ("NCCL_IB_DISABLE=1",),
        "slower",
        "No InfiniBand or RoCE between hosts: plain sockets instead. As above.",
        (Rule("slower", "leaves plain sockets between hosts, without InfiniBand or RoCE", "1"),),
    ),
    Variable(("NCCL_DEBUG=INFO",), "yes", "NCCL prints the transports it chose; `WARN` errors only."),
    Variable(
        ("NCCL_SOCKET_IFNAME",),
        "several hosts",
        "Interfaces for NCCL's connections: prefixes, `=eth0` for an exact name, `^docker` to exclude.",
    ),
    Variable(
        ("GLOO_SOCKET_IFNAME",),
        "several hosts",
        "The same for gloo, which exchanges what lies in the hosts' memory; exact names, which `launch_multi_node.sh` checks.",
    ),
    Variable(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING",),
        "set already",
        "torchrun sets it to 1 unless it is set: a failed or timed-out exchange ends the process. 0 turns that off, and a lost rank then leaves the others hanging.",
        (Rule("harmful", "leaves the other processes hanging when one is lost", "0"),),
    ),
    Variable(
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL",),
        "slower",
        "Every exchange is checked across processes first. For finding a mismatch.",
        (Rule("slower", "checks every exchange across processes first", "DETAIL"),),
    ),
    Variable(("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",), "yes", "Seconds that torchrun leaves the processes after a signal, see above."),
    Variable(
        ("OMP_NUM_THREADS",),
        "yes",
        "CPU threads per process. torchrun (with several processes) and accelerate launch set 1 unless it is set, which suits training on GPUs.",
    ),
    Variable(
        ("PYTORCH_CUDA_ALLOC_CONF",),
        "yes",
        "The scripts set `expandable_segments:True` unless it is set. torch reads the newer `PYTORCH_ALLOC_CONF` only where this one is absent, so set this one.",
        (
            Rule(
                "slower",
                "is set without expandable_segments:True, so more memory is lost between blocks of many sizes",
                "(?!.*expandable_segments:True).*",
            ),
        ),
    ),
    Variable(
        ("PYTORCH_ALLOC_CONF",),
        "no",
        "See the line above.",
        (Rule("no effect", "is not read, because the scripts set PYTORCH_CUDA_ALLOC_CONF, which torch reads first"),),
    ),
    Variable(
        ("TOKENIZERS_PARALLELISM",),
        "preparing data",
        "Threads inside a tokenising process; the number of processes is `--preprocessing_workers`.",
    ),
    Variable(
        ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
        "set by launchers",
        "Number of processes, and which of them this is. Left in a shell they make a script take itself for one process of several.",
        (
            Rule(
                "harmful", "makes a script take itself for one process of a launch that is not there", only_outside_a_launch=True
            ),
        ),
    ),
    Variable(
        (
            "ACCELERATE_MIXED_PRECISION",
            "ACCELERATE_FP8_*",
            "ACCELERATE_USE_*",
            "FSDP_*",
            "ACCELERATE_DEEPSPEED_*",
            "PARALLELISM_CONFIG_*",
        ),
        "as options",
        "Read once, as above, and removed.",
        (_LEFT_OVER,),
    ),
    Variable(
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",),
        "as an option",
        "Becomes `--gradient_accumulation_steps` and is removed.",
        (_LEFT_OVER,),
    ),
    Variable(
        ("ACCELERATE_DYNAMO_*",),
        "refused",
        "torch.compile is not used; `no` is removed.",
        (_LEFT_OVER,),
    ),
    Variable(
        ("ACCELERATE_USE_CPU", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE"),
        "yes",
        "Accelerate reads them: train on the CPU; bind each process to the cores near its GPU; check the shapes of its own exchanges.",
        (
            Rule("harmful", "makes Accelerate train on the CPU", _ON, names=("ACCELERATE_USE_CPU",)),
            Rule("slower", "checks the shapes of every exchange first", _ON, names=("ACCELERATE_DEBUG_MODE",)),
        ),
    ),
    Variable(
        ("CUDNN_HOME", "CUDNN_PATH"),
        "with TE",
        "Where TE looks for cuDNN first. The scripts set `CUDNN_HOME` to torch's own cuDNN unless one of them is set: a second, older one costs the fused attention.",
    ),
    Variable(
        ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"),
        "yes",
        "Where models and data sets are kept. Every host reads them, so put them on its own disk or on a shared one.",
    ),
    Variable(("HF_HUB_OFFLINE=1",), "yes", "Nothing is fetched from the hub."),
)

_PAIRS_OFF = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN")


def markdown_table() -> list[str]:
    """The table's lines as docs/multi_gpu.md has them."""
    lines = ["| variable | acts here | what it does |", "|---|---|---|"]
    for variable in VARIABLES:
        names = ", ".join(f"`{name}`" for name in variable.names)
        lines.append(f"| {names} | {variable.acts} | {variable.does} |")
    return lines


def _rules_of(name: str) -> tuple[Rule, ...]:
    """What is to be said of a variable, of the row that names it most exactly."""
    matches = [(pattern, row) for row in VARIABLES for pattern in row.patterns if fnmatch.fnmatchcase(name, pattern)]
    rules = max(matches, key=lambda match: len(match[0]))[1].rules if matches else ()
    return tuple(rule for rule in rules if not rule.names or name in rule.names)


def judge(environ: Mapping[str, str], *, launched: bool = False) -> list[Finding]:
    """The variables of `environ` that a run should not start with, the worst first.

    `launched`: whether torchrun or accelerate launch started this process, whose own variables are then as they should be.
    Attention variables are judged together: cuDNN's and flash-attn's attention both forbidden is harmful, one of them is slower at most.
    """
    findings = []
    for name, value in environ.items():
        for rule in _rules_of(name):
            if rule.only_outside_a_launch and launched:
                continue
            if re.fullmatch(rule.values, value.strip(), re.IGNORECASE | re.DOTALL):
                findings.append(Finding(name, value, rule.level, rule.says))
                break
    if all(environ.get(name) == "0" for name in _PAIRS_OFF):
        says = "with the other one at 0 leaves Transformer Engine only its slow attention"
        findings = [
            Finding(found.name, found.value, "harmful", says) if found.name in _PAIRS_OFF else found for found in findings
        ]
    order: tuple[Level, ...] = ("harmful", "slower", "no effect")
    return sorted(findings, key=lambda found: (order.index(found.level), found.name))


def is_left_over(name: str) -> bool:
    """Whether a launcher sets this variable for the processes it starts, so that it means something else in a shell."""
    return any(rule.only_outside_a_launch for rule in _rules_of(name)) or name.startswith("ACCELERATE_")
