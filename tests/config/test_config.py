"""The command line and the YAML file: every documented command parses, every option is explained, read and checked."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from llm_fp8.config.options import EMBEDDED, MOST_USED, OTHER_MEANING, SECTIONS, Config
from llm_fp8.config.parser import build_parser, parse_config
from llm_fp8.tools import evaluate, export_fp8
from llm_fp8.tools import memory as memory_tool
from llm_fp8.tools.compare import cli as compare_cli
from llm_fp8.utils.errors import UserError
from scripts import merge_adapter
from tests.support.documented_commands import COMMANDS, config_of, options_of

ROOT = Path(__file__).resolve().parents[2]

PROMISED_OPTIONS = """
model_name dataset_name split_name batch_size mixed_precision max_seq_length use_te fp8_scenario use_wandb
wandb_project wandb_run_name num_epochs learning_rate gradient_accumulation_steps num_warmup_steps
gradient_checkpointing num_of_samples max_steps eval_every eval_batches save_every save_total_limit
output_dir resume_from seed lr_scheduler weight_decay max_grad_norm optimizer attn_implementation packing
train_on_prompt random_init log_every fp8_format amax_history_len amax_compute_algo fp8_strict
""".split()


def flat(config: Config) -> dict[str, object]:
    """All options of a configuration in one dict."""
    return {name: value for section in config.to_dict().values() for name, value in section.items()}


def exit_message(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one line that the parser leaves behind on its way out with code 2."""
    with pytest.raises(SystemExit) as ended:
        parse_config(argv, prog="train_fp8.py")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_documented_command_means_what_it_says(command):
    words = options_of(command)
    options = flat(config_of(command))
    for word, value in zip(words, [*words[1:], "--"], strict=True):
        if not word.startswith("--"):
            continue
        name = word.removeprefix("--")
        if value.startswith("--"):
            assert options[name] is True
        else:
            assert options[name] == type(options[name])(value)


def test_every_promised_option_is_there():
    assert set(PROMISED_OPTIONS) <= set(flat(Config()))


def test_the_choices_and_defaults_that_were_promised():
    actions = {action.dest: action for action in build_parser()._actions}
    assert list(actions["mixed_precision"].choices) == ["no", "bf16", "fp16", "fp8", "auto"]
    assert flat(Config())["wandb_project"] == "llm-fp8"


def test_help_explains_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help-all"], prog="train_fp8.py")
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for action in build_parser()._actions:
        if action.dest in ("help", "help_all"):
            continue
        assert action.option_strings[0] in printed
        assert action.help and action.help in printed
        if action.option_strings[0].startswith("--no_"):
            continue
        if action.default is None:
            assert "default" in action.help.lower(), f"{action.dest}: None explains nothing"
        elif "(default:" not in action.help:
            shown = {True: "on", False: "off"}[action.default] if isinstance(action.default, bool) else action.default
            assert f"{action.help} (default: {shown})" in printed
    assert "(default: 1e-5, 0.0002 with --lora_rank, or 0.001 for weights that start random). --" in printed, (
        "no default is said twice"
    )


@pytest.mark.parametrize("parallel", [False, True])
def test_the_short_help_begins_with_the_most_used_options_and_names_all_others(parallel):
    text = build_parser("train_fp8.py", parallel=parallel).format_help()
    first, others = text.split("Further options, which --help-all explains:")
    most_used, _ = first.split("this help, and a file of options:")
    explained = re.findall(r"^  --(\w+)", most_used, re.MULTILINE)
    assert explained == [name for name in MOST_USED if parallel or name != "sharding_mode"]
    assert len(explained) == 12 + parallel
    names = flat(Config())
    sharding = {field.name for field in dataclasses.fields(Config().parallel)}
    expected = set(names) - set(explained) - (set() if parallel else sharding)
    assert set(re.findall(r"--(\w+)", others)) == expected
    assert max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) < 110


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--num_train_epochs 3", "num_epochs", 3),
        ("--num-train-epochs=3", "num_epochs", 3),
        ("--per_device_train_batch_size 2", "batch_size", 2),
        ("--gradient_accumulation_steps 2", "gradient_accumulation_steps", 2),
        ("--logging_steps 5", "log_every", 5),
        ("--save_steps 5", "save_every", 5),
        ("--eval_steps 5", "eval_every", 5),
        ("--lr_scheduler_type linear", "lr_scheduler", "linear"),
        ("--model_name_or_path x", "model_name", "x"),
        ("--mixed_precision fp32", "mixed_precision", "no"),
    ],
)
def test_the_trainers_names_are_names_of_the_same_options(words, name, value, tmp_path):
    assert flat(parse_config(words.split()))[name] == value
    key, _, text = words.removeprefix("--").replace("=", " ").partition(" ")
    (tmp_path / "run.yaml").write_text(f"{key}: {text}\n")
    assert flat(parse_config(["--config", str(tmp_path / "run.yaml")]))[name] == value


def test_a_name_of_the_trainer_stands_for_what_transformers_means_by_it():
    """Each alias is an option of TrainingArguments today; none of those with another meaning is one of ours."""
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)} | {"model_name_or_path", "warmup_ratio"}
    fields = [field for section in SECTIONS.values() for field in dataclasses.fields(section)]
    aliases = {alias[2:] for field in fields for alias in field.metadata["aliases"] if "_" in alias}
    assert aliases and aliases <= theirs
    assert set(OTHER_MEANING) <= theirs and not set(OTHER_MEANING) & (aliases | set(flat(Config())))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--bach_size 8", "unrecognized arguments: --bach_size 8 (did you mean --batch_size?);"),
        ("--lora_rnk=8", "(did you mean --lora_rank?);"),
        ("--fp8_scenario dealyed", "(did you mean delayed?);"),
        ("--lr_scheduler_type cosin", "argument --lr_scheduler/--lr_scheduler_type: invalid choice: 'cosin' "),
        ("--qqqqqqq", "unrecognized arguments: --qqqqqqq;"),
        ("--warmup_ratio 0.1", "(--warmup_ratio: use --num_warmup_steps, in optimizer steps);"),
        ("--bf16", "(--bf16: use --mixed_precision bf16);"),
    ],
)
def test_a_mistake_comes_with_what_was_probably_meant(words, said, capsys, tmp_path):
    message = exit_message(capsys, words.split())
    assert said in message and message.endswith("'train_fp8.py --help-all' lists the options.")


def test_an_unknown_key_of_a_file_comes_with_what_was_probably_meant(tmp_path):
    (tmp_path / "run.yaml").write_text("bach_size: 8\n")
    with pytest.raises(UserError, match=r"'bach_size' is not an option \(did you mean --batch_size\?\); --help-all"):
        parse_config(["--config", str(tmp_path / "run.yaml")])


def test_a_key_of_a_file_may_have_hyphens_and_turns_nothing_off_by_its_name(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning-rate: 3e-4\nper-device-train-batch-size: 2\n")
    options = parse_config(["--config", str(file)])
    assert (options.optim.learning_rate, options.data.batch_size) == (3e-4, 2)
    for key in ("no_export", "no-export"):
        file.write_text(f"{key}: true\n")
        with pytest.raises(UserError, match=rf"'{key}' is not an option \(write 'export: false'\);"):
            parse_config(["--config", str(file)])


def test_an_option_by_two_of_its_names_is_refused(tmp_path):
    file, both = tmp_path / "run.yaml", "--batch_size and --per_device_train_batch_size are the same option; give one"
    file.write_text("per_device_train_batch_size: 8\nbatch_size: 4\n")
    with pytest.raises(UserError, match=f"^--config {file}: {both}"):
        parse_config(["--config", str(file)])
    for words in ("--batch_size 4 --per_device_train_batch_size 8", "--per-device-train-batch-size=8 --batch-size 4"):
        with pytest.raises(UserError, match=f"^{both}"):
            parse_config(words.split())
    # The command line overrides the file, and a script's options, whatever the spelling.
    file.write_text("per_device_train_batch_size: 8\n")
    for words in (["--config", str(file), "--batch_size", "4"], ["--batch_size", "2", "--batch-size=4"]):
        assert parse_config(words).data.batch_size == 4


@pytest.mark.slow
def test_every_option_is_read_somewhere():
    """By name, as an attribute or as a string, outside of the declaration and of the checks of its value."""
    names: set[str] = set()
    for path in [*ROOT.glob("*.py"), *(ROOT / "llm_fp8").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        if path == ROOT / "llm_fp8" / "config" / "validation.py":
            continue
        if path == ROOT / "llm_fp8" / "config" / "options.py":
            classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
            tree.body = [node for each in classes for node in each.body if isinstance(node, ast.FunctionDef)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    assert [name for name in flat(Config()) if name not in names] == []


def test_no_option_is_declared_twice():
    names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("argv", "packing"),
    [
        ([], None),
        (["--packing"], True),
        (["--packing", "true"], True),
        (["--packing=false"], False),
        (["--no_packing"], False),
        (["--no-packing"], False),
    ],
)
def test_a_flag_with_three_states(argv, packing):
    assert parse_config(argv).data.packing is packing


@pytest.mark.parametrize("option", ["export", "use_wandb", "packing"])
def test_what_words_behind_a_flag_mean(option, capsys):
    def read(word: str) -> object:
        return flat(parse_config([f"--{option}", word]))[option]

    assert {read(word) for word in ("yes", "True", "t", "Y", "1")} == {True}
    assert {read(word) for word in ("no", "False", "f", "N", "0")} == {False}
    assert "got perhaps but expected one of yes/no, true/false" in exit_message(capsys, [f"--{option}=perhaps"])


def test_packing_follows_use_te_unless_said():
    assert not parse_config([]).packing
    assert parse_config(["--use_te"]).packing
    assert not parse_config(["--use_te", "--no_packing"]).packing


def test_trackers():
    assert parse_config(["--use_wandb"]).run.use_wandb


def test_yaml_is_read_and_the_command_line_overrides_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "learning_rate: 3e-4\nbatch_size: 2\nexport: false\npacking: true\nmax_steps:\nmodel_name: some/model\n"
    )
    options = flat(parse_config(["--config", str(file), "--batch_size", "4", "--no_packing"]))
    assert options == {
        **flat(Config()),
        "learning_rate": 3e-4,
        "batch_size": 4,
        "export": False,
        "packing": False,
        "model_name": "some/model",
    }


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("batchsize: 4\n", "batchsize"),
        ("- 1\n- 2\n", "list"),
        ("a: [1\n", "not valid YAML"),
        ("data:\n  batch_size: 4\n", "'data' is not an option"),
        (b"\xff\xfe\xfa: 1\n", "not valid YAML"),
        ("batch_size: 4\nseed: 1\nbatch_size: 8\n", "'batch_size' is given twice"),
        ("learning-rate: 1e-4\nlearning_rate: 1e-5\n", "'learning_rate' is given twice"),
    ],
)
def test_a_bad_yaml_file_is_named(tmp_path, content, named):
    file = tmp_path / "run.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        parse_config(["--config", str(file)])
    assert str(file) in str(error.value) and named in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_yaml_file_is_named():
    with pytest.raises(UserError, match=r"--config /no/such\.yaml"):
        parse_config(["--config", "/no/such.yaml"])


@pytest.mark.parametrize("content", ["batch_size: eight", "use_te: perhaps", "mixed_precision: fp4"])
def test_a_bad_value_in_the_yaml_file_is_named(tmp_path, capsys, content):
    file = tmp_path / "run.yaml"
    file.write_text(content + "\n")
    message = exit_message(capsys, ["--config", str(file)])
    assert content.partition(":")[0] in message and str(file) in message


def test_a_yaml_option_of_several_values_or_of_no_value_is_named(tmp_path):
    file = tmp_path / "run.yaml"
    for content, words in (("batch_size: [1, 2]", "'batch_size' must have one value"), ("seed: !!int a", "not valid")):
        file.write_text(content + "\n")
        with pytest.raises(UserError, match=words) as error:
            parse_config(["--config", str(file)])
        assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--no_such_option", "1"], "--no_such_option"),
        (["--batch", "4"], "--batch"),  # no abbreviations: --max_s could become another option tomorrow
        (["--batch_size", "x"], "--batch_size"),
        (["--batch_size"], "--batch_size"),
        (["--mixed_precision", "fp4"], "--mixed_precision"),
        (["surplus"], "surplus"),
    ],
)
def test_what_the_parser_refuses_is_one_sentence(capsys, argv, named):
    assert named in exit_message(capsys, argv)


@pytest.mark.parametrize(
    "argv",
    [
        *[
            [f"--{name}", "0"]
            for name in (
                *(
                    "batch_size",
                    "max_seq_length",
                    "num_epochs",
                    "max_steps",
                    "gradient_accumulation_steps",
                    "log_every",
                ),
                *(
                    "save_total_limit",
                    "num_of_samples",
                    "eval_batches",
                    "amax_history_len",
                    "preprocessing_workers",
                    "adam_epsilon",
                ),
            )
        ],
        *[
            [f"--{name}", "-1"]
            for name in (
                *(
                    "learning_rate",
                    "num_warmup_steps",
                    "weight_decay",
                    "max_grad_norm",
                    "save_every",
                    "eval_every",
                    "seed",
                ),
                *("adam_beta1", "adam_beta2", "validation_fraction"),
            )
        ],
        ["--learning_rate", "nan"],
        ["--learning_rate", "inf"],
        ["--adam_beta2", "1"],
        ["--validation_fraction", "1"],
        ["--seed", str(2**32)],
        ["--resume_from", "latest"],
        ["--allow_changed", "learning_rate"],
        ["--wandb_project", "team/project"],
        ["--wandb_project", ""],
        ["--allow_changed", "learning_rate,colour", "--resume_from", "run/checkpoints/step-00000003"],
        ["--streaming"],
        ["--attn_implementation", "eager", "--use_te"],
        ["--cuda_graphs"],
        *(
            ["--cuda_graphs", "--use_te", *more.split()]
            for more in (
                "--no_packing",
                "--gradient_checkpointing",
                "--lora_rank 4",
                "--optimizer adamw_fp32",
                "--mixed_precision fp8 --fp8_recast_weights",
            )
        ),
        ["--max_seq_length", "100", "--batch_size", "3", "--packing"],
        ["--max_seq_length", "100", "--batch_size", "3", "--mixed_precision", "fp8"],
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_is_refused_by_name(argv):
    with pytest.raises(UserError) as error:
        parse_config(argv)
    assert argv[0] in str(error.value)
    assert len(str(error.value).splitlines()) == 1


RUN_FILES = [
    p for p in (Path(__file__).resolve().parents[2] / "configs").glob("*.yaml") if not p.stem.startswith("accelerate_")
]


@pytest.mark.parametrize("path", sorted(RUN_FILES), ids=lambda path: path.stem)
def test_every_example_file_is_a_configuration(path):
    config = parse_config(["--config", str(path)])
    assert config.model.model_name != EMBEDDED
    assert not config.run.use_wandb, "an example runs without an account"


def test_an_option_of_the_other_script_is_told_as_such(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(["--sharding_mode", "ddp"], prog="train_fp8.py")
    assert ended.value.code == 2
    assert "--sharding_mode ddp (options of sharding belong to train_multi_gpu.py)" in capsys.readouterr().err


def test_a_tilde_is_the_home_folder_where_no_shell_replaced_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "options.yaml").write_text("model_name: ~/model\n")
    options = flat(parse_config(["--config=~/options.yaml", "--output_dir=~/run", "--resume_from=~/run/checkpoints/x"]))
    assert [options[name] for name in ("model_name", "output_dir", "resume_from")] == [
        f"{tmp_path}/{name}" for name in ("model", "cache", "run", "run/checkpoints/x")
    ]


def test_so_it_is_in_the_programs_around_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    exporting = export_fp8.parse([str(tmp_path), "--output=~/fp8"])
    merging = merge_adapter.parse(["--adapter=~/lora", "--output=~/merged", "--base_model=~/base"])
    evaluating = evaluate.parse(["--model=~/final", "--output=~/answers.json"])
    comparing = compare_cli.parse(["--runs", "~/one", "--output=~/page"])
    found = [
        *(exporting.output, merging.adapter, merging.output, merging.base_model, *comparing.runs, comparing.output),
        *(evaluating.model_name, evaluating.output),
        memory_tool.parse(["--model_name=~/model"]).model_name,
    ]
    names = "fp8 lora merged base one page final answers.json cache model".split()
    assert list(map(str, found)) == [f"{tmp_path}/{name}" for name in names]
