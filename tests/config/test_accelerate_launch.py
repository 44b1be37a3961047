"""What accelerate launch asks for becomes the same settings as our flags, and leaves the environment."""

from __future__ import annotations

import json

import pytest

from llm_fp8.config.accelerate_env import (
    apply_launch_settings,
    merge_launch_settings,
    require_launched,
    require_single_process,
    take_precision_settings,
    take_sharding_settings,
)
from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.parser import parse_config, parse_launch
from llm_fp8.utils.errors import UserError

FP8 = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_FP8_FORMAT": "HYBRID",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent",
    "ACCELERATE_FP8_MARGIN": "1",
    "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "False",
}


def test_fp8_settings_are_read_and_removed():
    environ = {**FP8, "PATH": "/bin"}
    settings = take_precision_settings(environ)
    assert environ == {"PATH": "/bin"}
    merged = merge_launch_settings(PrecisionConfig(), settings)
    assert merged == PrecisionConfig(
        mixed_precision="fp8", fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="most_recent", fp8_margin=1
    )


def test_mxfp8_is_a_scenario_and_drops_the_launchers_delayed_defaults():
    settings = take_precision_settings({**FP8, "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "true"})
    assert settings == {"mixed_precision": "fp8", "fp8_scenario": "mxfp8", "fp8_format": "HYBRID"}


def test_a_bf16_launch_sheds_every_fp8_variable():
    environ = {**FP8, "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert take_precision_settings(environ) == {"mixed_precision": "bf16"}
    assert environ == {}


def test_no_means_nothing_was_said():
    assert take_precision_settings({"ACCELERATE_MIXED_PRECISION": "no"}) == {}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (PrecisionConfig(mixed_precision="bf16"), "--mixed_precision bf16"),
        (PrecisionConfig(mixed_precision="fp8", amax_history_len=4), "--amax_history_len 4"),
    ],
)
def test_a_flag_that_contradicts_the_launcher_is_an_error(flags, named):
    with pytest.raises(UserError, match=named):
        merge_launch_settings(flags, take_precision_settings(dict(FP8)))


def test_a_flag_that_agrees_is_fine():
    flags = PrecisionConfig(mixed_precision="fp8", amax_history_len=16)
    assert merge_launch_settings(flags, take_precision_settings(dict(FP8))).amax_history_len == 16


@pytest.mark.parametrize(("variable", "value"), [("BACKEND", "MSAMP"), ("OVERRIDE_WGRAD", "True")])
def test_what_cannot_be_honoured_is_an_error(variable, value):
    with pytest.raises(UserError, match="fp8_config"):
        take_precision_settings({**FP8, f"ACCELERATE_FP8_{variable}": value})


AO = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_BACKEND": "ao",
    "ACCELERATE_FP8_FORMAT": "HYBRID",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent",
    "ACCELERATE_FP8_MARGIN": "0",
    "ACCELERATE_FP8_INTERVAL": "1",
    "ACCELERATE_FP8_OPT_LEVEL": "O2",
    "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "False",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "True",
    "ACCELERATE_FP8_PAD_INNER_DIM": "True",
}
"""What the launcher exports for 'backend: AO' and nothing else."""


def test_backend_ao_is_torchao():
    environ = {**AO, "PATH": "/bin"}
    assert take_precision_settings(environ) == {
        "mixed_precision": "fp8",
        "fp8_backend": "torchao",
        "fp8_all_gather": True,
    }
    assert environ == {"PATH": "/bin"}
    off = {
        **AO,
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "False",
        "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "False",
    }
    assert take_precision_settings(off) == {"mixed_precision": "fp8", "fp8_backend": "torchao"}


@pytest.mark.parametrize(
    ("variable", "value"),
    [("AMAX_HISTORY_LEN", "16"), ("FORMAT", "E4M3"), ("MARGIN", "1"), ("USE_MXFP8_BLOCK_SCALING", "true")],
)
def test_settings_of_transformer_engine_with_backend_ao_are_errors(variable, value):
    with pytest.raises(
        UserError, match=f"fp8_config sets (fp8_)?{variable.lower()} to {value}, .* no effect with backend AO"
    ):
        take_precision_settings({**AO, f"ACCELERATE_FP8_{variable}": value})


# ---- sharding ----

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
FSDP1 = {**FSDP, "FSDP_VERSION": "1"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage"}
MESH = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
}
LAUNCHED = {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
PLAIN = {
    **LAUNCHED,
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
}


@pytest.mark.parametrize(
    ("variables", "words", "gathers"),
    [
        (FSDP, [], True),
        (FSDP, ["--fp8_backend=torchao", "--fp8_scenario=rowwise"], False),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, [], False),
        ({}, [], False),
        ({}, ["--sharding_mode=fsdp_grad"], True),
    ],
    ids=["fsdp", "rowwise", "offload", "ddp", "flag"],
)
def test_the_launchers_default_gathers_in_fp8_where_that_can_be(variables, words, gathers):
    config, _ = parse_launch(words, {**PLAIN, **AO, **variables}, parallel=True)
    assert (config.precision.mixed_precision, config.precision.fp8_backend) == ("fp8", "torchao")
    assert config.parallel.fp8_all_gather == gathers


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (FSDP, {"sharding_mode": "fsdp_full"}),
        ({**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"sharding_mode": "fsdp_grad"}),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, {"sharding_mode": "fsdp_offload"}),
        (
            {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {"sharding_mode": "fsdp_full", "gradient_checkpointing": True},
        ),
        (
            {**FSDP, "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,Qwen2DecoderLayer"},
            {"sharding_mode": "fsdp_full"},
        ),
        ({"ACCELERATE_USE_FSDP": "1"}, {"sharding_mode": "fsdp_full"}),
        (FSDP1, {"sharding_mode": "fsdp_full"}),
        ({**FSDP1, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, {"sharding_mode": "fsdp_grad"}),
        ({**FSDP1, "FSDP_SHARDING_STRATEGY": "2"}, {"sharding_mode": "fsdp_grad"}),
        ({**FSDP1, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {"sharding_mode": "ddp"}),
        ({**FSDP1, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, {"sharding_mode": "fsdp_hybrid"}),
        (DEEPSPEED, {"sharding_mode": "deepspeed_2"}),
        (
            {
                **DEEPSPEED,
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                "ACCELERATE_GRADIENT_CLIPPING": "0.5",
            },
            {"sharding_mode": "deepspeed_3", "gradient_accumulation_steps": 4, "max_grad_norm": 0.5},
        ),
        ({**FSDP, **MESH}, {"sharding_mode": "fsdp_full"}),
        ({**FSDP, **MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"}, {"sharding_mode": "fsdp_full"}),
        (
            {**FSDP, **MESH, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"},
            {"sharding_mode": "fsdp_hybrid", "hybrid_shard_size": 4},
        ),
        (
            {
                **FSDP,
                **MESH,
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
                "PARALLELISM_CONFIG_CP_SIZE": "4",
                "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather",
            },
            {"sharding_mode": "fsdp_full", "context_parallel_size": 4},
        ),
        ({**MESH, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "8"}, {"sharding_mode": "ddp"}),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, {}),
    ],
)
def test_sharding_settings_are_read_and_removed(variables, expected):
    environ = {**LAUNCHED, **variables}
    assert take_sharding_settings(environ) == expected
    assert environ == LAUNCHED


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2"}, "Megatron-LM"),
        ({**FSDP, **DEEPSPEED}, "at once"),
        ({**FSDP, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy"),
        ({**FSDP, "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,Embedding"}, "Embedding"),
        ({**FSDP, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "fsdp_sharding_strategy"),
        ({**FSDP, "FSDP_VERSION": "3"}, "fsdp_version"),
        ({**FSDP, "FSDP_VERSION": "two"}, "fsdp_version"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "perhaps"}, "fsdp_offload_params"),
        ({**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "fsdp_activation_checkpointing_offload"),
        ({**FSDP, "FSDP_IGNORED_MODULES": "lm_head"}, "fsdp_ignored_modules"),
        ({**FSDP, "FSDP_NEW_IN_SOME_VERSION": "1"}, "FSDP_NEW_IN_SOME_VERSION"),
        ({**FSDP1, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward"),
        ({**FSDP1, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"}, "HYBRID_SHARD_ZERO2"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "stage 0"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offload_optimizer_device"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "MixtralSparseMoeBlock"}, "moe_layer"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "/nowhere/ds.json"}, "/nowhere/ds.json"),
        ({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "some"}, "gradient_clipping"),
        ({**FSDP, **MESH, "PARALLELISM_CONFIG_TP_SIZE": "2"}, "tp_size"),
        ({**FSDP, **MESH, "PARALLELISM_CONFIG_SP_SIZE": "2"}, "sp_size"),
        ({**FSDP, **MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}, "8 were started"),
        ({**FSDP, **MESH, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "8"}, "nothing to shard over"),
        ({**MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"}, "distributed_type: FSDP"),
        (
            {**FSDP, **MESH, "PARALLELISM_CONFIG_CP_SIZE": "8", "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"},
            "cp_comm_strategy",
        ),
        (
            {
                **FSDP,
                **MESH,
                "FSDP_RESHARD_AFTER_FORWARD": "false",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
            },
            "dp_replicate_size",
        ),
    ],
)
def test_sharding_that_cannot_be_honoured_is_an_error(variables, named):
    environ = {**LAUNCHED, **variables}
    with pytest.raises(UserError, match=named):
        take_sharding_settings(environ)
    assert environ == LAUNCHED


@pytest.mark.parametrize("stage", [1, 3])
def test_a_deepspeed_file_says_the_stage(tmp_path, stage):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    settings = take_sharding_settings(
        {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    )
    assert settings == {"sharding_mode": f"deepspeed_{stage}", "deepspeed_config": str(file)}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"zero_optimization": {"stage": "auto"}}', '{"zero_optimization": {"stage": 0}}']
)
def test_a_deepspeed_file_without_a_stage_is_an_error(tmp_path, text):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"ds\.json"):
        take_sharding_settings({**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)})


# ---- the whole configuration ----


def config_of(*options):
    return parse_config(list(options), parallel=True)


def launched(*options, **variables):
    return parse_launch(list(options), {**PLAIN, **variables}, parallel=True)[0]


def test_every_section_takes_its_part_of_the_launch_configuration():
    environ = {
        **PLAIN,
        **FP8,
        **FSDP,
        **MESH,
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "PARALLELISM_CONFIG_CP_SIZE": "8",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_USE_CPU": "True",
    }
    config = apply_launch_settings(config_of("--batch_size", "2"), environ)
    assert environ == {**LAUNCHED, "ACCELERATE_USE_CPU": "True"}  # which is Accelerate's to act on
    assert (config.parallel.sharding_mode, config.parallel.context_parallel_size) == ("fsdp_full", 8)
    assert config.precision.mixed_precision == "fp8" and config.precision.amax_history_len == 16
    assert config.model.gradient_checkpointing and config.optim.gradient_accumulation_steps == 4
    assert config.data.batch_size == 2


def test_torchrun_alone_changes_nothing():
    config, environ = config_of("--sharding_mode", "fsdp_grad"), dict(LAUNCHED)
    assert apply_launch_settings(config, environ) == config
    assert environ == LAUNCHED


def test_plain_multi_gpu_means_ddp_unless_a_flag_says_otherwise():
    assert apply_launch_settings(config_of(), dict(PLAIN)).parallel.sharding_mode == "ddp"
    assert (
        apply_launch_settings(config_of("--sharding_mode=fsdp_full"), dict(PLAIN)).parallel.sharding_mode == "fsdp_full"
    )
    assert apply_launch_settings(config_of(), {**PLAIN, "WORLD_SIZE": "1"}).parallel.sharding_mode == "auto"


@pytest.mark.parametrize(
    ("options", "variables", "named"),
    [
        (["--sharding_mode=ddp"], FSDP, "--sharding_mode ddp .*asks for fsdp_full"),
        (
            ["--context_parallel_size=2"],
            {**FSDP, **MESH, "PARALLELISM_CONFIG_CP_SIZE": "8"},
            "--context_parallel_size 2 .*asks for 8",
        ),
        (
            ["--gradient_accumulation_steps=2"],
            {**DEEPSPEED, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "--gradient_accumulation_steps 2 .*asks for 4",
        ),
        ([], {**FP8, "ACCELERATE_FP8_FORMAT": "E5M2"}, "fp8_format E5M2"),
        ([], {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "INDUCTOR"),
    ],
)
def test_a_flag_and_a_file_that_contradict_each_other_are_both_named(options, variables, named):
    with pytest.raises(UserError, match=named):
        apply_launch_settings(config_of(*options), {**PLAIN, **variables})


@pytest.mark.parametrize(
    ("option", "variables"),
    [
        ("--sharding_mode=auto", FSDP),
        ("--max_grad_norm=1.0", {**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "0.5"}),
        ("--gradient_accumulation_steps=1", {**DEEPSPEED, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
        ("--gradient_checkpointing=false", {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}),
        ("--fp8_scenario=default", {**FP8, "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "true"}),
        ("--fp8_backend=te", AO),
    ],
)
def test_a_flag_that_repeats_the_default_contradicts_the_file_as_any_other(tmp_path, option, variables):
    name, value = option.removeprefix("--").split("=")
    named = f"--{name} {value} contradicts"
    with pytest.raises(UserError, match=f"(?i){named}"):
        launched(option, **variables)
    file = tmp_path / "options.yaml"
    file.write_text(f"{name}: {value}\n")
    with pytest.raises(UserError, match=f"(?i){named}"):
        launched(f"--config={file}", **variables)


def test_a_default_that_only_the_launcher_chose_gives_way_to_a_flag():
    assert launched("--sharding_mode=auto").parallel.sharding_mode == "auto"
    assert not launched("--fp8_all_gather=false", **FSDP, **AO).parallel.fp8_all_gather
    options = launched("--amax_compute_algo=max", "--fp8_format=E4M3", **FP8).precision
    assert (options.amax_compute_algo, options.fp8_format, options.amax_history_len) == ("max", "E4M3", 16)


@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
def test_another_recipe_sheds_the_defaults_of_delayed_scaling(algorithm):
    """The launcher exports them whatever the file says, and they would be refused beside --fp8_scenario current."""
    defaults = {
        **FP8,
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
        "ACCELERATE_FP8_MARGIN": "0",
        "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": algorithm,
    }
    config = launched("--fp8_scenario=current", **defaults)
    assert config.precision == PrecisionConfig(mixed_precision="fp8", fp8_scenario="current")
    with pytest.raises(UserError, match="--amax_history_len has no effect with --fp8_scenario"):
        launched("--fp8_scenario=current", **FP8)  # a history of 16, which is no default


# ---- how a process was started ----


def test_train_multi_gpu_needs_a_launcher():
    require_launched(LAUNCHED)
    with pytest.raises(UserError, match="torchrun --nproc_per_node"):
        require_launched({})
    with pytest.raises(UserError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        require_launched({"WORLD_SIZE": "2", "RANK": "0"})


@pytest.mark.parametrize(
    ("variables", "named"), [({"WORLD_SIZE": "2"}, "started 2"), (FSDP, "FSDP"), (DEEPSPEED, "DEEPSPEED")]
)
def test_train_fp8_is_one_process(variables, named):
    require_single_process({"WORLD_SIZE": "1", "ACCELERATE_USE_FSDP": "false"})
    with pytest.raises(UserError, match=f"{named}.*train_multi_gpu.py"):
        require_single_process(variables)
