"""flash-attn 3 and 4 in the TE decoder: what is refused, and what they are called with. On a CPU with stand-ins for
all packages.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import te_llama
from llm_fp8.config.attention_packages import FLASH_ATTENTION_3, FLASH_ATTENTION_4, FLASH_ATTENTION_PACKAGES
from llm_fp8.config.options import ModelConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.kernels import flash_attention
from llm_fp8.kernels import flash_attention as flash_attention_3
from llm_fp8.kernels.flash_attention import (
    HOPPER,
    check_flash_attention,
    keep_from_transformer_engine,
    load_operators,
    require_flash_attention,
)
from llm_fp8.models import build as models
from llm_fp8.tools.bench.variant_names import parse_variant
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.utils.errors import UserError
from tests.support.small import tiny_config
from tests.support.stand_in_flash_attention_3 import stand_in_operators
from tests.support.stand_in_te import install_stand_in

DOCUMENTS = (0, 7, 8, 40)
NO_MASK = torch.empty(0, 0, 0, 0)
VERSION_4 = FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_4].version


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size
):
    """As flash-attn 4 computes it; returns the output and what it keeps for itself."""
    assert causal and cu_seqlens_k is cu_seqlens_q and cu_seqlens_q.dtype == torch.int32
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max_seqlen_k == max(stop - start for start, stop in itertools.pairwise(bounds))
    outputs = []
    for start, stop in itertools.pairwise(bounds):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        left, right = window_size
        seen = (distance >= 0) & (distance <= (stop - start if left is None else left))
        assert right in (None, 0)
        heads = [x[start:stop].transpose(0, 1) for x in (q, k, v)]
        outputs.append(
            F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(outputs), None


@pytest.fixture(params=FLASH_ATTENTION_PACKAGES)
def flash(request, monkeypatch):
    """Transformer Engine and one flash-attn, `which`; `windows()` are those of its calls."""
    install_stand_in(monkeypatch)
    if request.param == FLASH_ATTENTION_3:
        monkeypatch.setattr(flash_attention_3, "load_operators", lambda: None)
        with stand_in_operators() as calls:
            yield SimpleNamespace(
                which=request.param,
                windows=lambda: [(call["window_size_left"], call["window_size_right"]) for call in calls],
                no_window=(-1, -1),
            )
        return
    windows = []

    def counted(*tensors, **options):
        windows.append(options["window_size"])
        return flash_attn_varlen_func(*tensors, **options)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = counted
    yield SimpleNamespace(which=request.param, windows=lambda: windows, no_window=(None, None))


def outcome(which: str | None, bounds=DOCUMENTS, checkpointing=False, **changes):
    """Logits and gradients of a packed row."""
    model = te_llama.build_te_model(tiny_config(**changes), torch.bfloat16, "cpu", flash_attention=which)
    te_llama.initialize_weights_(model, torch.Generator().manual_seed(0))
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    ids = torch.randint(3, 1024, (1, bounds[-1]), generator=torch.Generator().manual_seed(1))
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    logits = model(
        input_ids=ids,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=longest,
        attention_mask=NO_MASK,
    ).logits
    logits.float().logsumexp(-1).sum().backward()
    return model, logits, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("bounds", [DOCUMENTS, (0, 40)], ids=["documents", "one_document"])
def test_packed_rows_are_what_transformer_engine_makes_of_them(bounds, flash):
    model, logits, gradients = outcome(flash.which, bounds)
    assert flash.windows() == [flash.no_window] * 2
    assert te_llama.attention_backend(model) == FLASH_ATTENTION_PACKAGES[flash.which].name
    other, expected, expected_gradients = outcome(None, bounds)
    assert len(flash.windows()) == 2 and te_llama.attention_backend(other) == "fused (cuDNN)"
    torch.testing.assert_close(logits, expected, atol=0.02, rtol=0.02)
    for name, gradient in gradients.items():
        difference = (gradient.float() - expected_gradients[name].float()).norm() / expected_gradients[
            name
        ].float().norm()
        assert difference < 0.02, name


def test_recomputed_layers_have_the_same_gradients(flash):
    _model, logits, gradients = outcome(flash.which)
    _model, recomputed, recomputed_gradients = outcome(flash.which, checkpointing=True)
    assert len(flash.windows()) == 2 + 4
    assert torch.equal(recomputed, logits)
    assert all(torch.equal(recomputed_gradients[name], gradient) for name, gradient in gradients.items())


def attend(model) -> None:
    """A packed row through `model`, whose weights are drawn first."""
    te_llama.initialize_weights_(model, torch.Generator().manual_seed(0))
    model(
        input_ids=torch.arange(3, 43)[None],
        cu_seq_lens_q=torch.tensor(DOCUMENTS, dtype=torch.int32),
        max_length_q=32,
        attention_mask=NO_MASK,
    )


def test_a_sliding_window_counts_the_token_itself(flash, monkeypatch):
    config = tiny_config()
    monkeypatch.setattr(te_llama, "_window", lambda config, layer: 5 if layer else None)
    model = te_llama.build_te_model(config, torch.bfloat16, "cpu", flash_attention=flash.which)
    attend(model)
    assert flash.windows() == [flash.no_window, (4, 0)]


def test_the_gradients_of_a_window_are_those_of_torchs_attention(flash):
    """In fp32, which only the stand-ins compute in: windows, groups of queries and a scale of its own."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(40, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    above = torch.randn(40, 4, 16, generator=generator)
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=torch.int32)
    found = flash_attention.flash_attention(flash.which, *leaves, cu_seqlens, 32, 0.3, 5)
    expected, _rest = flash_attn_varlen_func(*leaves, cu_seqlens, cu_seqlens, 32, 32, 0.3, True, (4, 0))
    torch.testing.assert_close(found, expected)
    # A gradient that is not contiguous, as a transposed reader leaves it.
    turned = above.transpose(1, 2).contiguous().transpose(1, 2)
    for of_found, of_expected in zip(
        torch.autograd.grad(found, leaves, turned), torch.autograd.grad(expected, leaves, above), strict=True
    ):
        torch.testing.assert_close(of_found, of_expected)


def test_fp32_layers_take_transformer_engines(flash):
    """The check against Hugging Face computes in fp32 too, which flash-attn cannot."""
    model = te_llama.build_te_model(tiny_config(), torch.float32, "cpu", flash_attention=flash.which)
    attend(model)
    assert flash.windows() == []


@pytest.mark.parametrize("which", FLASH_ATTENTION_PACKAGES)
def test_what_was_not_compared_is_refused(which, monkeypatch):
    package = FLASH_ATTENTION_PACKAGES[which]
    check_flash_attention(which, 64, 0.0)
    with pytest.raises(
        UserError, match=f"{which}: this model's heads have 80 elements, and its gradients were compared for 64 and"
    ):
        check_flash_attention(which, 80, 0.0)
    with pytest.raises(UserError, match=r"attention_dropout 0\.1"):
        check_flash_attention(which, 128, 0.1)
    with pytest.raises(UserError, match=r"this GPU has 10\.0"):
        require_flash_attention(which, (10, 0))
    monkeypatch.setattr(flash_attention, "package_version", lambda name: None)
    with pytest.raises(
        UserError, match=rf"needs {package.package} {package.version}, which is not installed; run: pip install"
    ):
        require_flash_attention(which, HOPPER)
    monkeypatch.setattr(flash_attention, "package_version", lambda name: "4.0.0")
    with pytest.raises(UserError, match=r"and 4\.0\.0 is installed; run: pip install"):
        require_flash_attention(which, HOPPER)
    loaded = []
    loader = "load_operators" if which == FLASH_ATTENTION_3 else "_function_of_flash_attention_4"
    monkeypatch.setattr(flash_attention, loader, lambda: loaded.append(which))
    monkeypatch.setattr(flash_attention, "package_version", lambda name: package.version)
    require_flash_attention(which, HOPPER)
    assert loaded == [which]


def test_flash_attn_4_that_does_not_load_is_one_sentence(monkeypatch):
    """Found before any weight is loaded; the CPU has the package's version alone."""
    package = FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_4]
    monkeypatch.setattr(flash_attention, "package_version", lambda name: package.version)
    with pytest.raises(
        UserError, match=r"flash_attention_4: flash-attn-4 does not load \(No module named .*\); run: pip install"
    ):
        require_flash_attention(FLASH_ATTENTION_4, HOPPER)


# --- the operators of flash-attn 3
# ------------------------------------------------------------------------------------------

RUNTIME = "nvidia-cuda-runtime-cu12"
FILES = {"xformers": "xformers/flash_attn_3/_C.so", RUNTIME: "nvidia/cuda_runtime/lib/libcudart.so.12"}


@pytest.fixture
def loading(tmp_path, monkeypatch):
    """A function: `load_operators` with the named packages installed, `broken` libraries not loading; gives what was
    loaded, in this order.
    """

    def load(*packages: str, system_runtime: bool, broken: tuple[str, ...] = ()) -> list[str]:
        loaded = []

        def distribution(name):
            if name not in packages:
                raise importlib.metadata.PackageNotFoundError(name)
            return SimpleNamespace(locate_file=lambda path: tmp_path / path)

        def load_library(path):  # as torch's
            try:
                library(path)
            except OSError as error:
                raise OSError(f"Could not load this library: {path}") from error

        def library(path):
            name = os.path.basename(path)
            if name in broken or (path == name and not system_runtime):
                raise OSError(f"{name}: cannot open shared object file")
            loaded.append(str(path).removeprefix(f"{tmp_path}/"))

        for package in packages:
            (tmp_path / FILES[package]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / FILES[package]).touch()
        monkeypatch.setattr(flash_attention_3, "distribution", distribution)
        monkeypatch.setattr(ctypes, "CDLL", library)
        monkeypatch.setattr(torch.ops, "load_library", load_library)
        load_operators()
        return loaded

    load_operators.cache_clear()
    yield load
    load_operators.cache_clear()


def test_the_cuda_runtime_of_torch_or_of_the_system_is_taken_first(loading):
    assert loading("xformers", RUNTIME, system_runtime=True) == ["libcudart.so.12", FILES["xformers"]]
    load_operators.cache_clear()
    assert loading("xformers", RUNTIME, system_runtime=False) == [FILES[RUNTIME], FILES["xformers"]]
    assert loading(system_runtime=False) == [], "once per process"


@pytest.mark.parametrize(
    ("packages", "broken", "words"),
    [
        ((), (), r"needs xformers/flash_attn_3/_C\.so of xformers 0\.0\.34"),
        (("xformers",), (), r"do not load \(libcudart\.so\.12: cannot open"),
        (("xformers", RUNTIME), ("libcudart.so.12",), r"do not load \(libcudart\.so\.12: cannot open"),
        (("xformers", RUNTIME), ("_C.so",), r"do not load \(_C\.so: cannot open"),
    ],
    ids=["no_xformers", "no_runtime", "broken_runtime", "broken_operators"],
)
def test_operators_that_cannot_be_had_are_one_sentence_with_the_command(packages, broken, words, loading):
    with pytest.raises(UserError, match=words) as error:
        loading(*packages, system_runtime=False, broken=broken)
    said = str(error.value)
    assert said.startswith("--attn_implementation flash_attention_3") and "\n" not in said
    assert said.endswith(FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_3].install)


def test_operators_of_another_package_are_refused(loading):
    with (
        stand_in_operators(),
        pytest.raises(UserError, match=r"another package has loaded .* uninstall it \(flash-attn-3\)"),
    ):
        loading("xformers", system_runtime=True)


# --- which attention a model has
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "version", "value"), [(80, VERSION_4, "0"), (128, VERSION_4, None), (80, None, None)]
)
def test_transformer_engine_does_not_come_to_it_by_itself_where_it_was_not_compared(
    head_dim, version, value, monkeypatch
):
    monkeypatch.setenv("NVTE_FLASH_ATTN_V4", "unset after this test")
    monkeypatch.delenv("NVTE_FLASH_ATTN_V4")
    monkeypatch.setattr(flash_attention, "package_version", lambda name: version if name == "flash-attn-4" else "1.0")
    keep_from_transformer_engine(head_dim)
    assert os.environ.get("NVTE_FLASH_ATTN_V4") == value


@pytest.mark.parametrize("which", FLASH_ATTENTION_PACKAGES)
def test_a_model_whose_heads_were_not_compared_is_refused_before_any_weight(which):
    config = parse_config(["--use_te", "--attn_implementation", which, "--max_seq_length", "64"])
    with pytest.raises(UserError, match=f"{which}: this model's heads have 16 elements"):
        models.check_model(config, tiny_config(), ["token"])


def test_flash_attn_4_is_not_taken_for_flash_attn_2(monkeypatch):
    """Both are folders `flash_attn`; the Hugging Face path calls the functions of version 2."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    assert models.choose_attention("auto", tiny_config(), torch.device("cuda"), torch.bfloat16) == "sdpa"


@pytest.mark.parametrize(("option", "which"), [("flash3", FLASH_ATTENTION_3), ("flash4", FLASH_ATTENTION_4)])
def test_an_arm_of_the_benchmarks(option, which):
    arm = parse_variant(f"delayed:{option}:fp8head_all").what
    work = Workload("Llama-3.2-1B", 2, 64, 1, 1)
    assert arm.config(work).model == ModelConfig(
        model_name="Llama-3.2-1B", random_init=True, use_te=True, attn_implementation=which
    )
    assert parse_variant("delayed").what.config(work).model.attn_implementation == "auto"


def test_an_arm_with_two_attentions_is_refused():
    with pytest.raises(UserError, match="--arms delayed:flash4:flash3: flash4 and flash3 are two attentions"):
        parse_variant("delayed:flash4:flash3")


@pytest.mark.parametrize("which", FLASH_ATTENTION_PACKAGES)
def test_a_row_that_gpus_share_is_refused(which):
    options = ["--use_te", "--attn_implementation", which, "--context_parallel_size", "2"]
    with pytest.raises(
        UserError, match=f"{which} cannot share a row between GPUs; drop it, or --context_parallel_size 2"
    ):
        parse_config(options, parallel=True)
