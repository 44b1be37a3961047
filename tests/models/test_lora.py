"""LoRA compared with PEFT in a plain loop: losses, gradients, exports and frozen weights of both decoders."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from llm_fp8.config.options import LoraConfig, PrecisionConfig
from llm_fp8.models.lora import adapters_of, add_adapters, initialize_adapters_, needs_unfused_mlp
from llm_fp8.models.model import Model
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import gemms_per_weight, linear_weights, measure_coverage
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.precision.te import TEBackend
from llm_fp8.run.checkpoint import Checkpoint
from llm_fp8.utils.errors import UserError
from tests.support.families import FAMILIES, te_model, write_family
from tests.support.processes import exit_code, start_ranks
from tests.support.reference import OPTIONS, documents, plain_steps, reference_options
from tests.support.small import final_weights, steps, train
from tests.support.stand_in_te import install_stand_in

RANK, ALPHA = 4, 6
LORA = [f"--lora_rank={RANK}", f"--lora_alpha={ALPHA}"]
SEED = 42


@pytest.fixture
def stand_in(monkeypatch):
    install_stand_in(monkeypatch)


@functools.cache
def lora_reference(
    model_folder: str, rows: str, targets: tuple[str, ...] | str
) -> tuple[list[float], list[float], dict]:
    """Let PEFT add adapters to `targets` and train them in a plain loop. Return losses, gradient norms and adapters."""
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    targets = list(targets) if isinstance(targets, tuple) else targets
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(plain, settings)
    initialize_adapters_(model.base_model.model, SEED)  # the initial values of our runs
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (0.9, OPTIONS["--adam_beta2"])
    optimizer = torch.optim.AdamW(trainable, weight_decay=OPTIONS["--weight_decay"], betas=betas)
    losses, norms = plain_steps(model, optimizer, documents(rows, model_folder, False))
    return losses, norms, {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


def check_with_peft(folder: Path, model_folder: str, rows: str, targets: tuple[str, ...] | str = "all-linear") -> None:
    """Compare losses, gradient norms and adapters of the run in `folder` with those that `lora_reference` returns."""
    losses, norms, tensors = lora_reference(model_folder, rows, targets)
    records = steps(folder)
    assert [step["loss"] for step in records] == pytest.approx(losses, rel=1e-5)
    assert [step["grad_norm"] for step in records] == pytest.approx(norms, rel=1e-4)
    exported = adapter(folder)
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-3, atol=1e-5)
    assert any(tensor.abs().max() > 1e-3 for name, tensor in exported.items() if "lora_B" in name)


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(3, 1024, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def loaded_by_peft(model_folder: str, folder: Path) -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), folder
    )


@pytest.mark.slow
def test_run_equals_peft_in_a_plain_loop_and_its_adapter_merges(tmp_path, tied_model, sixteen_rows, monkeypatch):
    sizes = ["--batch_size=4", "--gradient_accumulation_steps=4", *LORA]
    train(*reference_options(tied_model, sixteen_rows, tmp_path / "run"), *sizes)
    check_with_peft(tmp_path / "run", tied_model, sixteen_rows)
    check_merged(tied_model, tmp_path / "run" / "final", monkeypatch)
    check_continued(tmp_path / "run", sixteen_rows)


def check_continued(run: Path, rows: str, *more: str) -> None:
    """Without a learning rate, a run that starts from the adapter exports it again. Its loss is that of the adapter."""
    options = reference_options(run / "final", rows, run / "next")
    train(*options, "--batch_size=16", "--learning_rate=0", *more)
    first, second = adapter(run), adapter(run / "next")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert steps(run / "next")[0]["loss"] < steps(run)[-1]["loss"] < steps(run)[0]["loss"]
    config, continued = (json.loads((each / "final/adapter_config.json").read_text()) for each in (run, run / "next"))
    assert config == continued
    for contradiction in ("--lora_rank=5", "--lora_alpha=5", "--lora_targets=q_proj,v_proj,o_proj", "--random_init"):
        with pytest.raises(UserError, match=contradiction.partition("=")[0]):
            train(*options, contradiction, f"--output_dir={run / 'refused'}")


def merge(adapter: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    options = [f"--adapter={adapter}", f"--base_model={base}", f"--output={adapter.with_name('merged')}"]
    monkeypatch.setattr(sys, "argv", ["merge_adapter.py", *options])
    importlib.import_module("scripts.merge_adapter").main()
    return adapter.with_name("merged")


def check_merged(base: str, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(loaded_by_peft(base, adapter))
    merged = AutoModelForCausalLM.from_pretrained(merge(adapter, base, monkeypatch), dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    assert (logits(AutoModelForCausalLM.from_pretrained(base)) - expected).abs().max() > 1e-3


HEAD, Q = {"target_modules": ["lm_head"]}, {"r": RANK, "target_modules": ["q_proj"]}
FOREIGN_ADAPTERS = {
    "lm_head": peft.LoraConfig(target_modules=["q_proj", "embed_tokens", "lm_head"], use_rslora=True),
    "dora": peft.LoraConfig(**HEAD, use_dora=True, modules_to_save=["norm"]),
    "tokens": peft.LoraConfig(**Q, trainable_token_indices={"embed_tokens": [5, 6], "lm_head": [5, 9]}),
    "lokr": peft.LoKrConfig(**HEAD),
    "ia3": peft.IA3Config(**HEAD, feedforward_modules=[]),
}
REFUSED_ADAPTERS = {
    "layer_replication": peft.LoraConfig(**Q, layer_replication=[[0, 2], [0, 2]]),
    "prompt_embeddings": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "layers.9": peft.LoraConfig(**Q),
    "NaN": peft.LoraConfig(**Q),
}


@pytest.mark.parametrize("kind", [*FOREIGN_ADAPTERS, *REFUSED_ADAPTERS])
def test_adapters_trained_elsewhere_merge_as_in_peft_or_are_refused(tmp_path, tied_model, kind, monkeypatch):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(tied_model, dtype=torch.float32)
    model = peft.get_peft_model(plain, copy.deepcopy((FOREIGN_ADAPTERS | REFUSED_ADAPTERS)[kind]))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape) * parameter.requires_grad
    model.save_pretrained(tmp_path / "adapter")
    if kind in FOREIGN_ADAPTERS:
        check_merged(tied_model, tmp_path / "adapter", monkeypatch)
        with pytest.raises(UserError, match="--model_name .*adapter|--lora_targets"):
            train(f"--model_name={tmp_path / 'adapter'}", f"--output_dir={tmp_path / 'run'}", "--max_seq_length=128")
        return
    tensors = load_file(file := tmp_path / "adapter" / "adapter_model.safetensors")
    name, tensor = next(iter(tensors.items()))
    extra = {"layers.9": {f"{name}.layers.9": tensor.clone()}, "NaN": {name: tensor * torch.nan}}
    save_file(tensors | extra.get(kind, {}), file)
    with pytest.raises(UserError, match=f"--adapter.*{kind}"):
        merge(tmp_path / "adapter", tied_model, monkeypatch)


@pytest.mark.slow
def test_adapters_on_random_weights_are_merged_into_the_export(tmp_path, rows):
    """The export must contain the frozen weights, which were initialised randomly and are stored nowhere else."""
    options = ["--max_steps=1", "--max_seq_length=256", f"--dataset_name={rows}", "--validation_fraction=0"]
    train(*options, f"--output_dir={tmp_path}", *LORA)
    assert "model.layers.0.self_attn.q_proj.weight" in final_weights(tmp_path)


def install_permanent_stand_in() -> None:
    install_stand_in(pytest.MonkeyPatch())


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "use_te"), [("ddp", True), ("fsdp_full", False)])
def test_two_ranks_take_the_steps_of_peft(tmp_path, tied_model, sixteen_rows, mode, use_te):
    """PEFT trains in one process. The lm_head is tied to the embedding. The run with FSDP recomputes activations."""
    more = ["--gradient_checkpointing"] if mode == "fsdp_full" else []
    first = None
    if use_te:
        more, first = [*more, "--use_te", "--no_packing"], install_permanent_stand_in
    sizes = ["--batch_size=4", "--gradient_accumulation_steps=2", f"--sharding_mode={mode}", *LORA, *more]
    log = tmp_path / "log"
    ranks = start_ranks(2, log, *reference_options(tied_model, sixteen_rows, tmp_path), *sizes, first=first)
    assert [exit_code(rank) for rank in ranks] == [0, 0], log.read_text()
    check_with_peft(tmp_path, tied_model, sixteen_rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "targets", "more"),
    [
        ("tied_model", "all-linear", ["--packing"]),
        ("tied_model", "q_proj,v_proj", ["--no_packing", "--gradient_checkpointing"]),
        ("gemma_model", "all-linear", ["--packing"]),
    ],
)
def test_te_decoder_trains_the_adapters_of_peft(tmp_path, request, sixteen_rows, stand_in, model, targets, more):
    """Train on the stand-in for Transformer Engine. Losses, gradient norms and adapters must agree with PEFT's."""
    more, folder = [*LORA, *more, "--batch_size=8", "--gradient_accumulation_steps=2"], request.getfixturevalue(model)
    train(*reference_options(folder, sixteen_rows, tmp_path), "--use_te", f"--lora_targets={targets}", *more)
    check_with_peft(tmp_path, folder, sixteen_rows, targets if targets == "all-linear" else tuple(targets.split(",")))
    loaded_by_peft(folder, tmp_path / "final")  # raises if no name of the export matches
    assert set(json.loads((tmp_path / "final" / "adapter_config.json").read_text())["target_modules"]) == {
        name.split(".")[-3] for name in adapter(tmp_path)
    }
    check_continued(tmp_path, sixteen_rows, "--use_te")


NAMED_TARGETS = [("llama2", "k_proj,o_proj"), ("gemma3_text", "up_proj"), ("phi3_partial_rope", "gate_up_proj")]


@pytest.mark.parametrize(("family", "targets"), [*((name, "all-linear") for name in FAMILIES), *NAMED_TARGETS])
def test_te_decoder_with_adapters_matches_hugging_face(tmp_path, stand_in, family, targets):
    """Compare the logits, all gradients of the adapters and the merged tensors. A and B of each adapter are random."""
    from llm_fp8.models.export import hf_tensors

    options = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_targets=targets)
    folder = write_family(tmp_path, family, torch.float32)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    te = te_model(folder, unfused_mlp=needs_unfused_mlp(options)).module
    for model in (hf, te):
        add_adapters(Model(model), options, torch.float32)
        initialize_adapters_(model, SEED)
        with torch.no_grad():
            for number, (_name, pair) in enumerate(sorted(adapters_of(model).items())):
                pair.b.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    expected, adapters = adapters_of(hf), adapters_of(te)
    assert expected.keys() == adapters.keys()
    assert all(torch.equal(expected[name].a, adapters[name].a) for name in expected)
    ids = torch.randint(3, 1024, (2, 24), generator=torch.Generator().manual_seed(5))
    outputs = [model(input_ids=ids, labels=ids) for model in (hf, te)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=1e-4)
    for output in outputs:
        output.loss.backward()
    for name in expected:
        for ours, theirs in ((adapters[name].a, expected[name].a), (adapters[name].b, expected[name].b)):
            assert theirs.grad.abs().max() > 0
            assert (ours.grad - theirs.grad).norm() <= 2e-5 * theirs.grad.norm(), name
    assert all((p.grad is not None) == ("adapters" in name) for name, p in te.named_parameters())
    merged = dict(hf_tensors(Model(te), torch.float32))
    reference = dict(hf_tensors(Model(hf), torch.float32))
    assert merged.keys() == reference.keys()
    assert all(torch.allclose(merged[name], reference[name], atol=1e-6) for name in reference)


class GemmCounter(TorchDispatchMode):
    """Counts how many GEMMs read each tensor. `counts` maps the address of a tensor's storage to that number."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.counts.update(
                {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj", "o_proj", "gate_proj", "down_proj"])
@pytest.mark.parametrize("use_te", [False, True], ids=["hf", "te"])
def test_expected_gemms_of_frozen_weights_match_autograd(tiny_model, stand_in, use_te, targets):
    """`gemms_per_weight` gives the exact numbers of GEMMs, except in the first layer, where it gives lower bounds."""
    options = LoraConfig(lora_rank=RANK, lora_targets=targets)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    if use_te:
        model = te_model(tiny_model, unfused_mlp=needs_unfused_mlp(options)).module
    assert gemms_per_weight(Model(model)) == {}
    add_adapters(Model(model), options, torch.float32)
    initialize_adapters_(model, SEED)
    gemms = gemms_per_weight(Model(model))
    ids = torch.randint(3, 1024, (2, 24))
    with GemmCounter() as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    first = set(model.model.layers[0].modules())
    for module, number in gemms.items():
        for weight in linear_weights(module):
            count = counted.counts[weight.untyped_storage().data_ptr()]
            assert (count >= number) if module in first else (count == number), module
    coverage = measure_coverage(model, [m for m in gemms if m is not model.lm_head], "bf16", {}, gemms)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(weight.numel() for module in gemms for weight in linear_weights(module))
    assert coverage.num_linear_weights == frozen + adapters
    assert coverage.linear_flops_per_token <= 4 * frozen + 6 * adapters
    assert 0 < coverage.fp8_linear_flop_share < 1


@pytest.mark.slow
def test_checkpoints_contain_adapters_only_and_require_the_same_options(tmp_path, tiny_model, rows):
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--validation_fraction=0", "--max_steps=2"]
    options += ["--max_seq_length=256", "--batch_size=4", "--save_every=1", *LORA]
    train(*options, f"--output_dir={tmp_path / 'run'}")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    names = [name for name in Checkpoint.open(checkpoint).kinds if name.startswith(("model.", "optimizer."))]
    assert names and all("lora_" in name for name in names)
    with pytest.raises(UserError, match="does not belong to this run: .*lora"):
        train(*options, f"--output_dir={tmp_path / 'x'}", f"--resume_from={checkpoint}", "--lora_alpha=3")


def test_casts_of_frozen_weights_are_reused(monkeypatch):
    """The first training pass casts frozen weights; with delayed scaling, so does the second. Later passes do not."""
    monkeypatch.setattr(TEBackend, "autocast", lambda *_, **__: contextlib.nullcontext())
    for scenario, expected in (("current", [True, None, False, False]), ("delayed", [True, None, True, False])):
        plan = PrecisionPlan("fp8", "fp8", scenario, scenario, recipe=object())
        precision = Precision(plan, PrecisionConfig(), torch.device("cpu"), torch.bfloat16)
        module = torch.nn.Linear(2, 2)
        module.is_first_microbatch = None
        precision._caching_modules = [module]
        precision.keep_casts_of_frozen_weights()
        flags = []
        for number in range(4):
            with torch.set_grad_enabled(number != 1), precision.context(first_microbatch=None):
                flags.append(module.is_first_microbatch)
        assert flags == expected
