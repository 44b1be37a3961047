"""The benchmark of one GPU: what its variants train, measurements in processes of their own, rows and their figures.
Tiny models on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import te_llama
from llm_fp8.observability.provenance import recorded_command
from llm_fp8.tools.bench import baselines as rival_module
from llm_fp8.tools.bench.measure import build, describe_failure, measure, speed
from llm_fp8.tools.bench.variants import BASELINES, Baseline, parse_variant, parse_variants
from llm_fp8.tools.bench.worker import measure_apart, take_header
from llm_fp8.tools.bench.workload import Workload, draw_weights_
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.packages import REPOSITORY
from llm_fp8.utils.ranks import LaunchRanks
from scripts import benchmark
from tests.support.families import FAMILIES, family_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def workload(tiny_architecture):
    """Two micro-batches of 2 x 32 tokens of a tiny model whose sizes are multiples of 16."""
    return f"{tiny_architecture}:2x32x2"


@pytest.fixture(scope="module")
def swap_losses(workload):
    return measure(Workload.parse(workload, 3), parse_variant("bf16:swap"), 1, CPU)["losses"]


class WithTransformerEnginesParameters:
    """The parameters of a TE decoder under their names, which needs neither Transformer Engine nor a GPU."""

    def __init__(self, config, dtype: torch.dtype) -> None:
        self.config = config
        spec = te_llama.decoder_spec(config)
        self.model = SimpleNamespace(layers=[SimpleNamespace(spec=spec)])
        self._parameters = {
            name: torch.nn.Parameter(torch.zeros(parts[-1].stop, *parts[0].shape[1:], dtype=dtype))
            for name, parts in te_llama.parameter_map(spec).items()
        }

    def named_parameters(self):
        return self._parameters.items()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_the_same_in_both_layouts(family):
    """Fused or not, tied or not, in bf16 or as fp32 masters."""
    config = family_config(family)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights_(theirs, CPU, is_te=False)
    ours = WithTransformerEnginesParameters(config, torch.bfloat16)
    draw_weights_(ours, CPU, is_te=True)
    expected = dict(theirs.named_parameters())
    found = te_llama.hf_state_dict(te_llama.decoder_spec(config), te_llama.te_parameters(ours))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor.float(), expected[name]) for name, tensor in found.items())
    first, second = (expected[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert first.std() > 0 and not torch.equal(first, second)


class MadeUpTransformerEngine:
    """te.Linear and te.autocast without Transformer Engine: a linear layer that rounds to e4m3 inside the autocast,
    and notes its recipe.
    """

    recipe = None

    class Linear(torch.nn.Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

        def __init__(self, in_features, out_features, bias, params_dtype, device):
            super().__init__(in_features, out_features, bias, dtype=params_dtype, device=device)
            self.fp8_meta = {}

        def forward(self, inputs):
            rounded = inputs.to(torch.float8_e4m3fn).to(inputs.dtype) if MadeUpTransformerEngine.recipe else inputs
            return super().forward(rounded)

    @classmethod
    @contextlib.contextmanager
    def autocast(cls, enabled, recipe):
        cls.recipe = recipe
        yield
        cls.recipe = None


@pytest.mark.slow
def test_bare_transformer_engine_replaces_every_layer_and_opens_its_autocast(workload, swap_losses, monkeypatch):
    monkeypatch.setattr(rival_module, "require_te", lambda why: MadeUpTransformerEngine)
    monkeypatch.setattr(
        rival_module, "resolve_precision", lambda options, device: SimpleNamespace(recipe=options.fp8_scenario)
    )
    found = measure(Workload.parse(workload, 3), parse_variant("te_autocast"), 1, CPU)
    assert found["losses"][0] == pytest.approx(swap_losses[0], rel=1e-3) and found["losses"][0] != swap_losses[0]
    assert found["losses"][2] < found["losses"][0] and found["parameters_not_in_the_optimizer"] == []
    assert found["census"]["converted"]["lm_head"] == 1 and sum(found["census"]["converted"].values()) == 8


@pytest.mark.parametrize("name", ["hf_bf16", "torchao_tensorwise", "torchao_rowwise"])
def test_rivals_train_what_we_train(workload, swap_losses, name, monkeypatch):
    """From the same weights and tokens: first losses differ by rounding, of fp8 where it is used; losses fall.
    Uncompiled, for speed.
    """
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    compiled: list[str] = []
    found = measure(Workload.parse(workload, 3), parse_variant(name), 1, CPU)
    assert [len(times) for times in found["step_times_s_by_rank"]] == [2], "one process, the first step left out"
    assert len(found["losses"]) == 3 and found["losses"][2] < found["losses"][0]
    assert found["losses"][0] == pytest.approx(swap_losses[0], rel=1e-3 if BASELINES[name].computes_in_fp8 else 1e-4)
    assert found["parameters_not_in_the_optimizer"] == []
    assert compiled == (["LlamaDecoderLayer"] if BASELINES[name].compiled else [])
    census = found["census"]
    assert census["skipped"]["lm_head"] == "1 bf16 (lm_head)"
    assert sum(census["converted"].values()) == (7 if BASELINES[name].computes_in_fp8 else 0)
    assert "peak_memory_gib" not in found and "gemm_kernels" not in found, "the CPU has neither"


def test_torchaos_fp8_layers_round(workload):
    """That they compute in fp8, and the two recipes in different ways, shows in the gradients, which bf16 alone
    would round alike.
    """
    norms = {}
    for name in ("hf_bf16", "torchao_tensorwise", "torchao_rowwise"):
        baseline = BASELINES[name]
        training = (
            build(Workload.parse(workload, 1), parse_variant(name))
            if not baseline.compiled
            else uncompiled(baseline, workload)
        )
        training.model(**training._inputs[0], use_cache=False).loss.backward()
        norms[name] = training.model.model.layers[0].mlp.down_proj.weight.grad.float()
    plain = norms.pop("hf_bf16")
    off = {name: float((grad - plain).norm() / plain.norm()) for name, grad in norms.items()}
    assert all(0.01 < value < 0.2 for value in off.values()) and len(set(off.values())) == 2, off


def uncompiled(baseline: Baseline, workload: str):
    from llm_fp8.tools.bench.baselines import HfTraining

    return HfTraining(Workload.parse(workload, 1), Baseline(baseline.name, torchao_recipe=baseline.torchao_recipe))


@pytest.mark.slow
def test_a_layer_is_compiled_for_real(workload, swap_losses):
    found = measure(Workload.parse(workload, 2), parse_variant("hf_bf16_compiled"), 1, CPU)
    assert found["compiled"] and found["losses"][0] == pytest.approx(swap_losses[0], rel=1e-4)


def test_what_is_missing_is_named(workload, monkeypatch):
    work = Workload.parse(workload, 2)
    if not torch.cuda.is_available():
        for name in benchmark.CLAIM:
            with pytest.raises(UserError, match=f"--arms {name} needs Transformer Engine, .* run: pip install"):
                build(work, parse_variant(name))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="--arms torchao_rowwise needs torchao, which is not installed; run: pip install torchao"
    ):
        build(work, parse_variant("torchao_rowwise"))


def test_a_header_names_the_command_to_repeat():
    answer = {"failed": None, "header": {"provenance": {"command": []}, "peaks": None}}
    argv = [str(REPOSITORY / "scripts" / "benchmark.py"), "--quick"]
    assert take_header(answer, argv) == {"provenance": {"command": ["scripts/benchmark.py", "--quick"]}, "peaks": None}
    assert answer == {"failed": None}
    assert take_header(answer, argv) == {}, "of a process that wrote none"


@pytest.mark.slow
def test_arms_take_turns_and_one_that_fails_is_a_row(workload, tmp_path, capfd, monkeypatch):
    """bf16 needs Transformer Engine and a GPU, and is tried once. The first measurement that succeeds has a process of
    its own, from which the launcher's environment stays outside and that has the variables it is given; the others, for
    speed, share this one."""
    started = []

    def measured(name: str, variant: str, num_gpus: int, num_steps: int, warmup: int, timeout_s: float):
        if variant == "hf_bf16" and not started:
            started.append(variant)
            with monkeypatch.context() as launcher:
                launcher.setenv("ACCELERATE_FP8_BACKEND", "TE")
                launcher.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
                launcher.setenv("NVTE_FLASH_ATTN", "0")
                variables = {"NVTE_FP8_ALLREDUCE": "1", "NVTE_FLASH_ATTN": None}
                return measure_apart(name, variant, num_gpus, num_steps, warmup, timeout_s, variables)
        try:
            found = measure(Workload.parse(name, num_steps), parse_variant(variant), warmup, CPU)
        except UserError as error:
            return {"failed": str(error)}
        (times,) = found.pop("step_times_s_by_rank")
        return {"failed": None, **found, "step_times_s": times}

    monkeypatch.setattr(benchmark, "measure_apart", measured)
    path = tmp_path / "folder" / "r.json"
    variants = [parse_variant(name) for name in ("bf16", "hf_bf16")]
    rows = benchmark.measure_all([Workload.parse(workload, 3)], variants, 1, 2, 100, path)
    record = json.loads(path.read_text())
    assert started == ["hf_bf16"] and record["rows"] == rows
    assert record["provenance"]["command"] == recorded_command(sys.argv) and "peaks" in record
    environment = record["provenance"]["environment"]
    assert (
        environment["NVTE_FP8_ALLREDUCE"] == "1"
        and not {"NVTE_FLASH_ATTN", "ACCELERATE_FP8_BACKEND"} & environment.keys()
    )
    failed, measured = rows
    assert "--use_te needs an NVIDIA GPU" in failed["failed"] and "tokens_per_s" not in failed
    assert failed["workload"] == measured["workload"] == workload and measured["seq_length"] == 32
    first, second = measured["rounds"]
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-5) and measured["first_loss"] == first["losses"][0]
    times = sorted([*first["step_times_s"], *second["step_times_s"]])
    assert len(times) == 4
    assert measured["tokens_per_s_fastest"] == pytest.approx(128 / times[0])
    assert measured["tokens_per_s_slowest"] == pytest.approx(128 / times[-1])
    assert measured["tokens_per_s"] == pytest.approx(128 / ((times[1] + times[2]) / 2))
    benchmark.print_table(rows)
    printed, said = capfd.readouterr()
    assert printed.count("bf16               not measured: --use_te") == 2, "when it failed, and in the table"
    assert printed.count("round 2") == 1 and "first loss: hf_bf16 6.9" in printed and "1.00 x hf_bf16" in printed
    assert "Traceback" not in said


def test_a_loss_that_is_no_number_is_gone_on_with(tmp_path, monkeypatch, capsys):
    """The variant that diverged is compared with one that a later call measures."""

    def measured(name: str, variant: str, num_gpus: int, num_steps: int, warmup: int, timeout_s: float):
        loss = math.nan if variant == "accelerate_te" else 7.0
        times = [1.0] * (num_steps - warmup)
        return {"failed": None, "step_times_s": times, "losses": [loss, math.inf], "wall_time_s": 1.0}

    monkeypatch.setattr(benchmark, "measure_apart", measured)
    path, work = tmp_path / "r.json", Workload.parse("Llama-3.2-1B:1x16x1", 3)
    benchmark.measure_all([work], parse_variants("accelerate_te"), 1, 1, 9, path)
    earlier = benchmark.read_earlier(path, 3, 2)
    diverged, finite = benchmark.measure_all([work], parse_variants(",".join(benchmark.CLAIM)), 1, 1, 9, path, earlier)
    assert math.isnan(diverged["first_loss"]) and diverged["last_loss"] == math.inf and finite["first_loss"] == 7.0
    benchmark.print_table([diverged, finite])
    assert "first loss: accelerate_te nan, te_autocast 7.0000" in capsys.readouterr().out


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_an_answer_whose_loss_is_no_number_has_it_as_a_float(num_gpus, monkeypatch):
    found = {"losses": [7.0, math.nan]}

    def run(command: list[str], *_: object) -> None:
        answer = {"failed": None, **found, "provenance": {}, "peaks": None, "rows": [found]}
        write_json_atomic(Path(command[-1]), answer)

    monkeypatch.setattr("llm_fp8.tools.bench.worker._run", run)
    first, second = measure_apart("Llama-3.2-1B:1x16x1", "bf16", num_gpus, 2, 1, 9.0)["losses"]
    assert first == 7.0 and math.isnan(second)


def test_a_bench_goes_on_from_its_file(tmp_path, monkeypatch, capsys):
    """Rounds that are there count, what failed or was not reached is measured; other code, steps or programs' files
    are refused.
    """
    path, taken, commit = tmp_path / "r.json", [], ["a" * 40]

    def measured(name: str, variant: str, num_gpus: int, num_steps: int, warmup: int, timeout_s: float):
        taken.append(variant)
        git = {"commit": commit[0], "dirty": None}
        provenance = {"git": git, "packages": {}, "driver": "1", "gpus": [{"name": "H"}], "time_utc": str(len(taken))}
        header = {"provenance": provenance, "peaks": None}
        if len(taken) == 4 or variant == "block":
            return {"failed": "killed", "header": header}
        times = [float(len(taken))] * (num_steps - warmup)
        return {"failed": None, "header": header, "step_times_s": times, "losses": [7.0, 6.0], "wall_time_s": 1.0}

    monkeypatch.setattr(benchmark, "measure_apart", measured)
    work = Workload.parse("Llama-3.2-1B:1x16x1", 3)

    def measure_arms(names: str, num_rounds: int, warmup: int = 1) -> list[dict]:
        earlier = benchmark.read_earlier(path, 3, 3 - warmup)
        return benchmark.measure_all([work], parse_variants(names), warmup, num_rounds, 9, path, earlier)

    measure_arms("bf16,delayed", 1)
    rows = measure_arms("bf16,delayed,current", 2)
    assert taken == ["bf16", "delayed", "current", "bf16", "delayed", "current"]
    assert rows[0]["failed_rounds"] == ["killed"] and [len(row["rounds"]) for row in rows] == [1, 2, 2]
    del taken[1:]  # the one that failed was the fourth
    rows = measure_arms("bf16", 2)
    assert taken[1:] == ["bf16"], "the one that failed, and nothing else"
    assert [row["arm"] for row in rows] == ["delayed", "current", "bf16"], "what was not asked for stays, first"
    assert rows[-1]["rounds"][0]["step_times_s"] == [1.0, 1.0] and rows[-1]["rounds"][1]["step_times_s"] == [2.0, 2.0]
    record = json.loads(path.read_text())
    assert record["rows"] == rows and [origin["time_utc"] for origin in record["earlier_provenance"]] == ["1", "3"]
    kept = path.read_text()
    assert measure_arms("bf16", 2) == rows and len(taken) == 2 and path.read_text() == kept, (
        "nothing was left to measure"
    )
    measure_arms("block", 1)
    assert [row.get("failed") for row in measure_arms("bf16", 2)] == [None, None, "killed", None], (
        "and what failed stays too"
    )
    kept = path.read_text()
    with pytest.raises(UserError, match="with --steps 3 and --warmup 1; give the same"):
        measure_arms("bf16", 2, warmup=2)
    commit[0] = "b" * 40
    with pytest.raises(UserError, match=r"r\.json was measured with another code; give another file"):
        measure_arms("bf16", 3)
    assert path.read_text() == kept
    path.write_text("{}")
    with pytest.raises(UserError, match="holds no measurements of this program"):
        measure_arms("bf16", 1)
    with pytest.raises(UserError, match="--resume goes on from the file of --output, and none is named"):
        benchmark.parse(["--resume"])


@pytest.mark.slow
def test_a_measurement_that_hangs_or_is_killed_is_ended(workload, started_processes, monkeypatch):
    folder = workload.partition(":")[0]
    started = time.monotonic()
    answer = measure_apart(f"{folder}:1x16x1000000", "hf_bf16", 1, 2, 1, timeout_s=1)
    assert answer == {"failed": "took longer than 1 s"} and time.monotonic() - started < 5
    (process,) = started_processes
    assert process.returncode is not None
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    answer = measure_apart(workload, "hf_bf16", 1, 2, 1, timeout_s=60)
    assert answer["failed"].startswith("a process ended without saying why") and "(exit code 1)" in answer["failed"]


def test_what_an_error_is_called():
    assert describe_failure(torch.OutOfMemoryError("CUDA out of memory. Tried ...")) == "out of memory"
    assert describe_failure(ValueError("one\ntwo")) == "ValueError: one"
    assert describe_failure(ValueError()) == "ValueError: no message"


def test_figures_of_step_times():
    work = Workload.parse("Llama-3.2-1B:8x1024x4", 6)
    found = speed(work, [1.0, 2.0, 4.0, 2.0, 2.0])
    assert (
        found["tokens_per_s"] == 16384
        and found["tokens_per_s_slowest"] == 8192
        and found["tokens_per_s_fastest"] == 32768
    )
    # The tenth of the steps lies 0.4 of the way from the shortest to the next, the ninetieth 0.6 of the way to the
    # longest.
    assert found["tokens_per_s_p90"] == pytest.approx(32768 / 1.4) and found["tokens_per_s_p10"] == pytest.approx(
        32768 / 3.2
    )
    assert len(set(value for key, value in speed(work, [2.0]).items() if key.startswith("tokens"))) == 1


def test_rounds_that_failed_are_said():
    work, variant = Workload.parse("Llama-3.2-1B:8x1024x4", 2), parse_variant("delayed")
    gemms = {"fp8": {"count": 768, "time_s": 0.3, "share": 0.75}, "bf16": {"count": 12, "time_s": 0.1, "share": 0.25}}
    good = {
        "failed": None,
        "step_times_s": [1.0],
        "losses": [12.0, 11.9],
        "peak_memory_gib": 30.0,
        "gemm_kernels": gemms,
    }
    row = benchmark.summarise(work, variant, [good, {**good, "peak_memory_gib": 31.0}, {"failed": "out of memory"}])
    assert row["peak_memory_gib"] == 31 and row["failed_rounds"] == ["out of memory"] and len(row["rounds"]) == 2
    line = benchmark._line(row, row)
    assert (
        "32,768" in line
        and "31.0 GiB" in line
        and "fp8 768 (75%), bf16 12 (25%)" in line
        and "1 round failed: out of memory" in line
    )


def test_help_says_what_quick_measures(capsys):
    with pytest.raises(SystemExit):
        benchmark.parse(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert (
        "--quick one model, few variants, one round: --workloads Llama-3.2-1B:8x1024x4, --arms hf_bf16,bf16," in words
    )
    assert "minute" not in words


def test_quick_gives_way_to_what_is_asked():
    quick = benchmark.parse(["--quick", "--rounds", "2"])
    assert (quick.arms, quick.rounds, quick.steps) == ("hf_bf16,bf16,delayed,current", 2, 6)
    usual = benchmark.parse([])
    assert set(usual.arms.split(",")) == {*BASELINES, "bf16", "delayed", "current", "block"} and usual.rounds == 3
    for wrong, sentence in (
        (["--warmup", "8"], "--warmup 8 must leave some of the 8"),
        (["--rounds", "0"], "measures nothing"),
        (["--arm_timeout_s", "nan"], "--arm_timeout_s nan leaves no time"),
        (
            ["--output", "/proc/none/r.json"],
            "--output /proc/none/r.json: .*; give a file in a folder that can be written",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            benchmark.parse(wrong)


def test_what_belongs_to_several_gpus_is_refused():
    with pytest.raises(UserError, match="spread over several GPUs, .* drop 'fsdp_full:' here"):
        parse_variant("fsdp_full:delayed").check(Workload.parse("Llama-3.2-1B:1x16x1", 1), LaunchRanks())


@pytest.mark.parametrize(
    ("rows", "code"), [([{"failed": "no"}, {"tokens_per_s": 1.0}], 0), ([{"failed": "no"}] * 2, 1)]
)
def test_the_exit_code_says_whether_anything_was_measured(rows, code, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/benchmark.py"])
    monkeypatch.setattr(benchmark, "measure_and_print", lambda *_: rows)
    assert benchmark.main() == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_mistakes_are_one_sentence(tmp_path, monkeypatch):
    def said(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["scripts/benchmark.py", f"--output={tmp_path / 'r.json'}", *options])
        with pytest.raises(UserError) as mistake:
            benchmark.main()
        assert not (tmp_path / "r.json").exists()
        return str(mistake.value)

    assert said("--quick") == "the benchmark needs an NVIDIA GPU, and none is found."
    assert said("--workloads=Llama-3.2-1B:1x16x1,Llama-3.2-1B:1x16x1") == (
        "--workloads names Llama-3.2-1B:1x16x1 twice."
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "run it with python" in said()


def test_the_claim_that_accelerates_own_fp8_equals_transformer_engine(capsys):
    work = Workload.parse("Llama-3.2-1B:8x1024x4", 3)

    def row(variant: str, times: list[float], loss: float) -> dict:
        answer = {"failed": None, "step_times_s": times, "losses": [loss, 9.0]}
        return benchmark.summarise(work, parse_variant(variant), [answer])

    rows = [
        row("te_autocast", [1.0, 1.1, 1.2], 10.0),
        row("accelerate_te", [1.1, 1.21, 1.15], 10.001),
        row("hf_bf16", [2.0], 10.0),
    ]
    (claim,) = benchmark.claims(rows)
    assert claim["speed_ratio"] == pytest.approx(1.1 / 1.15) and claim["speeds_overlap"]
    assert claim["first_loss_difference"] == pytest.approx(1e-4)
    slower = row("accelerate_te", [2.0, 2.1], 10.0)
    assert not benchmark.claims([rows[0], slower])[0]["speeds_overlap"]
    assert benchmark.claims(rows[:1]) == benchmark.claims([rows[0], {**slower, "failed": "out of memory"}]) == []
    benchmark.print_table(rows)
    assert (
        "accelerate_te is 0.957 x as fast as te_autocast (their steps overlap); first losses +0.0100%"
        in capsys.readouterr().out
    )
