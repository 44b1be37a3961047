"""Does a model fit? Estimate the GPU memory of each way to train it in each sharding mode, without GPU and weights."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Column, Table

from llm_fp8.config.options import AUTO_BATCH_SIZE, EMBEDDED, Config, ModelConfig
from llm_fp8.config.parser import parse_config, to_argv, with_underscores
from llm_fp8.config.validation import refusal
from llm_fp8.models import BUNDLED
from llm_fp8.tools.gpus import GPUS, named_machine
from llm_fp8.tools.programs import wide_console
from llm_fp8.tools.script import writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, did_you_mean, positive
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.ranks import LaunchRanks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from llm_fp8.models.memory import RunSize
    from llm_fp8.settle.machine import Machine
    from llm_fp8.settle.settle import Settled

LEGEND = (
    "GiB on each GPU at the peak. Needed: with CUDA, allocator, communication. Recomputed: all layers (auto: fewer)."
)
HUB_OWNERS = {"Llama-3": "meta-llama", "Qwen": "Qwen"}  # prefix of a bundled model's name -> its owner on the hub


class Row(NamedTuple):
    """A way to train in a sharding mode. `size` has the requested batch size, or the largest that fits."""

    way: str
    size: RunSize
    fits: str  # 'yes', 'with --batch_size N', 'no', 'no: reason', or 'without activations' if these are not counted

    @property
    def runs(self) -> bool:
        return not self.fits.startswith("no")

    @property
    def command(self) -> str:
        """The command that trains in this way, with all options that differ from their defaults."""
        options, default = self.size.config.options, Config().options
        is_here = Path("train_fp8.py").is_file()
        command = ["python", "train_fp8.py"] if is_here else ["llm-fp8", "train"]
        if self.size.mode != "single":
            script = ["train_multi_gpu.py"] if is_here else ["-m", "llm_fp8", "train"]
            command = ["torchrun", f"--nproc_per_node={self.size.num_gpus}", *script]
        changed = {name: value for name, value in options.items() if value != default[name] or name == "dataset_name"}
        return shlex.join([*command, *(word.removesuffix("=True") for word in to_argv(changed))])

    def to_dict(self) -> dict[str, Any]:
        estimate = self.size.estimate()
        figures = {"parts_gib": estimate.parts, "total_gib": estimate.total_gib, "needed_gib": estimate.needed_gib}
        settings = {"training": self.way, "sharding_mode": self.size.mode, "fits": self.fits, "command": self.command}
        return settings | figures


def find_model(model: ModelConfig) -> tuple[PretrainedConfig, dict[str, Any]]:
    """Return the model's config, and the options by which the training scripts load it."""
    from llm_fp8.models.source import bundled_name, load_config, resolve_source

    name, options = model.model_name, {"model_name": model.model_name, "random_init": model.random_init}
    if "/" not in name and name != EMBEDDED and not Path(name).is_dir():
        if (known := bundled_name(name)) is None:
            near = did_you_mean(name, BUNDLED)
            raise UserError(f"--model_name {name}: neither a folder, nor bundled{near}, nor owner/name on the hub.")
        owner = next((owner for start, owner in HUB_OWNERS.items() if known.startswith(start)), None)
        options["model_name"] = f"{owner}/{known}" if owner else known
        options["random_init"] = model.random_init or owner is None
    # With random_init a bundled config is read, without the hub.
    return load_config(resolve_source(ModelConfig(name, random_init=bundled_name(name) is not None))), options


def ways_of(config: Config) -> dict[str, Config]:
    """Return name -> options of each of `WAYS` that keeps the options which `config` already sets."""
    from llm_fp8.settle.memory import WAYS

    options, default, ways = config.options, Config().options, dict[str, Config]()
    fixed = {name: options[name] for way in WAYS.values() for name in way if options[name] != default[name]}
    all_layers = config.data.batch_size == AUTO_BATCH_SIZE  # since --gradient_checkpointing auto would choose none
    for way, changes in WAYS.items():
        if fixed.keys() <= changes.keys() and fixed.get("optimizer") in (None, changes.get("optimizer")):
            changes = {name: 1 if all_layers and value == "auto" else value for name, value in changes.items()}
            ways[way] = config.with_options(**changes | fixed)
    return ways if config in ways.values() else {"these options": config, **ways}


def row_of(way: str, size: RunSize, machine: Machine) -> Row:
    """Return the table row of a run, with smaller micro-batches if these fit. Choose the size of --batch_size auto."""
    from llm_fp8.settle.memory import largest_fitting, row_multiple
    from llm_fp8.settle.settle import settle

    requested_rows = size.config.data.batch_size
    automatic = requested_rows == AUTO_BATCH_SIZE
    fitted = size if automatic else largest_fitting(size, machine.gpu_gib or 0.0)
    if fitted is None:
        return Row(way, size, "no")
    try:
        settled = settle(fitted.config, size.hf_config, machine, num_parameters=size.num_parameters)
    except UserError as error:  # with --batch_size auto, usually since no size fits
        size = size.changed(batch_size=row_multiple(size)) if automatic else size
        return Row(way, size, "no" if automatic else f"no: {error}".rstrip("."))
    if automatic:
        fitted = fitted.changed(batch_size=settled.config.data.batch_size)
    rows = fitted.config.data.batch_size
    fits = "yes" if rows == requested_rows else f"with --batch_size {rows}"
    return Row(way, fitted, "without activations" if size.spec is None else fits)


def rows_of(config: Config, hf_config: PretrainedConfig, machine: Machine) -> list[Row]:
    """Return a table row for each way in each sharding mode. The cheapest way that fits comes first."""
    from llm_fp8.models.build import count_parameters
    from llm_fp8.models.memory import RunSize
    from llm_fp8.settle.settle import resolve_precision

    precision, num_gpus = resolve_precision(config, machine), machine.ranks.world_size
    recipe = precision.effective_scenario or precision.effective
    modes: tuple[str, ...] = ("ddp", "fsdp_grad", "fsdp_full") if num_gpus > 1 else ("single",)
    if config.parallel.sharding_mode != "auto":
        modes = (config.parallel.sharding_mode,)
    num_parameters, rows = count_parameters(hf_config), []
    for (way, options), mode in itertools.product(ways_of(config).items(), modes):
        if mode != "single":
            options = options.with_options(sharding_mode=mode)
        if refusal(options, mode):  # for example --fp8_recast_weights in a bf16 run
            continue
        size = RunSize(options, hf_config, recipe, mode, num_gpus, num_parameters)
        if size.spec is None:  # activations are not counted: there is no TE decoder
            if "recomputed" in way:
                continue
            size = size.changed(use_te=options.model.use_te and size.sizes is not None)
        row = row_of(way, size, machine)
        if row.fits == "no" and size.sharded:  # retry without whole gradients between micro-batches
            row = row_of(way, size.changed(sync_every_micro_batch=True), machine)
        rows.append(row)
    if not rows:
        raise UserError(f"{refusal(config, modes[0])}.")
    return sorted(rows, key=lambda row: (not row.runs, row.fits != "yes"))


def memory_lines(settled: Settled) -> list[str]:
    """Describe the memory of a run by part, or return no lines if it has no GPU."""
    from llm_fp8.models.memory import HEAD

    machine, estimate = settled.machine, settled.size.estimate()
    if machine.gpu_gib is None:
        return []
    gpus = f"{machine.ranks.world_size} x {machine.gpu}{', assumed' if machine.is_assumed else ''}"
    need = f"{estimate.needed_gib:.2f} of {machine.gpu_gib:.1f} GiB"
    lines = [f"memory: {need} on each of {gpus}, at the peak, in a backward pass:"]
    names = {HEAD: "lm_head, or the layer in computation"}
    parts = estimate.parts | {"CUDA, allocator, communication": estimate.beside_gib}
    lines += [f"  {names.get(part, part):36} {part_gib:8.2f} GiB" for part, part_gib in parts.items()]
    if not estimate.is_whole:
        lines.append("  activations are not counted: only those of TE decoders are known")
    if settled.precision.effective == "fp8" and (10, 0) <= machine.capability < (12, 0):
        lines.append("  as on Hopper; this GPU needs less, since fp8 GEMMs need no transposed copies here")
    return lines


def main() -> int:
    """Print a table of estimated GPU memory for each way to train, and write it to --output as JSON, if requested."""
    epilog = "All options of train_multi_gpu.py, such as --lora_rank 32, hold; --help_all explains them."
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    names = f"hub id, folder, or bundled name: {', '.join(BUNDLED)} (default: that of --config, else {EMBEDDED})"
    add("--model_name", default=argparse.SUPPRESS, help=names)
    add("--gpu", help=f"GPU to assume: its memory in GiB, or {', '.join(GPUS)} (default: this machine's, else H100)")
    add("--num_gpus", type=positive, default=1, help="(default %(default)s)")
    add("--output", type=writable, metavar="FILE", help="write the figures to this JSON file")
    own, others = parser.parse_known_args([with_underscores(word) for word in sys.argv[1:]])
    if "model_name" in own:
        others.insert(0, f"--model_name={own.model_name}")
    typed = parse_config(others, parser.prog, parallel=True)

    from llm_fp8.models.source import require_positions
    from llm_fp8.settle.machine import assumed_machine, detect_machine
    from llm_fp8.settle.settle import settle

    ranks = LaunchRanks(world_size=own.num_gpus, local_world_size=own.num_gpus)
    machine = detect_machine(typed, ranks, asks_te=False) if own.gpu is None else named_machine(own.gpu, ranks)
    machine = machine if machine.gpu is not None else assumed_machine(ranks)
    (hf_config, model), name = find_model(typed.model), typed.model.model_name
    require_positions(hf_config, typed.data.max_seq_length, name, "--max_seq_length")
    config = typed.with_options(**model)
    if config.precision.mixed_precision is None:
        config = config.with_options(mixed_precision="fp8" if machine.has_fp8 else "bf16")
    with_te = config.with_options(use_te=True)
    config = config if refusal(with_te) else with_te
    rows = rows_of(config, hf_config, machine)
    console = wide_console(markup=False, soft_wrap=True)  # a name may contain brackets
    billions, precision = rows[0].size.num_parameters / 1e9, config.precision.mixed_precision
    shape = f"{config.data.batch_size or 'auto'} x {config.data.max_seq_length:,}"
    assumed = ", assumed; --gpu names another" if own.gpu is None and machine.is_assumed else ""
    hardware = f"on {own.num_gpus} x {machine.gpu} ({machine.gpu_gib:.1f} GiB{assumed})"
    console.print(f"{name}, {billions:.2f} billion parameters, {precision}, {shape} tokens {hardware}")
    fitting, unfit = [row for row in rows if row.runs], [row for row in rows if not row.runs]
    if fitting:
        figures = (Column(title, justify="right") for title in ("tensors, GiB", "needed, GiB"))
        table = Table("training", "sharding", *figures, "fits")
        for row in fitting:
            estimate = row.size.estimate()
            way = row.way.replace("LoRA", f"LoRA of rank {row.size.config.lora.lora_rank}")
            table.add_row(way, row.size.mode, f"{estimate.total_gib:.1f}", f"{estimate.needed_gib:.1f}", row.fits)
        console.print(table, soft_wrap=False)
    if unfit:
        needs = (f"{way} ({size.mode}) {size.estimate().needed_gib:.1f}{fits[2:]}" for way, size, fits in unfit)
        console.print(f"do not fit (GiB needed): {'; '.join(needs)}")
    console.print(f"{LEGEND}{' Single: one GPU, nothing is sharded.' if rows[0].size.mode == 'single' else ''}")
    if fitting:
        trial = ", on trial data (give your --dataset_name)" if config.data.dataset_name == EMBEDDED else ""
        console.print(f"the command of the first row{trial}:\n  {rows[0].command}")
        settled = settle(rows[0].size.config, hf_config, machine, num_parameters=rows[0].size.num_parameters)
        console.print("\n".join([*settled.notes, *memory_lines(settled)]))
    else:
        console.print("nothing fits: use more GPUs or shorter rows")
    if own.output is not None:
        content = {"options": config.options, "gpu": machine.gpu, "gpu_gib": machine.gpu_gib}
        write_json_atomic(own.output, content | {"rows": [row.to_dict() for row in rows]})
    return 0
