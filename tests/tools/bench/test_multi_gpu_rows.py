"""The benchmark in several processes: variants, rows, variants that fail and those that follow them. gloo on the CPU,
started by torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llm_fp8.config.options import ParallelConfig
from llm_fp8.tools.bench import launch
from llm_fp8.tools.bench.launch import ResultsFile, summarise
from llm_fp8.tools.bench.variants import parse_variant, parse_variants
from llm_fp8.tools.bench.worker import ENDED_IN_SILENCE
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.small import tiny_config

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]


@pytest.fixture(scope="module")
def architecture(tmp_path_factory):
    """A folder with the config.json of a tiny model and nothing else."""
    folder = tmp_path_factory.mktemp("architecture") / "tiny"
    tiny_config().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def start(warm_python):
    """A function: start a launch that measures with these options, in processes that have their imports; the launcher
    has them too, unless its children are to be found.
    """

    def start(output: Path, *options: str, max_restarts: int = 0, python: str = warm_python) -> subprocess.Popen[str]:
        launcher = [python, *TORCHRUN, "--nproc_per_node=2", f"--max_restarts={max_restarts}"]
        return subprocess.Popen(
            [*launcher, "scripts/benchmark_multi_gpu.py", f"--output={output}", *options],
            cwd=ROOT,
            env={**os.environ, "PYTHON_EXEC": warm_python},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed; it has to end well."""
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
def test_rows_of_every_arm_and_a_new_start_behind_one_that_fails(tmp_path, architecture, start):
    """The TE decoder needs a GPU, so its variant fails; the one after it is measured by the processes of the second
    start.
    """
    path = tmp_path / "result.json"
    ours = "fsdp_full:bf16:swap,fsdp_full:bf16,ddp:bf16:swap,ddp:hf_bf16,deepspeed_1:bf16:swap,deepspeed_3:bf16:swap"
    variants = f"{ours},deepspeed_1:hf_bf16,deepspeed_3:hf_bf16"
    printed = ended(
        start(
            path, f"--workloads={architecture}:2x64x2", f"--arms={variants}", "--steps=4", "--warmup=1", max_restarts=1
        )
    )
    record = json.loads(path.read_text())
    assert record["measuring"] is None and record["provenance"]["command"][0] == "scripts/benchmark_multi_gpu.py"
    rows = record["rows"]
    assert [row["arm"] for row in rows] == variants.split(",")
    assert [row["mode"] for row in rows] == [
        "fsdp_full",
        "fsdp_full",
        "ddp",
        "ddp",
        *["deepspeed_1", "deepspeed_3"] * 2,
    ]
    failed = rows.pop(1)
    assert "--use_te needs an NVIDIA GPU" in failed["failed"] and "tokens_per_s" not in failed
    assert printed.count("failed: --use_te needs") == 1
    for row in rows:
        assert row["workload"] == f"{architecture}:2x64x2" and row["num_gpus"] == 2
        assert len(row["step_times_s"]) == 3 and len(row["median_step_time_s_by_rank"]) == 2
        median = max(row["median_step_time_s_by_rank"])
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 64 * 2 / median)
        assert row["tokens_per_s_per_gpu"] == pytest.approx(row["tokens_per_s"] / 2)
        assert row["tokens_per_s_slowest"] <= row["tokens_per_s"] <= row["tokens_per_s_fastest"]
        # Random weights on 1024 equally likely tokens: about ln 1024.
        assert row["losses"][0] == pytest.approx(6.93, abs=0.1) and row["model_tflops"] > 0 and row["build_s"] > 0
    by_arm = {row["arm"]: row["losses"] for row in rows}
    for variant in ("fsdp_full:bf16:swap", "deepspeed_1:bf16:swap", "deepspeed_3:bf16:swap"):
        assert by_arm[variant][0] == pytest.approx(by_arm["ddp:bf16:swap"][0], rel=2e-4), (
            "the same weights and tokens at first"
        )
    for mode in ("deepspeed_1", "deepspeed_3"):
        assert by_arm[f"{mode}:bf16:swap"] == pytest.approx(by_arm["ddp:bf16:swap"], rel=2e-3), (
            "the same training but for rounding"
        )
    assert by_arm["deepspeed_1:hf_bf16"] == pytest.approx(by_arm["deepspeed_3:hf_bf16"], rel=1e-4)
    assert by_arm["deepspeed_1:hf_bf16"][0] == by_arm["ddp:hf_bf16"][0], "the same weights and tokens"


@pytest.mark.slow
def test_a_file_for_deepspeed(tmp_path, architecture, start):
    """Ours is refused what a run refuses; the baseline has it, and DeepSpeed then exchanges fp32. What ours may have is
    in its row, and harmless.
    """
    work, path = f"--workloads={architecture}:2x64x2", tmp_path / "result.json"
    file = tmp_path / "ds.json"
    sums = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}
    traffic = {"zero_optimization": {"stage": 2}, "communication_data_type": "fp32"}
    losses = {}
    for settings in (sums, traffic):
        file.write_text(json.dumps(settings))
        variants = "--arms=deepspeed_2:hf_bf16,deepspeed_2:bf16:swap"
        process = start(path, work, variants, "--steps=4", "--warmup=1", f"--deepspeed_config={file}", max_restarts=1)
        ended(process)
        baseline, ours = json.loads(path.read_text())["rows"]
        assert baseline["deepspeed_config"] == ours["deepspeed_config"] == settings
        assert "DeepSpeed" in baseline["optimizer"] and baseline["losses"][0] == pytest.approx(6.93, abs=0.1)
        losses[list(settings)[1]] = baseline["losses"]
        if settings is sums:
            assert ours["losses"][0] == pytest.approx(6.93, abs=0.1)
        else:
            assert "communication_data_type" in ours["failed"] and "losses" not in ours
    assert losses["data_types"] == pytest.approx(losses["communication_data_type"], rel=1e-3)


@pytest.mark.slow
def test_an_arm_that_takes_too_long_and_one_that_is_killed(tmp_path, architecture, start):
    path = tmp_path / "result.json"
    works = f"--workloads={architecture}:1x16x100000,{architecture}:2x16x100000,{architecture}:1x16x1"
    options = ["--arms=fsdp_full:bf16:swap", "--steps=2", "--warmup=1", "--arm_timeout_s=10"]
    process = start(path, works, *options, max_restarts=2, python=sys.executable)
    deadline = time.monotonic() + 90
    while not (path.exists() and (json.loads(path.read_text())["measuring"] or {}).get("batch_size") == 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    ended(process)
    slow, killed, measured = json.loads(path.read_text())["rows"]
    assert slow["failed"] == "took longer than 10 s" and slow["micro_batches"] == 100000
    # The one that is left may find its peer gone before the launcher ends it, and say so.
    assert killed["batch_size"] == 2 and (killed["failed"] == ENDED_IN_SILENCE or "RuntimeError" in killed["failed"])
    assert measured["tokens_per_s"] > 0


def test_mistakes_are_one_sentence(tmp_path, architecture, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    def said(*options: str) -> str:
        output = tmp_path / "r.json"
        monkeypatch.setattr(sys, "argv", ["scripts/benchmark_multi_gpu.py", f"--output={output}", *options])
        with pytest.raises(UserError) as mistake:
            launch.main()
        assert not output.exists()
        return str(mistake.value)

    assert "fsdp_full:hf_bf16: Accelerate's FSDP2 needs NVIDIA GPUs" in said(
        f"--workloads={architecture}:1x16x1", "--arms=fsdp_full:hf_bf16"
    )
    assert "--arms delayed: say how it is spread over the GPUs" in said(
        f"--workloads={architecture}:1x16x1", "--arms=delayed"
    )
    assert "--warmup 6 must leave some" in said("--warmup=6")
    assert "names Llama-3.2-1B:1x16x1 twice" in said("--workloads=Llama-3.2-1B:1x16x1,Llama-3.2-1B:1x16x1")
    assert "can be written" in said("--output=/proc/none/r.json")
    work = f"--workloads={architecture}:1x16x1"
    assert "no variant is under DeepSpeed" in said(
        work, "--arms=ddp:bf16:swap", "--deepspeed_config=configs/ds_z1.json"
    )
    assert "cannot be read" in said(work, "--arms=deepspeed_1:hf_bf16", f"--deepspeed_config={tmp_path / 'none.json'}")
    monkeypatch.delenv("WORLD_SIZE")
    assert "torchrun --nproc_per_node" in said()


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "ddp:fp8",
        "zero:bf16",
        "ddp:bf16:fast",
        "ddp:bf16:swap:swap",
        "cp0:ddp:bf16",
        "cp2:ddp",
        "cp2:bf16",
        "cp2",
        "",
        "hf_bf16:swap",
    ]
    + [
        "fsdp_grad:hf_bf16",
        "cp2:ddp:hf_bf16",
        "delayed:sync",
        "delayed:fp8_params",
        "bf16:",
        "bf16:lora0",
        "bf16:lora8:lora16",
        "hf_bf16:lora8",
    ],
)
def test_unknown_variants(name):
    with pytest.raises(
        UserError, match=f"--arms {name} is unknown; choose from bf16, delayed, .* hf_bf16, .* fsdp_full"
    ):
        parse_variant(name)


def test_names_of_variants():
    variant = parse_variant("cp4:fsdp_grad:current:recompute:sync")
    assert (variant.mode, variant.context_size, variant.computes_in_fp8) == ("fsdp_grad", 4, True)
    model = variant.what.model
    assert variant.what.precision.fp8_scenario == "current" and model.gradient_checkpointing and model.use_te
    assert variant.what.parallel.sync_every_micro_batch and not variant.what.parallel.fp8_params
    assert not parse_variant("deepspeed_3:bf16:swap").what.model.use_te
    assert parse_variant("fsdp_full:delayed:fp8_params").what.parallel.fp8_params
    on_one = parse_variant("delayed:swap")
    assert (on_one.mode, on_one.what.model.use_te, on_one.what.parallel) == (None, False, ParallelConfig())
    adapted, of_qv = parse_variant("delayed:lora16"), parse_variant("ddp:bf16:recompute:lora8qv")
    assert (adapted.what.lora.lora_rank, adapted.what.lora.lora_targets, on_one.what.lora.lora_rank) == (
        16,
        "all-linear",
        0,
    )
    assert (of_qv.what.lora.lora_rank, of_qv.what.lora.lora_targets, of_qv.what.model.gradient_checkpointing) == (
        8,
        "q_proj,v_proj",
        True,
    )
    assert parse_variant("fsdp_grad:delayed:fp8_params:fp8head_all").on_one_gpu == "delayed:fp8head_all"
    assert [parse_variant(name).on_one_gpu for name in ("cp4:fsdp_full:bf16:sync", "ddp:hf_bf16", "bf16")] == [
        "bf16",
        "hf_bf16",
        "bf16",
    ]
    with pytest.raises(UserError, match="a baseline under DeepSpeed computes in bf16; write deepspeed_3:hf_bf16"):
        parse_variant("deepspeed_3:accelerate_te")
    with_file, without, _ = launch.variants_of(
        SimpleNamespace(
            arms="deepspeed_3:hf_bf16,ddp:bf16,deepspeed_2:bf16", deepspeed_config=Path("configs/ds_z1.json")
        )
    )
    assert with_file.deepspeed_file == Path("configs/ds_z1.json") and without == parse_variant("ddp:bf16")
    assert parse_variant("deepspeed_3:hf_bf16").deepspeed_file.name == "ds_z3.json"
    baseline = parse_variant("ddp:torchao_rowwise")
    assert (baseline.mode, baseline.what.torchao_recipe, baseline.what.compiled, baseline.computes_in_fp8) == (
        "ddp",
        "rowwise",
        True,
        True,
    )
    assert [parse_variant(name).computes_in_fp8 for name in ("bf16", "hf_bf16", "accelerate_te")] == [
        False,
        False,
        True,
    ]
    with pytest.raises(UserError, match="names bf16 twice"):
        parse_variants("bf16,delayed,bf16")


def test_what_a_variant_cannot_do_is_known_beforehand(architecture):
    work, ranks = (
        Workload.parse(f"{architecture}:2x96x2", 4),
        LaunchRanks(world_size=4, local_world_size=4, launched=True),
    )
    parse_variant("cp2:fsdp_full:delayed").check(work, ranks)
    for name, sentence in (
        ("cp3:fsdp_full:bf16", "--context_parallel_size 3 does not divide the 4 processes"),
        ("cp2:ddp:bf16", "--context_parallel_size 2 needs"),
        ("ddp:delayed:fp8_params", "--fp8_params needs an fsdp mode"),
    ):
        with pytest.raises(UserError, match=f"--arms {name} with --workloads .*: .*{sentence}"):
            parse_variant(name).check(work, ranks)


@pytest.mark.parametrize(
    "text",
    ["Llama-3.2-1B", "Llama-3.2-1B:8x1024", "Llama-3.2-1B:8x0x4", ":8x1024x4", "Llama-9:8x1024x4", "/nowhere:1x16x1"],
)
def test_unknown_workloads(text):
    with pytest.raises(UserError):
        Workload.parse(text, 6)


def test_rows_longer_than_the_models_positions():
    said = "^--workloads Llama-3.2-1B:1x131073x1: a row of 131073 is more than the 131072 positions of Llama-3.2-1B "
    with pytest.raises(UserError, match=said):
        Workload.parse("Llama-3.2-1B:1x131073x1", 6)


def test_figures_of_a_variant():
    """The slowest GPU counts, by its median; a context group's tokens count once."""
    work = Workload.parse("Llama-3.2-1B:8x1024x4", 6)
    assert work.name == "Llama-3.2-1B:8x1024x4" and work.tokens_per_step == 32768
    times = [[1.0, 1.0, 4.0], [2.0, 1.0, 3.0]]
    row = summarise(work, parse_variant("fsdp_full:delayed"), times)
    assert (row["tokens_per_s"], row["tokens_per_s_per_gpu"]) == (32768.0, 16384.0)
    assert (row["tokens_per_s_slowest"], row["tokens_per_s_fastest"]) == (65536 / 3, 65536.0)
    assert row["step_times_s"] == times[1] and row["median_step_time_s_by_rank"] == [1.0, 2.0]
    # 6 x linear weights and 6 x layers x width x length a token: 1.236e9 weights, 16 layers of 2048.
    assert row["model_tflops"] == pytest.approx(16384 * (6 * 1.2358e9 + 6 * 16 * 2048 * 1024) / 1e12, rel=1e-3)
    shared = summarise(work, parse_variant("cp2:fsdp_full:delayed"), times)
    assert shared["tokens_per_s"] == row["tokens_per_s"] / 2 and shared["model_tflops"] == pytest.approx(
        row["model_tflops"] / 2
    )


def test_each_process_has_tokens_of_its_own():
    work = Workload.parse("Llama-3.2-1B:2x16x3", 6)
    rows = [batch.input_ids for reader in range(2) for batch in work.batches(1000, reader)]
    assert len({tuple(ids.flatten().tolist()) for ids in rows}) == 6
    assert work.batches(1000)[0].num_supervised_tokens == int((work.batches(1000)[0].labels >= 0).sum()) == 30


def test_a_results_file_outlives_its_processes(tmp_path):
    path = tmp_path / "folder" / "r.json"
    results = ResultsFile(path, "a", writes=True)
    assert results.read() == {}
    results.start({"provenance": 1})
    results.begin({"arm": "x"})
    assert results.read()["measuring"] == {"arm": "x"}
    results.add({"arm": "x", "tokens_per_s": 1.0})
    results.add_failure({"arm": "x"}, "too late: it has a row")
    other = ResultsFile(path, "a", writes=False)
    other.begin({"arm": "y"})
    assert results.read()["measuring"] is None, "another process does not say what is measured"
    other.add({"arm": "y", "tokens_per_s": 2.0})
    other.add_failure({"arm": "y"}, "out of memory")
    again = ResultsFile(path, "a", writes=True)
    assert again.read()["launch"] == "a"
    assert again.read()["rows"] == [{"arm": "x", "tokens_per_s": 1.0}, {"arm": "y", "failed": "out of memory"}]
    assert json.loads(path.read_text())["provenance"] == 1
    again.start({"provenance": 2})
    assert again.read()["rows"] == [] and json.loads(path.read_text())["provenance"] == 2
