#!/usr/bin/env python
"""Ours beside the trainers that people use, each from its own package: TRL, torchtitan, NeMo Automodel, Unsloth.

    for name in trl torchtitan torchtitan02 automodel unsloth; do
        mkdir -p /tmp/rivals/$name
        for wheel in wheels/$name/*.whl; do python -m zipfile -e $wheel /tmp/rivals/$name; done
    done
    python benchmarks/rivals.py --model Llama-3.2-1B --text gsm8k.jsonl --output benchmarks/results/rivals_1b.json \\
        --packages trl=/tmp/rivals/trl --packages torchtitan=/tmp/rivals/torchtitan \\
        --packages torchtitan02=/tmp/rivals/torchtitan02 --packages automodel=/tmp/rivals/automodel \\
        --packages unsloth=/tmp/rivals/unsloth

Every variant of `VARIANTS` fine-tunes the model on the same rows, as many tokens a step, in a process of its own, one
after the other on the same GPUs, --rounds times. Weights are random, written to --models once. Each trainer has the
settings that its documentation gives for speed: packed rows, attention inside each document, fused AdamW, nothing
recomputed. One that runs out of memory takes half the rows and twice the micro-batches, and its entry says so; one that
fails is an entry with the reason.

A step is timed from one optimizer step to the next, with a synchronisation; tokens are those that are no padding,
supervised or not. Memory, kernels and the optimizer's storage are read from the running process
(benchmarks/rival_trainings.py). --light takes fewer bytes per parameter: 8-bit moments over bf16 weights in TRL and,
on one GPU, here, where several GPUs keep sharded gradients alone; everything in bf16 in torchtitan, which recomputes
what is cheap.

`--packages NAME=FOLDER` puts a folder on the path of the variants of that package alone. Exit code 1: --time_limit_s
left variants to be measured; the same command with --resume goes on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.other_trainers import (
    Variant,
    add_packages_option,
    drop_launcher_variables,
    sites_of,
    started_by,
    variables_of,
    versions_of,
)
from benchmarks.rival_trainings import RECORDED_STEP, our_words, probe_file, run_job
from llm_fp8.data.embedded import DATASET_DIR, MODEL_DIR
from llm_fp8.observability.metrics import DecoderSize
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.bench.worker import add_measuring_options, check_measuring_options
from llm_fp8.tools.bench.workload import Workload, draw_weights_
from llm_fp8.tools.verify.processes import Started
from llm_fp8.utils.cuda_environment import CUDA_DEFAULTS, TF32_VARIABLE
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, read_jsonl, write_json_atomic, write_jsonl_atomic
from llm_fp8.utils.subprocesses import torchrun

SHAPES = {"Llama-3.2-1B": (16, 4), "Llama-3.2-3B": (8, 8), "Llama-3.1-8B": (4, 8)}
"""Model -> rows of a micro-batch and micro-batches of a step."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
"""The same text for every trainer. torchtitan renders it without eos_token and appends EOS itself."""
SPARE_TOKENS = 1.3
"""Of the text that is written over what the steps need: packing leaves gaps."""
FULL_TOKENS = 16
"""A row of --data full lacks fewer tokens than this."""
BYTES_PER_PARAMETER = 16
"""Of fp32 weights, gradients and moments, which is what a trainer keeps by default."""
MEMORY_SHARE = 0.75
"""Of a GPU's memory, which these may take before --light is the default."""
SMALLEST_TIME_S = 25.0
"""No variant is begun with less time left."""


@dataclass(frozen=True)
class Rival(Variant):
    """A variant whose `launch` is for one GPU."""

    launch_several: tuple[str, ...] = ()
    """Options of `accelerate launch` on several GPUs, without their number."""
    fallback: dict[str, Any] = field(default_factory=dict)
    """Options to change where it fails."""


FSDP = (
    *("--config_file", "configs/accelerate_bf16_fsdp.yaml"),
    *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
)
TE_FILE = ("--config_file", "configs/accelerate_fp8.yaml")
TE_FILE_DDP = ("--config_file", "configs/accelerate_fp8_ddp.yaml")
"""Accelerate computes no fp8 under FSDP2."""
PACKED = {"packing_strategy": "bfd", "attention": "best"}
BY_TE = "accelerate launch --config_file with fp8_config backend: TE, SFTConfig(packing=True, bf16=False"


def _fallback(options: dict[str, Any]) -> dict[str, Any]:
    return {"attention": "sdpa"} if "attention" in options else {}


def _trl(name: str, how: str, options: dict[str, Any]) -> Rival:
    return Rival(f"trl_{name}", "trl", how, "bf16", None, options, FSDP, _fallback(options))


def _trl_te(name: str, how: str, options: dict[str, Any]) -> Rival:
    options = {**PACKED, "bf16": False, **options}
    fallback = _fallback(options) if "fix_head_bias" in options else {}  # the other one fails with any attention
    return Rival(f"trl_te{name}", "trl", how, "fp8", TE_FILE, options, TE_FILE_DDP, fallback)


def _torchtitan(name: str, how: str, **options: Any) -> Rival:
    # CUDA graphs are torchtitan's default; they may need a newer torch.
    options = {"compile": True, "cuda_graphs": True, **options}
    asked = "fp8" if "recipe" in options else "bf16"
    return Rival(f"torchtitan_{name}", "torchtitan", how, asked, options=options, fallback={"cuda_graphs": False})


def _torchtitan_02(name: str, how: str, **options: Any) -> Rival:
    asked = "fp8" if "recipe" in options else "bf16"
    return Rival(f"torchtitan02_{name}", "torchtitan02", how, asked, options={"compile": True, **options})


def _automodel(name: str, how: str, **options: Any) -> Rival:
    asked = "fp8" if {"recipe", "te_fp8"} & set(options) else "bf16"
    # torch's compiler fails in Transformer Engine's attention.
    options = {"packing": "neat" if options.get("compile") else "thd", **options}
    return Rival(f"automodel_{name}", "automodel", how, asked, options=options, fallback={"packing": "neat"})


VARIANTS = (
    *(
        Rival(
            f"ours_{name}",
            "ours",
            f"--use_te --mixed_precision {name} --packing",
            name,
            options={"mixed_precision": name},
        )
        for name in ("bf16", "fp8")
    ),
    _trl("bf16", "SFTConfig(packing=True), which is bfd and padding-free", PACKED),
    _trl(
        "bf16_liger",
        "SFTConfig(packing=True, use_liger_kernel=True)",
        {**PACKED, "use_liger_kernel": True},
    ),
    _trl(
        "bf16_wrapped",
        'SFTConfig(packing=True, packing_strategy="wrapped", use_liger_kernel=True): rows cut and attended to whole',
        {"packing_strategy": "wrapped", "use_liger_kernel": True},
    ),
    _trl(
        "bf16_compiled",
        'SFTConfig(packing=True, packing_strategy="wrapped", torch_compile=True): rows cut and attended to whole',
        {"packing_strategy": "wrapped", "torch_compile": True},
    ),
    _trl(
        "bf16_padded",
        "SFTConfig(use_liger_kernel=True): about as many documents as the packed rows hold, padded to the longest",
        {"packing": False, "use_liger_kernel": True},
    ),
    _trl_te("", f"{BY_TE})", {}),
    _trl_te("_fixed", f"{BY_TE}), and lm_head.bias = None before the first step", {"fix_head_bias": True}),
    _trl_te(
        "_fixed_liger",
        f"{BY_TE}, use_liger_kernel=True), and lm_head.bias = None before the first step",
        {"fix_head_bias": True, "use_liger_kernel": True},
    ),
    _torchtitan("bf16", "llama3 of the registry, compile.enable"),
    _torchtitan("rowwise", "compile.enable, Float8LinearConverter(recipe_name='rowwise')", recipe="rowwise"),
    _torchtitan(
        "tensorwise",
        "compile.enable, Float8LinearConverter(recipe_name='tensorwise'), a recipe of torchao that 0.3 does not list",
        recipe="tensorwise",
    ),
    _torchtitan_02("bf16", "llama3, --compile.enable: text packed without regard to documents"),
    _torchtitan_02("rowwise", "the same, --model.converters quantize.linear.float8, rowwise", recipe="rowwise"),
    _torchtitan_02(
        "tensorwise", "the same, --model.converters quantize.linear.float8, tensorwise", recipe="tensorwise"
    ),
    _automodel("bf16", "torch_dtype: bf16, packed_sequence, backend.attn: te"),
    _automodel("bf16_compiled", "the same, backend.attn: sdpa, distributed.enable_compile", compile=True),
    _automodel(
        "tensorwise",
        "the same, backend.attn: sdpa, distributed.enable_compile, fp8.recipe_name: tensorwise",
        compile=True,
        recipe="tensorwise",
    ),
    _automodel(
        "rowwise",
        "the same, backend.attn: sdpa, distributed.enable_compile, fp8.recipe_name: rowwise",
        compile=True,
        recipe="rowwise",
    ),
    _automodel(
        "te",
        "the same as in bf16, backend.linear: te, backend.te_fp8.recipe: current; its Llama has no such layer",
        te_fp8="current",
    ),
    Rival("unsloth_bf16", "unsloth", "FastLanguageModel with full_finetuning=True, SFTConfig(packing=True)", "bf16"),
)
TORCHRUN = ("torchtitan", "torchtitan02", "automodel")
"""Packages that are started with torchrun on one GPU, too."""
FILES = ("config.json", "tokenizer.json", "chat_template.jinja")


# ---- model and rows ----


def write_model(model: str, folder: Path) -> None:
    """`model`, a bundled architecture or a folder with a config.json, with random weights in bf16, the embedded
    tokenizer and a chat template. What is there already stays.
    """
    if all((folder / name).exists() for name in FILES) and any(folder.glob("*.safetensors")):
        return
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.chat_template = CHAT_TEMPLATE
    config = Workload(model, 1, 16, 1, 1).hf_config()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        built: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    draw_weights_(built, device, is_te=False)
    built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def num_chat_tokens(tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]]) -> list[int]:
    """Tokens of the rows as the trainers take them: through the chat template, EOS included."""
    chats = [
        [{"role": "user", "content": row["problem"]}, {"role": "assistant", "content": row["generated_solution"]}]
        for row in rows
    ]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def full_rows(tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], seq_length: int) -> Iterator[dict]:
    """Rows that fill `seq_length` tokens, the last few aside: solutions behind each other, cut where they must be."""
    parts: Iterator[dict[str, Any]] = itertools.cycle(rows)
    while True:
        text = ""
        while len(tokenizer(text)["input_ids"]) < seq_length:
            text += next(parts)["generated_solution"] + "\n"
        # A bisection of characters: tokens of a beginning of the text are no beginning of its tokens.
        low, high = 1, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            row = {"problem": "Go on.", "generated_solution": text[:middle]}
            # Two are left to trainers that add BOS.
            fits = num_chat_tokens(tokenizer, [row])[0] <= seq_length - 2
            low, high = (middle, high) if fits else (low, middle - 1)
        yield {"problem": "Go on.", "generated_solution": text[:low]}


def write_rows(path: Path, text: Path | None, data: str, model: Path, seq_length: int, num_tokens: int) -> dict:
    """Rows of more than `num_tokens` tokens, from the text's beginning and again where it is short; what they hold."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    sources = [text] if text is not None else sorted((DATASET_DIR / "data").glob("train-*.jsonl"))
    known = [row for source in sources for row in read_jsonl(source)]
    if not known or any(not row.get("problem") or not row.get("generated_solution") for row in known):
        raise UserError(
            f"--text {text} has rows without problem or generated_solution; give a file in OpenMathInstruct-2's "
            "columns."
        )
    candidates = itertools.cycle(known) if data == "text" else full_rows(tokenizer, known, seq_length)
    rows: list[dict[str, Any]] = []
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        chunk = list(itertools.islice(candidates, min(1000, len(known)) if data == "text" else 8))
        chunk = [{"problem": row["problem"], "generated_solution": row["generated_solution"]} for row in chunk]
        for row, length in zip(chunk, num_chat_tokens(tokenizer, chunk), strict=True):
            if length < seq_length:  # longer ones are dropped by some trainers and cut by others
                rows.append(row)
                lengths.append(length)
        if not rows:
            raise UserError(f"--text {text}: no row is shorter than --seq_length {seq_length}; raise it.")
    write_jsonl_atomic(path, rows)
    return {
        "num_rows": len(rows),
        "num_tokens": sum(lengths),
        "mean_length": statistics.mean(lengths),
        "longest": max(lengths),
        "num_different_rows": min(len(rows), len(known)) if data == "text" else len(rows),
    }


# ---- one variant ----


def command_of(variant: Rival, job: dict[str, Any], path: Path) -> list[str]:
    """The command of a variant's job, which lies at `path`."""
    own = ["benchmarks/rivals.py", "--job", str(path)]
    if variant.package == "unsloth":
        own = ["benchmarks/rival_unsloth.py", str(path)]
    several = job["num_gpus"] > 1
    if variant.package in TORCHRUN or (several and variant.package == "ours"):
        return torchrun(job["num_gpus"], *own)
    launch = variant.launch
    if several:
        launch = (*variant.launch_several, "--num_processes", str(job["num_gpus"]))
    return started_by(launch, own)


def environment_of(variant: Rival, site: str | None, scratch: Path, num_gpus: int) -> dict[str, str]:
    """Environment variables of a variant's processes."""
    # The allocator's setting is torchtitan's documented one, and ours. TF32 is left to each trainer.
    defaults = {
        name: value for name, value in CUDA_DEFAULTS.items() if variant.package == "ours" or name != TF32_VARIABLE
    }
    return {
        **{name: value for name, value in defaults.items() if name not in os.environ},
        **variables_of(site, num_gpus),
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(scratch / "unsloth"),
        "HF_DATASETS_CACHE": str(scratch / "datasets"),
    }


def read_probes(job: dict[str, Any], warmup: int) -> dict[str, Any]:
    """The figures of a job that ended well: speed of the first process, memory of the one that needs most."""
    probes = [read_json(probe_file(job["folder"], rank)) for rank in range(job["num_gpus"])]
    first = probes[0]
    times_s = [later - one for one, later in itertools.pairwise(first["ends_s"])]
    timed = times_s[warmup - 1 :]
    found = {name: first[name] for name in ("optimizer", "parameters_not_in_the_optimizer", "attention", "remarks")}
    for name in ("peak_memory_gib", "peak_reserved_memory_gib"):
        found[name] = max((probe[name] for probe in probes if probe[name] is not None), default=None)
    tokens = first["tokens_per_step"]
    return {
        **found,
        "kernels": first["kernels"],
        "ran": None if first["kernels"] is None else "fp8" if first["kernels"]["num_fp8_gemm_kernels"] else "bf16",
        "step_times_s": timed,
        "tokens_per_step_per_gpu": tokens,
        "tokens_per_s_per_gpu": tokens / statistics.median(timed) if timed and tokens else None,
        "losses": first["losses"],
        "first_loss": first["losses"][0] if first["losses"] else None,
        "last_loss": first["losses"][-1] if first["losses"] else None,
    }


def halved(job: dict[str, Any]) -> dict[str, Any]:
    """The job with half the rows in a micro-batch and as many tokens a step."""
    return {**job, "batch_size": job["batch_size"] // 2, "micro_batches": job["micro_batches"] * 2}


def next_try(variant: Rival, job: dict[str, Any], output: str) -> dict[str, Any] | None:
    """The job to be tried after one that failed with `output`; None where nothing is left to be tried. Out of memory:
    half the rows. Any other failure: the variant's fallback.
    """
    if "out of memory" in output.lower():
        return halved(job) if job["batch_size"] > 1 else None
    options = {**job["options"], **variant.fallback}
    return {**job, "options": options} if options != job["options"] else None


def measure(
    variant: Rival, job: dict[str, Any], site: str | None, scratch: Path, logs: Path, warmup: int, until_s: float
) -> dict[str, Any]:
    """Train one variant, once more with other settings where it fails, and read what it left.

    `until_s`: on the clock of `time.monotonic`, when the last attempt is ended.
    """
    entry: dict[str, Any] = {
        "name": variant.name,
        "package": variant.package,
        "how": variant.how,
        "asked": variant.asked,
        "failed_attempts": [],
    }
    for number in itertools.count():
        now = {**job, "folder": f"{job['folder']}-{number}"}
        path = Path(f"{now['folder']}.json")
        write_json_atomic(path, now)
        command = command_of(variant, now, path)
        timeout_s = min(job["timeout_s"], max(1.0, until_s - time.monotonic()))
        environment = environment_of(variant, site, scratch, job["num_gpus"])
        ended = Started(command, logs / f"{Path(now['folder']).name}.log", environment).wait(timeout_s)
        shown = our_words(now) if variant.package == "ours" else command[1:]
        tried = {
            "command": [Path(sys.executable).name, *shown],
            "options": now["options"],
            "batch_size": now["batch_size"],
            "micro_batches": now["micro_batches"],
            "wall_s": ended.wall_s,
            "exit_code": ended.code,
            "error": None if ended.code == 0 else why(ended.why(), ended.output),
        }
        if ended.code == 0:
            return {**entry, **tried, **read_probes(now, warmup)}
        following = None if ended.code is None else next_try(variant, job, ended.output)
        if following is None:
            return {**entry, **tried}
        entry["failed_attempts"].append(tried)
        job = following
    raise AssertionError("the loop ends with a return")


def why(reason: str, output: str) -> str:
    """The reason of a failure in at most a few hundred characters."""
    return "out of memory" if "out of memory" in output.lower() else reason[:400]


def describe(entry: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{entry['name']:22} {entry['wall_s']:4.0f} s  "
    if entry["error"] is not None:
        return f"{head}{entry['error']}"
    speed, memory, optimizer = entry["tokens_per_s_per_gpu"], entry["peak_memory_gib"], entry["optimizer"]
    words = ["no speed" if speed is None else f"{speed:9,.0f} tokens/s per GPU"]
    words += [] if memory is None else [f"{memory:.1f} GiB"]
    words += [] if optimizer is None else [f"{optimizer['total_bytes_per_parameter']:.1f} bytes per parameter"]
    if entry["kernels"] is not None:
        kernels = entry["kernels"]
        total = sum(kernels["num_gemm_kernels"].values())
        words += [f"{kernels['num_fp8_gemm_kernels']} of {total} GEMM kernels in fp8"]
        words += [f"attention {entry['attention']} ({kernels['attention_library']})"]
    words += [f"loss {entry['first_loss']:.3f} to {entry['last_loss']:.3f}"] if entry["losses"] else []
    words += [f"{entry['batch_size']} x {entry['micro_batches']} rows"]
    return head + "  ".join(words)


# ---- the command ----


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, checked. Raises `UserError`."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--job", type=Path, help="train by this file, which this script writes for its own processes")
    parser.add_argument("--write_model", type=Path, help="write the model to this folder and end")
    parser.add_argument(
        "--model", default="Llama-3.2-1B", help=f"one of {', '.join(SHAPES)}, or a folder with a config.json"
    )
    parser.add_argument("--models", type=Path, help="folder that keeps the models (default: in the temporary folder)")
    parser.add_argument("--text", type=Path, help="JSONL file in OpenMathInstruct-2's columns (default: the embedded)")
    parser.add_argument(
        "--data",
        choices=["text", "full"],
        default="text",
        help="the text's rows, packed, or rows of its solutions that fill the sequence (default %(default)s)",
    )
    add_packages_option(parser)
    parser.add_argument("--variants", default="", help="comma-separated names, or beginnings of names (default: all)")
    parser.add_argument("--num_gpus", type=int, default=1, help="default %(default)s")
    parser.add_argument("--seq_length", type=int, default=1024, help="default %(default)s")
    parser.add_argument("--batch_size", type=int, help="rows of a micro-batch (default: by the model)")
    parser.add_argument("--micro_batches", type=int, help="of a step on one GPU (default: by the model)")
    parser.add_argument(
        "--light",
        action=argparse.BooleanOptionalAction,
        help="fewer bytes per parameter (default: where the usual 16 do not fit)",
    )
    parser.add_argument("--logs", type=Path, help="folder for what each process prints")
    parser.add_argument(
        "--time_limit_s", type=float, default=0.0, help="end after about so many seconds (default 0: no limit)"
    )
    add_measuring_options(
        parser, steps=14, warmup=8, rounds=1, arm_timeout_s=150, output_required=False, resumable=True
    )
    options = parser.parse_args(argv)
    if options.job is not None or options.write_model is not None:
        return options
    if options.output is None:
        raise UserError("--output is missing; name the JSON file of the results.")
    check_measuring_options(options, RECORDED_STEP)
    options.sites = sites_of(options.packages)
    if options.model not in SHAPES and not Path(options.model, "config.json").exists():
        raise UserError(f"--model {options.model} is none of {', '.join(SHAPES)}, and no folder with a config.json.")
    if options.seq_length < 16 or options.seq_length % 16:
        raise UserError(f"--seq_length {options.seq_length} is no multiple of 16, which fp8 needs; take 1024.")
    if options.num_gpus < 1 or options.num_gpus > max(1, torch.cuda.device_count()):
        raise UserError(f"--num_gpus {options.num_gpus}: there are {torch.cuda.device_count()} GPUs.")
    if not options.time_limit_s >= 0:
        raise UserError(f"--time_limit_s {options.time_limit_s:g}: give seconds, or 0 for no limit.")
    rows, micro_batches = SHAPES.get(options.model, (2, 2))
    options.batch_size = options.batch_size or rows
    options.micro_batches = options.micro_batches or micro_batches
    if options.batch_size < 1 or options.micro_batches < 1:
        raise UserError("--batch_size and --micro_batches are 1 or more.")
    options.variants = chosen(options.variants.split(","))
    if options.light is None:
        size = DecoderSize.from_config(Workload(options.model, 1, 16, 1, 1).hf_config())
        options.light = needs_light(size.num_linear_parameters, options.num_gpus)
    return options


def chosen(words: list[str]) -> list[Rival]:
    """The variants of these names, or whose names begin so. Raises `UserError` for a word without any."""
    names = [variant.name for variant in VARIANTS]
    found = set()
    for word in words:
        of_word = [word] if word in names else [name for name in names if name.startswith(word)]
        if not of_word:
            raise UserError(f"--variants {word} names none of {', '.join(names)}.")
        found.update(of_word)
    return [variant for variant in VARIANTS if variant.name in found]


def needs_light(num_parameters: int, num_gpus: int) -> bool:
    """Whether the usual bytes of a model would fill its GPUs."""
    if not torch.cuda.is_available():
        return False
    memory = torch.cuda.get_device_properties(0).total_memory
    return num_parameters * BYTES_PER_PARAMETER / num_gpus > MEMORY_SHARE * memory


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What all entries of a file have in common."""
    names = ("model", "data", "num_gpus", "seq_length", "batch_size", "micro_batches", "light", "steps", "warmup")
    found = {name: getattr(options, name) for name in names}
    return {**found, "text": options.text.name if options.text is not None else None}


def kept(options: argparse.Namespace, settings: dict[str, Any], gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """What --resume keeps of --output: all entries but those of this call's variants with an error, the versions, and
    the provenances of earlier calls. Raises `UserError` where they were measured otherwise.
    """
    if not options.resume or not options.output.exists():
        return {"entries": [], "versions": {}, "runs": []}
    record = read_json(options.output)
    if record.get("settings") != settings or record["provenance"]["gpus"] != gpus:
        raise UserError(f"--resume: {options.output} was measured with other settings or GPUs; give another --output.")
    again = {variant.name for variant in options.variants}
    entries = [entry for entry in record["entries"] if entry["error"] is None or entry["name"] not in again]
    return {**record, "entries": entries}


def main() -> int:
    """Train every variant and keep what was seen."""
    options = parse(sys.argv[1:])
    if options.job is not None:
        run_job(options.job)
        return 0
    if options.write_model is not None:
        write_model(options.model, options.write_model)
        return 0
    began = time.monotonic()
    until_s = began + options.time_limit_s if options.time_limit_s else float("inf")
    drop_launcher_variables()
    settings, provenance = settings_of(options), collect_provenance(sys.argv)
    earlier = kept(options, settings, provenance["gpus"])
    entries, runs = earlier["entries"], [*earlier["runs"], provenance]
    left: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        models = options.models or Path(tempfile.gettempdir()) / "rivals-models"
        model = models / Path(options.model).name
        # In a process of its own, whose memory on the GPU is given back.
        writing = [sys.executable, "benchmarks/rivals.py", "--model", options.model, "--write_model", str(model)]
        written = Started(writing, scratch / "model.log").wait(options.arm_timeout_s)
        if written.code != 0:
            raise UserError(f"--model {options.model} could not be written to {model}: {written.why()}")
        tokens = options.steps * options.batch_size * options.micro_batches * options.num_gpus * options.seq_length
        held = write_rows(
            scratch / "rows.jsonl", options.text, options.data, model, options.seq_length, int(SPARE_TOKENS * tokens)
        )
        logs = options.logs or scratch
        logs.mkdir(parents=True, exist_ok=True)
        versions = earlier["versions"] | {
            package: versions_of(package, options.sites.get(package))
            for package in dict.fromkeys(variant.package for variant in options.variants if variant.package != "ours")
        }
        for number, variant in itertools.product(range(options.rounds), options.variants):
            if any((entry["name"], entry["round"]) == (variant.name, number) for entry in entries):
                continue
            if until_s - time.monotonic() < SMALLEST_TIME_S:
                left.append(variant.name)
                continue
            job = {
                "package": variant.package,
                "architecture": options.model if options.model in SHAPES else "tiny",
                "model": str(model),
                "rows": str(scratch / "rows.jsonl"),
                "folder": str(scratch / f"{variant.name}-{number}"),
                "options": variant.options,
                "timeout_s": options.arm_timeout_s,
                "documents_per_row": max(1, int(options.seq_length // held["mean_length"])),
                **{key: settings[key] for key in settings if key not in ("model", "data", "text", "warmup")},
            }
            if options.light and variant.package in ("trl", "unsloth") and job["batch_size"] > 1:
                job = halved(job)  # saves a training that would run out of memory
            found = measure(variant, job, options.sites.get(variant.package), scratch, logs, options.warmup, until_s)
            entries.append({"round": number, "run": len(runs) - 1, **found})
            print(describe(found), flush=True)
            write_json_atomic(
                options.output,
                {
                    "provenance": provenance,
                    "runs": runs,
                    "settings": settings,
                    "rows": held,
                    "versions": versions,
                    "entries": entries,
                },
            )
    print(f"{time.monotonic() - began:.0f} s: {options.output}")
    if left:
        print(f"{len(left)} are left, the first {left[0]}: run the same command with --resume")
    return EXIT_FAILED_CHECK if left else 0


if __name__ == "__main__":
    run_script(main)
