"""The command line and the YAML file: values, names and mistakes. Every option is documented and used."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from transformers import TrainingArguments

from llm_fp8.config.options import EMBEDDED, FIELDS, MOST_USED, SECTIONS, Config, ShardingMode
from llm_fp8.config.parser import OTHER_NAMES, OptionsParser, parse_config, to_argv
from llm_fp8.config.recipes import RECIPE_OPTIONS
from llm_fp8.models.memory import MODES
from llm_fp8.utils.errors import UserError
from tests.support.documented_commands import COMMANDS, config_of, options_of

ROOT = Path(__file__).resolve().parents[2]

STABLE_OPTIONS = """
model_name dataset_name split_name batch_size mixed_precision max_seq_length use_te fp8_scenario use_wandb
wandb_project wandb_run_name num_epochs learning_rate gradient_accumulation_steps num_warmup_steps
gradient_checkpointing num_of_samples max_steps eval_every eval_batches save_every save_total_limit
output_dir resume_from seed lr_scheduler weight_decay max_grad_norm optimizer attn_implementation packing
train_on_prompt random_init log_every fp8_format amax_history_len amax_compute_algo fp8_strict
""".split()


def test_stable_options_exist_and_names_are_unique():
    names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert len(names) == len(set(names)) and set(STABLE_OPTIONS) <= set(names)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_documented_command_sets_its_options(command):
    argv = options_of(command)
    options = config_of(command).options
    for flag, value in zip(argv, [*argv[1:], "--"], strict=True):
        if flag.startswith("--"):
            parsed = options[flag.removeprefix("--")]
            assert parsed == (1 if value.startswith("--") else type(parsed)(value))


def test_help_explains_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_config(["--help_all"], prog="train_multi_gpu.py", parallel=True)
    assert stopped.value.code == 0
    printed = "".join(capsys.readouterr().out.split())  # because lines also break at hyphens
    for field in FIELDS.values():
        default = f"(default: {field.default})" if field.default is not None else "default"
        assert f"--{field.name}" in printed and "".join(field.metadata["help"].split()) in printed
        assert "(default:" in field.metadata["help"] or "".join(default.split()) in printed


@pytest.mark.parametrize("parallel", [False, True])
def test_short_help_explains_the_most_used_options_and_lists_the_others(parallel):
    text = OptionsParser(parallel).format_help()
    first, others = text.split("Further options, which --help_all explains:")
    explained = set(re.findall(r"^  --(\w+)", first, re.MULTILINE)) - {"help_all", "config"}
    assert explained == {name for name in MOST_USED if parallel or name != "sharding_mode"}
    sharding = {field.name for field in dataclasses.fields(Config().parallel)}
    assert set(re.findall(r"--(\w+)", others)) == set(Config().options) - explained - (set() if parallel else sharding)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--help"], ["--bach_size=8"], ["--lora_alpha=3"]], ids=str)
def test_help_and_errors_do_not_import_torch(argv):
    code = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print({"torch", "transformers", "datasets", "wandb"} & set(sys.modules))
"""
    command = [sys.executable, "-c", code, "train_fp8.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (0 if argv == ["--help"] else 2), done.stderr
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("--num_train_epochs 3", "num_epochs", 3),
        ("--per_device_train_batch_size 2", "batch_size", 2),
        ("--logging_steps 5", "log_every", 5),
        ("--eval_steps 5", "eval_every", 5),
        ("--lr_scheduler_type linear", "lr_scheduler", "linear"),
        ("--model_name_or_path x", "model_name", "x"),
        ("--mixed_precision fp32", "mixed_precision", "no"),
        ("--gradient_checkpointing true", "gradient_checkpointing", 1),
        ("--gradient_checkpointing 3", "gradient_checkpointing", 3),
        ("--gradient_checkpointing 0.25", "gradient_checkpointing", 0.25),
        ("--gradient_checkpointing 1.0", "gradient_checkpointing", 1),
        ("--gradient_checkpointing auto", "gradient_checkpointing", "auto"),
    ],
)
def test_names_and_values_of_the_trainer_are_accepted(argv, name, value, tmp_path):
    assert parse_config(argv.split()).options[name] == value
    key, _, text = argv.removeprefix("--").replace("=", " ").partition(" ")
    (tmp_path / "run.yaml").write_text(f"{key}: {text}\n")
    assert parse_config(["--config", str(tmp_path / "run.yaml")]).options[name] == value


def test_other_names_exist_in_transformers_and_refer_to_existing_options():
    trainer_names = {field.name for field in dataclasses.fields(TrainingArguments)} | {"model_name_or_path"}
    aliases = {alias[2:] for field in FIELDS.values() for alias in field.metadata["aliases"] if "_" in alias}
    assert aliases and aliases <= trainer_names
    advice = yaml.safe_load(OTHER_NAMES.read_text())
    names, flags = " ".join(advice.values()).split(), re.findall(r"--(\w+)", " ".join(advice))
    assert len(set(names)) == len(names) and not {*names} & {*aliases, *Config().options}
    assert {*flags} - {"nproc_per_node"} <= {*Config().options}


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        *((f"--{typo}=8", "--batch_size?") for typo in ("bach_size", "batchsize")),
        *(("--lora_rnk=8", "--lora_rank?"), ("--learing_rate 2", "--learning_rate?"), ("--use_t", "--use_te?")),
        ("--fp8_scenario dealyed", "delayed?"),
        ("--lr_scheduler_type LINEA", "linear?"),
        ("--batch 4", "--batch"),  # no abbreviations: --max_s could become another option tomorrow
        ("--lr 1e-4", "--learning_rate"),
        ("-lr 1e-4", "--learning_rate"),
        ("--grad-accum 2", "--gradient_accumulation_steps"),
        ("--seq_len 5", "--max_seq_length?"),
        ("--clip 1", "--max_grad_norm"),
        ("--run_name x", "--wandb_run_name"),
        ("--gpus 2", "--nproc_per_node"),
        *(("--use_peft", "--lora_rank"), ("--load_in_4bit", "--lora_rank"), ("--adam_beta1 0.9", "0.9")),
        ("--warmup_ratio 0.1", "--num_warmup_steps"),
        ("--push_to_hub", "hf upload"),
        ("--batch_size x", "number or auto"),
        ("--sharding_mode ddp", "train_multi_gpu.py"),
        ("surplus", "surplus"),
        *((f"--{name}", f"--{name};") for name in ("use_dora", "revision", "device")),
    ],
)
def test_error_for_a_mistake_suggests_the_right_option(argv, hint):
    with pytest.raises(UserError) as error:
        parse_config(argv.split(), prog="train_fp8.py")
    assert hint in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "packing"), [([], None), (["--packing"], True), (["--packing", "true"], True), (["--no_packing"], False)]
)
def test_packing_is_true_false_or_undecided(argv, packing):
    assert parse_config(argv).data.packing is packing
    assert parse_config([*argv, "--use_te"]).packing is (packing is not False)


def test_default_learning_rate_depends_on_model_and_lora():
    argv = ("", "--model_name x", "--model_name x --lora_rank 4", "--model_name x --random_init", "--learning_rate 3")
    assert [parse_config(each.split()).optim.learning_rate for each in argv] == [1e-3, 1e-5, 2e-4, 1e-3, 3]


def test_command_line_overrides_the_yaml_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning-rate: 3e-4\nbatch_size: 2\nexport: false\npacking: true\nmax_steps:\nmodel_name: a/b\n")
    options = parse_config(["--config", str(file), "--batch_size", "4", "--no_packing"]).options
    expected = {"learning_rate": 3e-4, "batch_size": 4, "export": False, "packing": False, "model_name": "a/b"}
    assert options == {**Config().options, **expected}
    other = "base_model: x\nmicro_batch_size: 2\noptimizer: adamw_torch\nfoo: {bar: 1}"
    for text in ("batch_size: 2\nseed: 3\nbatch_size: 4", "batch-size: ~\nper_device_train_batch_size: 4", other):
        file.write_text(text)
        with pytest.raises(UserError, match="batch_size") as error:
            parse_config(["--config", str(file)])
    words = [line.split()[0] for line in str(error.value).splitlines()[1:]]
    assert words == ["base_model:", "micro_batch_size:", "foo:"]


def test_yaml_values_are_parsed_by_the_type_of_the_option(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "{seed: 017, output_dir: 2025_11_28, wandb_run_name: 0123, split_name: no, mixed_precision: no, packing: ~, "
        "learning_rate: 1e-5, use_wandb: on, export: Off, max_steps: 1_000, lora_targets: [[q_proj, v_proj], o_proj], "
        "lora_rank: '08', chat_template_kwargs: {think: off, date: 2025-11-28, n: 3, code: 017, text: '1', x: 1e-5}}"
    )
    expected = {
        "seed": 17, "output_dir": "2025_11_28", "wandb_run_name": "0123", "split_name": "no", "mixed_precision": "no",
        "learning_rate": 1e-5, "use_wandb": True, "export": False, "max_steps": 1000, "lora_rank": 8,
        "lora_targets": "q_proj,v_proj,o_proj", "chat_template_kwargs":
            {"think": False, "date": "2025-11-28", "n": 3, "code": "017", "text": "1", "x": 1e-05},
    }  # fmt: skip
    assert parse_config(["--config", str(tmp_path / "run.yaml")]).options == {**Config().options, **expected}
    assert parse_config(to_argv(expected)).options == {**Config().options, **expected}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!a]*.yaml")), ids=lambda path: path.stem)
def test_every_example_configuration_parses(path):
    config = parse_config(["--config", str(path)])
    assert config.model.model_name != EMBEDDED
    assert not config.run.use_wandb, "an example runs without an account"


def test_tilde_in_a_path_becomes_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "options.yaml").write_text("model_name: ~/model\n")
    options = parse_config(["--config=~/options.yaml", "--output_dir=~/run"]).options
    assert (options["model_name"], options["output_dir"]) == (f"{tmp_path}/model", f"{tmp_path}/run")


def test_every_option_is_used_in_the_package():
    """An option counts as used if its name is an attribute or a string outside of llm_fp8/config."""
    names = set(RECIPE_OPTIONS)  # `build_recipe` reads them through the table
    for path in [*ROOT.glob("*.py"), *(ROOT / "llm_fp8").rglob("*.py")]:
        if path.parent == ROOT / "llm_fp8" / "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    through_properties = {"fp8_bf16_modules", "dataset_weights", "lora_targets", "columns", "allow_changed", "packing"}
    through_properties |= {"use_wandb", "report_to", "wandb_project", "lora_alpha"}
    assert set(Config().options) - names <= through_properties


def test_every_sharding_mode_has_a_row():
    assert {"single", *get_args(ShardingMode)} == {"auto", *MODES}


def test_conditions_in_the_declarations_name_existing_options():
    conditions = {each for field in FIELDS.values() for each in (*field.metadata["needs"], *field.metadata["excludes"])}
    parts = {part for condition in conditions for part in re.split(" and | or ", condition)}
    assert {part.partition("=")[0] for part in parts} <= set(Config().options)
    assert all(
        bound in ("at_least", "at_most", "above", "below")
        for field in FIELDS.values()
        for bound in field.metadata["bounds"]
    )
