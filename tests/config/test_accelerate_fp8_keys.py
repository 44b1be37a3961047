"""Every key of fp8_config goes through Accelerate's own launcher and recipes; what each does there is what the table
says.
"""

from __future__ import annotations

import os
from pathlib import Path

import accelerate.accelerator
import accelerate.utils.launch
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from torch import nn

from llm_fp8.config.accelerate_env import FP8_KEYS, PREFIX, apply_launch_settings, backend_elsewhere, idle_keys
from llm_fp8.config.parser import parse_config
from llm_fp8.utils.errors import UserError
from tests.support import made_up_te
from tests.support.small import forget_accelerator, train

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = REPOSITORY / "docs" / "multi_gpu.md"
OTHER = {
    "backend": "TE",
    "fp8_format": "E4M3",
    "amax_history_len": 16,
    "amax_compute_algo": "max",
    "margin": 2,
    "interval": 3,
    "override_linear_precision": [True, True, True],
    "use_autocast_during_eval": True,
    "use_mxfp8_block_scaling": True,
    "opt_level": "O1",
    "pad_inner_dim": False,
    "enable_fsdp_float8_all_gather": False,
}
"""A value of each key that is not the launcher's default."""
HANDLERS = {
    "opt_level": MSAMPRecipeKwargs,
    "pad_inner_dim": AORecipeKwargs,
    "enable_fsdp_float8_all_gather": AORecipeKwargs,
}
BY_NAME = {key.name: key for key in FP8_KEYS}
ACT_IN_ACCELERATE = {"fp8_format", "amax_history_len", "margin", "use_autocast_during_eval", "use_mxfp8_block_scaling"}
"""Keys of which another value than the default changes what Accelerate's own path computes with backend TE."""


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """A function: the variables that the launcher sets for a file with this fp8_config, or for a file of configs/."""
    monkeypatch.setattr(accelerate.utils.launch, "is_fp8_available", lambda: True)  # asks for the machine's libraries

    def variables(config: dict | Path, *options: str) -> dict[str, str]:
        if isinstance(config, dict):
            content = yaml.safe_load((REPOSITORY / "configs" / "accelerate_fp8.yaml").read_text())
            file = tmp_path / "launch.yaml"
            file.write_text(yaml.safe_dump({**content, "fp8_config": config}))
            config = file
        arguments = launch_command_parser().parse_args(["--config_file", str(config), *options, "train_fp8.py"])
        arguments, _, _ = _validate_launch_command(arguments)
        _, made = accelerate.utils.launch.prepare_simple_launcher_cmd_env(arguments)
        return {
            name: value for name, value in made.items() if name.startswith("ACCELERATE_") and name not in os.environ
        }

    return variables


@pytest.fixture
def recipe_of(monkeypatch):
    """A function: the recipe, and whether evaluation runs in it, of a model that Accelerate prepares under these
    variables.
    """
    made_up_te.install(monkeypatch)

    def recipe(environ: dict[str, str]) -> tuple[dict, bool]:
        forget_accelerator()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            model = nn.Sequential(nn.Linear(16, 32))
            accelerator = Accelerator(cpu=True)
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
            forget_accelerator()
        layer = next(module for module in model.modules() if isinstance(module, made_up_te.Linear))
        model(torch.ones(16, 16))
        found = layer.fp8_meta["recipe"]
        model.eval()(torch.ones(16, 16))
        return {"class": type(found).__name__, **vars(found)}, layer.fp8

    return recipe


def test_the_table_names_every_key_that_the_launcher_or_a_recipe_knows(launch):
    options = {
        name.removeprefix("fp8_")
        for name in vars(launch_command_parser().parse_args(["x.py"]))
        if name.startswith("fp8_")
    }
    fields = {
        name for handler in (TERecipeKwargs, MSAMPRecipeKwargs, AORecipeKwargs) for name in handler.__dataclass_fields__
    }
    known = {name.removeprefix("fp8_") for name in options | fields} - {
        "config",
        "module_filter_func",
    }  # these are objects
    assert {key.name.removeprefix("fp8_") for key in FP8_KEYS} == known == {name.removeprefix("fp8_") for name in OTHER}


@pytest.mark.parametrize("name", OTHER)
def test_what_a_key_becomes_and_what_the_launcher_says_without_it(launch, name):
    key, other = BY_NAME[name], OTHER[name]
    bare, given = launch({}), launch({name: other})
    assert {bare.get(variable) for variable in key.variables} == {key.default}
    expected = other if isinstance(other, list) else [other]
    assert [given[variable] for variable in key.variables] == [str(value) for value in expected]
    assert given.keys() - bare.keys() <= set(key.variables)


@pytest.mark.parametrize("name", [name for name in OTHER if name != "backend"])
def test_a_recipes_arguments_take_the_variable(launch, name, monkeypatch):
    made_up_te.install(monkeypatch)
    for variable, value in launch({name: OTHER[name]}).items():
        monkeypatch.setenv(variable, value)
    handler = HANDLERS.get(name, TERecipeKwargs)()
    taken = getattr(handler, name)
    assert (list(taken) if isinstance(taken, tuple) else taken) == OTHER[name]


@pytest.mark.parametrize("name", [name for name in OTHER if name != "backend"])
def test_whether_a_key_acts_in_accelerates_own_path(launch, recipe_of, name):
    before = recipe_of(launch({"backend": "TE"}))
    after = recipe_of(launch({"backend": "TE", name: OTHER[name]}))
    assert (before != after) == (name in ACT_IN_ACCELERATE)


def test_most_recent_never_reaches_the_recipe(launch, recipe_of):
    environ = launch({"backend": "TE", "amax_compute_algo": "most_recent"})
    assert environ["ACCELERATE_FP8_AMAX_COMPUTE_ALGO"] == "most_recent"
    assert recipe_of(environ)[0]["amax_compute_algo"] == "max"


def test_the_case_of_the_backend_matters_upstream_and_not_here(launch, recipe_of):
    environ = launch({}, "--fp8_backend", "te")
    with pytest.raises(ValueError, match="'te' is not a valid FP8BackendType"):
        recipe_of(environ)
    assert "ends in a ValueError; write backend: TE" in str(backend_elsewhere(environ))
    assert apply_launch_settings(parse_config([]), environ).precision.mixed_precision == "fp8"


@pytest.mark.parametrize(("has_torchao", "taken"), [(True, "AO"), (False, "TE")])
def test_without_a_backend_torchao_comes_first_upstream_and_te_here(launch, monkeypatch, has_torchao, taken):
    made_up_te.install(monkeypatch)
    monkeypatch.setattr(accelerate.accelerator, "is_torchao_available", lambda: has_torchao)
    environ = launch({"fp8_format": "HYBRID"})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        assert Accelerator(cpu=True).fp8_backend == taken
    assert "torchao first" in str(backend_elsewhere(environ))
    assert apply_launch_settings(parse_config([]), environ).precision.fp8_backend == "te"


@pytest.mark.parametrize("backend", ["TE", "AO"])
@pytest.mark.parametrize("name", [name for name in OTHER if name != "backend"])
def test_whether_a_key_acts_in_our_scripts_and_what_they_say_where_it_does_not(launch, name, backend):
    key = BY_NAME[name]
    others = {"backend": backend, **({"amax_compute_algo": "max"} if backend == "TE" else {})}
    value = OTHER[name]
    if name == "amax_compute_algo" and backend == "TE":
        value = "most_recent"  # the launcher's default and ours alike could not show that it is read
    flags = parse_config(["--sharding_mode", "fsdp_full"], parallel=True)  # in which weights can be gathered in fp8
    environ = launch({**others, name: value})
    assert idle_keys(launch({"backend": backend})) == {}
    idle = idle_keys(environ)
    plain = apply_launch_settings(flags, launch(others))
    try:
        acts = apply_launch_settings(flags, environ) != plain
    except UserError as error:
        acts = name in str(error)
    assert acts == ((key.idle_with_te if backend == "TE" else key.idle_with_torchao) is None)
    assert list(idle) == [name] * (not acts)


@pytest.mark.parametrize("backend", ["TE", "AO"])
def test_a_key_that_nobody_knows_is_named(launch, backend):
    environ = launch({"backend": backend, "amax_history_length": 16})
    assert environ[f"{PREFIX}AMAX_HISTORY_LENGTH"] == "16"
    assert list(idle_keys(environ)) == ["amax_history_length"]
    assert idle_keys({**environ, "ACCELERATE_MIXED_PRECISION": "bf16"}) == {}


@pytest.mark.slow
def test_a_run_says_which_keys_do_nothing(launch, monkeypatch, capsys, tmp_path):
    """Before it finds that there is no GPU for the rest."""
    for variable, value in launch({"backend": "TE", "interval": 3}).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        train("--max_steps", "1", "--output_dir", str(tmp_path / "run"))
    warning = "WARNING: fp8_config.interval does nothing here: Transformer Engine no longer has it."
    assert capsys.readouterr().out.splitlines() == [warning]


def test_the_files_for_one_gpu_give_the_run_of_the_same_options(launch):
    """In the form of the guide this project started from, `distributed_type: NO` without quotation marks, which YAML
    reads as false.
    """
    for precision in ("fp8", "bf16"):
        environ = launch(REPOSITORY / "configs" / f"accelerate_{precision}.yaml")
        assert idle_keys(environ) == {}
        config = apply_launch_settings(parse_config([]), environ)
        flags = [f"--mixed_precision={precision}"]
        if precision == "fp8":
            flags += ["--fp8_format=HYBRID", "--amax_history_len=1024", "--amax_compute_algo=max", "--fp8_margin=0"]
        assert config == parse_config(flags)
        assert not [name for name in environ if name.startswith((PREFIX, "ACCELERATE_MIXED", "ACCELERATE_DYNAMO"))]


def test_the_document_names_every_key():
    text = DOCUMENT.read_text()
    assert [key.name for key in FP8_KEYS if f"| `{key.name}` |" not in text] == []
