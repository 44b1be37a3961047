"""--fp8_lm_head in emulated fp8: what it leaves exact, how far its gradients are from exact ones, what it keeps, and
where it is refused.
"""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks import fp8_head_rounding
from benchmarks.fp8_head_rounding import batch, emulated_head, excess_slope
from llm_fp8.config.options import LoraConfig, PrecisionConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.config.validation import MachineFacts, check_machine
from llm_fp8.kernels import fp8_lm_head as fp8_head
from llm_fp8.kernels import softmax
from llm_fp8.kernels.cross_entropy import linear_cross_entropy_sum
from llm_fp8.kernels.fp8_lm_head import E4M3, E5M2, Fp8Gemms, Fp8Head, cast_to_fp8
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.models.lora import add_adapters, gemms_per_weight
from llm_fp8.models.parity import relative_difference
from llm_fp8.precision.certificate import ExpectedKernels
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import measure_coverage
from llm_fp8.precision.plan import PrecisionPlan, resolve_precision
from llm_fp8.tools.bench.variants import parse_variant
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.fp8_head_reference import GRADIENT_ERROR, MODES, exact, head_of, run
from tests.support.processes import exit_code, start_ranks
from tests.support.small import records, steps, tiny_config, train, write_model

CPU = torch.device("cpu")
TOKENS, VOCABULARY, WIDTH = 256, 2048, 64
CHUNKS = (96, 1000)


def inputs(tokens: int = TOKENS, spread: float = 4.0, seed: int = 0):
    hidden, weight, labels = batch(spread, tokens, VOCABULARY, WIDTH, seed)
    labels[:5] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_with_fp8_gradients_the_loss_is_the_same_bit_for_bit(chunk_tokens):
    values = inputs()
    plain = run(*values, chunk_tokens=chunk_tokens)
    rounded = run(*values, head_of(values[1], "gradients"), chunk_tokens=chunk_tokens)
    assert torch.equal(plain[0], rounded[0])
    assert not torch.equal(plain[1], rounded[1]) and not torch.equal(plain[2], rounded[2]), "nothing was rounded"


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("spread", [2.0, 6.0])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_near_the_exact_ones_without_bias(mode, spread, chunk_tokens):
    values = inputs(spread=spread)
    loss, *got = run(*values, head_of(values[1], mode), chunk_tokens=chunk_tokens)
    want_loss, *want = exact(*values)
    assert abs(loss.double() / want_loss - 1) < (0.03 if mode == "all" else 1e-3)
    for name, a, b in zip(("hidden", "weight"), got, want, strict=True):
        # Rounded logits give another softmax: an error of its own, which grows with their size.
        bound = GRADIENT_ERROR if mode == "gradients" else GRADIENT_ERROR + 0.05 * spread
        assert 0.01 < relative_difference(a, b) < bound, name
        assert abs(excess_slope(a, b)) < (0.02 if mode == "gradients" else 0.05), name
    assert not got[0][:5].any(), "ignored rows have no gradient"


def test_the_rounding_hardly_favours_a_direction():
    """Over several batches: in one, the few tokens with the largest gradients decide the slope.

    What is left, 0.6%, lengthens the gradient: entries of labels that were not foreseen lie just below the bound, and
    round up to it.
    """
    slopes = []
    for seed in range(8):
        values = inputs(seed=seed)
        got, want = run(*values, head_of(values[1], "gradients"))[1:], exact(*values)[1:]
        slopes.append([excess_slope(a, b) for a, b in zip(got, want, strict=True)])
    mean, spread = torch.tensor(slopes).mean(dim=0), torch.tensor(slopes).std(dim=0)
    assert (mean.abs() < 0.01).all() and (spread < 0.02).all(), (mean, spread)


def test_the_slope_comes_from_the_entries_of_the_labels():
    for seed in range(3):
        hidden, weight, labels = batch(4.0, TOKENS, VOCABULARY, WIDTH, seed)
        exact_grad = torch.softmax(hidden.double() @ weight.double().t(), dim=-1)
        at_label = F.one_hot(labels, VOCABULARY).bool()
        exact_grad -= at_label.double()
        rounded = cast_to_fp8(exact_grad.bfloat16(), E5M2, amax=torch.tensor(1.0)).dequantized(torch.float64)
        without_labels = torch.where(at_label, exact_grad, rounded)
        want = exact_grad @ weight.double()
        assert excess_slope(rounded @ weight.double(), want) > 0.004
        assert abs(excess_slope(without_labels @ weight.double(), want)) < 0.002


def test_the_logits_of_all_are_those_of_rounded_operands():
    hidden, weight, labels = (value.detach() for value in inputs())
    rounded = []
    for operand in (hidden, weight):
        scale = 448 / operand.abs().max().float()
        rounded.append((operand.float() * scale).to(E4M3).float() / scale)
    want = (rounded[0] @ rounded[1].t()).bfloat16()
    got = Fp8Gemms(head_of(weight, "all")).logits(hidden, weight)
    torch.testing.assert_close(got, want)
    assert 0.01 < relative_difference(got, hidden.double() @ weight.double().t()) < 0.05


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_the_loss_is_exact(mode):
    hidden, weight, labels = inputs()
    with torch.no_grad():
        plain = linear_cross_entropy_sum(hidden, weight, labels)
        assert torch.equal(linear_cross_entropy_sum(hidden, weight, labels, fp8_head=head_of(weight, mode)), plain)


def test_the_bound_serves_as_well_as_the_largest_value():
    """At worst half of it is reached: a power of two, which costs nothing above underflow."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(64, 64, generator=generator) * 0.5
    values[0, 0] = 0.5
    own, bound = cast_to_fp8(values, E5M2), cast_to_fp8(values, E5M2, amax=torch.tensor(1.0))
    assert torch.equal(own.dequantized(torch.float32), bound.dequantized(torch.float32))


def test_the_tail_of_a_softmax_survives_in_e5m2_alone():
    probabilities = torch.tensor([[-1.0, 0.9, 1e-3, 1e-5, 1e-6, 1e-8, 1e-9]]) / 8192
    largest = torch.tensor(1 / 8192)
    wide, narrow = (cast_to_fp8(probabilities, kind, amax=largest).dequantized(torch.float32) for kind in (E5M2, E4M3))
    assert torch.equal(wide[0, 0], probabilities[0, 0]), "the label's entry of a token that was not foreseen is exact"
    assert ((wide - probabilities).abs() <= probabilities.abs() / 8).all()
    assert (narrow[0, 4:] == 0).all() and (narrow[0, :4] != 0).all()


def test_casts_saturate_and_do_not_hide_what_is_not_finite():
    zeros = cast_to_fp8(torch.zeros(2, 16))
    assert not zeros.dequantized(torch.float32).any() and torch.equal(zeros.scale_inverse, torch.ones(1))
    beyond = cast_to_fp8(torch.tensor([[1.1, -3.0]]), E5M2, amax=torch.tensor(1.0)).dequantized(torch.float32)
    assert torch.equal(beyond, torch.tensor([[1.0, -1.0]]))
    assert (
        cast_to_fp8(torch.tensor([[math.nan, 1.0]]), E5M2, amax=torch.tensor(1.0))
        .dequantized(torch.float32)[0, 0]
        .isnan()
    )
    hidden, weight, labels = inputs()
    with torch.no_grad():
        hidden[9, 3] = math.nan
    assert all(value.isnan().any() for value in run(hidden, weight, labels, head_of(weight, "gradients")))
    assert run(hidden, weight, labels, head_of(weight, "all"))[0].isnan()


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("mode", MODES)
def test_any_number_of_tokens(mode, chunk_tokens):
    """Filled up with rows of zeros, as rows without a label and hidden states of zero would."""
    hidden, weight, labels = inputs(tokens=107)
    padded = F.pad(hidden.detach(), (0, 0, 0, 5)).requires_grad_()
    odd = run(hidden, weight, labels, head_of(weight, mode), 1 / 107, chunk_tokens)
    even = run(padded, weight, F.pad(labels, (0, 5), value=IGNORE_INDEX), head_of(weight, mode), 1 / 107, chunk_tokens)
    torch.testing.assert_close(odd[0], even[0])
    assert torch.equal(odd[1], even[1][:107]) and odd[1].shape == hidden.shape
    torch.testing.assert_close(odd[2], even[2])


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [0, 24])
def test_without_a_label_loss_and_gradients_are_zero(tokens, mode, chunk_tokens):
    """As in a batch without rows; and without a token at all."""
    hidden, weight, _ = inputs()
    hidden = hidden.detach()[:tokens].requires_grad_()
    labels = torch.full((tokens,), IGNORE_INDEX)
    loss, *gradients = run(hidden, weight, labels, head_of(weight, mode), 1.0, chunk_tokens)
    assert loss == 0
    assert [gradient.shape for gradient in gradients] == [hidden.shape, weight.shape] and not any(
        map(torch.any, gradients)
    )


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("mode", MODES)
def test_only_what_requires_grad_gets_one(mode, chunk_tokens):
    values = inputs()
    both = run(*values, head_of(values[1], mode), chunk_tokens=chunk_tokens)
    for frozen in (0, 1):
        values[frozen].requires_grad_(False)
        got = run(*values, head_of(values[1], mode), chunk_tokens=chunk_tokens)
        assert got[1 + frozen] is None and torch.equal(got[2 - frozen], both[2 - frozen])
        values[frozen].requires_grad_(True)


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_weight_gets_both_gradients(mode):
    _, weight, labels = inputs()
    tokens = torch.arange(TOKENS)
    loss = linear_cross_entropy_sum(F.embedding(tokens, weight), weight, labels, fp8_head=head_of(weight, mode))
    got = torch.autograd.grad(loss, weight)[0]
    grad_hidden, grad_weight = run(
        weight.detach()[:TOKENS].requires_grad_(), weight, labels, head_of(weight, mode), factor=1.0
    )[1:]
    torch.testing.assert_close(got[TOKENS:], grad_weight[TOKENS:])
    torch.testing.assert_close(got[:TOKENS], grad_weight[:TOKENS] + grad_hidden)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_weight_is_cast_once_a_step(monkeypatch):
    hidden, weight, labels = inputs()
    cast, shapes = fp8_head.cast_to_fp8, []

    def counting(tensor, *args, **kwargs):
        shapes.append(tuple(tensor.shape))
        return cast(tensor, *args, **kwargs)

    monkeypatch.setattr(fp8_head, "cast_to_fp8", counting)
    for mode in MODES:
        for chunk_tokens in CHUNKS:
            head = head_of(weight, mode)
            for positions, expected in (
                ((True, False, False), 1),
                ((True, False), 1),
                ((None, None), 2),
                ((False,), 1),
            ):
                shapes.clear()
                for head.is_first_microbatch in positions:
                    run(hidden, weight, labels, head, chunk_tokens=chunk_tokens)
                assert shapes.count((VOCABULARY, WIDTH)) == expected, (mode, chunk_tokens, positions)


@pytest.mark.parametrize("mode", MODES)
def test_a_new_step_sees_the_new_weight(mode):
    hidden, weight, labels = inputs()
    head = head_of(weight, mode)
    head.is_first_microbatch = True
    run(hidden, weight, labels, head)
    with torch.no_grad():
        weight.neg_()
    want = run(hidden, weight, labels, head_of(weight, mode))
    assert all(map(torch.equal, run(hidden, weight, labels, head), want))
    head.is_first_microbatch = False
    assert all(map(torch.equal, run(hidden, weight, labels, head), want))


@pytest.mark.parametrize("tokens", [TOKENS, 107])
@pytest.mark.parametrize("mode", MODES)
def test_the_logits_are_given_back_before_their_gradient_is_multiplied(mode, tokens):
    hidden, weight, labels = (value.detach() for value in inputs(tokens))
    gemms = Fp8Gemms(head_of(weight, mode))
    logits = gemms.logits(hidden, weight)
    statistics = softmax.losses(logits, labels)[1]
    gemms.grad_logits(logits, statistics, labels, torch.tensor(1.0))
    assert logits.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("overwrites", [True, False])
def test_a_second_backward_pass_is_an_error(overwrites, monkeypatch):
    """Also where nothing writes into the logits, as the kernel for GPUs does not."""
    if not overwrites:
        in_two_steps = fp8_head.gradient_in_two_steps
        monkeypatch.setattr(
            fp8_head, "gradient_in_two_steps", lambda logits, *rest: in_two_steps(logits.clone(), *rest)
        )
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy_sum(hidden, weight, labels, fp8_head=head_of(weight, "all"))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- in a training ----------------------------------------------------------------------------------------------------


def test_help_of_the_bench_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr(fp8_head_rounding, "gradients_by_format", lambda spread: pytest.fail("it measures"))
    monkeypatch.setattr("sys.argv", ["fp8_head_rounding.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        fp8_head_rounding.main()
    assert ended.value.code == 0 and "What --fp8_lm_head rounds" in capsys.readouterr().out


LOSS_BOUND = 0.02
"""Of the relative difference of the last steps' mean loss; `benchmarks/fp8_head_rounding.py` trains longer."""


@pytest.mark.slow
def test_training_reaches_the_same_loss(tmp_path, tiny_model, rows):
    losses = {}
    for mode in ("none", *MODES):
        folder = tmp_path / mode
        with emulated_head(mode):
            train(
                f"--model_name={tiny_model}",
                f"--dataset_name={rows}",
                f"--output_dir={folder}",
                "--mixed_precision=bf16",
                "--batch_size=4",
                "--max_seq_length=128",
                "--gradient_accumulation_steps=2",
                "--max_steps=30",
                "--learning_rate=0.01",
                "--no_export",
            )
        losses[mode] = [record["loss"] for record in records(folder) if "loss" in record]
    assert losses["gradients"][0] == losses["none"][0], "logits and loss are as without it"
    assert losses["all"][0] != losses["none"][0] and losses["gradients"][-1] != losses["none"][-1]
    last = {mode: sum(values[-5:]) / 5 for mode, values in losses.items()}
    assert last["none"] < 0.8 * losses["none"][0], "it has to learn something"
    assert all(abs(last[mode] / last["none"] - 1) < LOSS_BOUND for mode in MODES), last


_FOR_THE_PROCESS = contextlib.ExitStack()


def put_head_in(mode: str) -> None:
    """What each process of `start_ranks` calls first; its head stays until it ends."""
    _FOR_THE_PROCESS.enter_context(emulated_head(mode))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "tied"), [("gradients", False), ("all", True)])
def test_two_processes_take_the_steps_of_one(mode, tied, tmp_path, rows):
    """One process or two take the same micro-batches, and so round the same numbers to fp8; FSDP those of weights that
    it gathered.

    In the fourth step the rows run out, and the second process has a batch without any.
    """
    model = write_model(tmp_path / "model", tie_word_embeddings=tied)

    def options(folder, accumulation):
        return (
            f"--model_name={model}",
            f"--dataset_name={rows}",
            f"--output_dir={folder}",
            "--validation_fraction=0",
            "--mixed_precision=no",
            "--batch_size=5",
            "--max_seq_length=128",
            f"--gradient_accumulation_steps={accumulation}",
            "--max_steps=6",
            "--learning_rate=1e-3",
            "--log_every=1",
            "--no_export",
        )

    def taken(folder):
        return [step["loss"] for step in steps(folder)], [step["grad_norm"] for step in steps(folder)]

    train(*options(tmp_path / "plain", 4))
    with emulated_head(mode):
        train(*options(tmp_path / "one", 4))
    plain_norms, (losses, norms) = taken(tmp_path / "plain")[1], taken(tmp_path / "one")
    effects = [abs(norm / plain - 1) for norm, plain in zip(norms, plain_norms, strict=True)]
    assert min(effects) > 3e-4, f"the head shows in every step: {effects}"
    for sharding in ("ddp", "fsdp_full"):
        folder, log = tmp_path / sharding, tmp_path / f"{sharding}.log"
        ranks = start_ranks(
            2, log, *options(folder, 2), f"--sharding_mode={sharding}", first=functools.partial(put_head_in, mode)
        )
        assert [exit_code(process) for process in ranks] == [0, 0], log.read_text()
        assert taken(folder)[0] == pytest.approx(losses, rel=1e-5), sharding
        assert taken(folder)[1] == pytest.approx(norms, rel=1e-4), sharding


def test_the_seam_tells_the_head_which_micro_batch_it_is():
    options = PrecisionConfig()
    precision = Precision(resolve_precision(options, CPU), options, CPU, torch.float32)
    precision.fp8_head = head_of(inputs()[1], "gradients")
    for first in (True, False, None):
        with precision.context(first_microbatch=first):
            assert precision.fp8_head.is_first_microbatch is first


# --- what is said of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "lora", "num_gemms"), [("gradients", 0, 2), ("all", 0, 3), ("gradients", 4, 1), ("all", 4, 2)]
)
def test_coverage_and_expected_kernels_count_its_gemms(mode, lora, num_gemms):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config())
    if lora:
        add_adapters(model, LoraConfig(lora_rank=lora), torch.float32)
    precision = Precision(
        PrecisionPlan("fp8", "fp8", "delayed", "delayed", backend="te"), PrecisionConfig(), CPU, torch.bfloat16
    )
    precision.fp8_head = Fp8Head(model.get_output_embeddings(), mode)
    gemms = gemms_per_weight(model)
    in_head = precision.lm_head_gemms(gemms)
    assert list(in_head.values()) == [num_gemms]
    without = measure_coverage(model, (), "bf16", {}, gemms)
    coverage = measure_coverage(model, (), "bf16", {}, gemms, lm_head_gemms=in_head)
    assert coverage.fp8_flops_per_token - without.fp8_flops_per_token == 2 * num_gemms * 1024 * 32
    assert coverage.linear_flops_per_token == without.linear_flops_per_token
    assert coverage.skipped["lm_head"] == f"1 bf16 (lm_head, {num_gemms} of {2 if lora else 3} GEMMs in fp8)"
    expected = ExpectedKernels.of_model(precision, coverage, gemms=gemms)
    assert expected.num_fp8_lm_head_gemms == num_gemms and expected.num_fp8_gemms(4) == 4 * num_gemms


def test_arms_of_the_benchmarks():
    assert parse_variant("delayed:fp8head").what.precision.fp8_lm_head == "gradients"
    both = parse_variant("ddp:current:swap:fp8head_all:lora8").what
    assert (both.precision.fp8_lm_head, both.precision.fp8_scenario, both.lora.lora_rank) == ("all", "current", 8)
    for name in ("bf16:fp8head", "tensorwise:swap:fp8head", "delayed:fp8head:fp8head_all"):
        with pytest.raises(
            UserError, match=f"--arms {name}: one of fp8head and fp8head_all goes with a recipe of Transformer Engine"
        ):
            parse_variant(name)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_where_it_is_refused():
    with pytest.raises(UserError, match="--fp8_lm_head has no effect with --mixed_precision bf16"):
        parse_config(["--mixed_precision=bf16", "--fp8_lm_head=all"])
    with pytest.raises(UserError, match="--fp8_lm_head all is computed by Transformer Engine .* torchao; drop one"):
        parse_config(["--mixed_precision=fp8", "--fp8_backend=torchao", "--fp8_lm_head=all"])
    config = parse_config(["--mixed_precision=fp8", "--fp8_lm_head=gradients"])
    ranks = LaunchRanks(world_size=2, local_world_size=2, launched=True)
    for mode in ("ddp", "fsdp_grad", "fsdp_full"):
        check_machine(config, MachineFacts(ranks, mode))
    for mode in ("deepspeed_1", "deepspeed_3"):
        with pytest.raises(UserError, match=f"--fp8_lm_head gradients cannot go with --sharding_mode {mode}"):
            check_machine(config, MachineFacts(ranks, mode))
