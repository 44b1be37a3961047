"""Does a model fit, and with which options? Estimate the GPU memory of each way to train it in each sharding mode. This
needs no GPU and no weights.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Column, Table

from llm_fp8.config.options import EMBEDDED, Config, ModelConfig
from llm_fp8.config.recipes import DEFAULTS
from llm_fp8.models import BUNDLED
from llm_fp8.tools.programs import wide_console
from llm_fp8.tools.script import writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, did_you_mean, positive
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.ranks import LaunchRanks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from llm_fp8.models.memory import RunSize
    from llm_fp8.settle.machine import Machine

GPUS = {
    "h200": (139.8, (9, 0)),
    "h100": (79.2, (9, 0)),
    "a100": (79.1, (8, 0)),
    "l40s": (44.4, (8, 9)),
    "4090": (23.6, (8, 9)),
}
"""GPU name -> memory in GiB as torch reports it (the largest size sold), and compute capability."""

WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, recomputed": {"gradient_checkpointing": "auto"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "offload": {"offload_optimizer": 1.0},
    "offload, fp8 weights cast anew": {"offload_optimizer": 1.0, "fp8_recast_weights": True},
    "adamw_8bit, recomputed": {"optimizer": "adamw_8bit", "gradient_checkpointing": "auto"},
    "LoRA": {"lora_rank": 16},
    "LoRA, recomputed": {"lora_rank": 16, "gradient_checkpointing": "auto"},
}
"""Way to train -> the options that lower its memory, sorted by their cost in time and quality, cheapest first."""

SIZES = ("batch_size", "max_seq_length", "gradient_accumulation_steps")
HUB_OWNERS = {"Llama-3": "meta-llama", "Qwen": "Qwen"}  # prefix of a bundled model's name -> its owner on the hub


class Row(NamedTuple):
    """A way to train in a sharding mode. `run` has the requested batch size, `fitted` the largest that fits, if any."""

    way: str
    run: RunSize
    fitted: RunSize | None

    @property
    def fits(self) -> str:
        """Return 'yes', 'with --batch_size N' or 'no', or 'without activations' if activations cannot be estimated."""
        if self.fitted is None:
            return "no"
        if self.run.spec is None:
            return "without activations"
        rows = self.fitted.config.data.batch_size
        return "yes" if rows == self.run.config.data.batch_size else f"with --batch_size {rows}"

    def command(self, model_argv: list[str]) -> str:
        config = (self.fitted or self.run).config
        command = ["python", "train_fp8.py"]
        if self.run.num_gpus > 1:
            command = ["torchrun", f"--nproc_per_node={self.run.num_gpus}", "train_multi_gpu.py"]
            command.append(f"--sharding_mode={self.run.mode}")
        model = config.model  # its options come from `model_argv`
        default = Config().with_options(model_name=model.model_name, random_init=model.random_init).options
        options = {name: value for name, value in config.options.items() if value != default[name]}
        changed = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
        return shlex.join([*command, *model_argv, *changed])

    def to_dict(self, model_argv: list[str]) -> dict[str, Any]:
        estimate = self.run.estimate()
        figures = {"parts_gib": estimate.parts, "total_gib": estimate.total_gib, "needed_gib": estimate.needed_gib}
        settings = {"training": self.way, "sharding_mode": self.run.mode, "fits": self.fits}
        return {**settings, **figures, "command": self.command(model_argv)}


def assumed_machine(gpu: str | None, num_gpus: int) -> Machine:
    """Return a machine with `num_gpus` GPUs. `gpu` is a name, a memory size in GiB, or None for this machine's GPU."""
    from llm_fp8.settle.machine import assumed_machine, detect_machine

    ranks = LaunchRanks(world_size=num_gpus, local_world_size=num_gpus)
    if gpu is None:
        here = detect_machine(Config(), LaunchRanks(), asks_te=False)
        if here.gpu is None or here.gpu_gib is None:
            raise UserError(f"--gpu: this machine has no GPU; name one ({', '.join(GPUS)}) or give its memory in GiB.")
        return assumed_machine(ranks, here.gpu, here.gpu_gib, here.capability)
    plain = re.sub(r"nvidia|geforce|rtx|tesla|sxm\d?|pcie|hbm\de?|(?<=\w)[-_ ]", "", gpu.lower())
    size = r"([1-9]\d*(?:\.\d+)?)"
    match = re.fullmatch(rf"({'|'.join(GPUS)})(?:{size}gi?b)?|{size}(?:gi?b)?", plain)
    if match is None:
        names, near = ", ".join(GPUS), did_you_mean(plain, GPUS)
        raise UserError(f"--gpu {gpu}: give a known name ({names}) or the GPU's memory in GiB, as 80{near}.")
    name, stated_gib, gib = match.groups()
    if name is None:
        return assumed_machine(ranks, f"a GPU of {gib} GiB", float(gib))
    known_gib, capability = GPUS[name]
    is_known = stated_gib is None or abs(float(stated_gib) - known_gib) < 4
    return assumed_machine(ranks, gpu, known_gib if is_known else float(stated_gib), capability)


def find_model(name: str) -> tuple[PretrainedConfig, list[str]]:
    """Return the config of the model `name`, and the options by which the training scripts load this model."""
    from llm_fp8.models.source import bundled_name, load_config, resolve_source

    argv = [f"--model_name={name}"]
    if "/" not in name and name != EMBEDDED and not Path(name).is_dir():
        if (known := bundled_name(name)) is None:
            near = did_you_mean(name, BUNDLED)
            raise UserError(f"--model_name {name}: neither a folder, nor bundled{near}, nor owner/name on the hub.")
        owner = next((owner for start, owner in HUB_OWNERS.items() if known.startswith(start)), None)
        argv = [f"--model_name={owner}/{known}"] if owner else [f"--model_name={known}", "--random_init"]
    # With random_init a bundled config is read, without the hub.
    return load_config(resolve_source(ModelConfig(model_name=name, random_init=True))), argv


def rows_of(config: Config, hf_config: PretrainedConfig, machine: Machine) -> list[Row]:
    """Return a table row for each of `WAYS` in each sharding mode. The cheapest way that fits comes first."""
    from llm_fp8.config.validation import refusal
    from llm_fp8.models.build import count_parameters
    from llm_fp8.models.memory import RunSize
    from llm_fp8.settle.memory import largest_fitting
    from llm_fp8.settle.settle import settle

    recipe = DEFAULTS["te"] if config.precision.mixed_precision == "fp8" else "bf16"
    num_gpus, gpu_gib = machine.ranks.world_size, machine.gpu_gib or 0.0
    modes = ("ddp", "fsdp_grad", "fsdp_full") if num_gpus > 1 else ("single",)
    num_parameters, rows = count_parameters(hf_config), []
    for (way, changes), mode in itertools.product(WAYS.items(), modes):
        run = RunSize(config, hf_config, recipe, mode, num_gpus, num_parameters).changed(**changes)
        if refusal(run.config, mode):  # for example --fp8_recast_weights in a bf16 run
            continue
        if run.spec is None:  # activations are not counted: there is no TE decoder
            if "gradient_checkpointing" in changes:
                continue
            run = run.changed(use_te=run.sizes is not None)
        fitted = largest_fitting(run, gpu_gib)
        if fitted is None and run.sharded:  # retry without whole gradients between micro-batches
            run = run.changed(sync_every_micro_batch=True)
            fitted = largest_fitting(run, gpu_gib)
        if fitted is not None:
            requested = fitted.config.with_options(sharding_mode=mode)
            try:
                settle(requested, hf_config, machine, num_parameters=num_parameters)
            except UserError:  # a run would refuse these options
                fitted = None
        rows.append(Row(way, run, fitted))
    return sorted(rows, key=lambda row: (row.fitted is None, row.fits != "yes"))


def main() -> int:
    """Print a table of estimated GPU memory for each way to train, and write it to --output as JSON, if requested."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add, defaults = parser.add_argument, Config().options
    names = f"hub id, folder, or bundled name: {', '.join(BUNDLED)}"
    add("--model_name", type=os.path.expanduser, required=True, help=names)
    add("--gpu", help=f"{', '.join(GPUS)}, or its memory in GiB (default: this machine's)")
    for name in ("num_gpus", *SIZES):
        add(f"--{name}", type=positive, default=defaults.get(name, 1), help="(default %(default)s)")
    add("--mixed_precision", choices=["bf16", "fp8"], help="(default: fp8 if the GPU has it)")
    add("--output", type=writable, metavar="FILE", help="write the figures to this JSON file")
    options = parser.parse_args()
    machine = assumed_machine(options.gpu, options.num_gpus)
    if options.mixed_precision == "fp8" and not machine.has_fp8:
        raise UserError(f"--mixed_precision fp8: {machine.gpu} has no fp8; drop it for bf16.")
    precision = options.mixed_precision or ("fp8" if machine.has_fp8 else "bf16")
    hf_config, model_argv = find_model(options.model_name)

    from llm_fp8.models.source import require_positions

    require_positions(hf_config, options.max_seq_length, options.model_name, "--max_seq_length")
    model = {"model_name": options.model_name, "random_init": "--random_init" in model_argv}
    sizes = {name: getattr(options, name) for name in SIZES}
    config = Config().with_options(use_te=True, mixed_precision=precision, **model, **sizes)
    rows = rows_of(config, hf_config, machine)
    console = wide_console(markup=False, soft_wrap=True)  # a name may contain brackets
    billions = rows[0].run.num_parameters / 1e9
    shape = f"{options.batch_size} x {options.max_seq_length:,}"
    hardware = f"on {options.num_gpus} x {machine.gpu} ({machine.gpu_gib:.1f} GiB)"
    console.print(f"{options.model_name}, {billions:.2f} billion parameters, {precision}, {shape} tokens {hardware}")
    figures = (Column(title, justify="right") for title in ("GiB per GPU", "needs"))
    table = Table("training", "sharding", *figures, "fits")
    for row in rows:
        estimate = row.run.estimate()
        table.add_row(row.way, row.run.mode, f"{estimate.total_gib:.1f}", f"{estimate.needed_gib:.1f}", row.fits)
    console.print(table, soft_wrap=False)
    is_whole = rows[0].run.estimate().is_whole
    if not is_whole:
        console.print("note: this model has no TE decoder, so activations, logits and casts are not counted")
    elif rows[0].run.spec is not None and rows[0].run.spec.delta_net:
        console.print("note: gated delta nets are estimated from the sources of flash-linear-attention's kernels")
    if rows[0].fitted is not None:
        console.print(f"the cheapest that {'fits' if is_whole else 'may fit'}:\n  {rows[0].command(model_argv)}")
    else:
        console.print("nothing fits: use more GPUs or shorter rows")
    if options.output is not None:
        typed = {name: str(value) for name, value in vars(options).items()}
        content = [row.to_dict(model_argv) for row in rows]
        gpu = {"gpu": machine.gpu, "gpu_gib": machine.gpu_gib}
        write_json_atomic(options.output, {"options": typed, **gpu, "rows": content})
    return 0
