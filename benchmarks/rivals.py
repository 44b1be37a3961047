#!/usr/bin/env python
"""Compare our trainer with the packages TRL, torchtitan 0.3, NeMo Automodel and Unsloth.

    pip install --target /tmp/rivals/trl trl         # each package with its dependencies in its own folder
    python benchmarks/rivals.py --model Llama-3.2-1B --text gsm8k.jsonl --output rivals_1b.json \\
        --packages trl=/tmp/rivals/trl --packages torchtitan=/tmp/rivals/torchtitan

All `VARIANTS` fine-tune the same random weights on the same rows with the same number of tokens per step, one after the
other on the same GPUs. Each runs in its own process, with the settings that its documentation recommends for speed:
packed rows, fused AdamW, no recomputation. If a variant runs out of memory, it runs again with half the rows per
micro-batch and twice the micro-batches. If a variant fails, its entry in --output has the reason.

After every optimizer step a hook of torch synchronises with the GPU and reads the clock, so that no trainer is changed
for the measurement. Padding does not count as tokens. The kernels of one warm-up step show whether fp8 ran.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if "--job" in sys.argv and "unsloth" in sys.argv[-1]:
    import unsloth  # noqa: F401  # imported before transformers and TRL, since it patches them

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.gpus import visible_gpus
from llm_fp8.config.options import ModelConfig
from llm_fp8.data.embedded import DATASET_DIR, MODEL_DIR
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.observability.kernel_trace import LOW_PRECISION, gemm_kernels, kernel_times, record_kernels
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.programs import run_program, torchrun
from llm_fp8.tools.script import CUDA_DEFAULTS, run_script, writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, positive
from llm_fp8.utils.json_files import json_line, read_json, read_jsonl, write_json_atomic, write_text_atomic
from llm_fp8.utils.packages import REPOSITORY

Job = dict[str, Any]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours_bf16": ("ours", {"mixed_precision": "bf16"}),
    "ours_fp8": ("ours", {"mixed_precision": "fp8"}),
    "trl_bf16": ("trl", {}),
    "trl_bf16_liger": ("trl", {"use_liger_kernel": True}),
    "trl_te": ("trl", {"bf16": False, "launch": "configs/accelerate_fp8.yaml"}),
    "torchtitan_bf16": ("torchtitan", {}),
    "torchtitan_rowwise": ("torchtitan", {"recipe": "rowwise"}),
    "torchtitan_tensorwise": ("torchtitan", {"recipe": "tensorwise"}),
    "automodel_bf16": ("automodel", {}),
    "automodel_tensorwise": ("automodel", {"recipe": "tensorwise"}),
    "unsloth_bf16": ("unsloth", {}),
}
"""Name -> package and options."""
SHAPES = {"Llama-3.2-1B": (16, 4), "Llama-3.2-3B": (8, 8), "Llama-3.1-8B": (4, 8)}
SHAPES |= dict.fromkeys(("Gemma-3-4B", "Qwen3.5-4B"), (8, 4))
"""Model -> (rows of a micro-batch, micro-batches of a step)."""
RECORDED_STEP = 7  # the kernels of this step are recorded; our own runs record their fifth
WARMUP = 8  # steps that are not timed
STEPS = 14
LEARNING_RATE = 1e-4
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


class Probe:
    """Record times, memory and kernels of training steps. `train_*` add losses, token counts and the attention used."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tokens_per_step: float | None = None  # mean over steps, for this process, without padding
        self.attention: str | None = None
        self._counted: list[float] = []
        self._optimizer: Any = None
        self._ends_s: list[float] = []
        self._gemms: dict[str, int] = {}
        self._peak = 0
        self._recording = contextlib.ExitStack()
        self._recorded: Any = None
        register_optimizer_step_post_hook(self._stepped)

    def count_tokens(self, num_tokens: float) -> None:
        """Add the number of tokens, without padding, of one micro-batch of this process."""
        self._counted.append(num_tokens)

    def figures(self, micro_batches: int) -> dict[str, Any]:
        """Return speed, memory, kernels and losses of this process. A step has `micro_batches` micro-batches."""
        if self.tokens_per_step is None and self._counted:
            self.tokens_per_step = statistics.mean(self._counted) * micro_batches
        times = [end - before for before, end in itertools.pairwise(self._ends_s)][WARMUP - 1 :]
        median = statistics.median(times) if times else None
        return {
            "tokens_per_s_per_gpu": self.tokens_per_step / median if self.tokens_per_step and median else None,
            "step_time_s": median,
            "peak_memory_gib": self._peak / GIB,
            "gemm_kernels": self._gemms,
            "ran": "fp8" if any(self._gemms.get(kind) for kind in LOW_PRECISION) else "bf16",
            "attention": self.attention,
            "losses": self.losses,
        }

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:  # this optimizer is a wrapper of the first one
            return
        torch.cuda.synchronize()
        self._ends_s.append(time.perf_counter())
        step = len(self._ends_s)
        if step == 1:
            torch.cuda.reset_peak_memory_stats()  # excludes the peak of loading the model
        else:  # some trainers reset the counters, so record the largest peak
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        if step == RECORDED_STEP - 1:
            self._recorded = self._recording.enter_context(record_kernels())
        elif step == RECORDED_STEP:
            self._recording.close()
            gemms = gemm_kernels(kernel_times(self._recorded))
            self._gemms = {str(kind): kernels.count for kind, kernels in gemms.items()}


def train_ours(job: Job, probe: Probe) -> None:
    """Run train_fp8.py, or train_multi_gpu.py on several GPUs, in this process."""
    options = {
        "model_name": job["model"], "dataset_name": job["rows"], "output_dir": job["folder"],
        "batch_size": job["batch_size"], "gradient_accumulation_steps": job["micro_batches"],
        "max_seq_length": job["seq_length"], "max_steps": STEPS, "validation_fraction": 0, "log_every": 1,
        "learning_rate": LEARNING_RATE, "lr_scheduler": "constant", "num_warmup_steps": 0, **job["options"],
        **({"sharding_mode": "fsdp_full"} if job["num_gpus"] > 1 else {}),
    }  # fmt: skip
    script = "train_fp8.py" if job["num_gpus"] == 1 else "train_multi_gpu.py"
    sys.argv = [script, *(f"--{name}={value}" for name, value in options.items()), "--use_te", "--no-export"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(REPOSITORY / script), run_name="__main__")
    steps = [record for record in read_jsonl(Path(job["folder"], "metrics.jsonl")) if "loss" in record]
    tokens = [record["real_tokens_per_s"] * record["step_time_s"] for record in steps]
    probe.losses = [record["loss"] for record in steps]
    probe.tokens_per_step = statistics.mean(tokens) / job["num_gpus"]
    probe.attention = "Transformer Engine"


class TrlCallback(TrainerCallback):
    """Pass the losses to the probe, and make TRL work with Transformer Engine's lm_head."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        head = kwargs["model"].get_output_embeddings()
        if head.bias is not None and head.bias.numel() == 0:
            head.bias = None  # te.Linear has an empty tensor here, which TRL's fused head would add to the logits

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._probe.losses = [record["loss"] for record in state.log_history if "loss" in record]


def train_sft(job: Job, probe: Probe, model: Any, options: dict[str, Any], **arguments: Any) -> None:
    """Run TRL's SFTTrainer on prompts and completions. `options` are for SFTConfig, `arguments` for the trainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    chats = [
        {
            "prompt": [{"role": "user", "content": row["problem"]}],
            "completion": [{"role": "assistant", "content": row["generated_solution"]}],
        }
        for row in read_jsonl(Path(job["rows"]))
    ]
    args = SFTConfig(
        output_dir=job["folder"], max_steps=STEPS, per_device_train_batch_size=job["batch_size"],
        gradient_accumulation_steps=job["micro_batches"], learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to="none", max_length=job["seq_length"], packing=True,
        gradient_checkpointing=False, **options
    )  # fmt: skip
    callbacks = [TrlCallback(probe)]
    trainer = SFTTrainer(model, args=args, train_dataset=Dataset.from_list(chats), callbacks=callbacks, **arguments)
    collate = trainer.data_collator

    def counting(examples: list[dict[str, Any]]) -> dict[str, Any]:
        probe.count_tokens(sum(len(example["input_ids"]) for example in examples))
        return collate(examples)

    trainer.data_collator = counting
    trainer.train()


def train_trl(job: Job, probe: Probe) -> None:
    """Run TRL's trainer with the fastest installed attention for packed documents."""
    from transformers.utils import import_utils

    installed = [number for number in (3, 4, 2) if getattr(import_utils, f"is_flash_attn_{number}_available")()]
    probe.attention = f"flash_attention_{installed[0]}" if installed else "sdpa"
    options = {name: value for name, value in job["options"].items() if name != "launch"}
    options["pad_to_multiple_of"] = job["batch_size"] * job["seq_length"]  # fp8 needs batches of one size
    options["model_init_kwargs"] = {"attn_implementation": probe.attention, "dtype": "float32"}
    train_sft(job, probe, job["model"], options)


def train_unsloth(job: Job, probe: Probe) -> None:
    """Train all weights of Unsloth's model in TRL's trainer, which Unsloth patches."""
    options = {"full_finetuning": True, "load_in_4bit": False, "use_gradient_checkpointing": False}
    unsloth_model = importlib.import_module("unsloth").FastLanguageModel
    model, tokenizer = unsloth_model.from_pretrained(job["model"], max_seq_length=job["seq_length"], **options)
    probe.attention = model.config._attn_implementation
    train_sft(job, probe, model, job["options"], processing_class=tokenizer)


def adapt_torch() -> bool:
    """Patch a torch that is too old for torchtitan 0.3's Llama. Return True if it lacks DataParallelMeshDims."""
    distributed: Any = torch.distributed
    if not hasattr(distributed, "set_timeout"):
        distributed.set_timeout = distributed.distributed_c10d._set_pg_timeout
    if hasattr(importlib.import_module("torch.distributed.fsdp"), "DataParallelMeshDims"):
        return False
    distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})
    decoder = importlib.import_module("torchtitan.models.common.decoder")
    create = decoder.create_attention_mask
    decoder.create_attention_mask = lambda *args, separate_full_blocks=True, **options: create(*args, **options)
    return True


def train_torchtitan(job: Job, probe: Probe) -> None:
    """Run torchtitan 0.3, compiled, with its llama3_8b settings and the job's model, rows and batch size. torchtitan's
    loader packs the rows as chats and trains on the answers. If an 8B model is trained on one GPU, its weights and
    optimizer states are bf16, and cheap operations are recomputed.
    """
    is_old = adapt_torch()
    from torchtitan import train
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.hf_datasets.text_datasets import ChatDataLoader, ChatDataset
    from torchtitan.models.llama3 import config_registry, model_registry

    fp8 = [
        Float8LinearConverter.Config(recipe_name=recipe, filter_fqns=["lm_head"], model_compile_enabled=True)
        for option, recipe in job["options"].items()
    ]
    config = config_registry.llama3_8b()
    config.model_spec = model_registry(job["architecture"].rpartition("-")[2], converters=fp8)
    config.loss.loss_fn.global_vocab_size = config.model_spec.model.vocab_size
    if is_old:
        config.parallelism.spmd_backend = "partial_dtensor"  # the default and chunked loss need a newer torch
        config.loss = config.loss.loss_fn
    config.hf_assets_path, config.dump_folder = job["model"], job["folder"]
    config.profiler.enable_profiling = config.validator.enable = config.checkpoint.enable = False
    config.metrics = MetricsProcessor.Config(log_freq=1)
    config.optimizer = config_registry.default_adamw(lr=LEARNING_RATE)
    config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor = 0, 1.0
    config.training.local_batch_size = job["batch_size"]
    config.training.global_batch_size = job["batch_size"] * job["micro_batches"] * job["num_gpus"]
    config.training.seq_len, config.training.steps = job["seq_length"], STEPS
    config.training.disable_cuda_graphs = True  # CUDA graphs do not support packed documents
    if job["architecture"] == "Llama-3.1-8B" and job["num_gpus"] == 1:
        config.training.dtype = "bfloat16"
    else:
        config.activation_checkpoint = None
    config.compile.enable = True
    config.dataloader = ChatDataLoader.Config(
        dataset_path="json",
        load_dataset_kwargs={"data_files": job["rows"], "split": "train"},
        sample_processor=lambda row: [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": row["generated_solution"]},
        ],
    )
    log, flush = MetricsProcessor.log, ChatDataset._flush_buffers

    def log_loss(self: Any, step: int, loss: float, *args: Any, **options: Any) -> None:
        probe.losses.append(loss)
        log(self, step, loss, *args, **options)

    def count_row(self: Any) -> Any:
        inputs, labels = flush(self)
        last = int((inputs["positions"] == 0).nonzero()[-1])
        is_padding = bool((labels[last:] < 0).all())
        probe.count_tokens(job["batch_size"] * (last if is_padding else len(labels)))
        return inputs, labels

    MetricsProcessor.log = log_loss
    ChatDataset._flush_buffers = count_row
    config_registry.of_job = lambda: config
    probe.attention = "flex_attention"
    sys.argv = ["torchtitan", "--module", "llama3", "--config", "of_job"]
    train.main()


def train_automodel(job: Job, probe: Probe) -> None:
    """Run NeMo Automodel's fine-tuning recipe with the settings of its example llama3_1_8b_hellaswag_fp8.yaml."""
    import yaml

    fp8 = "recipe" in job["options"]
    probe.attention = "sdpa" if fp8 else "te"  # fp8 needs torch.compile, which fails in TE's attention
    llm = "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset"
    entries: dict[str, Any] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": job["batch_size"] * job["micro_batches"] * job["num_gpus"],
            "local_batch_size": job["batch_size"],
            "max_steps": STEPS,
            "num_epochs": 1,
            "ckpt_every_steps": 10_000,
            "val_every_steps": 10_000,
        },
        "dist_env": {"backend": "nccl", "timeout_minutes": 5},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": job["model"],
            "torch_dtype": "bf16",
            "backend": {
                "_target_": "nemo_automodel.components.models.common.BackendConfig",
                "attn": probe.attention,
                "linear": "torch",
                "rms_norm": "torch_fp32",
            },
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": job["folder"]},
        "distributed": {"strategy": "fsdp2", "tp_size": 1, "cp_size": 1, **({"enable_compile": True} if fp8 else {})},
        "clip_grad_norm": {"max_norm": 1.0},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": f"{llm}.ColumnMappedTextInstructionDataset",
            "path_or_dataset_id": job["rows"],
            "column_mapping": {"question": "problem", "answer": "generated_solution"},
            "answer_only_loss_mask": True,
            "use_hf_chat_template": True,
        },
        "packed_sequence": {"packed_sequence_size": job["seq_length"], "packing_strategy": "neat" if fp8 else "thd"},
        "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader", "shuffle": False},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": LEARNING_RATE, "weight_decay": 0.0, "fused": True},
    }
    if fp8:
        entries["fp8"] = {"enabled": True, "recipe_name": job["options"]["recipe"], "filter_fqns": ["lm_head"]}
    recipe = Path(job["folder"], "recipe.yaml")
    write_text_atomic(recipe, yaml.safe_dump(entries, sort_keys=False))
    sys.argv = ["automodel", "--config", str(recipe)]
    from nemo_automodel.recipes.llm.train_ft import main

    main()
    steps = read_jsonl(recipe.with_name("training.jsonl"))
    probe.losses = [step["loss"] for step in steps]
    probe.tokens_per_step = statistics.mean(step["num_tokens_per_step"] for step in steps) / job["num_gpus"]


def run_job(path: Path) -> int:
    """Run the job in the JSON file `path` in this process. Write the measurements of this rank to a file beside it."""
    job = read_json(path)
    probe = Probe()
    globals()[f"train_{job['package']}"](job, probe)
    rank = os.environ.get("RANK", "0")
    write_json_atomic(Path(f"{job['folder']}.rank{rank}.json"), probe.figures(job["micro_batches"]))
    return 0


def write_model(model: str, folder: Path) -> None:
    """Write to `folder` the bundled architecture `model` with random bf16 weights, a tokenizer and a chat template."""
    options = ModelConfig(model_name=model, random_init=True)
    config = load_config(resolve_source(options))
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.chat_template = CHAT_TEMPLATE
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(path: Path, text: Path | None, model: Path, seq_length: int, num_tokens: int) -> None:
    """Write rows of `text` (None: the bundled dataset) to `path` until they have over `num_tokens` tokens in total.
    Skip rows of `seq_length` or more tokens. At the end of the text, begin again. The folder `model` has the tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    sources = [text] if text is not None else sorted((DATASET_DIR / "data").glob("train-*.jsonl"))
    rows, counted = [], 0
    for row in itertools.cycle([row for source in sources for row in read_jsonl(source)]):
        length = len(tokenizer(f"user:\n{row['problem']}\n\nassistant:\n{row['generated_solution']}")["input_ids"]) + 1
        if length < seq_length:  # some trainers drop longer rows, others truncate them
            rows.append({"problem": row["problem"], "generated_solution": row["generated_solution"]})
            counted += length
        if counted > num_tokens:
            break
    write_text_atomic(path, "".join(map(json_line, rows)))


def measure(job: Job, site: str | None, scratch: Path, timeout_s: float) -> dict[str, Any]:
    """Train one variant and return its entry in the results. Each time memory runs out, halve the rows per micro-batch,
    double the number of micro-batches, and try again. `site` is the folder with the variant's package, or None.
    """
    while True:
        path = scratch / f"{job['name']}-{job['batch_size']}.json"
        job = {**job, "folder": str(path.with_suffix(""))}
        write_json_atomic(path, job)
        argv = ["benchmarks/rivals.py", "--job", str(path)]
        if job["package"] in ("torchtitan", "automodel") or (job["package"] == "ours" and job["num_gpus"] > 1):
            command = torchrun(job["num_gpus"], *argv)
        elif "launch" in job["options"] or job["num_gpus"] > 1:
            launch = job["options"].get("launch", "configs/accelerate_bf16_fsdp.yaml")
            number = ["--num_processes", str(job["num_gpus"])]
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launch, *number, *argv]
        else:
            command = [sys.executable, *argv]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
        environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[: job["num_gpus"]])
        folders = (site, str(REPOSITORY), os.environ.get("PYTHONPATH"))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        place = {"log": scratch / f"{job['name']}.log", "cwd": REPOSITORY}
        outcome = run_program(command, environ=CUDA_DEFAULTS | environ, timeout_s=timeout_s, **place)
        entry = {name: job[name] for name in ("name", "package", "options", "batch_size", "micro_batches")}
        entry |= {"wall_s": outcome.wall_s, "error": outcome.failure}
        if outcome.failure is None:
            ranks = [read_json(Path(f"{job['folder']}.rank{rank}.json")) for rank in range(job["num_gpus"])]
            return {**entry, **ranks[0], "peak_memory_gib": max(rank["peak_memory_gib"] for rank in ranks)}
        if "out of memory" not in outcome.output.lower() or job["batch_size"] == 1:
            return entry
        job = {**job, "batch_size": job["batch_size"] // 2, "micro_batches": job["micro_batches"] * 2}


def main() -> int:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--job", type=Path, help="run the job in this file (for the processes that this script starts)")
    add("--model", default="Llama-3.2-1B", choices=SHAPES)
    add("--text", type=Path, help="JSONL file in OpenMathInstruct-2's columns (default: the embedded dataset)")
    add("--packages", action="append", default=[], metavar="NAME=FOLDER", help="folder of an installed package")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    add("--num_gpus", type=positive, default=1, help="default %(default)s")
    add("--seq_length", type=positive, default=1024, help="default %(default)s")
    add("--timeout_s", type=float, default=300, help="time limit of a training (default %(default)s)")
    add("--output", type=writable, help="JSON file for the results")
    options = parser.parse_args()
    if options.job is not None:
        return run_job(options.job)
    if options.output is None:
        raise UserError("--output is missing; name the JSON file of the results.")
    if malformed := [package for package in options.packages if "=" not in package]:
        raise UserError(f"--packages {malformed[0]}: write NAME=FOLDER.")
    sites = dict(package.split("=", 1) for package in options.packages)
    batch_size, micro_batches = SHAPES[options.model]
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        model, rows = scratch / "model", scratch / "rows.jsonl"
        write_model(options.model, model)
        tokens = STEPS * batch_size * micro_batches * options.num_gpus * options.seq_length
        write_rows(rows, options.text, model, options.seq_length, int(1.3 * tokens))  # packing leaves gaps
        shared = {
            "architecture": options.model, "model": str(model), "rows": str(rows), "num_gpus": options.num_gpus,
            "seq_length": options.seq_length, "batch_size": batch_size, "micro_batches": micro_batches,
        }  # fmt: skip
        for name in options.variants:
            package, changes = VARIANTS[name]
            job = {"name": name, "package": package, "options": changes, **shared}
            entries.append(measure(job, sites.get(package), scratch, options.timeout_s))
            speed = entries[-1].get("tokens_per_s_per_gpu") or 0.0
            print(f"{name:22} {entries[-1]['error'] or f'{speed:,.0f} tokens/s per GPU'}", flush=True)
            record = {"provenance": collect_provenance(sys.argv), "model": options.model, "entries": entries}
            write_json_atomic(options.output, record)
    return 0


if __name__ == "__main__":
    run_script(main)
