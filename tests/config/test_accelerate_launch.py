"""Variables of `accelerate launch` become our options and are removed. Accelerate's own code sets the variables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import accelerate.utils.launch
import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from llm_fp8.config.accelerate_env import DEFAULTS, PREFIX, apply_launch_settings
from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config, parse_launch
from llm_fp8.utils.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "8"}


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """Return a function that takes entries of a launch file and returns the variables that `accelerate launch` sets."""
    monkeypatch.setattr(accelerate.utils.launch, "is_fp8_available", lambda: True)  # whatever is installed here

    def variables(*, kind: str = "MULTI_GPU", processes: int = 8, **entries: Any) -> dict[str, str]:
        content = yaml.safe_load((REPOSITORY / "configs" / "accelerate_bf16_ddp.yaml").read_text())
        file = tmp_path / "launch.yaml"
        file.write_text(yaml.safe_dump({**content, "distributed_type": kind, "num_processes": processes, **entries}))
        arguments = launch_command_parser().parse_args(["--config_file", str(file), "train_multi_gpu.py"])
        arguments, _, _ = _validate_launch_command(arguments)
        arguments.deepspeed_fields_from_accelerate_config = "zero_stage"  # as the launcher's main function does
        deepspeeds = arguments.use_deepspeed and accelerate.utils.launch.prepare_deepspeed_cmd_env(arguments)[1]
        environ = deepspeeds or accelerate.utils.launch.prepare_multi_gpu_env(arguments)
        changed = {name: value for name, value in environ.items() if os.environ.get(name) != value}
        return {**LAUNCHED, **changed, "WORLD_SIZE": str(processes)}

    return variables


def options(config: Config) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    defaults = Config().options
    return {name: value for name, value in config.options.items() if value != defaults[name]}


def options_of_launch(environ: dict[str, str], *argv: str) -> dict[str, Any]:
    """Parse `argv` and `environ`. Check that Accelerate's variables are removed from `environ`. Return the options that
    differ from their defaults, except the learning rate.
    """
    config = parse_launch(list(argv), environ, parallel=True)
    assert not [name for name in environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]
    return {name: value for name, value in options(config).items() if name != "learning_rate"}


TE = {"backend": "TE", "fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "max"}
FSDP = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}
IN_FP8 = {"mixed_precision": "fp8", "sharding_mode": "ddp"}
FULL = {"mixed_precision": "bf16", "sharding_mode": "fsdp_full"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, {"mixed_precision": "bf16", "sharding_mode": "ddp"}),
        ({"mixed_precision": "no"}, {"sharding_mode": "ddp"}),
        (
            {"mixed_precision": "fp8", "fp8_config": TE},
            {**IN_FP8, "fp8_format": "E4M3", "amax_history_len": 16, "amax_compute_algo": "max"},
        ),
        (
            {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "use_mxfp8_block_scaling": True}},
            {**IN_FP8, "fp8_scenario": "mxfp8"},
        ),
        ({"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}}, {**IN_FP8, "fp8_backend": "torchao"}),
        (
            {"kind": "FSDP", "fsdp_config": FSDP, "mixed_precision": "fp8", "fp8_config": {"backend": "AO"}},
            {**FULL, "mixed_precision": "fp8", "fp8_backend": "torchao", "fp8_params": True},
        ),
        ({"kind": "FSDP", "fsdp_config": FSDP}, FULL),
        (
            {"kind": "FSDP", "fsdp_config": {**FSDP, "fsdp_activation_checkpointing": True}},
            {**FULL, "gradient_checkpointing": 1},
        ),
        (
            {"kind": "FSDP", "fsdp_config": {**FSDP, "fsdp_reshard_after_forward": False}},
            {**FULL, "sharding_mode": "fsdp_grad"},
        ),
        (
            {"kind": "FSDP", "fsdp_config": {**FSDP, "fsdp_offload_params": True}},
            {**FULL, "sharding_mode": "fsdp_offload"},
        ),
        (
            {"kind": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 0.5}},
            {"mixed_precision": "bf16", "sharding_mode": "deepspeed_3", "max_grad_norm": 0.5},
        ),
    ],
    ids=str,
)
def test_launch_file_becomes_options(launch, entries, expected, capsys):
    assert options_of_launch(launch(**entries)) == expected
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"fp8_config": {"backend": "MSAMP"}, "mixed_precision": "fp8"}, "backend"),
        ({"fp8_config": {**TE, "fp8_format": "E5M2"}, "mixed_precision": "fp8"}, "E5M2"),
        ({"fp8_config": {**TE, "margin": 1}, "mixed_precision": "fp8"}, "fp8_config.margin 1"),
        ({"fp8_config": {**TE, "made_up": 4}, "mixed_precision": "fp8"}, "fp8_config.made_up 4"),
        (
            {"kind": "FSDP", "fsdp_config": FSDP, "parallelism_config": {"parallelism_config_dp_shard_size": 8}},
            "parallel",
        ),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo"),
        ({"kind": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "fsdp_version"),
        ({"kind": "FSDP", "fsdp_config": {**FSDP, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}}, "auto_wrap"),
        (
            {"kind": "FSDP", "fsdp_config": {**FSDP, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True}},
            "offload",
        ),
        ({"kind": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}}, "stage 0"),
        ({"kind": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}, "offload"),
        ({"kind": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "/no/ds.json"}}, "/no/ds.json"),
    ],
    ids=str,
)
def test_unsupported_entry_is_refused(launch, entries, message):
    with pytest.raises(UserError, match=message):
        options_of_launch(launch(**entries))


def test_entry_that_the_recipe_ignores_is_a_warning_of_the_first_process(launch, capsys):
    environ = launch(mixed_precision="fp8", fp8_config={"backend": "AO", "amax_history_len": 16})
    for rank in range(2):
        assert "amax_history_len" not in options_of_launch({**environ, "RANK": str(rank)})
        assert capsys.readouterr().out.startswith("WARNING: fp8_config.amax_history_len of ") == (rank == 0)


def test_defaults_have_every_fp8_key_of_the_launcher():
    options = vars(launch_command_parser().parse_args(["x.py"]))
    known = {name.removeprefix(PREFIX).lower() for name in DEFAULTS if name.startswith(PREFIX)}
    keys = {name.removeprefix("fp8_") for name in options if name.startswith("fp8_")}
    assert keys - known == {"override_linear_precision"}


def test_deepspeed_file_determines_the_stage(launch, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    settings = options_of_launch(launch(kind="DEEPSPEED", deepspeed_config={"deepspeed_config_file": str(file)}))
    assert (settings["sharding_mode"], settings["deepspeed_config"]) == ("deepspeed_1", str(file))


def test_flags_override_the_launchers_defaults_but_not_its_explicit_settings(launch):
    def environ() -> dict[str, str]:
        return launch(kind="FSDP", fsdp_config=FSDP, mixed_precision="fp8", fp8_config={"backend": "TE"})

    assert options_of_launch(environ(), "--amax_compute_algo=max")["amax_compute_algo"] == "max"
    assert "amax_compute_algo" not in options_of_launch(environ(), "--fp8_scenario=current")
    assert options_of_launch(launch(), "--sharding_mode=fsdp_full")["sharding_mode"] == "fsdp_full"
    assert options_of_launch(environ(), "--sharding_mode=fsdp_hybrid")["sharding_mode"] == "fsdp_hybrid"
    for flag in ("--mixed_precision=bf16", "--sharding_mode=ddp", "--mixed_precision=no"):
        with pytest.raises(UserError, match=flag.partition("=")[0]):
            options_of_launch(environ(), flag)


def test_script_must_match_the_launcher_and_ranks_must_be_valid():
    with pytest.raises(UserError, match="torchrun"):
        parse_launch([], {}, parallel=True)
    for environ in ({"WORLD_SIZE": "2", "RANK": "0"}, {"ACCELERATE_USE_FSDP": "true"}):
        with pytest.raises(UserError, match="train_multi_gpu.py"):
            parse_launch([], environ)
    for name, value in {"RANK": "8", "LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "9", "WORLD_SIZE": "x"}.items():
        with pytest.raises(UserError, match=f"^{name} '{value}'"):
            parse_launch([], {**LAUNCHED, "WORLD_SIZE": "8", name: value}, parallel=True)
    one_process = {"RANK": "0", "WORLD_SIZE": "1"}
    assert parse_launch([], one_process) == parse_config([]) and one_process == {}


def test_single_variable_counts_as_an_option():
    config = apply_launch_settings(Config(), {"ACCELERATE_MIXED_PRECISION": "fp8"}, ())
    assert options(config) == {"mixed_precision": "fp8"}
