"""--fp8_backend torchao: emulated on the CPU, where operands are rounded to fp8 as on a GPU and multiplied in a
wider type.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BioGptConfig, BioGptForCausalLM

from llm_fp8.config.options import Config, PrecisionConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.config.recipes import recipe_names
from llm_fp8.distributed.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.source import check_model, load_config, load_tokenizer, resolve_source
from llm_fp8.precision import torchao as torchao_fp8
from llm_fp8.precision.certificate import ExpectedKernels, certify
from llm_fp8.precision.context import Precision
from llm_fp8.precision.convert import convert_with_torchao
from llm_fp8.precision.coverage import measure_coverage
from llm_fp8.precision.plan import PrecisionPlan, resolve_precision
from llm_fp8.tools.bench.variants import parse_variant
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.tools.compare.variants import parse_variants, requested_variant, variant_words, variants
from llm_fp8.tools.diagnose.gemm_operands import GemmRecorder
from llm_fp8.tools.diagnose.result import precision_problems
from llm_fp8.tools.diagnose.static_report import diagnose_without_gpu
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import TRITON
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.torch_internals import uncompiled
from tests.support.processes import run_ranks
from tests.support.small import final_weights, records, run_json, steps, tiny_config, train, write_model

CPU = torch.device("cpu")
FP8 = ["--mixed_precision=fp8", "--fp8_backend=torchao"]
NUM_STEPS = 4


def options(model: str, rows: str, folder: Path, *more: object) -> list[object]:
    """A short run, to which `more` is added."""
    return [
        f"--model_name={model}",
        f"--dataset_name={rows}",
        "--validation_fraction=0",
        "--max_seq_length=256",
        "--learning_rate=1e-3",
        "--log_every=1",
        f"--output_dir={folder}",
        f"--max_steps={NUM_STEPS}",
        *more,
    ]


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps(folder)]


def converted(scenario: str, **changes: object) -> tuple[nn.Module, Precision, PrecisionPlan]:
    """A small bf16 model whose layers are torchao's, the precision attached to it, and the plan."""
    options = PrecisionConfig(mixed_precision="fp8", fp8_backend="torchao", fp8_scenario=scenario)
    plan = resolve_precision(options, CPU)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.bfloat16)
    convert_with_torchao(model, plan.recipe)
    precision = Precision(plan, options, CPU, torch.bfloat16)
    precision.attach(model, decoder_layers(model))
    return model, precision, plan


# --- a training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bf16_losses(tiny_model, rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    train(*options(tiny_model, rows, folder, "--batch_size=4", "--mixed_precision=bf16"))
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["default", "rowwise", "rowwise_with_gw_hp"])
def test_it_trains_close_to_bf16(scenario, tiny_model, rows, bf16_losses, tmp_path, capfd):
    train(*options(tiny_model, rows, tmp_path, "--batch_size=4", *FP8, f"--fp8_scenario={scenario}"))
    found = losses(tmp_path)
    assert found == pytest.approx(bf16_losses, rel=5e-3) and found != bf16_losses
    assert found[-1] < found[0] - 0.02, "training must move the loss for this to mean anything"
    effective = "tensorwise" if scenario == "default" else scenario
    said = run_json(tmp_path)["precision"]
    assert (said["requested"], said["effective"], said["backend"], said["emulated"]) == ("fp8", "fp8", "torchao", True)
    assert (said["requested_scenario"], said["effective_scenario"], said["fallback_reason"]) == (
        scenario,
        effective,
        None,
    )
    assert (
        said["optimizer"] == "adamw_fp32"
        and said["parameter_dtype"] == "torch.float32"
        and "Float8LinearConfig" in said["recipe"]
    )
    coverage = said["census"]
    assert len(coverage["converted"]) == 7 and set(coverage["converted"].values()) == {2}
    assert coverage["skipped"] == {"lm_head": "1 bf16 (lm_head)"}
    assert all(step["fp8_linear_flop_share"] == coverage["fp8_linear_flop_share"] > 0 for step in steps(tmp_path))
    assert "EMULATED on the CPU" in capfd.readouterr().out


@pytest.mark.slow
def test_what_goes_together_with_it(tiny_model, rows, tmp_path):
    """Packed rows, recomputation, bf16 parameters with their remainders, evaluation, resuming, layers left in bf16;
    and the files are those of any run.
    """
    shared = ["--batch_size=2", *FP8, "--packing", "--optimizer=adamw_master", "--fp8_bf16_modules=layers.-1"]
    kept, again, resumed = tmp_path / "kept", tmp_path / "again", tmp_path / "resumed"
    train(*options(tiny_model, rows, kept, *shared, "--save_every=2", "--validation_fraction=0.3"))
    train(
        *options(
            tiny_model, rows, again, *shared, "--gradient_checkpointing", "--validation_fraction=0.3", "--no_export"
        )
    )
    checkpoint = kept / "checkpoints" / "step-00000002"
    train(*options(tiny_model, rows, resumed, *shared, f"--resume_from={checkpoint}", "--validation_fraction=0.3"))
    assert losses(again) == losses(kept), "recomputed layers change nothing"
    assert losses(resumed) == losses(kept)[2:]
    one, other = final_weights(kept), final_weights(resumed)
    assert one.keys() == AutoModelForCausalLM.from_config(tiny_config()).state_dict().keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any("eval_loss" in record for record in records(kept))
    coverage = run_json(kept)["precision"]["census"]
    assert set(coverage["converted"].values()) == {1}
    assert coverage["skipped"]["model.layers.*.mlp.down_proj"] == "1 bf16 (kept in bf16)"


@pytest.mark.slow
def test_a_checkpoint_of_another_backend_is_not_continued(tiny_model, rows, tmp_path):
    train(
        *options(
            tiny_model,
            rows,
            tmp_path / "bf16",
            "--mixed_precision=bf16",
            "--max_steps=1",
            "--save_every=1",
            "--no_export",
        )
    )
    checkpoint = tmp_path / "bf16" / "checkpoints" / "step-00000001"
    with pytest.raises(UserError, match="precision was 'bf16' and is 'fp8 tensorwise'"):
        train(*options(tiny_model, rows, tmp_path / "fp8", *FP8, f"--resume_from={checkpoint}"))


# --- several processes ------------------------------------------------------------------------------------------------


def say_what_is_gathered() -> None:
    """Let a process print the types of the weights that torchao hands to FSDP2, and how often scales are computed
    for all of them at once.
    """
    import torchao.float8
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    gather, scales = Weight.fsdp_pre_all_gather, torchao.float8.precompute_float8_dynamic_scale_for_fsdp

    def told(self, mesh):
        tensors, more = gather(self, mesh)
        ahead = "ahead" if self._precomputed_scale is not None else "now"
        sys.stdout.write("".join(f"gathers {tensor.dtype} {ahead}\n" for tensor in tensors))
        return tensors, more

    def counted(model):
        sys.stdout.write("computes all scales\n")
        scales(model)

    Weight.fsdp_pre_all_gather = told
    torchao.float8.precompute_float8_dynamic_scale_for_fsdp = counted


def in_two_processes(folder: Path, *words: object) -> str:
    """What they printed; they have to end well."""
    return run_ranks(2, folder, *words, first=say_what_is_gathered)


@pytest.fixture(scope="module")
def one_process(tiny_model, rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(*options(tiny_model, rows, folder, "--batch_size=4", "--gradient_accumulation_steps=2", *FP8, "--no_export"))
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_two_processes_take_the_steps_of_one(mode, tiny_model, rows, one_process, tmp_path):
    cut = ["--batch_size=2", "--gradient_accumulation_steps=2", f"--sharding_mode={mode}", "--no_export"]
    log = in_two_processes(tmp_path / "two", *options(tiny_model, rows, tmp_path / "two", *cut, *FP8))
    # Other micro-batches have other scales, and FSDP hands weights over in bf16.
    assert losses(tmp_path / "two") == pytest.approx(one_process, rel=3e-3)
    assert "gathers" not in log and "computes" not in log


@pytest.mark.slow
def test_weights_are_gathered_in_fp8_and_a_resumed_run_goes_on(tiny_model, rows, one_process, tmp_path):
    cut = ["--batch_size=4", "--sharding_mode=fsdp_full", "--fp8_params", *FP8]
    log = in_two_processes(tmp_path / "two", *options(tiny_model, rows, tmp_path / "two", *cut, "--save_every=2"))
    assert losses(tmp_path / "two") == pytest.approx(one_process, rel=3e-3)
    gathered = [line for line in log.splitlines() if line.startswith("gathers")]
    assert set(gathered) == {"gathers torch.float8_e4m3fn now", "gathers torch.float8_e4m3fn ahead"}
    # Only before the first step is there no scale: 14 weights, gathered for the forward and again for the backward
    # pass, on two ranks.
    assert gathered.count("gathers torch.float8_e4m3fn now") == 14 * 2 * 2
    assert log.count("computes all scales") == 2 * NUM_STEPS
    checkpoint = tmp_path / "two" / "checkpoints" / "step-00000002"
    in_two_processes(
        tmp_path / "again", *options(tiny_model, rows, tmp_path / "again", *cut, f"--resume_from={checkpoint}")
    )
    assert losses(tmp_path / "again") == losses(tmp_path / "two")[2:]
    one, other = final_weights(tmp_path / "two"), final_weights(tmp_path / "again")
    assert all(torch.equal(one[name], other[name]) for name in one)
    # A checkpoint holds plain rows: one process without the option goes on from it.
    alone = options(tiny_model, rows, tmp_path / "alone", "--batch_size=4", "--gradient_accumulation_steps=2", *FP8)
    train(*alone, f"--resume_from={checkpoint}", "--no_export")
    assert losses(tmp_path / "alone") == pytest.approx(losses(tmp_path / "two")[2:], rel=3e-3)


# --- which layers -----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Layers that stay out, and two that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.q_proj = nn.Linear(32, 48, bias=True)
        self.output_proj = nn.Linear(48, 32, bias=False)
        self.odd_in, self.odd_out = nn.Linear(24, 32), nn.Linear(32, 8)
        self.lm_head, self.embed_out, self.output_layer = (nn.Linear(32, 64) for _ in range(3))
        self.score, self.classifier = nn.Linear(32, 16), nn.Linear(32, 16)


@pytest.mark.slow
def test_the_filter_and_the_coverage():
    model = Odd()
    parameters = dict(model.named_parameters())
    left = convert_with_torchao(model, torchao_fp8.build_config("rowwise", emulate=True))
    assert list(torchao_fp8.converted_modules(model)) == ["q_proj", "output_proj"]
    assert left == {
        "odd_in": "size 24 x 32 is not a multiple of 16",
        "odd_out": "size 32 x 8 is not a multiple of 16",
        **dict.fromkeys(("lm_head", "embed_out", "output_layer", "score", "classifier"), "lm_head"),
    }
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    coverage = measure_coverage(model, torchao_fp8.converted_modules(model).values(), "bf16", left)
    assert coverage.converted == {"q_proj": 1, "output_proj": 1}
    assert coverage.skipped["odd_out"] == "1 bf16 (size 32 x 8 is not a multiple of 16)" and len(coverage.skipped) == 7


def test_lm_head_stays_out_under_any_name():
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 96,
    }
    model = BioGptForCausalLM(BioGptConfig(**shape))
    left = convert_with_torchao(model, torchao_fp8.build_config("tensorwise", emulate=True))
    assert left == {"output_projection": "lm_head"} and type(model.get_output_embeddings()) is nn.Linear
    coverage = measure_coverage(model, torchao_fp8.converted_modules(model).values(), "bf16", left)
    assert coverage.num_head_weights == 32 * 96 and coverage.skipped == {"output_projection": "1 bf16 (lm_head)"}


@pytest.mark.slow
def test_a_model_without_a_layer_for_fp8_is_an_error(rows, tmp_path):
    model = write_model(tmp_path / "model", hidden_size=24, intermediate_size=40, num_attention_heads=1)
    with pytest.raises(UserError, match="no linear layer of the model could be converted, so nothing would run in fp8"):
        train(*options(model, rows, tmp_path / "run", *FP8))


OPERANDS = {
    "tensorwise": {"fprop": "e4m3 x e4m3", "dgrad": "e5m2 x e4m3", "wgrad": "e5m2 x e4m3"},
    "rowwise": dict.fromkeys(("fprop", "dgrad", "wgrad"), "e4m3/row x e4m3/row"),
    "rowwise_with_gw_hp": {"fprop": "e4m3/row x e4m3/row", "dgrad": "e4m3/row x e4m3", "wgrad": "bf16 x bf16"},
}


@pytest.mark.parametrize("scenario", recipe_names("torchao"))
def test_the_diagnosis_sees_the_operands(scenario):
    """The operands of each GEMM, recorded where torch dispatches it; a layer that was left in bf16 is a
    problem.
    """
    model, precision, plan = converted(scenario)
    ids = torch.randint(0, 1000, (2, 32))
    recorder = GemmRecorder(model)
    with recorder.recording([]):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {module.name: module for module in recorder.modules()}
    assert len(precision.fp8_modules) == 14
    for name in torchao_fp8.converted_modules(model):
        assert found[name].told_by == "mm"
        assert {gemm_pass: found[name].operands(gemm_pass) for gemm_pass in OPERANDS[scenario]} == {
            gemm_pass: (operands,) for gemm_pass, operands in OPERANDS[scenario].items()
        }
    assert found["lm_head"].operands("fprop") == ("bf16 x bf16",)
    names = list(torchao_fp8.converted_modules(model))
    assert precision_problems(plan, recorder.modules(), names, None) == []
    wide = precision_problems(plan, recorder.modules(), [*names, "lm_head"], None)
    assert any("lm_head: fprop multiplies bf16 x bf16, not fp8" in sentence for sentence in wide)
    assert model.model.layers[0].mlp.down_proj.weight.grad.abs().sum() > 0


def test_the_diagnosis_without_a_gpu(tiny_model):
    found = diagnose_without_gpu(parse_config([*FP8, f"--model_name={tiny_model}", "--fp8_bf16_modules=layers.0"]))
    assert (found["precision"]["effective_scenario"], found["precision"]["backend"]) == ("tensorwise", "torchao")
    assert set(found["census"]["converted"].values()) == {1}


@pytest.mark.slow
def test_layers_share_their_compiled_code(monkeypatch):
    """All decoder layers, recomputed too, are one graph: many would reach torch.compile's limit and run uncompiled."""
    from torch._dynamo.utils import counters

    model, _, _ = converted("rowwise", num_hidden_layers=9)
    layers = decoder_layers(model)
    enable_gradient_checkpointing(layers, 1, uses_te=False)
    names = [name for name, _ in model.named_parameters()]
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend="aot_eager"))
    ids = torch.randint(0, 1000, (2, 32))

    def loss_and_gradient() -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item(), model.model.layers[0].mlp.down_proj.weight.grad.clone()

    expected = loss_and_gradient()
    counters.clear()
    # Not monkeypatch, which would delete the entry afterwards, for every later test of this process.
    with torch._dynamo.config.patch(optimize_ddp=True):
        torchao_fp8.compile_layers(layers, recomputed=True)
        found = loss_and_gradient()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    assert (
        torch.nn.functional.cosine_similarity(found[1].float().flatten(), expected[1].float().flatten(), dim=0) > 0.99
    )
    assert [name for name, _ in model.named_parameters()] == names
    with uncompiled(layers):
        assert layers[0]._compiled_call_impl is None
    assert layers[0]._compiled_call_impl is not None


# --- the certificate --------------------------------------------------------------------------------------------------

FP8_KERNEL = "nvjet_sm90_qqtst_128x256_128x6_2x1_v_bz_coopA_TNT"
BF16_KERNEL = "nvjet_sm90_ttt_128x256_64x4_2x1_v_bz_coopA_TNT"


def on_hardware(model: nn.Module) -> None:
    """Let the modules be set up as on a GPU."""
    for module in torchao_fp8.converted_modules(model).values():
        module.config = torchao_fp8.build_config(
            next(n for n in recipe_names("torchao") if same_recipe(module.config, n)), emulate=False
        )


def same_recipe(config: object, name: str) -> bool:
    return config == torchao_fp8.build_config(name, emulate=True)


@pytest.mark.parametrize(("scenario", "num_gemms"), [("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2)])
def test_the_certificate_counts_the_gemms_of_the_recipe(scenario, num_gemms):
    model, precision, plan = converted(scenario)
    all_in_fp8 = measure_coverage(model, precision.fp8_modules, plan.compute_name, {}).fp8_linear_flop_share
    coverage = measure_coverage(
        model, precision.fp8_modules, plan.compute_name, {}, most_in_fp8=precision.num_fp8_gemms_per_weight
    )
    assert coverage.fp8_linear_flop_share == pytest.approx(all_in_fp8 * num_gemms / 3)
    expected = ExpectedKernels.of_model(precision, coverage, recomputed=decoder_layers(model))
    assert expected.num_fp8_gemms(2) == 2 * num_gemms * 14, "what torch.compile recomputes is not counted"
    num_expected = expected.num_fp8_gemms(2)

    def verdict(num_fp8: int, name: str = FP8_KERNEL):
        kernels = {name: (num_fp8, 0.1), BF16_KERNEL: (2 * 3 * 14 - num_fp8 + 6, 0.1)}
        return certify(expected, kernels, precision.module_state(), num_micro_batches=2)

    assert "0 say that they are set up for fp8" in verdict(0).reasons[0], "emulated GEMMs do not run in fp8"
    on_hardware(model)
    state = precision.module_state()
    assert (state.library, state.num_modules, state.num_in_fp8, state.recipes) == ("torchao", 14, 14, {scenario: 14})
    assert verdict(num_expected).verdict == "certified" and not verdict(num_expected).remarks
    assert json.loads(json.dumps(verdict(num_expected).to_dict()))["modules"]["library"] == "torchao"
    fewer = verdict(num_expected - 1)
    assert (
        fewer.verdict == "failed"
        and f"expected at least {num_expected} fp8 GEMM kernels (14 weights x {num_gemms} GEMMs" in fewer.reasons[0]
    )
    renamed = verdict(num_expected, "some_new_gemm")
    assert (
        renamed.verdict == "undetermined"
        and "of 14 modules of torchao 14 say that they are set up for fp8" in renamed.reasons[0]
    )
    # One module whose forward function something replaced denies it.
    model.model.layers[0].mlp.up_proj.forward = lambda x: x
    assert (
        verdict(num_expected).verdict == "undetermined" and verdict(num_expected, "some_new_gemm").verdict == "failed"
    )


def test_another_recipe_and_torchao_in_a_bf16_run_are_failures():
    model, precision, plan = converted("rowwise")
    on_hardware(model)
    kernels = {FP8_KERNEL: (42, 0.1), BF16_KERNEL: (3, 0.1)}
    asked = ExpectedKernels("fp8 tensorwise", "bf16", "tensorwise", num_fp8_weights=14)
    found = certify(asked, kernels, precision.module_state(), num_micro_batches=1)
    assert found.verdict == "failed" and found.reasons == [
        "expected the recipe tensorwise, and modules computed by rowwise (14)"
    ]
    options = PrecisionConfig(mixed_precision="bf16")
    bf16 = Precision(resolve_precision(options, CPU), options, CPU, torch.bfloat16)
    bf16.attach(model, decoder_layers(model))
    found = certify(ExpectedKernels("bf16", "bf16"), {BF16_KERNEL: (45, 0.1)}, bf16.module_state(), num_micro_batches=1)
    assert (
        found.verdict == "failed" and "expected no module in fp8, and of 14 modules of torchao 14" in found.reasons[0]
    )


# --- what cannot be ---------------------------------------------------------------------------------------------------

REFUSED = {
    "delayed is Transformer Engine's": (
        ["--fp8_scenario=delayed"],
        "--fp8_scenario delayed is a recipe of --fp8_backend te",
    ),
    "mxfp8 too": (["--fp8_scenario=mxfp8"], "tensorwise, rowwise, rowwise_with_gw_hp; change one"),
    "rowwise is torchao's": (
        ["--fp8_backend=te", "--fp8_scenario=rowwise"],
        "--fp8_scenario rowwise is a recipe of --fp8_backend torchao",
    ),
    "the TE decoder": (["--use_te"], "--use_te builds the decoder from Transformer Engine's modules"),
    "an amax history": (["--amax_history_len=16"], "--amax_history_len has no effect with --fp8_scenario tensorwise"),
    "a format": (["--fp8_format=E4M3"], "--fp8_format has no effect with --fp8_scenario tensorwise"),
    "tokens": (["--max_seq_length=30", "--batch_size=1"], "multiple of 16"),
    "gathering by rows": (
        ["--fp8_params", "--fp8_scenario=rowwise"],
        "--fp8_params gathers a weight with the one scale",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_cannot_go_together(case):
    words, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        parse_config([*FP8, *words], parallel=True)


def test_without_fp8_it_has_no_effect():
    with pytest.raises(UserError, match="--fp8_backend has no effect with --mixed_precision bf16"):
        parse_config(["--mixed_precision=bf16", "--fp8_backend=torchao"])


@pytest.mark.parametrize(
    ("mode", "more", "sentence"),
    [
        ("deepspeed_2", [], "--fp8_backend torchao cannot go with --sharding_mode deepspeed_2"),
        ("ddp", ["--fp8_params"], "--fp8_params"),
        ("fsdp_offload", ["--fp8_params"], "--fp8_params"),
    ],
)
def test_modes_that_cannot(mode, more, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_config([*FP8, f"--sharding_mode={mode}", *more], parallel=True)


@pytest.mark.slow
def test_first_and_last_layers_must_leave_some(tiny_model, rows, tmp_path):
    with pytest.raises(UserError, match="leave none of the 2 decoder layers in fp8"):
        train(*options(tiny_model, rows, tmp_path, *FP8, "--fp8_bf16_modules=layers.:2"))


@pytest.mark.slow
def test_modules_that_stay_in_bf16_are_named(tiny_model, rows, tmp_path):
    """A layer may be counted from the end; an end of a name is that module of every layer."""
    folders = {
        option: tmp_path / str(number)
        for number, option in enumerate(
            ("--fp8_bf16_modules=layers.-1", "--fp8_bf16_modules=layers.1", "--fp8_bf16_modules=q_proj, 0.mlp.*")
        )
    }
    for option, folder in folders.items():
        train(*options(tiny_model, rows, folder, *FP8, option, "--no_export"))
    by_count, by_name, modules = folders.values()
    assert losses(by_count) == losses(by_name) != losses(modules)
    coverage = run_json(modules)["precision"]["census"]
    assert coverage["skipped"]["model.layers.*.self_attn.q_proj"] == "2 bf16 (kept in bf16)"
    assert coverage["converted"]["model.layers.*.mlp.down_proj"] == 1
    assert coverage["converted"]["model.layers.*.self_attn.k_proj"] == 2
    with pytest.raises(UserError, match=r"--fp8_bf16_modules: .* named 'qkv'; .* model.layers.0.self_attn.q_proj, "):
        train(*options(tiny_model, rows, tmp_path / "none", *FP8, "--fp8_bf16_modules=qkv"))
    with pytest.raises(UserError, match=r"--fp8_bf16_modules \*_proj keeps every linear layer in bf16"):
        train(*options(tiny_model, rows, tmp_path / "all", *FP8, "--fp8_bf16_modules=*_proj"))


# The guide's table of errors: fp8 with quantisation, a missing package, and an fp8 that Accelerate did not notice.


@pytest.mark.parametrize("backend", ["te", "torchao"])
@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "hqq", "eetq"])
def test_fp8_with_a_quantised_model_is_refused(method, backend, tiny_model, tmp_path):
    folder = tmp_path / "quantised"
    folder.mkdir()
    for path in Path(tiny_model).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**entries, "quantization_config": {"quant_method": method, "bits": 4}})
    )
    config: Config = parse_config([f"--model_name={folder}", "--mixed_precision=fp8", f"--fp8_backend={backend}"])
    source = resolve_source(config.model)
    with pytest.raises(UserError, match=rf"--model_name {folder} holds quantised weights \({method} in the"):
        check_model(config, load_config(config.model, source), load_tokenizer(config.model, source)[0])


@pytest.mark.slow
def test_a_missing_package_is_named(monkeypatch, tiny_model, rows, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="--fp8_backend torchao needs torchao, which is not installed; run: pip install torchao"
    ):
        train(*options(tiny_model, rows, tmp_path, *FP8))


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CC", "a-compiler-that-is-not-here")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        UserError, match="Triton needs a C compiler, and none is found; install gcc, or name one in the variable CC"
    ):
        torchao_fp8.require_c_compiler("--fp8_backend torchao")
    monkeypatch.setenv("CC", sys.executable)
    torchao_fp8.require_c_compiler("--fp8_backend torchao")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs Triton, which is not installed; run: pip install triton"):
        TRITON.require_installed("--fp8_backend torchao")


@pytest.mark.slow
def test_fp8_that_cannot_run_is_an_error_and_never_another_precision(tiny_model, rows, tmp_path):
    with pytest.raises(UserError, match="--mixed_precision fp8 needs an NVIDIA GPU of compute capability 8.9"):
        train(*options(tiny_model, rows, tmp_path / "te", "--mixed_precision=fp8"))
    assert not (tmp_path / "te" / "run.json").exists()


# --- arms of a comparison ---------------------------------------------------------------------------------------------


def test_arms_of_a_comparison():
    assert parse_variants("rowwise,bf16,delayed") == ["bf16", "rowwise", "delayed"]
    assert variant_words("rowwise", ["--fp8_format", "E4M3", "--fp8_bf16_modules", "layers.-1"]) == [
        "--fp8_bf16_modules",
        "1",
        "--mixed_precision",
        "fp8",
        "--fp8_backend",
        "torchao",
        "--fp8_scenario",
        "rowwise",
    ]
    for arm in recipe_names("torchao"):
        plan = resolve_precision(parse_config(list(variants()[arm])).precision, CPU)
        assert requested_variant(plan.to_dict()) == arm
    assert requested_variant(resolve_precision(parse_config(FP8).precision, CPU).to_dict()) == "tensorwise"


def test_arms_of_a_benchmark():
    with pytest.raises(
        UserError,
        match="--arms tensorwise: torchao converts the layers of the Hugging Face decoder; write tensorwise:swap",
    ):
        parse_variant("tensorwise")
    arm = parse_variant("fsdp_full:tensorwise:swap:fp8_params")
    assert isinstance(arm.what, Config) and not arm.what.model.use_te and arm.computes_in_fp8
    assert arm.what.parallel.fp8_params and arm.what.precision.fp8_backend == "torchao"
    work = Workload.parse("embedded:2x64x1", 1)
    ranks = LaunchRanks.from_environment({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    arm.check(work, ranks)
    with pytest.raises(UserError, match="--fp8_params gathers a weight with the one scale"):
        parse_variant("fsdp_full:rowwise:swap:fp8_params").check(work, ranks)
