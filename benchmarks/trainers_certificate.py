#!/usr/bin/env python
"""What the certificate says of other trainers' fp8: transformers' Trainer, TRL, LLaMA-Factory, axolotl and a loop of
one's own around Accelerate, each with fp8 turned on by its own options.

    python benchmarks/trainers_certificate.py --output benchmarks/results/trainers_certificate.json \\
        --packages trl=/tmp/site/trl --packages llamafactory=/tmp/site/llamafactory --packages axolotl=/tmp/site/axolotl

A random Llama model and rows that fill the whole sequence are written to disk; every variant of `VARIANTS` trains on
them in a process of its own, with the callback of `llm_fp8.tools.hf_trainer_callback` attached as docs/tools.md says. A
variant that fails is an entry that says so. `--packages NAME=FOLDER` puts the folder of a `pip install --target` on the
path of the variants of that package alone, since the packages pin different versions of each other.

Speed is recorded where variants run one at a time (`--at_once 1`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerState

from benchmarks.hf_trainer import write_full_rows
from benchmarks.other_trainers import (
    Variant,
    add_packages_option,
    drop_launcher_variables,
    sites_of,
    started_by,
    variables_of,
    versions_of,
)
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.hf_trainer_callback import CertificateCallback
from llm_fp8.tools.verify.processes import Started
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, read_jsonl, write_json_atomic, write_jsonl_atomic

ROOT = Path(__file__).resolve().parent.parent
FP8_FILE = ("--config_file", "configs/accelerate_fp8.yaml")
TE_FILE = "accelerate launch --config_file with fp8_config backend: TE"
FP8_FLAG = ("--num_processes", "1", "--mixed_precision", "fp8")
RECORDED_STEP = 5
WARMUP_STEPS = 8
"""Left out of the speed, the recorded step among them."""


@dataclass(frozen=True)
class Certified(Variant):
    """A variant with what `CertificateCallback` is told."""

    precision: str | None = None


VARIANTS = (
    Certified("trainer_bf16", "transformers", "TrainingArguments(bf16=True)", "bf16", options={"bf16": True}),
    Certified("trainer_te", "transformers", TE_FILE, "fp8", FP8_FILE),
    Certified("trainer_flag", "transformers", "accelerate launch --mixed_precision fp8", "fp8", FP8_FLAG),
    Certified(
        "trainer_flag_te",
        "transformers",
        "accelerate launch --mixed_precision fp8 --fp8_backend te",
        "fp8",
        (*FP8_FLAG, "--fp8_backend", "te"),
    ),
    Certified(
        "trainer_flag_bf16",
        "transformers",
        "accelerate launch --mixed_precision fp8, TrainingArguments(bf16=True)",
        "fp8",
        FP8_FLAG,
        {"bf16": True},
    ),
    Certified("loop_bf16", "accelerate", "accelerate launch --mixed_precision bf16", "bf16", (*FP8_FLAG[:-1], "bf16")),
    Certified("loop_te", "accelerate", TE_FILE, "fp8", FP8_FILE),
    Certified(
        "loop_te_eval",
        "accelerate",
        f"{TE_FILE}, without model.train()",
        "fp8",
        FP8_FILE,
        {"train_mode": False},
    ),
    Certified("loop_flag", "accelerate", "accelerate launch --mixed_precision fp8", "fp8", FP8_FLAG),
    Certified("trl_bf16", "trl", "SFTConfig(), whose default is bf16=True", "bf16"),
    Certified("trl_te", "trl", f"{TE_FILE}, SFTConfig()", "fp8", FP8_FILE),
    Certified(
        "trl_te_no_bf16",
        "trl",
        f"{TE_FILE}, SFTConfig(bf16=False)",
        "fp8",
        FP8_FILE,
        {"bf16": False},
    ),
    Certified("trl_flag", "trl", "accelerate launch --mixed_precision fp8, SFTConfig()", "fp8", FP8_FLAG),
    Certified(
        "trl_flag_no_bf16",
        "trl",
        "accelerate launch --mixed_precision fp8, SFTConfig(bf16=False)",
        "fp8",
        FP8_FLAG,
        {"bf16": False},
    ),
    Certified("llamafactory_bf16", "llamafactory", "bf16: true", "bf16", options={"bf16": True}),
    *(
        Certified(f"llamafactory_{label}", "llamafactory", how, "fp8", options=options, precision="fp8")
        for label, how, options in (
            ("fp8", "fp8: true", {"fp8": True}),
            ("te", "fp8: true, fp8_backend: te", {"fp8": True, "fp8_backend": "te"}),
            ("torchao", "fp8: true, fp8_backend: torchao", {"fp8": True, "fp8_backend": "torchao"}),
            ("fp8_bf16", "fp8: true, bf16: true", {"fp8": True, "bf16": True}),
            ("te_bf16", "fp8: true, fp8_backend: te, bf16: true", {"fp8": True, "fp8_backend": "te", "bf16": True}),
        )
    ),
    Certified("axolotl_bf16", "axolotl", "bf16: true", "bf16", options={"bf16": True}),
    Certified("axolotl_fp8", "axolotl", "fp8: true, bf16: true", "fp8", options={"bf16": True, "fp8": True}),
    Certified(
        "axolotl_fp8_compile",
        "axolotl",
        "fp8: true, bf16: true, torch_compile: true",
        "fp8",
        options={"bf16": True, "fp8": True, "torch_compile": True},
    ),
)


class StepTimes(TrainerCallback):
    """Writes when each optimizer step ended, in seconds, to step_times.json in the output folder."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends_s.append(time.perf_counter())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        losses = [record["loss"] for record in state.log_history if "loss" in record]
        write_json_atomic(Path(args.output_dir, "step_times.json"), {"ends_s": self.ends_s, "losses": losses})


# ---- the trainings, each in a process of its own ----


def training_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """What every trainer takes under these names."""
    return {
        "output_dir": job["folder"],
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["batch_size"],
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        **job["options"],
    }


def callbacks(job: dict[str, Any]) -> list[TrainerCallback]:
    return [CertificateCallback(job["precision"], RECORDED_STEP), StepTimes()]


def tokenised(job: dict[str, Any]) -> list[dict[str, list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = [tokenizer(row["text"])["input_ids"][: job["seq_length"]] for row in read_jsonl(Path(job["rows"]))]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def train_with_transformers(job: dict[str, Any]) -> None:
    """transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    args = TrainingArguments(**training_arguments(job))
    Trainer(model, args, train_dataset=tokenised(job), callbacks=callbacks(job)).train()


def train_with_trl(job: dict[str, Any]) -> None:
    """TRL's SFTTrainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": row["text"]} for row in read_jsonl(Path(job["rows"]))])
    args = SFTConfig(**training_arguments(job), max_length=job["seq_length"])
    SFTTrainer(job["model"], args=args, train_dataset=rows, callbacks=callbacks(job)).train()


def train_with_llamafactory(job: dict[str, Any]) -> None:
    """LLaMA-Factory's own entry to its training, which takes callbacks."""
    from llamafactory.train.tuner import run_exp

    rows = Path(job["rows"])
    columns = {"prompt": "problem", "response": "generated_solution"}
    Path(job["folder"]).mkdir(exist_ok=True)
    Path(job["folder"], "dataset_info.json").write_text(
        json.dumps({"rows": {"file_name": str(rows), "columns": columns}})
    )
    options = {
        "model_name_or_path": job["model"],
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": job["folder"],
        "template": "default",
        "cutoff_len": job["seq_length"],
        **training_arguments(job),
    }
    run_exp(options, callbacks=callbacks(job))


def train_with_accelerate(job: dict[str, Any]) -> None:
    """A loop of one's own, which calls the callback where a Trainer would."""
    from accelerate import Accelerator
    from transformers import TrainingArguments

    # Before the Accelerator, whose state it resets.
    args = TrainingArguments(output_dir=job["folder"], report_to="none", use_cpu=not torch.cuda.is_available())
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    model.train(job["options"].get("train_mode", True))  # loaded in eval mode, in which Accelerate's autocast is off
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = torch.utils.data.DataLoader(
        tokenised(job),
        batch_size=job["batch_size"],
        collate_fn=lambda rows: {key: torch.tensor([row[key] for row in rows]) for key in rows[0]},
    )
    state = TrainerState(max_steps=job["steps"])
    attached = callbacks(job)
    for callback in attached:
        callback.on_train_begin(args, state, None)
    for batch in accelerator.prepare(loader):
        for callback in attached:
            callback.on_step_begin(args, state, None, model=model, optimizer=optimizer)
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        state.log_history.append({"loss": loss.item()})
        for callback in attached:
            callback.on_step_end(args, state, None, model=model, optimizer=optimizer)
    for callback in attached:
        callback.on_train_end(args, state, None)


def axolotl_file(job: dict[str, Any]) -> dict[str, Any]:
    """axolotl's YAML file."""
    return {
        "base_model": job["model"],
        "datasets": [{"path": job["rows"], "ds_type": "json", "type": "completion", "field": "text"}],
        "dataset_prepared_path": f"{job['folder']}-prepared",
        "output_dir": job["folder"],
        "sequence_len": job["seq_length"],
        "excess_length_strategy": "truncate",
        "micro_batch_size": job["batch_size"],
        "gradient_accumulation_steps": 1,
        "max_steps": job["steps"],
        "optimizer": "adamw_torch",
        "learning_rate": 1e-4,
        "lr_scheduler": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "attn_implementation": "sdpa",
        "plugins": ["llm_fp8.tools.axolotl_plugin.CertificatePlugin"],
        **job["options"],
    }


def train_with_axolotl(job: dict[str, Any]) -> None:
    """axolotl's own entry, with the certificate's plugin in its file; step times come from a plugin made here."""
    from axolotl.cli.train import do_cli
    from axolotl.integrations.base import BasePlugin, PluginManager

    class StepTimesPlugin(BasePlugin):
        def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
            return [StepTimes()]

    PluginManager.get_instance().plugins["step_times"] = StepTimesPlugin()
    path = Path(job["folder"]).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(axolotl_file(job), sort_keys=False))
    do_cli(str(path))


TRAININGS = {
    "transformers": train_with_transformers,
    "accelerate": train_with_accelerate,
    "trl": train_with_trl,
    "llamafactory": train_with_llamafactory,
    "axolotl": train_with_axolotl,
}


# ---- the measuring process ----


def write_model(folder: Path, hidden_size: int, num_layers: int) -> None:
    """A random Llama model of heads of 64 elements in bf16, with the embedded tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def command_of(variant: Variant, job: dict[str, Any]) -> list[str]:
    """Writes the job's file and returns the command that trains by it."""
    path = Path(job["folder"]).with_suffix(".json")
    write_json_atomic(path, job)
    return started_by(variant.launch, ["benchmarks/trainers_certificate.py", "--job", str(path)])


def measure(variant: Variant, job: dict[str, Any], site: str | None, log: Path, timeout_s: float) -> dict[str, Any]:
    """Run one variant and read what it left."""
    folder = Path(job["folder"])
    variables = {
        **variables_of(site),
        # LLaMA-Factory asks for older versions of transformers and datasets than are installed.
        "DISABLE_VERSION_CHECK": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    command = command_of(variant, job)
    ended = Started(command, log, variables).wait(timeout_s)
    found: dict[str, Any] = {
        "name": variant.name,
        "package": variant.package,
        "how": variant.how,
        "asked": variant.asked,
        "command": [Path(sys.executable).name, *command[1:]],
        "options": job["options"],
        "exit_code": ended.code,
        "error": None if ended.code == 0 else ended.why(),
        "wall_s": ended.wall_s,
        "certificate": None,
        "losses": None,
        "step_times_s": None,
        "tokens_per_s": None,
    }
    if (stored := folder / "certificate.json").exists():
        found["certificate"] = read_json(stored)
    if (stored := folder / "step_times.json").exists():
        steps = read_json(stored)
        ends = steps["ends_s"]
        found["losses"] = steps["losses"]
        found["step_times_s"] = [later - one for one, later in zip(ends[:-1], ends[1:], strict=True)]
        if job["timed"]:
            timed = found["step_times_s"][WARMUP_STEPS - 1 :]
            found["tokens_per_s"] = job["batch_size"] * job["seq_length"] / statistics.median(timed)
    return found


def describe(entry: dict[str, Any]) -> str:
    """One line for the terminal."""
    certificate, speed = entry["certificate"], entry["tokens_per_s"]
    if certificate is None:
        said = f"no certificate: {entry['error'] or 'no GPU'}"
    else:
        said = f"{certificate['verdict']}, {certificate['num_fp8_gemm_kernels']} of {certificate['num_gemm_kernels']} "
        said += f"GEMM kernels in fp8; {'; '.join([*certificate['reasons'], *certificate['remarks']]) or 'no remarks'}"
    return f"{entry['name']:20} {'' if speed is None else f'{speed:,.0f} tokens/s '}{said}"


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    parser.add_argument("--job", type=Path, help="train by this file, which this script writes for its own processes")
    add_packages_option(parser)
    parser.add_argument("--variants", default="", help="comma-separated beginnings of names (default: all)")
    parser.add_argument("--at_once", type=int, default=1, help="processes at a time (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for what each process prints")
    parser.add_argument("--hidden_size", type=int, default=2048, help="a multiple of 128 (default %(default)s)")
    parser.add_argument("--num_layers", type=int, default=4, help="default %(default)s")
    parser.add_argument("--seq_length", type=int, default=1024, help="default %(default)s")
    parser.add_argument("--batch_size", type=int, default=8, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default %(default)s")
    parser.add_argument("--timeout_s", type=float, default=150.0, help="of one variant (default %(default)s)")
    options = parser.parse_args(argv)
    if options.job is not None:
        return options
    if options.output is None:
        raise UserError("--output is missing; name the JSON file of the results.")
    if options.hidden_size % 128:
        raise UserError(f"--hidden_size {options.hidden_size} is no multiple of 128; take one, such as 2048.")
    if options.steps <= WARMUP_STEPS:
        raise UserError(f"--steps {options.steps} leaves none behind the {WARMUP_STEPS} of warm-up; take more.")
    if options.at_once < 1:
        raise UserError(f"--at_once {options.at_once} starts no process; take 1 or more.")
    options.sites = sites_of(options.packages)
    beginnings = tuple(options.variants.split(","))
    options.variants = [variant for variant in VARIANTS if variant.name.startswith(beginnings)]
    if not options.variants:
        raise UserError(f"--variants {','.join(beginnings)} names none of {', '.join(each.name for each in VARIANTS)}.")
    return options


def main() -> int:
    """Train every variant and keep what its certificate says."""
    options = parse(sys.argv[1:])
    if options.job is not None:
        job = read_json(options.job)
        TRAININGS[job["package"]](job)
        return 0
    drop_launcher_variables()
    record: dict[str, Any] = {
        "provenance": collect_provenance(sys.argv),
        "model": {"hidden_size": options.hidden_size, "num_layers": options.num_layers},
        **{key: getattr(options, key) for key in ("seq_length", "batch_size", "steps", "at_once")},
        "versions": {
            package: versions_of(package, options.sites.get(package))
            for package in dict.fromkeys(variant.package for variant in options.variants)
        },
    }
    with tempfile.TemporaryDirectory() as scratch:
        model, rows = Path(scratch, "model"), Path(scratch, "rows.jsonl")
        write_model(model, options.hidden_size, options.num_layers)
        write_full_rows(rows, options.steps * options.batch_size, options.seq_length)
        texts = [{**row, "text": f"{row['problem']}\n{row['generated_solution']}"} for row in read_jsonl(rows)]
        write_jsonl_atomic(rows, texts)
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)

        def run(variant: Variant) -> dict[str, Any]:
            job = {
                "package": variant.package,
                "model": str(model),
                "rows": str(rows),
                "folder": str(Path(scratch, variant.name)),
                "precision": variant.precision,
                "options": variant.options,
                "timed": options.at_once == 1 and torch.cuda.is_available(),
                **{key: getattr(options, key) for key in ("seq_length", "batch_size", "steps")},
            }
            site, log = options.sites.get(variant.package), logs / f"{variant.name}.log"
            found = measure(variant, job, site, log, options.timeout_s)
            print(describe(found), flush=True)
            return found

        with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
            record["entries"] = []
            for found in pool.map(run, options.variants):
                record["entries"].append(found)
                write_json_atomic(options.output, record)
    return 0


if __name__ == "__main__":
    run_script(main)
