"""The verifier's look through DeepSpeed's and Accelerate's files: each entry that the guides warn of is named, with
what it does.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from llm_fp8.tools.verify import configs
from llm_fp8.tools.verify.cli import parse
from llm_fp8.utils.errors import UserError

ZERO = {"zero_optimization": {"stage": 1, "overlap_comm": False, "contiguous_gradients": True}}
TE = {"backend": "TE", "fp8_format": "HYBRID", "amax_compute_algo": "max", "amax_history_len": 1024}
GUIDE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "fp8", "num_processes": 1,
    "fp8_config": {**TE, "override_linear_precision": [False, False, False], "use_autocast_during_eval": False}
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """A function: a file with these contents."""

    def write(content: object, name: str = "") -> Path:
        is_json = isinstance(content, dict) and "compute_environment" not in content
        path = tmp_path / (name or ("ds.json" if is_json else "accelerate.yaml"))
        path.write_text(
            content if isinstance(content, str) else json.dumps(content) if is_json else yaml.safe_dump(content)
        )
        return path

    return write


def found_in(path: Path) -> list[tuple[str, str]]:
    return [(finding.level, finding.says) for finding in configs.findings(path, configs.required_kind(path))]


def test_the_corrected_file_of_the_guides_is_fine(written):
    assert found_in(written(ZERO)) == []


def test_every_broken_entry_of_a_deepspeed_file_is_named(written):
    broken = {
        **ZERO, "fp8": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_allreduce_op": "sum", "bf16": {"enabled": False}, "train_batch_size": 64
    }  # fmt: skip
    broken["zero_optimization"] = {**ZERO["zero_optimization"], "bucket": 5}
    found = found_in(written(broken))
    assert {level for level, _ in found} == {"refused"}
    named = [says.partition(":")[0].strip('"') for _, says in found]
    assert named == [
        "fp8",
        "gradient_allreduce_op",
        "bf16.enabled",
        "communication_data_type",
        "data_types.grad_accum_dtype",
        "zero_optimization.bucket",
    ]
    assert (
        "fp32 would double that traffic"
        in dict(zip(named, (says for _, says in found), strict=True))["communication_data_type"]
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"zero_optimization": {"stage": 0}}, "the deepspeed modes are stages 1, 2 and 3"),
        ({"bf16": {"enabled": True}}, "has no section"),
        ({**ZERO, "bf16": True}, '"bf16": it must be a section'),
    ],
)
def test_a_deepspeed_file_of_another_form(written, content, words):
    ((level, says),) = found_in(written(content))
    assert level == "refused" and words in says


def with_fp8(**entries: object) -> dict[str, object]:
    """The guide's file with these entries; None: without."""
    return {**GUIDE, "fp8_config": {key: value for key, value in {**TE, **entries}.items() if value is not None}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GUIDE, []),
        (
            with_fp8(use_autocast_during_eval=True, amax_history_length=16),
            [
                ("no effect", "fp8_config.amax_history_length: neither accelerate nor these scripts know it"),
                ("no effect", "fp8_config.use_autocast_during_eval: evaluation runs in the precision of training"),
            ],
        ),
        (
            {**GUIDE, "fp8_config": {"backend": "AO", "pad_inner_dim": False}},
            [("no effect", "fp8_config.pad_inner_dim: layers whose sizes would need padding")],
        ),
        (with_fp8(), []),
        (with_fp8(backend=None), [("elsewhere", "fp8_config.backend is left out: ")]),
        ({**GUIDE, "fp8_config": None}, [("elsewhere", "torchao first, where it is installed; write backend: TE")]),
        (with_fp8(backend="te"), [("elsewhere", "fp8_config.backend te is in small letters: ")]),
        ({**GUIDE, "fp8_config": {"backend": "ao"}}, [("elsewhere", "ends in a ValueError; write backend: AO")]),
        ({**with_fp8(backend=None), "mixed_precision": "bf16"}, [("no effect", "so no fp8 runs")]),
        (
            {**GUIDE, "mixed_precision": "bf16", "fp8_config": TE},
            [("no effect", "fp8_config: mixed_precision is bf16, so no fp8 runs")],
        ),
        (with_fp8(override_linear_precision=[True, False, False]), [("refused", "override_linear_precision")]),
        (with_fp8(backend="MSAMP"), [("refused", "asks for backend MSAMP")]),
        ({**with_fp8(), "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, [("refused", "asks for torch.compile")]),
        ({**with_fp8(), "precision": "fp8"}, [("refused", "accelerate launch refuses it (The config file at")]),
        (
            {
                **with_fp8(),
                "distributed_type": "FSDP",
                "num_processes": 2,
                "fsdp_config": {
                    "fsdp_version": 2,
                    "fsdp_backward_prefetch": "BACKWARD_PRE",
                    "fsdp_offload_params": False,
                },
            },
            [("no effect", "fsdp_config.fsdp_backward_prefetch: FSDP2 prefetches by itself")],
        ),
    ],
    ids=[
        "guide",
        "idle",
        "torchao",
        "te",
        "no_backend",
        "no_fp8_config",
        "small_te",
        "small_ao",
        "no_backend_bf16",
        "bf16",
        "override",
        "msamp",
        "dynamo",
        "unknown",
        "fsdp",
    ],
)
def test_entries_of_an_accelerate_file(written, content, expected):
    found = found_in(written(content))
    assert [level for level, _ in found] == [level for level, _ in expected]
    for (_, says), (_, words) in zip(found, expected, strict=True):
        assert words in says


def test_the_deepspeed_file_that_an_accelerate_file_names_is_looked_through_too(written):
    deepspeed = written({**ZERO, "fp8": {"enabled": True}})
    section = {"deepspeed_config_file": str(deepspeed), "zero3_init_flag": False}
    file = written(
        {
            **GUIDE,
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "fp8_config": None,
            "deepspeed_config": section,
        }
    )
    found = configs.findings(file, "Accelerate")
    assert [(finding.path, finding.says.partition(":")[0]) for finding in found] == [
        (file, "deepspeed_config.zero3_init_flag"),
        (deepspeed, '"fp8"'),
    ]


def test_a_named_file_fails_and_one_that_lies_there_is_a_warning(written, tmp_path):
    path = written({**ZERO, "fp8": {}})
    found = {path: configs.findings(path, "DeepSpeed")}
    named = configs.judge(found, {})
    assert named.status == "failed" and str(path) in named.fixes[0] and '"fp8"' in named.summary
    assert configs.judge({}, found).status == "warning"
    harmless = {path: [configs.Finding(path, "no effect", "x: does nothing")]}
    assert configs.judge(harmless, {}).status == "warning" and configs.judge({}, harmless).status == "passed"


def test_a_backend_that_a_trainer_takes_for_another_is_a_warning_with_its_fix(written):
    path = written(with_fp8(backend="te"))
    found = {path: configs.findings(path, "Accelerate")}
    named = configs.judge(found, {})
    assert named.status == "warning" and named.fixes[0].endswith("write backend: TE")
    assert configs.judge({}, found).status == "passed"


def test_what_lies_in_the_folder(written, tmp_path):
    """Other YAML files, a run's options among them, are not about this; one that cannot be read is said."""
    written("batch_size: 8\nmixed_precision: fp8\n", "run.yaml")
    written("{'no json", "broken.json")
    named = written(ZERO, "named.json")
    found = configs.findings_in(tmp_path, [named])
    assert [path.name for path in found] == ["broken.json"] and "is neither JSON nor YAML" in found[
        tmp_path / "broken.json"
    ][0].says


def test_this_repositorys_own_files_are_fine():
    found = configs.findings_in(configs.FOLDER, [])
    assert len(found) >= 7 and not [
        finding for of_file in found.values() for finding in of_file if finding.level == "refused"
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("a: [1", "neither JSON nor YAML"),
        ("batch_size: 8\n", "neither a DeepSpeed file"),
    ],
)
def test_a_file_that_is_none_of_them_is_the_users_mistake(written, tmp_path, content, words):
    path = tmp_path / "none.yaml" if content is None else written(content, "some.yaml")
    with pytest.raises(UserError, match=words) as mistake:
        parse(["--config_file", str(path)], "")
    assert str(path) in str(mistake.value) and "\n" not in str(mistake.value)
