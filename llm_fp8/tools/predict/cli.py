"""What a step will take in each recipe, in time and in memory, before it is run. No GPU needed.

`llm-fp8 predict` and scripts/predict.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from llm_fp8.config.options import (
    EMBEDDED,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
)
from llm_fp8.config.recipes import token_multiple
from llm_fp8.config.validation import check_fp8_params, check_options, fp8_params_recipes
from llm_fp8.models.architectures import bundled_architectures
from llm_fp8.tools.predict.calibration import CALIBRATED_GPU, MAX_GPUS, MODES
from llm_fp8.utils.errors import OneSentenceParser, UserError, did_you_mean
from llm_fp8.utils.json_files import require_writable, write_json_atomic

if TYPE_CHECKING:
    from llm_fp8.tools.predict.prediction import Prediction
    from llm_fp8.tools.predict.workload import StepWorkload


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; the options have the names and defaults of train_fp8.py's."""
    defaults = Config()
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--model_name",
        type=os.path.expanduser,
        required=True,
        help=f"hub id, local folder, or a bundled one: {', '.join(bundled_architectures())}",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=defaults.data.batch_size,
        help="rows of a micro-batch per GPU (default %(default)s)",
    )
    parser.add_argument(
        "--max_seq_length", type=int, default=defaults.data.max_seq_length, help="tokens of a row (default %(default)s)"
    )
    parser.add_argument(
        "--mean_length",
        type=float,
        help="document length, averaged over tokens, where rows are packed (default: the row)",
    )
    parser.add_argument(
        "--gradient_accumulation_steps", type=int, default=1, help="micro-batches of a step (default %(default)s)"
    )
    parser.add_argument(
        "--optimizer",
        choices=["auto", "adamw_fp32", "adamw_master", "adamw_8bit"],
        default="auto",
        help="(default %(default)s)",
    )
    parser.add_argument("--gradient_checkpointing", action="store_true", help="every decoder layer is computed again")
    parser.add_argument(
        "--offload_optimizer",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of adamw_master's state, in host memory (default %(default)g)",
    )
    parser.add_argument("--fp8_recast_weights", action="store_true", help="no fp8 casts of weights are kept")
    parser.add_argument("--cuda_graphs", action="store_true", help="micro-batches are replayed; on one GPU")
    parser.add_argument("--num_gpus", type=int, default=1, help="GPUs of one host (default %(default)s)")
    parser.add_argument("--sharding_mode", choices=MODES[1:], help="with several GPUs")
    parser.add_argument(
        "--sync_every_micro_batch", action="store_true", help="gradients are reduced in every micro-batch"
    )
    parser.add_argument(
        "--fp8_params",
        action="store_true",
        help="weights are gathered in fp8; of delayed and current, under an fsdp mode",
    )
    parser.add_argument(
        "--gpu",
        help=f"as torch.cuda.get_device_name has it, for example {CALIBRATED_GPU} (default: this machine's, or that "
        "one)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each row to this JSON file")
    return parser.parse_args(argv)


def checked(options: argparse.Namespace) -> Config:
    """The training that the command line describes. Raises `UserError` for values that cannot be."""
    for name in ("batch_size", "num_gpus"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}.")
    if options.mean_length is not None and not 1 <= options.mean_length <= options.max_seq_length:
        raise UserError(
            f"--mean_length {options.mean_length:g} must be from 1 to --max_seq_length {options.max_seq_length}."
        )
    if options.num_gpus > MAX_GPUS:
        raise UserError(
            f"--num_gpus {options.num_gpus}: several hosts were never measured; give at most {MAX_GPUS}, the GPUs of "
            "one host."
        )
    if options.num_gpus > 1 and options.sharding_mode is None:
        raise UserError(f"--num_gpus {options.num_gpus} needs --sharding_mode: {', '.join(MODES[1:])}.")
    for name in ("sharding_mode", "sync_every_micro_batch", "fp8_params"):
        if options.num_gpus == 1 and getattr(options, name):
            raise UserError(f"--{name} has no effect on one GPU; add --num_gpus or drop it.")
    if options.cuda_graphs and options.num_gpus > 1:
        raise UserError("--cuda_graphs is predicted on one GPU alone; drop it, or --num_gpus and --sharding_mode.")
    config = Config(
        model=ModelConfig(
            use_te=True,
            gradient_checkpointing=int(options.gradient_checkpointing),
            cuda_graphs=options.cuda_graphs,
        ),
        data=DataConfig(batch_size=options.batch_size, max_seq_length=options.max_seq_length, packing=True),
        precision=PrecisionConfig(
            mixed_precision="fp8",
            fp8_recast_weights=options.fp8_recast_weights,
        ),
        optim=OptimConfig(
            optimizer=options.optimizer,
            offload_optimizer=options.offload_optimizer,
            gradient_accumulation_steps=options.gradient_accumulation_steps,
        ),
        parallel=ParallelConfig(
            sharding_mode=options.sharding_mode or "auto",
            fp8_params=options.fp8_params,
            sync_every_micro_batch=options.sync_every_micro_batch,
        ),
    )
    check_options(config)
    if options.json is not None:
        require_writable("--json", options.json)
    return config


def workload_of(options: argparse.Namespace, config: Config) -> StepWorkload:
    """What the command line describes, in bf16; `config` is `checked`'s."""
    from llm_fp8.distributed.sharding_mode import default_optimizer
    from llm_fp8.models.source import load_config, require_positions, resolve_source
    from llm_fp8.tools.predict import before_run
    from llm_fp8.tools.predict.workload import ModelSize
    from llm_fp8.train.prediction import RunDescription
    from te_llama import UnsupportedArchitecture, layer_weight_shapes

    model_name = options.model_name
    bundled = model_name.rpartition("/")[2].replace("Meta-Llama", "Llama") in bundled_architectures()
    if not bundled and "/" not in model_name and model_name != EMBEDDED and not Path(model_name).is_dir():
        raise UserError(
            f"--model_name {model_name}: no such folder, and no bundled model has this name"
            f"{did_you_mean(model_name, bundled_architectures())}; a model of the hub is named owner/name."
        )
    model_options = ModelConfig(model_name=model_name, random_init=bundled)  # a bundled config needs no hub
    hf_config = load_config(model_options, resolve_source(model_options))
    try:
        model = ModelSize.from_config(hf_config)
    except UnsupportedArchitecture as error:
        raise UserError(
            f"--model_name {model_name}: there is no prediction for this model, because {error}; a run of a few steps "
            "measures it."
        ) from error
    require_positions(hf_config, options.max_seq_length, model_name, "--max_seq_length")
    mode = options.sharding_mode or "single"
    optimizer = default_optimizer(mode) if options.optimizer == "auto" else options.optimizer
    if options.fp8_params:
        check_fp8_params("delayed", layer_weight_shapes(model.spec), options.num_gpus)
    run = RunDescription(config, hf_config, "bf16", optimizer, mode, options.num_gpus, gpu_name=options.gpu or "")
    tokens = options.batch_size * options.max_seq_length
    work = before_run.workload_of(run, tokens, options.mean_length or options.max_seq_length)
    assert work is not None  # `checked` lets through what has constants
    return work


def speed_up(found: Prediction, predictions: list[Prediction]) -> float:
    """Over the first of the predictions."""
    return predictions[0].step_time_s / found.step_time_s


def figures(predictions: list[Prediction]) -> list[dict[str, Any]]:
    """The rows of the table for a JSON file: seconds, tokens/s, GiB; `parts_s` are the step's, as in the document."""
    return [
        {
            "recipe": found.scenario.recipe,
            "step_time_s": found.step_time_s,
            "tokens_per_s": found.tokens_per_s,
            "speed_up": speed_up(found, predictions),
            "peak_memory_gib": found.peak_memory_gib,
            "fits": found.fits,
            "tight": found.tight,
            "host_s": found.host_s,
            "parts_s": dataclasses.asdict(found.time),
            "notes": found.notes,
        }
        for found in predictions
    ]


def table(predictions: list[Prediction], title: str) -> Table:
    """One line per recipe; the first is what speed-ups are over."""
    result = Table(title=title, title_justify="left")
    for column in ("recipe", "s a step", "tokens/s", "speed-up", "memory GiB", "fits"):
        result.add_column(column, justify="left" if column == "recipe" else "right")
    for found in predictions:
        result.add_row(
            found.scenario.recipe,
            f"{found.step_time_s:.3f}",
            f"{found.tokens_per_s:,.0f}",
            f"{speed_up(found, predictions):.2f}",
            f"{found.peak_memory_gib:.1f}",
            ("tight" if found.tight else "yes") if found.fits else "no",
        )
    return result


def main() -> int:
    """Print the table and what it leaves out."""
    options = parse(sys.argv[1:])
    config = checked(options)
    # After the parser: --help and mistakes answer without loading torch.
    from llm_fp8.observability.provenance import collect_provenance
    from llm_fp8.tools.predict.prediction import can_predict, gpu_by_name, predict
    from llm_fp8.tools.predict.workload import PREDICTED

    gpu = gpu_by_name(options.gpu)
    scenario = workload_of(options, config)
    tokens = scenario.micro_batch_tokens
    recipes = [name for name in PREDICTED if can_predict(gpu, name)]
    if scenario.fp8_params:
        recipes = [name for name in recipes if name in ("bf16", *fp8_params_recipes())]
    odd = {name: token_multiple(name) for name in recipes if tokens % token_multiple(name)}
    predictions = [predict(scenario.with_recipe(recipe), gpu) for recipe in recipes if recipe not in odd]
    where = gpu.name if scenario.num_gpus == 1 else f"{scenario.num_gpus} x {gpu.name}, {scenario.mode}"
    title = (
        f"{options.model_name}, {scenario.micro_batches} x {tokens:,} tokens a step on each GPU, "
        f"{scenario.optimizer}\n{where} ({gpu.memory_gib:.1f} GiB): predicted"
    )
    console = Console(markup=False, highlight=False, soft_wrap=True)  # names may hold brackets
    console.print(table(predictions, title), soft_wrap=False)
    for note in dict.fromkeys(note for found in predictions for note in found.notes):
        console.print(f"note: {note}")
    for name, multiple in odd.items():
        console.print(f"note: {name} needs a multiple of {multiple} tokens in a micro-batch")
    console.print(f"the constants were fitted to runs on {CALIBRATED_GPU}; how far to trust them: docs/tools.md")
    if scenario.fp8_params:
        console.print(
            f"note: --fp8_params is of {' and '.join(fp8_params_recipes())} alone; bf16 is predicted without it"
        )
    if missing := [name for name in PREDICTED if not can_predict(gpu, name)]:
        console.print(f"note: nothing was measured for {', '.join(missing)} on {gpu.name}")
    if options.json is not None:
        content = {
            "options": vars(options),
            "gpu": gpu.name,
            "gpu_memory_gib": gpu.memory_gib,
            "optimizer": scenario.optimizer,
            "tokens_per_step": scenario.tokens_per_step,
            "rows": figures(predictions),
        }
        write_json_atomic(options.json, {"provenance": collect_provenance(sys.argv), **content})
        console.print(f"figures in {options.json}")
    return 0
