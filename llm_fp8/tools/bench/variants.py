"""Variants of a benchmark by name, ours and the baselines: [cpN:][MODE:]WHAT[:OPTION...]

    delayed                       this project on one GPU: fp8 with delayed scaling, the TE decoder
    delayed:swap                  the Hugging Face decoder, its linear layers swapped for Transformer Engine's
    tensorwise:swap               torchao's fp8, which always is in the Hugging Face decoder
    bf16:recompute                with activation checkpointing
    delayed:graphs                with --cuda_graphs
    delayed:adamw_8bit            with --optimizer adamw_8bit
    delayed:offload75             with --offload_optimizer 0.75
    delayed:recast                with --fp8_recast_weights
    delayed:lora16                with LoRA: adapters of rank 16 on all linear layers; lora16qv: on q and v alone
    fsdp_full:delayed             several GPUs, --sharding_mode fsdp_full
    cp4:fsdp_full:delayed:sync    context parallelism over 4 GPUs; gradients reduced in each micro-batch
    fsdp_full:hf_bf16             a baseline (baselines.py) under Accelerate's FSDP2, DDP (ddp:) or DeepSpeed

WHAT is one of our precisions or a baseline. MODE belongs to several GPUs, and is left out on one. What a check needs
is imported there; names, and mistakes in them, need none of it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llm_fp8.config.options import (
    SHARDING_MODES,
    Config,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
)
from llm_fp8.config.recipes import Backend, recipe_names
from llm_fp8.config.validation import check_machine, check_options
from llm_fp8.distributed.deepspeed_config import file_of, load_deepspeed
from llm_fp8.tools.bench.worker import split_names
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

if TYPE_CHECKING:
    from llm_fp8.tools.bench.workload import Workload


@dataclass(frozen=True)
class Baseline:
    name: str
    compiled: bool = False
    """Per decoder layer."""
    torchao_recipe: str | None = None
    accelerate_te: bool = False
    te_autocast: bool = False

    @property
    def computes_in_fp8(self) -> bool:
        return self.accelerate_te or self.te_autocast or self.torchao_recipe is not None


DEEPSPEED_MODES = tuple(mode for mode in SHARDING_MODES if mode.startswith("deepspeed_"))
BASELINE_MODES = ("ddp", "fsdp_full", *DEEPSPEED_MODES)
"""How a baseline is spread over several GPUs; under DeepSpeed in bf16 alone."""
REFERENCE = "hf_bf16"
"""The baseline that others are compared with, where it is measured."""
BASELINES = {
    baseline.name: baseline
    for baseline in (
        Baseline("hf_bf16"),
        Baseline("hf_bf16_compiled", compiled=True),
        Baseline("accelerate_te", accelerate_te=True),
        Baseline("te_autocast", te_autocast=True),
        Baseline("torchao_tensorwise", compiled=True, torchao_recipe="tensorwise"),
        Baseline("torchao_rowwise", compiled=True, torchao_recipe="rowwise"),
    )
}


def precisions(backend: Backend) -> dict[str, PrecisionConfig]:
    """Name -> options of bf16 and the recipes of `backend`, without fallback. torchao's always need `swap`."""
    baseline = {"bf16": PrecisionConfig(mixed_precision="bf16")} if backend == "te" else {}
    return baseline | {
        name: PrecisionConfig(mixed_precision="fp8", fp8_backend=backend, fp8_scenario=name, fp8_strict=backend == "te")
        for name in recipe_names(backend)
    }


_OPTIONS_OF_ONE_GPU = ("swap", "recompute", "graphs", "adamw_8bit", "recast")
_OPTIONS_OF_SEVERAL = ("fp8_params", "sync")
LORA = re.compile(r"lora([1-9]\d*)(qv)?")
"""An option: adapters of rank N on all linear layers, or on q and v alone."""
OFFLOAD = re.compile(r"offload([1-9]\d?|100)")
"""An option: so many per cent of the optimizer's state in host memory."""


@dataclass(frozen=True)
class Variant:
    name: str
    what: Config | Baseline
    """Ours by its options, without those that a workload decides (`Workload.config`), or a baseline."""
    mode: str | None
    """--sharding_mode (for a baseline the one most like it); None on one GPU."""
    deepspeed_config: str | None = None
    """DeepSpeed's file in a deepspeed mode; None: the mode's own."""

    @property
    def computes_in_fp8(self) -> bool:
        if isinstance(self.what, Baseline):
            return self.what.computes_in_fp8
        return self.what.precision.mixed_precision == "fp8"

    @property
    def on_one_gpu(self) -> str:
        """The name of the variant that trains the same on one GPU, where nothing is communicated."""
        if self.mode is None:
            return self.name
        words = self.name.partition(f"{self.mode}:")[2].split(":")
        return ":".join(word for word in words if word not in _OPTIONS_OF_SEVERAL)

    @property
    def deepspeed_file(self) -> Path | None:
        """None in a mode without DeepSpeed."""
        if self.mode is None or self.mode not in DEEPSPEED_MODES:
            return None
        return file_of(self.deepspeed_config, self.mode)

    @property
    def context_size(self) -> int:
        """Processes that share the tokens of a row."""
        return self.what.parallel.context_parallel_size if isinstance(self.what, Config) else 1

    def config(self, work: Workload) -> Config:
        """The options of a run of ours on `work`."""
        assert isinstance(self.what, Config)
        parallel = dataclasses.replace(self.what.parallel, deepspeed_config=self.deepspeed_config)
        return work.config(dataclasses.replace(self.what, parallel=parallel))

    def check(self, work: Workload, ranks: LaunchRanks) -> None:
        """Raise `UserError` where it cannot train `work` in this launch, as far as that is known beforehand."""
        is_baseline, name = isinstance(self.what, Baseline), self.name
        fsdp2_without_gpu = is_baseline and self.mode == "fsdp_full" and not torch.cuda.is_available()
        for refused, why in (
            (ranks.launched and self.mode is None, f": say how it is spread over the GPUs, for example ddp:{name}."),
            (
                not ranks.launched and self.mode is not None,
                f" is spread over several GPUs, which scripts/benchmark_multi_gpu.py measures; drop '{self.mode}:' "
                "here.",
            ),
            (
                work.text is not None and self.mode is not None,
                f" with --workloads {work.name}: real documents are measured on one GPU alone.",
            ),
            (fsdp2_without_gpu, ": Accelerate's FSDP2 needs NVIDIA GPUs, and none is found; drop it."),
        ):
            if refused:
                raise UserError(f"--arms {name}{why}")
        if is_baseline:
            if self.mode in DEEPSPEED_MODES:
                load_deepspeed()
            return
        config = self.config(work)
        try:
            check_options(config)
            scenario = config.precision.fp8_scenario
            check_machine(config, on_gpu=True, mode=self.mode or "single", scenario=scenario, ranks=ranks)
        except UserError as error:
            raise UserError(f"--arms {name} with --workloads {work.name}: {error}") from error


def parse_variant(name: str) -> Variant:
    """The variant of that name; raises `UserError` where there is none."""
    words = name.split(":")
    context = re.fullmatch(r"cp([1-9]\d*)", words[0])
    words = words[1:] if context else words
    mode = next((mode for mode in SHARDING_MODES if words and words[0] == mode), None)
    what, *options = (words[1:] if mode else words) or [""]
    if what in BASELINES and not options and not context and mode in (None, *BASELINE_MODES):
        if BASELINES[what].computes_in_fp8 and mode in DEEPSPEED_MODES:
            raise UserError(f"--arms {name}: a baseline under DeepSpeed computes in bf16; write {mode}:hf_bf16.")
        return Variant(name, BASELINES[what], mode)
    te, torchao = precisions("te"), precisions("torchao")
    adapters = next((match for option in options if (match := LORA.fullmatch(option))), None)
    on_host = next((match for option in options if (match := OFFLOAD.fullmatch(option))), None)
    numbered = [match[0] for match in (adapters, on_host) if match]
    allowed = {*_OPTIONS_OF_ONE_GPU, *(_OPTIONS_OF_SEVERAL if mode else ()), *numbered}
    if (
        what not in te | torchao
        or not set(options) <= allowed
        or len(set(options)) < len(options)
        or (context is not None and mode is None)
    ):
        raise UserError(f"--arms {name} is unknown; choose {_choices()}.")
    if what in torchao and "swap" not in options:
        raise UserError(f"--arms {name}: torchao converts the layers of the Hugging Face decoder; write {what}:swap.")
    precision = (te | torchao)[what]
    if "recast" in options:
        precision = dataclasses.replace(precision, fp8_recast_weights=True)
    ours = Config(
        model=ModelConfig(
            use_te="swap" not in options,
            gradient_checkpointing=int("recompute" in options),
            cuda_graphs="graphs" in options,
        ),
        precision=precision,
        optim=OptimConfig(
            optimizer="adamw_8bit" if "adamw_8bit" in options else "auto",
            offload_optimizer=int(on_host[1]) / 100 if on_host else 0.0,
        ),
        lora=LoraConfig(
            lora_rank=int(adapters[1]) if adapters else 0,
            lora_targets="q_proj,v_proj" if adapters and adapters[2] else LoraConfig.lora_targets,
        ),
        parallel=ParallelConfig(
            sharding_mode=mode or ParallelConfig.sharding_mode,
            context_parallel_size=int(context[1]) if context else 1,
            fp8_params="fp8_params" in options,
            sync_every_micro_batch="sync" in options,
        ),
    )
    return Variant(name, ours, mode)


def parse_variants(text: str) -> list[Variant]:
    """The variants of a comma-separated list; raises `UserError` for one that is unknown or there twice."""
    return [parse_variant(name) for name in split_names(text, "--arms")]


def _choices() -> str:
    return (
        f"from {', '.join(precisions('te'))}, each with :{', :'.join(_OPTIONS_OF_ONE_GPU)}, :loraN, :loraNqv or "
        f":offloadN behind it if wanted, {', '.join(f'{name}:swap' for name in precisions('torchao'))}, and "
        f"{', '.join(BASELINES)}; on "
        f"several GPUs with MODE: before it ({', '.join(SHARDING_MODES)}; baselines {', '.join(BASELINE_MODES)}), "
        f"ours also with cpN: before that and {' or '.join(f':{option}' for option in _OPTIONS_OF_SEVERAL)} behind"
    )
