"""Names of arms that run in several processes -> what they train.

Ours are [cpN:]MODE:PRECISION[:OPTION...], for example

    fsdp_full:delayed             --sharding_mode fsdp_full, fp8 with delayed scaling, the TE decoder
    fsdp_full:delayed:recompute   with gradient checkpointing
    cp4:fsdp_full:delayed         4 GPUs share the tokens of a row
    ddp:bf16:swap                 the Hugging Face decoder, in fp8 with its linear layers swapped for TE's

and the rivals have names of their own (`RIVALS`).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import torch

import te_llama
from llm_fp8.config import SHARDING_MODES, ParallelConfig, PrecisionConfig, check_config
from llm_fp8.errors import UserError
from llm_fp8.parallel.choice import check_mode
from llm_fp8.parallel.context import check_context_parallel
from llm_fp8.precision import TOKEN_MULTIPLE
from llm_fp8.ranks import LaunchRanks
from llm_fp8.throughput.ours import OurArm, OurTraining
from llm_fp8.throughput.rival import HfTraining
from llm_fp8.throughput.workload import Workload

PRECISIONS = {
    "bf16": PrecisionConfig(mixed_precision="bf16"),
    "delayed": PrecisionConfig(mixed_precision="fp8", fp8_scenario="delayed", fp8_strict=True),
    "current": PrecisionConfig(mixed_precision="fp8", fp8_scenario="current", fp8_strict=True),
    "block": PrecisionConfig(mixed_precision="fp8", fp8_scenario="block", fp8_strict=True),
}
RIVALS = {"hf_ddp_bf16": False, "hf_fsdp2_bf16": True}
"""Name -> whether FSDP2 splits the model."""

_OPTIONS = ("swap", "recompute", "fp8_params", "sync")
_ALL_NAMES = (
    f"{', '.join(RIVALS)}, or [cpN:]MODE:PRECISION[:OPTION...] with a mode of {', '.join(SHARDING_MODES)}; a precision of "
    f"{', '.join(PRECISIONS)}; options {', '.join(_OPTIONS)}"
)


@dataclass(frozen=True)
class Arm:
    """One way to train a workload in several processes."""

    name: str
    ours: OurArm | None
    """None for a rival."""

    @property
    def mode(self) -> str:
        """How it is spread: a value of --sharding_mode; for a rival the one that is most like it."""
        if self.ours is not None:
            return self.ours.parallel.sharding_mode
        return "fsdp_full" if RIVALS[self.name] else "ddp"

    @property
    def context_size(self) -> int:
        """Processes that share the tokens of a row."""
        return 1 if self.ours is None else self.ours.parallel.context_parallel_size

    def check(self, work: Workload, ranks: LaunchRanks) -> None:
        """Raise `UserError` where it cannot train `work` in this launch, as far as that is known beforehand."""
        if self.ours is None:
            if RIVALS[self.name] and not torch.cuda.is_available():
                raise UserError(f"--arms {self.name}: Accelerate's FSDP2 needs NVIDIA GPUs, and none is found; drop it.")
            return
        config = self.ours.config(work)
        try:
            check_config(config)
            check_mode(config, self.mode, ranks, compute_name="bf16")
            if self.context_size > 1:
                windows = te_llama.decoder_spec(work.hf_config()).windows
                check_context_parallel(config, windows, "bf16", TOKEN_MULTIPLE.get(config.precision.fp8_scenario, 1))
        except UserError as error:
            raise UserError(f"--arms {self.name} with --workloads {work.name}: {error}") from error

    def build(self, work: Workload) -> OurTraining | HfTraining:
        """The training, ready for its first step; collective."""
        return OurTraining(work, self.ours) if self.ours is not None else HfTraining(work, fsdp2=RIVALS[self.name])


def parse_arm(name: str) -> Arm:
    """The arm of that name; raises `UserError` where there is none."""
    if name in RIVALS:
        return Arm(name, None)
    words = name.split(":")
    context = re.fullmatch(r"cp([1-9]\d*)", words[0])
    mode, precision, *options = [*(words[1:] if context else words), "", ""][: max(2, len(words) - bool(context))]
    unknown = [word for word in options if word not in _OPTIONS]
    if mode not in SHARDING_MODES or precision not in PRECISIONS or unknown or len(set(options)) < len(options):
        raise UserError(f"--arms {name} is unknown; choose from {_ALL_NAMES}.")
    parallel = ParallelConfig(
        sharding_mode=mode,  # type: ignore[arg-type]
        context_parallel_size=int(context[1]) if context else 1,
        fp8_params="fp8_params" in options,
        sync_every_micro_batch="sync" in options,
    )
    ours = OurArm(PRECISIONS[precision], parallel, use_te="swap" not in options)
    return Arm(name, dataclasses.replace(ours, gradient_checkpointing="recompute" in options))
