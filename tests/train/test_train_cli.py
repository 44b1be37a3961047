"""train_fp8.py as a user meets it, and every option that a CPU can show to have its effect."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import wandb
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import setup_fp8_env
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_fp8.config.accelerate_env import apply_launch_settings
from llm_fp8.config.options import Config, PrecisionConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.train.run_dir import with_output_dir
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.documented_commands import (
    COMMANDS,
    config_of,
    is_multi_gpu,
    readme_commands,
    words_for_a_cpu,
    write_dataset,
)
from tests.support.small import final_weights, records, run_json, steps, train, write_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def script(*options: object, cwd: Path, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run train_fp8.py as a process of its own, its output not a terminal."""
    command = [*(launcher or [sys.executable]), str(ROOT / "train_fp8.py"), *map(str, options)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "default::FutureWarning"}
    )


# ---- start ----


@pytest.mark.parametrize(
    "program, words",
    [
        ("train_fp8.py", "--help"),
        ("train_fp8.py", "--batch_size=x"),
        ("train_fp8.py", "--batch_size=0"),
        ("train_multi_gpu.py", "--help"),
        ("scripts/verify_fp8.py", "--help"),
        ("scripts/diagnose_fp8.py", "--help"),
        ("scripts/memory.py", "--help"),
        ("scripts/memory.py", "--model_name=Llama-3.1-8B --gpu=H900"),
        ("scripts/evaluate.py", "--help"),
        ("scripts/evaluate.py", "--model=x --num_problems=0"),
        ("scripts/merge_adapter.py", "--help"),
        ("scripts/export_fp8.py", "--help"),
        ("scripts/export_fp8.py", "nowhere --output=out"),
    ],
)
def test_help_and_mistakes_are_answered_without_torch_and_transformers(program, words):
    _answers_without(program, words, "torch", "transformers")


@pytest.mark.parametrize(
    "program, words",
    [
        ("scripts/compare_performance.py", "--help"),
        ("scripts/wandb_dashboard.py", "--help"),
        ("scripts/benchmark.py", "--help"),
        ("scripts/benchmark.py", "--arms=fast"),
        ("scripts/lora_study.py", "--help"),
    ],
)
def test_comparisons_and_benchmarks_answer_without_models(program, words):
    _answers_without(program, words)


def _answers_without(program: str, words: str, *modules: str) -> None:
    """Assert that a program ends with help or a mistake, by its exit code, and has loaded none of `modules` and of
    what else takes long to import.
    """
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{program!r}, *{words.split()!r}]\n"
        f"try: runpy.run_path({str(ROOT / program)!r}, run_name='__main__')\n"
        "except SystemExit as ended: print('code', ended.code)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, ended, loaded = done.stdout.splitlines()
    assert ended == ("code 0" if words == "--help" else "code 2"), done.stderr
    slow = {
        "transformers.modeling_utils",
        "datasets",
        "pandas",
        "wandb",
        "peft",
        "torchao",
        "deepspeed",
        "transformer_engine",
    }
    assert "llm_fp8.utils.errors" in loaded.split()
    assert (slow | set(modules)) & set(loaded.split()) == set()


# ---- whole runs ----


def test_without_a_model_or_dataset_the_embedded_ones_are_trained_evaluated_and_exported(tmp_path):
    done = script(
        "--max_steps=12", "--max_seq_length=128", "--num_of_samples=300", "--learning_rate=3e-3", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no word of any library"
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-embedded-auto", run.name)

    summary = json.loads((run / "summary.json").read_text())
    phases = [
        "imports",
        "devices",
        "config_and_tokenizer",
        "data",
        "weights",
        "parity",
        "optimizer",
        "records",
        "first_step",
    ]
    assert list(summary["phases_s"]) == phases and min(summary["phases_s"].values()) >= 0
    assert summary["phases_s"]["imports"] > 0.1, "from the script's first line"
    assert summary["phases_s"]["first_step"] == records(run)[0]["step_time_s"]
    assert sum(summary["phases_s"].values()) < summary["wall_time_s"] + summary["phases_s"]["imports"]

    lines = done.stdout.splitlines()
    assert not any("\r" in line or "%|" in line or "arning" in line for line in lines)
    assert lines[0].startswith("precision: fp32 (asked for: fp32)")
    for expected in (
        r"data: embedded, split train, evaluated on split validation, padded sequences of 128 tokens",
        r"  300 rows read, \d+ used, 0 held out, \d+ dropped as longer than 128 tokens, 0 truncated to that, 0 empty",
        r"training 12 steps on the CPU, results in runs/.*",
        r"step  1/12  loss \d\.\d{4}  grad norm .*",
        r"step 12/12  loss \d\.\d{4}  grad norm .*",
        r"evaluation at step 12: loss \d\.\d{4}  perplexity \d+\.\d+  \d+\.\d s",
        r"done: 12 steps in \d+ s, precision fp32",
    ):
        assert any(re.fullmatch(expected, line) for line in lines), expected

    losses = [step["loss"] for step in steps(run)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    assert losses[0] == pytest.approx(math.log(1024), abs=0.3), "random weights guess among the vocabulary"
    evaluation = records(run)[-1]
    assert losses[-1] - 1 < evaluation["eval_loss"] < losses[0] - 1

    model, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    model.generate(**tokenizer("Compute 2 + 2.", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert "| optimizer steps | 12 |" in (run / "final" / "README.md").read_text()

    recorded = run_json(run)
    assert recorded["precision"]["effective"] == "no" and recorded["precision"]["optimizer"] == "adamw_fp32"
    assert recorded["config"]["data"]["max_seq_length"] == 128 and recorded["config"]["optim"]["learning_rate"] == 3e-3
    assert recorded["effective"]["num_warmup_steps"] == 1 and recorded["effective"]["packing"] is False
    assert recorded["provenance"]["command"][1:3] == ["--max_steps=12", "--max_seq_length=128"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 12 and summary["exported"] == f"runs/{run.name}/final"


@pytest.fixture(scope="module")
def hub_dataset(tmp_path_factory) -> Path:
    """A folder laid out as the hub lays out the dataset of the documented commands."""
    return write_dataset(tmp_path_factory.mktemp("dataset"), 300)


@pytest.fixture(scope="module")
def hub_models(tiny_model, tmp_path_factory) -> dict[str, str]:
    """Owner on the hub -> a model's folder, laid out as the hub lays them out."""
    # The tokenizer class that belongs to this type of model adds a token.
    qwen = write_model(tmp_path_factory.mktemp("models") / "qwen", model_type="qwen2", vocab_size=1040)
    return {"meta-llama": tiny_model, "Qwen": qwen}


DOCUMENTED = {
    name: command
    for name, command in (COMMANDS | readme_commands()).items()
    if name != "split_test" and not is_multi_gpu(command)
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_command(name, tmp_path, hub_models, hub_dataset, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked, folder = config_of(DOCUMENTED[name]), tmp_path / "run"
    words = words_for_a_cpu(DOCUMENTED[name], hub_models[asked.model.model_name.partition("/")[0]], hub_dataset)
    assert train(*words, "--max_steps=3", "--eval_batches=1", f"--output_dir={folder}") == 0
    wandb.teardown()
    recorded = run_json(folder)
    assert (
        recorded["data"]["num_rows_read"] == 300 and recorded["config"]["data"]["split_name"] == asked.data.split_name
    )
    assert (
        recorded["effective"]["global_batch_size"] == asked.data.batch_size
        and recorded["precision"]["effective"] == "bf16"
    )
    assert len(steps(folder)) == 3 and (folder / "final" / "model.safetensors").exists()
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == asked.run.use_wandb


def test_a_split_that_the_documented_dataset_lacks(tmp_path, tiny_model, hub_dataset):
    words = words_for_a_cpu(COMMANDS["split_test"], tiny_model, hub_dataset)
    with pytest.raises(UserError, match="--split_name test: .* has no such split; it has: train, train_1M"):
        train(*words, f"--output_dir={tmp_path / 'run'}")


def launch_config(tmp_path: Path, **entries: object) -> str:
    """An accelerate configuration file."""
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        yaml.safe_dump(
            {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, **entries}
        )
    )
    return str(path)


def test_accelerate_launch_decides_the_precision(tmp_path, warm_python, tiny_model, rows):
    words = ["--config_file", launch_config(tmp_path, mixed_precision="bf16", use_cpu=True), "--cpu"]
    launcher = [str(Path(sys.executable).parent / "accelerate"), "launch", *words]
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=2"]
    done = script(*options, "--output_dir=run", cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    recorded = run_json(tmp_path / "run")
    assert recorded["precision"]["effective"] == recorded["config"]["precision"]["mixed_precision"] == "bf16"
    train(*options, "--mixed_precision=bf16", f"--output_dir={tmp_path / 'flag'}")
    assert [s["loss"] for s in steps(tmp_path / "run")] == [s["loss"] for s in steps(tmp_path / "flag")]

    launcher = [warm_python, "-m", "accelerate.commands.launch", *words]
    refused = script(*options, "--mixed_precision=no", "--output_dir=other", cwd=tmp_path, launcher=launcher)
    assert refused.returncode != 0
    assert "error: --mixed_precision no contradicts accelerate's launch configuration" in refused.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "override", [{}, {"override_linear_precision": [False, False, False], "use_autocast_during_eval": False}]
)
def test_an_fp8_configuration_file_of_accelerate_becomes_our_options(tmp_path, override):
    """With the variables that accelerate's own launcher makes of it (which itself refuses to start without a GPU
    library).
    """
    fp8 = {"backend": "TE", "fp8_format": "HYBRID", "amax_compute_algo": "max", "amax_history_len": 1024, **override}
    content = {"mixed_precision": "fp8", "fp8_config": fp8}
    arguments = launch_command_parser().parse_args(["train_fp8.py"])
    for name, value in content["fp8_config"].items():
        setattr(arguments, f"fp8_{name}" if not name.startswith("fp8_") else name, value)
    environment = {"ACCELERATE_MIXED_PRECISION": content["mixed_precision"], **setup_fp8_env(arguments, {})}
    settings = apply_launch_settings(Config(), environment)[0].precision
    assert settings == PrecisionConfig(
        mixed_precision="fp8",
        fp8_format="HYBRID",
        amax_compute_algo="max",
        amax_history_len=1024,
    )
    assert environment == {}


# ---- options, one by one ----


@pytest.fixture
def run(tmp_path, tiny_model, rows):
    """A function: train a few steps with these options in a new folder, which it returns."""
    number = iter(range(100))

    def start(*options: str) -> Path:
        folder = tmp_path / f"run-{next(number)}"
        common = [
            f"--model_name={tiny_model}",
            f"--dataset_name={rows}",
            "--max_seq_length=128",
            "--max_steps=4",
            "--learning_rate=1e-2",
        ]
        assert train(*common, f"--output_dir={folder}", *options) == 0
        return folder

    return start


def losses(folder: Path) -> list[float]:
    """The loss of every step."""
    return [step["loss"] for step in steps(folder)]


def learning_rates(folder: Path) -> list[float]:
    """The learning rate of every step."""
    return [step["learning_rate"] for step in steps(folder)]


def test_the_same_options_give_the_same_bits_and_another_seed_does_not(run):
    first, again, other = run(), run(), run("--seed=7")
    assert losses(first) == losses(again) != losses(other)
    for name, tensor in final_weights(first).items():
        assert torch.equal(tensor, final_weights(again)[name])


def test_mixed_precision_bf16_rounds_and_no_does_not(run):
    fp32, bf16 = losses(run("--mixed_precision=no")), losses(run("--mixed_precision=bf16"))
    assert fp32 != bf16
    assert bf16 == pytest.approx(fp32, rel=1e-2)


def test_num_of_samples_and_batch_size_and_accumulation(run):
    few = run("--num_of_samples=20", "--validation_fraction=0", "--batch_size=4", "--gradient_accumulation_steps=2")
    recorded = run_json(few)
    assert recorded["data"]["num_rows_read"] == 20
    assert recorded["effective"]["global_batch_size"] == 8
    used = recorded["data"]["num_rows_used"]
    assert steps(few)[0]["epoch"] == pytest.approx(8 / used)


def test_packing_fills_rows(run):
    padded, packed = run_json(run("--max_seq_length=256")), run_json(run("--max_seq_length=256", "--packing"))
    assert packed["data"]["num_rows_of_batches"] < 0.7 * padded["data"]["num_rows_of_batches"]
    assert packed["effective"]["packing"] and not padded["effective"]["packing"]


def test_train_on_prompt_supervises_more_tokens(run):
    without, with_prompt = run_json(run())["data"], run_json(run("--train_on_prompt"))["data"]
    assert without["num_tokens"] == with_prompt["num_tokens"]
    assert (
        without["num_supervised_tokens"]
        < with_prompt["num_supervised_tokens"]
        == with_prompt["num_tokens"] - with_prompt["num_rows_used"]
    )


def test_overlong_rows_are_dropped_or_truncated(run):
    dropped, truncated = (
        run_json(run("--max_seq_length=96"))["data"],
        run_json(run("--max_seq_length=96", "--overlong=truncate"))["data"],
    )
    assert dropped["num_overlong_dropped"] == truncated["num_overlong_truncated"] > 0
    assert dropped["num_overlong_truncated"] == truncated["num_overlong_dropped"] == 0


def test_splits_and_the_held_out_share(run):
    embedded = ["--dataset_name=embedded", "--num_of_samples=100", "--max_steps=1", "--eval_batches=1"]
    swapped = run_json(run(*embedded, "--split_name=validation", "--validation_split_name=train"))["data"]
    assert swapped["num_rows_read"] == 100 and swapped["num_eval_rows"] > 300
    shares = [run_json(run(f"--validation_fraction={share}"))["data"]["num_rows_held_out"] for share in (0.0, 0.5)]
    assert shares[0] == 0 and 15 < shares[1] < 45


def test_streaming_trains_on_the_same_rows(run):
    """The file is smaller than a buffer, so the stream holds the same rows; each is read once in an epoch."""
    folder = run("--streaming", "--validation_fraction=0")
    assert len(losses(folder)) == 4 and losses(folder)[-1] < losses(folder)[0]


def test_two_workers_tokenise_the_same_as_one(run, tmp_path, monkeypatch):
    one = run()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    two = run("--preprocessing_workers=2")
    assert list((tmp_path / "cache").glob("llm_fp8/*/*.arrow"))
    assert losses(one) == losses(two)


def test_random_init_forgets_the_weights(run):
    loaded, random = run("--max_steps=1", "--no_export"), run("--max_steps=1", "--random_init", "--no_export")
    assert losses(loaded) != losses(random)


def test_max_grad_norm_clips(run):
    free, clipped = run("--max_grad_norm=0"), run("--max_grad_norm=1e-9")
    assert steps(free)[0]["grad_norm"] == steps(clipped)[0]["grad_norm"], "what is reported is the norm before clipping"
    assert losses(free) != losses(clipped)


@pytest.mark.parametrize("option", ["--weight_decay=0.5", "--adam_beta2=0.1", "--learning_rate=1e-3"])
def test_the_optimizer_follows_its_options(run, option):
    assert losses(run("--no_export")) != losses(run("--no_export", option))


@pytest.mark.parametrize(
    ("scheduler", "asked", "warmup"),
    [("linear", 0, 0), ("linear", 1000, 3), ("cosine", 2, 2), ("cosine", 1000, 3), ("constant", 2, 2)],
)
def test_the_learning_rate_warms_up_over_a_tenth_at_most(run, scheduler, asked, warmup):
    shape = {"linear": lambda p: 1 - p, "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2, "constant": lambda p: 1.0}[
        scheduler
    ]
    folder = run(
        "--max_steps=30",
        f"--lr_scheduler={scheduler}",
        f"--num_warmup_steps={asked}",
        "--no_export",
        "--num_of_samples=16",
    )
    expected = [(i + 1) / warmup for i in range(warmup)] + [shape(i / (30 - warmup)) for i in range(30 - warmup)]
    assert learning_rates(folder) == pytest.approx([1e-2 * share for share in expected], rel=1e-6, abs=1e-12)
    assert run_json(folder)["effective"]["num_warmup_steps"] == warmup


def test_eval_every_and_eval_batches(run):
    folder = run("--eval_every=2", "--validation_fraction=0.5", "--batch_size=4", "--eval_batches=1")
    evaluations = [record for record in records(folder) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [2, 4]
    whole = [record for record in records(run("--validation_fraction=0.5", "--batch_size=4")) if "eval_loss" in record]
    assert [record["step"] for record in whole] == [4]
    assert evaluations[-1]["eval_num_supervised_tokens"] < whole[-1]["eval_num_supervised_tokens"]


def test_an_evaluation_changes_nothing(run):
    assert losses(run("--eval_every=1", "--no_export")) == losses(run("--no_export"))


def test_log_every_chooses_the_lines_and_no_step_is_missing_from_the_file(run, capfd):
    folder = run("--max_steps=7", "--log_every=3")
    shown = [int(n) for n in re.findall(r"^step (\d+)/7", capfd.readouterr().out, flags=re.MULTILINE)]
    assert shown == [1, 3, 6, 7]
    assert [step["step"] for step in steps(folder)] == list(range(1, 8))


def test_no_export_writes_no_model(run):
    assert not (run("--no_export") / "final").exists()
    assert (run("--export") / "final").exists()


def test_gradient_checkpointing_and_attention_are_recorded_and_change_no_result(run):
    plain, checkpointed, eager = run(), run("--gradient_checkpointing"), run("--attn_implementation=eager")
    assert losses(checkpointed) == losses(plain)
    assert losses(eager) == pytest.approx(losses(plain), rel=1e-5)
    assert run_json(eager)["effective"]["attn_implementation"] == "eager"
    assert run_json(plain)["effective"]["attn_implementation"] == "sdpa"


def test_trackers_get_the_run(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = run("--use_wandb", "--wandb_project=my-project", "--wandb_run_name=my-run", "--no_export", "--max_steps=2")
    wandb.teardown()  # waits for W&B's own process, which writes the file
    (stored,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"my-project" in stored.read_bytes() and b"my-run" in stored.read_bytes()


def test_use_wandb_alone_and_its_default_project(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = run("--use_wandb", "--no_export", "--max_steps=1")
    wandb.teardown()
    (stored,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"llm-fp8" in stored.read_bytes()


def test_a_run_from_a_yaml_file_is_the_run_from_flags(run, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("batch_size: 4\nlearning_rate: 3e-3\npacking: true\n")
    flags = run("--batch_size=4", "--learning_rate=3e-3", "--packing")
    folder = tmp_path / "yaml"
    common = run_json(flags)["config"]
    options = [f"--model_name={common['model']['model_name']}", f"--dataset_name={common['data']['dataset_name']}"]
    train("--config", file, *options, "--max_seq_length=128", "--max_steps=4", f"--output_dir={folder}")
    assert losses(folder) == losses(flags)


def test_a_bf16_model_is_trained_in_fp32_and_exported_in_bf16(tmp_path, rows):
    model = write_model(tmp_path / "bf16", torch.bfloat16)
    train(
        f"--model_name={model}",
        f"--dataset_name={rows}",
        "--max_seq_length=128",
        "--max_steps=2",
        f"--output_dir={tmp_path / 'run'}",
    )
    assert run_json(tmp_path / "run")["precision"]["parameter_dtype"] == "torch.float32"
    assert {tensor.dtype for tensor in final_weights(tmp_path / "run").values()} == {torch.bfloat16}
    with safe_open(tmp_path / "run" / "final" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("was_there", [True, False])
def test_a_final_folder_that_is_a_link_is_written_where_it_leads(tmp_path, tiny_model, rows, was_there):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128", f"--output_dir={run}"]
    train(*options, "--max_steps=1", "--save_every=1", "--no_export")
    if was_there:
        elsewhere.mkdir()
        (elsewhere / "config.json").write_text("{}")
    (run / "final").symlink_to(elsewhere)
    assert train(*options, "--max_steps=2", "--resume_from=latest", "--allow_changed=total_steps") == 0
    assert (run / "final").is_symlink() and (elsewhere / "model.safetensors").is_file()
    assert json.loads((elsewhere / "config.json").read_text())


def test_the_default_folder_is_named_after_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_output_dir(
        parse_config(["--model_name=meta-llama/Llama-3.2-1B", "--mixed_precision=bf16"]), LaunchRanks()
    )
    assert re.fullmatch(r"runs/\d{8}-\d{6}-meta-llama-Llama-3\.2-1B-bf16", str(config.run.output_dir))
    assert list(tmp_path.iterdir()) == []
