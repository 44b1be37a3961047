"""The kinds of files that users bring: good ones, and for each what the scripts do with it first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from llm_fp8.tools.evaluate_checkpoint import base_of, data_options, load_merged
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from llm_fp8.config.options import Config, DataConfig, ModelConfig, RunConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.data import prepare_data
from llm_fp8.models.build import build_model, build_structure
from llm_fp8.models.fp8_export import export_fp8
from llm_fp8.models.source import check_model, load_config, load_tokenizer, resolve_source
from llm_fp8.models.weights import weight_files
from llm_fp8.observability.reporter import truncate_metrics
from llm_fp8.observability.step_stats import RESUMES, throughput_summary
from llm_fp8.tools.compare.page import render_page
from llm_fp8.tools.compare.report import compare
from llm_fp8.tools.compare.run_record import read_run_folder
from llm_fp8.train.checkpoint import LATEST, CheckpointManager, has_checkpoint, read_meta
from llm_fp8.train.run_dir import is_finished, refuse_finished
from llm_fp8.utils.json_files import read_json, read_metrics, write_json_atomic, write_jsonl_atomic
from scripts.wandb_dashboard import read_offline_run
from tests.faults.fuzz import Reader
from tests.support.fp8_files import write_fp8_model
from tests.support.made_up_runs import NUM_STEPS, made_up_run, write_run_folder
from tests.support.small import write_model

MODEL, ADAPTER, RUN, CHECKPOINTS, OPTIONS = "model", "adapter", "run", "run/checkpoints", "options.yaml"
BLOCKS, CHANNELS = "blocks/fp8", "channels/fp8"
OLDER = f"{CHECKPOINTS}/step-00000001"
OFFLINE = f"{RUN}/wandb/offline-run-x-y"
DEEPSPEED, ACCELERATE = "deepspeed.json", "accelerate.yaml"
DEEP_YAML = 300
"""Levels of nesting at which PyYAML's recursion has long ended; the time it takes grows with their square."""
STOPPED_EARLY = "stopped_early"
ROWS: dict[str, list[dict[str, Any]]] = {
    "problems": [{"question": f"{i} + 1?", "answer": f"= {i + 1}", "id": i} for i in range(6)],
    "messages": [
        {"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"= {i + 1}"}]}
        for i in range(6)
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": f"{i} + 1?"}, {"from": "gpt", "value": f"= {i + 1}"}], "id": i}
        for i in range(6)
    ],
    "alpaca": [{"instruction": "Add.", "input": f"{i} and 1", "output": f"= {i + 1}"} for i in range(6)],
}
"""Name of a file -> its rows."""
ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def write_good_files(folder: Path) -> None:
    """One file of each kind."""
    write_model(folder / MODEL, max_shard_size="40KB")
    write_fp8_model(folder / "blocks", "uneven block")
    write_fp8_model(folder / "channels", "channel")
    (folder / RUN / "final").mkdir(parents=True)
    (folder / OFFLINE).mkdir(parents=True)
    run = write_run_folder(folder / RUN, made_up_run(), {15: {0: True}, 60: {0: True, 1: False}})
    record = json.loads((run / "run.json").read_text())
    record["effective"] |= {"sharding_mode": "single", "num_processes": 1, "tokens_per_step": 8000}
    resumes = [{"resumed_after_step": 30, "config": record["config"]}]
    (run / "run.json").write_text(json.dumps({**record, "resumes": resumes}))
    (run / "certificate.json").write_text(json.dumps(made_up_run().certificate))
    for step in (1, 2):
        CheckpointManager(run, limit=3).save(step, {"weight": torch.ones(3)}, {"fingerprint": {}})
    lora = LoraConfig(base_model_name_or_path=str(folder / MODEL), target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / MODEL), lora).save_pretrained(folder / ADAPTER)
    for name, rows in ROWS.items():
        write_jsonl_atomic(folder / f"{name}.jsonl", rows)
    early = write_run_folder(folder / STOPPED_EARLY, made_up_run(), {})
    write_json_atomic(early / "summary.json", {"steps": 30, "stopped_early": "no improvement"})
    (folder / DEEPSPEED).write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    # JSON is YAML too, and has values to change.
    options = {"model_name": "embedded", "learning_rate": 1e-4, "max_steps": 3, "packing": True, "lora_rank": 8}
    (folder / OPTIONS).write_text(json.dumps(options))
    launch = yaml.safe_load((ROOT / "configs" / "accelerate_fp8_fsdp.yaml").read_text())
    (folder / ACCELERATE).write_text(json.dumps(launch, indent=1))


def _model(folder: Path, build: bool) -> None:
    """What a run asks of a model's folder before its first step."""
    config = Config(model=ModelConfig(model_name=str(folder / MODEL)), data=DataConfig(max_seq_length=64))
    source = resolve_source(config.model)
    hf_config = load_config(config.model, source)
    tokenizer, _ = load_tokenizer(config.model, source)
    check_model(config, hf_config, tokenizer)
    if not build:
        tokenizer.decode(tokenizer("3 + 4 = 7")["input_ids"])
        return
    dtypes: dict[str, Any] = {"parameter_dtype": torch.float32, "compute_dtype": torch.float32, "device": CPU}
    structure = build_structure(config.model, source, hf_config, **dtypes)
    structure.generation_config.save_pretrained(folder / "exported")


def _whole_model(folder: Path) -> None:
    """A run's model, with one forward pass."""
    options = ModelConfig(model_name=str(folder))
    source = resolve_source(options)
    hf_config = load_config(options, source)
    dtypes: dict[str, Any] = {"parameter_dtype": torch.float32, "compute_dtype": torch.float32, "device": CPU}
    model, _ = build_model(options, source, hf_config, seed=0, **dtypes)
    model(input_ids=torch.ones(1, 4, dtype=torch.long))


def _compared(folder: Path) -> None:
    """What scripts/compare_performance.py makes of a run."""
    render_page(compare([read_run_folder(folder / RUN), made_up_run("delayed")]))


def _merged(folder: Path) -> None:
    """What scripts/merge_adapter.py loads."""
    base = base_of(folder / ADAPTER)
    assert base is not None
    load_merged(folder / ADAPTER, base, CPU)


def _resumed(folder: Path) -> None:
    """What a resumed run reads of the run that it goes on with."""
    has_checkpoint(folder / RUN)
    read_meta(CheckpointManager(folder / RUN, limit=2).find(LATEST))


def _saved(folder: Path) -> None:
    """A save beside an older checkpoint."""
    manager = CheckpointManager(folder / RUN, limit=3)
    manager.save(3, {"weight": torch.ones(3)}, {"fingerprint": {}})


def _metrics(folder: Path) -> None:
    """A resumed run cuts what it repeats, and sums up the rest."""
    path = folder / RUN / "metrics.jsonl"
    truncate_metrics(path, NUM_STEPS)
    throughput_summary(read_metrics(path))


def _rows(folder: Path, names: str, **options: Any) -> None:
    """The first step's rows of datasets that a run trains on."""
    files = ",".join(str(folder / f"{name}.jsonl") for name in names.split(","))
    data = DataConfig(files, max_seq_length=128, validation_fraction=0.0, **options)
    tokenizer, _ = load_tokenizer(ModelConfig(), resolve_source(ModelConfig()))
    next(iter(prepare_data(Config(data=data), tokenizer).train))


def _exported(folder: Path) -> None:
    """The model in fp8, written."""
    try:
        export_fp8(folder / MODEL, folder / "exported_fp8")
    finally:
        shutil.rmtree(folder / "exported_fp8", ignore_errors=True)


def _resumed_early(folder: Path) -> None:
    """A resumed run looks at how the run before ended."""
    run = RunConfig(output_dir=str(folder / STOPPED_EARLY), resume_from=LATEST, early_stopping_patience=9)
    refuse_finished(Config(run=run), NUM_STEPS)


READERS: dict[str, Reader] = {
    **{
        name: Reader(
            f"{model}/config.json", lambda folder, model=model: _whole_model(folder / model), named=f"/{model}"
        )
        for name, model in (("config.json", MODEL), ("config.json blocks", BLOCKS), ("config.json channels", CHANNELS))
    },
    **{
        f"model.safetensors {model}": Reader(
            f"{model}/model.safetensors", lambda folder, model=model: _whole_model(folder / model), named=f"/{model}"
        )
        for model in (BLOCKS, CHANNELS)
    },
    "config.json exported": Reader(f"{MODEL}/config.json", _exported, named=f"/{MODEL}"),
    "index exported": Reader(f"{MODEL}/model.safetensors.index.json", _exported, named=f"/{MODEL}"),
    **{
        f"{name}.jsonl": Reader(
            f"{name}.jsonl",
            lambda folder, names=names, options=options: _rows(folder, names, **options),
            deepest=2000,
        )
        for name, names, options in (
            ("problems", "problems", {"columns": "problem=question,generated_solution=answer"}),
            ("messages", "messages", {"streaming": True}),
            ("sharegpt", "alpaca,sharegpt", {"dataset_weights": "0.5,0.5"}),
            ("alpaca", "sharegpt,alpaca", {"dataset_weights": "0.5,0.5", "streaming": True}),
        )
    },
    "run.json stopped early": Reader(f"{STOPPED_EARLY}/run.json", _resumed_early),
    "summary.json stopped early": Reader(f"{STOPPED_EARLY}/summary.json", _resumed_early, named=STOPPED_EARLY),
    "generation_config.json": Reader(f"{MODEL}/generation_config.json", lambda folder: _model(folder, build=True)),
    "tokenizer.json": Reader(f"{MODEL}/tokenizer.json", lambda folder: _model(folder, build=False), named="tokenizer"),
    "tokenizer_config.json": Reader(
        f"{MODEL}/tokenizer_config.json", lambda folder: _model(folder, build=False), named="tokenizer"
    ),
    "index": Reader(
        f"{MODEL}/model.safetensors.index.json",
        lambda folder: weight_files(options := ModelConfig(model_name=str(folder / MODEL)), resolve_source(options)),
        named="model",
    ),
    "adapter_config.json": Reader(f"{ADAPTER}/adapter_config.json", lambda folder: base_of(folder / ADAPTER)),
    "adapter_config.json merged": Reader(f"{ADAPTER}/adapter_config.json", _merged, named=f"/{ADAPTER}"),
    "latest": Reader(f"{CHECKPOINTS}/latest", _resumed),
    "manifest.json": Reader(
        f"{CHECKPOINTS}/step-00000002/manifest.json",
        lambda folder: read_meta(folder / CHECKPOINTS / "step-00000002"),
        named="step-00000002",
    ),
    "older manifest.json": Reader(f"{OLDER}/manifest.json", _saved),
    "meta.json": Reader(
        f"{CHECKPOINTS}/step-00000002/meta.json", lambda folder: read_meta(folder / CHECKPOINTS / "step-00000002")
    ),
    "run.json": Reader(f"{RUN}/run.json", _compared),
    "run.json resumed": Reader(f"{RUN}/run.json", lambda folder: read_json(folder / RUN / "run.json", RESUMES)),
    "run.json evaluated": Reader(f"{RUN}/run.json", lambda folder: data_options(folder / RUN / "final", {})),
    "run.json offline": Reader(f"{RUN}/run.json", lambda folder: read_offline_run(folder / OFFLINE)),
    "summary.json": Reader(f"{RUN}/summary.json", _compared),
    "summary.json resumed": Reader(f"{RUN}/summary.json", lambda folder: is_finished(folder / RUN, NUM_STEPS)),
    "metrics.jsonl": Reader(f"{RUN}/metrics.jsonl", _compared),
    "metrics.jsonl resumed": Reader(f"{RUN}/metrics.jsonl", _metrics),
    "certificate.json": Reader(f"{RUN}/certificate.json", _compared),
    "answers": Reader(f"{RUN}/eval_answers/step-60.jsonl", _compared),
    "options.yaml": Reader(
        OPTIONS, lambda folder: parse_config(["--config", str(folder / OPTIONS)]), named="--", deepest=DEEP_YAML
    ),
}
