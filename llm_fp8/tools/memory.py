"""Does a model fit, and with which options? GPU memory for each way of training and sharding, without GPU or weights.

`llm-fp8 memory` and scripts/memory.py. `llm_fp8.distributed.memory` computes the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llm_fp8.config.options import EMBEDDED, Config, ModelConfig
from llm_fp8.config.recipes import DEFAULTS
from llm_fp8.models import bundled_architectures
from llm_fp8.tools.programs import wide_console
from llm_fp8.utils.errors import OneSentenceParser, UserError, did_you_mean, positive
from llm_fp8.utils.json_files import writable, write_json_atomic
from llm_fp8.utils.ranks import LaunchRanks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from llm_fp8.settle.machine import Machine
    from llm_fp8.settle.memory import RunSize

GPUS = {"h200": 139.8, "h100": 79.2, "a100": 79.1, "l40s": 44.4, "4090": 23.6}
"""A GPU's name -> its memory in GiB as torch reports it; the largest, where there are several sizes."""

WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, recomputed": {"gradient_checkpointing": "auto"},  # counted with all layers
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "offload": {"offload_optimizer": 1.0},
    "offload, fp8 weights cast anew": {"offload_optimizer": 1.0, "fp8_recast_weights": True},
    "adamw_8bit, recomputed": {"optimizer": "adamw_8bit", "gradient_checkpointing": "auto"},
    "LoRA": {"lora_rank": 16},
    "LoRA, recomputed": {"lora_rank": 16, "gradient_checkpointing": "auto"},
}
"""Way of training -> its options; the cheapest in time and quality comes first."""
SIZES = ("batch_size", "max_seq_length", "gradient_accumulation_steps")
HUB_OWNERS = {"Llama-3": "meta-llama", "Qwen": "Qwen"}  # start of a bundled model's name -> its owner on the hub


class Row(NamedTuple):
    """A way of training in a sharding mode: `run` as requested, `fitted` with the longest micro-batch that fits."""

    way: str
    run: RunSize
    fitted: RunSize | None

    @property
    def fits(self) -> str:
        """'yes', 'with --batch_size N', 'no', or 'without activations' where those are not counted."""
        if self.fitted is None:
            return "no"
        if self.run.spec is None:
            return "without activations"
        rows = self.fitted.config.data.batch_size
        return "yes" if rows == self.run.config.data.batch_size else f"with --batch_size {rows}"

    def command(self, model_words: list[str]) -> str:
        config = (self.fitted or self.run).config
        words = ["python", "train_fp8.py"]
        if self.run.num_gpus > 1:
            words = ["torchrun", f"--nproc_per_node={self.run.num_gpus}", "train_multi_gpu.py"]
            words.append(f"--sharding_mode={self.run.mode}")
        model = config.model  # which `model_words` name
        default = Config().with_options(model_name=model.model_name, random_init=model.random_init).options
        options = {name: value for name, value in config.options.items() if value != default[name]}
        given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
        return shlex.join([*words, *model_words, *given])

    def to_dict(self, model_words: list[str]) -> dict[str, Any]:
        estimate = self.run.estimate()
        return {
            "training": self.way,
            "sharding_mode": self.run.mode,
            "fits": self.fits,
            "parts_gib": estimate.parts,
            "total_gib": estimate.total_gib,
            "needed_gib": estimate.needed_gib,
            "command": self.command(model_words),
        }


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Training options have the names and defaults of train_fp8.py."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    bundled = ", ".join(bundled_architectures())
    add("--model_name", type=os.path.expanduser, required=True, help=f"hub id, folder, or bundled name: {bundled}")
    add("--gpu", help=f"{', '.join(GPUS)}, or its memory in GiB (default: this machine's)")
    defaults = Config().options
    for name in ("num_gpus", *SIZES):
        add(f"--{name}", type=positive, default=defaults.get(name, 1), help="(default %(default)s)")
    add("--mixed_precision", choices=["bf16", "fp8"], help="(default: fp8 where the GPU has it)")
    add("--output", type=writable, metavar="FILE", help="write the figures to this JSON file")
    return parser.parse_args(argv)


def gpu_memory(name: str | None) -> tuple[str, float, bool]:
    """The GPU's name, its memory in GiB, and whether it has fp8. Raises `UserError` for an unknown GPU."""
    if name is None:
        import torch

        if not torch.cuda.is_available():
            raise UserError(f"--gpu: this machine has none, so name one ({', '.join(GPUS)}) or give its memory in GiB.")
        properties = torch.cuda.get_device_properties(0)
        return properties.name, properties.total_memory / 2**30, (properties.major, properties.minor) >= (8, 9)
    plain = re.sub(r"nvidia|geforce|rtx|tesla|sxm\d?|pcie|hbm\de?|(?<=\w)[-_ ]", "", name.lower())
    size = r"([1-9]\d*(?:\.\d+)?)"
    found = re.fullmatch(rf"({'|'.join(GPUS)})(?:{size}gi?b)?|{size}(?:gi?b)?", plain)
    if found is None:
        names, near = ", ".join(GPUS), did_you_mean(plain, GPUS)
        raise UserError(f"--gpu {name}: give a known name ({names}) or the GPU's memory in GiB, as 80{near}.")
    key, stated, alone = found.groups()
    if key is None:
        return f"a GPU of {alone} GiB", float(alone), True
    usual = stated is None or abs(float(stated) - GPUS[key]) < 4
    return name, GPUS[key] if usual else float(stated), key != "a100"


def find_model(name: str) -> tuple[PretrainedConfig, list[str]]:
    """The model's config, and the words that name the model on a training command line."""
    from llm_fp8.models.source import bundled_name, load_config, resolve_source

    words = [f"--model_name={name}"]
    if "/" not in name and name != EMBEDDED and not Path(name).is_dir():
        if (known := bundled_name(name)) is None:
            near = did_you_mean(name, bundled_architectures())
            raise UserError(f"--model_name {name}: neither a folder, nor bundled{near}, nor owner/name on the hub.")
        owner = next((owner for start, owner in HUB_OWNERS.items() if known.startswith(start)), None)
        words = [f"--model_name={owner}/{known}"] if owner else [f"--model_name={known}", "--random_init"]
    # A bundled config needs no hub, and is that of random weights.
    return load_config(resolve_source(ModelConfig(model_name=name, random_init=True))), words


def rows_of(
    options: argparse.Namespace,
    hf_config: PretrainedConfig,
    model_words: list[str],
    machine: Machine,
    precision: Literal["bf16", "fp8"],
) -> list[Row]:
    """The rows of every way of training in every sharding mode, the cheapest that fits first."""
    from llm_fp8.models.build import count_parameters
    from llm_fp8.settle.memory import RunSize
    from llm_fp8.settle.settle import settle

    sizes = {name: getattr(options, name) for name in SIZES}
    model = {"model_name": options.model_name, "random_init": "--random_init" in model_words}
    config = Config().with_options(use_te=True, mixed_precision=precision, **model, **sizes)
    recipe = DEFAULTS["te"] if precision == "fp8" else "bf16"
    num_parameters, gpu_gib, rows = count_parameters(hf_config), machine.gpu_gib or 0.0, []
    for way, changes in WAYS.items():
        for mode in ("ddp", "fsdp_grad", "fsdp_full") if options.num_gpus > 1 else ("single",):
            if mode.startswith("fsdp") and "offload_optimizer" in changes:
                continue
            if precision == "bf16" and "fp8_recast_weights" in changes:
                continue
            run = RunSize(config, hf_config, recipe, mode, options.num_gpus, num_parameters).changed(**changes)
            if run.spec is None:  # without a TE decoder for this model its activations are not counted
                if "gradient_checkpointing" in changes:
                    continue
                run = run.changed(use_te=False)
            fitted = run.fitted(gpu_gib)
            if fitted is None and run.sharded:  # whole gradients are kept between the micro-batches of a step
                run = run.changed(sync_every_micro_batch=True)
                fitted = run.fitted(gpu_gib)
            if fitted is not None:
                with contextlib.suppress(UserError):  # what a run would refuse does not fit either
                    run_config = fitted.config if mode == "single" else fitted.config.with_options(sharding_mode=mode)
                    settle(run_config, hf_config, machine, num_parameters=num_parameters)
                    rows.append(Row(way, run, fitted))
                    continue
            rows.append(Row(way, run, None))
    return sorted(rows, key=lambda row: (row.fitted is None, row.fits != "yes"))


def main() -> int:
    options = parse(sys.argv[1:])
    gpu, gpu_gib, has_fp8 = gpu_memory(options.gpu)
    if options.mixed_precision == "fp8" and not has_fp8:
        raise UserError(f"--mixed_precision fp8: {gpu} has no fp8; drop it for bf16.")
    precision: Literal["bf16", "fp8"] = options.mixed_precision or ("fp8" if has_fp8 else "bf16")
    hf_config, model_words = find_model(options.model_name)

    from rich.table import Column, Table

    from llm_fp8.models.source import require_positions
    from llm_fp8.settle.machine import assume

    require_positions(hf_config, options.max_seq_length, options.model_name, "--max_seq_length")
    ranks = LaunchRanks(world_size=options.num_gpus, local_world_size=options.num_gpus)
    machine = assume(ranks, gpu, gpu_gib, (9, 0) if has_fp8 else (8, 0))
    rows = rows_of(options, hf_config, model_words, machine, precision)
    console = wide_console(markup=False, soft_wrap=True)  # names may hold brackets
    billions = rows[0].run.num_parameters / 1e9
    shape = f"{options.batch_size} x {options.max_seq_length:,}"
    where = f"on {options.num_gpus} x {gpu} ({gpu_gib:.1f} GiB)"
    console.print(f"{options.model_name}, {billions:.2f} billion parameters, {precision}, {shape} tokens {where}")
    table = Table(
        "training", "sharding", Column("GiB per GPU", justify="right"), Column("needs", justify="right"), "fits"
    )
    for row in rows:
        estimate = row.run.estimate()
        table.add_row(row.way, row.run.mode, f"{estimate.total_gib:.1f}", f"{estimate.needed_gib:.1f}", row.fits)
    console.print(table, soft_wrap=False)
    is_whole = rows[0].run.estimate().is_whole
    if not is_whole:
        console.print("note: without a TE decoder for this model activations, logits and casts are not counted")
    if rows[0].fitted is not None:
        console.print(f"the cheapest that {'fits' if is_whole else 'may fit'}:\n  {rows[0].command(model_words)}")
    else:
        console.print("nothing fits: take more GPUs or shorter rows")
    if options.output is not None:
        given = {name: str(value) for name, value in vars(options).items()}
        content = [row.to_dict(model_words) for row in rows]
        write_json_atomic(options.output, {"options": given, "gpu": gpu, "gpu_gib": gpu_gib, "rows": content})
    return 0
