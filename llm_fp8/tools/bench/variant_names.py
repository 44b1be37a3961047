"""Names of variants -> what they train: [cpN:][MODE:]WHAT[:OPTION...]

    delayed                       this project on one GPU: fp8 with delayed scaling, the TE decoder
    delayed:swap                  the Hugging Face decoder, its linear layers swapped for Transformer Engine's
    tensorwise:swap               torchao's fp8, which always is in the Hugging Face decoder
    delayed:fp8head               the gradients of lm_head in fp8; fp8head_all: its logits too
    delayed:flash4                --attn_implementation flash_attention_4
    bf16:recompute                with activation checkpointing
    delayed:adamw_8bit            with --optimizer adamw_8bit
    delayed:lora16                with LoRA: adapters of rank 16 on all linear layers; lora16qv: on q and v alone
    fsdp_full:delayed             several GPUs, --sharding_mode fsdp_full
    cp4:fsdp_full:delayed:sync    context parallelism over 4 GPUs; gradients reduced in each micro-batch
    fsdp_full:hf_bf16             a baseline (baselines.py) under Accelerate's FSDP2, DDP (ddp:) or DeepSpeed

WHAT is one of our precisions or a baseline. MODE belongs to several GPUs, and is left out on one. What trains a variant
is imported when it is checked or built; names, and mistakes in them, need none of it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llm_fp8.config.options import SHARDING_MODES, LoraConfig, ParallelConfig, PrecisionConfig
from llm_fp8.config.recipes import Backend, recipe_names, token_multiple
from llm_fp8.config.validation import MachineFacts, check_machine, check_options
from llm_fp8.tools.bench.variants import BASELINE_MODES, BASELINES, DEEPSPEED_MODES, Baseline, OurVariant
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

if TYPE_CHECKING:
    from llm_fp8.tools.bench.baselines import HfTraining
    from llm_fp8.tools.bench.ours import OurTraining
    from llm_fp8.tools.bench.workload import Workload


def precisions(backend: Backend) -> dict[str, PrecisionConfig]:
    """Name -> options of bf16 and the recipes of `backend`, without fallback. torchao's always need `swap`."""
    baseline = {"bf16": PrecisionConfig(mixed_precision="bf16")} if backend == "te" else {}
    return baseline | {
        name: PrecisionConfig(mixed_precision="fp8", fp8_backend=backend, fp8_scenario=name, fp8_strict=backend == "te")
        for name in recipe_names(backend)
    }


OLD_NAMES = {"hf_ddp_bf16": "ddp:hf_bf16", "hf_fsdp2_bf16": "fsdp_full:hf_bf16"}
"""Names in older results files -> names."""
REMOVED_OPTIONS = {"flash3": "flash4"}
"""In recorded files: flash-attn 3's attention, which is gone, -> the one that is within 1% of its step."""

HEADS: dict[str, Literal["gradients", "all"]] = {"fp8head": "gradients", "fp8head_all": "all"}
"""Option -> --fp8_lm_head."""
_OPTIONS_OF_ONE_GPU = ("swap", "recompute", "adamw_8bit", "flash4", *HEADS)
_OPTIONS_OF_SEVERAL = ("fp8_params", "fp8_all_gather", "sync")
_OPTIONS = (*_OPTIONS_OF_ONE_GPU, *_OPTIONS_OF_SEVERAL)
LORA = re.compile(r"lora([1-9]\d*)(qv)?")
"""An option: adapters of rank N on all linear layers, or on q and v alone."""


@dataclass(frozen=True)
class Variant:
    name: str
    what: OurVariant | Baseline
    mode: str | None
    """--sharding_mode (for a baseline the one most like it); None on one GPU."""

    @property
    def computes_in_fp8(self) -> bool:
        return self.what.computes_in_fp8

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
        from llm_fp8.distributed.deepspeed_config import file_of

        if self.mode is None or self.mode not in DEEPSPEED_MODES:
            return None
        named = self.what.deepspeed_config if isinstance(self.what, Baseline) else self.what.parallel.deepspeed_config
        return file_of(named, self.mode)

    @property
    def context_size(self) -> int:
        """Processes that share the tokens of a row."""
        return self.what.parallel.context_parallel_size if isinstance(self.what, OurVariant) else 1

    def check(self, work: Workload, ranks: LaunchRanks) -> None:
        """Raise `UserError` where it cannot train `work` in this launch, as far as that is known beforehand."""
        import torch

        from llm_fp8.train.machine import model_facts

        if ranks.launched and self.mode is None:
            raise UserError(f"--arms {self.name}: say how it is spread over the GPUs, for example ddp:{self.name}.")
        if not ranks.launched and self.mode is not None:
            raise UserError(
                f"--arms {self.name} is spread over several GPUs, which scripts/benchmark_multi_gpu.py measures; drop "
                f"'{self.mode}:' here."
            )
        if work.text is not None and self.mode is not None:
            raise UserError(
                f"--arms {self.name} with --workloads {work.name}: real documents are measured on one GPU alone."
            )
        if isinstance(self.what, Baseline):
            if self.mode == "fsdp_full" and not torch.cuda.is_available():
                raise UserError(
                    f"--arms {self.name}: Accelerate's FSDP2 needs NVIDIA GPUs, and none is found; drop it."
                )
            if self.mode in DEEPSPEED_MODES:
                from llm_fp8.distributed.deepspeed_config import load_deepspeed

                load_deepspeed()
            return
        config = self.what.config(work)
        try:
            check_options(config)
            facts = MachineFacts(
                ranks=ranks,
                sharding_mode=self.mode or "single",
                token_multiple=token_multiple(config.precision.fp8_scenario),
                scenario=config.precision.fp8_scenario,
                model=model_facts(config, work.hf_config()) if self.context_size > 1 else None,
            )
            check_machine(config, facts)
        except UserError as error:
            raise UserError(f"--arms {self.name} with --workloads {work.name}: {error}") from error

    def build(self, work: Workload) -> OurTraining | HfTraining:
        """The training, ready for its first step; collective. Raises `UserError` where a package is missing."""
        from llm_fp8.tools.bench.baselines import HfTraining
        from llm_fp8.tools.bench.ours import OurTraining

        if isinstance(self.what, Baseline):
            return HfTraining(work, self.what, self.mode)
        return OurTraining(work, self.what)

    def with_deepspeed_config(self, path: Path) -> Variant:
        """The same with this file for DeepSpeed; itself in a mode without it."""
        if self.mode not in DEEPSPEED_MODES:
            return self
        if isinstance(self.what, Baseline):
            return dataclasses.replace(self, what=dataclasses.replace(self.what, deepspeed_config=str(path)))
        parallel = dataclasses.replace(self.what.parallel, deepspeed_config=str(path))
        return dataclasses.replace(self, what=dataclasses.replace(self.what, parallel=parallel))


def parse_variant(name: str) -> Variant:
    """The variant of that name; raises `UserError` where there is none."""
    words = name.split(":")
    context = re.fullmatch(r"cp([1-9]\d*)", words[0])
    if context:
        words.pop(0)
    mode = words.pop(0) if words and words[0] in SHARDING_MODES else None
    what, options = (words[0], words[1:]) if words else ("", [])
    adapters = next((match for option in options if (match := LORA.fullmatch(option))), None)
    allowed = _OPTIONS if mode is not None else _OPTIONS_OF_ONE_GPU
    own, torchao = precisions("te"), precisions("torchao")
    if what in BASELINES and not options and not context and mode in (None, *BASELINE_MODES):
        if BASELINES[what].computes_in_fp8 and mode in DEEPSPEED_MODES:
            raise UserError(f"--arms {name}: a baseline under DeepSpeed computes in bf16; write {mode}:hf_bf16.")
        return Variant(name, BASELINES[what], mode)
    if (
        what not in (*own, *torchao)
        or not set(options) <= {*allowed, *([adapters[0]] if adapters else [])}
        or len(set(options)) < len(options)
        or (context is not None and mode is None)
    ):
        raise UserError(f"--arms {name} is unknown; choose {_choices()}.")
    if what in torchao and "swap" not in options:
        raise UserError(f"--arms {name}: torchao converts the layers of the Hugging Face decoder; write {what}:swap.")
    precision = {**own, **torchao}[what]
    heads = [option for option in options if option in HEADS]
    if heads:
        if what not in own or precision.mixed_precision != "fp8" or len(heads) > 1:
            raise UserError(
                f"--arms {name}: one of {' and '.join(HEADS)} goes with a recipe of Transformer Engine; write "
                f"delayed:{heads[0]}."
            )
        precision = dataclasses.replace(precision, fp8_lm_head=HEADS[heads[0]])
    parallel = ParallelConfig()
    if mode is not None:
        parallel = ParallelConfig(
            sharding_mode=mode,  # type: ignore[arg-type]
            context_parallel_size=int(context[1]) if context else 1,
            fp8_params="fp8_params" in options,
            fp8_all_gather="fp8_all_gather" in options,
            sync_every_micro_batch="sync" in options,
        )
    ours = OurVariant(
        precision,
        parallel,
        use_te="swap" not in options,
        flash_attention_4="flash4" in options,
        gradient_checkpointing="recompute" in options,
        lora=_lora_of(adapters),
        optimizer="adamw_8bit" if "adamw_8bit" in options else "auto",
    )
    return Variant(name, ours, mode)


def recorded_variant(name: str) -> Variant:
    """The variant of a name in a recorded file, under that name; removed options stand for what replaced them."""
    words = OLD_NAMES.get(name, name).split(":")
    return dataclasses.replace(parse_variant(":".join(REMOVED_OPTIONS.get(word, word) for word in words)), name=name)


def _lora_of(adapters: re.Match[str] | None) -> LoraConfig:
    """What an option such as lora16qv means; full fine-tuning for None."""
    if adapters is None:
        return LoraConfig()
    rank = int(adapters[1])
    return LoraConfig(lora_rank=rank, lora_targets="q_proj,v_proj") if adapters[2] else LoraConfig(lora_rank=rank)


def parse_variants(text: str) -> list[Variant]:
    """The variants of a comma-separated list; raises `UserError` for one that is unknown or there twice."""
    names = text.split(",")
    if doubled := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UserError(f"--arms names {doubled[0]} twice.")
    return [parse_variant(name) for name in names]


def _choices() -> str:
    return (
        f"from {', '.join(precisions('te'))}, each with :{', :'.join(_OPTIONS_OF_ONE_GPU)}, :loraN or :loraNqv behind "
        f"it if wanted, {', '.join(f'{name}:swap' for name in precisions('torchao'))}, and {', '.join(BASELINES)}; on "
        f"several GPUs with MODE: before it ({', '.join(SHARDING_MODES)}; baselines {', '.join(BASELINE_MODES)}), "
        f"ours also with cpN: before that and {' or '.join(f':{option}' for option in _OPTIONS_OF_SEVERAL)} behind"
    )
