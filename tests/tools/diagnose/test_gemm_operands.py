"""Recording of GEMM operands against a stand-in of Transformer Engine's seam, real hooks and real autograd."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.precision.coverage import Fp8Coverage
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.tools.diagnose.gemm_operands import (
    PASSES,
    GemmRecorder,
    group_layers,
    number_ranges,
    operand_type,
    te_gemm_owners,
)
from llm_fp8.tools.diagnose.result import left_out_problems, precision_problems, reasons_outside_fp8
from tests.support.diagnosed import FP8, module

BF16 = PrecisionPlan(requested="bf16", effective="bf16")


class DType(enum.IntEnum):
    """Members and values as in Transformer Engine 2.20."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Float8TensorStorage:
    """What `operand_type` reads of it, around the wide tensor."""

    def __init__(self, wide: torch.Tensor, dtype: DType) -> None:
        self.wide, self._fp8_dtype = wide, dtype


class Float8BlockwiseQTensorStorage(Float8TensorStorage):
    pass


class MXFP8TensorStorage(Float8TensorStorage):
    pass


class NVFP4TensorStorage:
    pass


def plain_gemm(A, B, layout="TN", **_):
    """BLAS letters, column-major: TN is B A', NN is B A, NT is B' A."""
    a, b = (getattr(operand, "wide", operand) for operand in (A, B))
    return {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()


class _Product(torch.autograd.Function):
    """A linear layer as Transformer Engine writes one; `wide_wgrad` is the fault that is to be found."""

    @staticmethod
    def forward(ctx, x, weight, owner, fp8, wide_wgrad):
        ctx.save_for_backward(x, weight)
        ctx.owner, ctx.fp8, ctx.wide_wgrad = owner, fp8, wide_wgrad
        cast = (lambda t: Float8TensorStorage(t, DType.kFloat8E4M3)) if fp8 else (lambda t: t)
        return owner.general_gemm(cast(weight), cast(x))

    @staticmethod
    def backward(ctx, grad):
        x, weight = (saved.detach() for saved in ctx.saved_tensors)
        cast, cast_grad = (
            (lambda t, d=d: Float8TensorStorage(t, d)) if ctx.fp8 else (lambda t: t)
            for d in (DType.kFloat8E4M3, DType.kFloat8E5M2)
        )
        dgrad = ctx.owner.general_gemm(cast(weight), cast_grad(grad), layout="NN", grad=True)
        if ctx.wide_wgrad:
            cast = cast_grad = lambda t: t
        wgrad = ctx.owner.general_gemm(A=cast(x), B=cast_grad(grad), layout="NT", grad=True)
        return dgrad, wgrad, None, None, None


class TELinear(nn.Module):
    def __init__(self, owner, fp8=True, wide_wgrad=False) -> None:
        super().__init__()
        self.in_features = self.out_features = 16
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.owner, self.fp8, self.wide_wgrad = owner, fp8, wide_wgrad

    def forward(self, x):
        return _Product.apply(x, self.weight, self.owner, self.fp8, self.wide_wgrad)


class Layer(nn.Module):
    def __init__(self, owner, recompute=False, **options) -> None:
        super().__init__()
        self.qkv, self.output, self.recompute = TELinear(owner, **options), TELinear(owner, **options), recompute

    def _layer(self, x):
        return self.output(torch.tanh(self.qkv(x)))

    def forward(self, x):
        return checkpoint(self._layer, x, use_reentrant=False) if self.recompute else self._layer(x)


class Decoder(nn.Module):
    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.lm_head = nn.Linear(16, 32, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def record(decoder, owner):
    recorder = GemmRecorder(decoder)
    with recorder.recording([owner]):
        decoder(torch.randn(4, 16, requires_grad=True)).sum().backward()
    recorder.note_lm_head("lm_head", torch.bfloat16)
    return recorder.modules()


@pytest.fixture
def owner():
    return SimpleNamespace(general_gemm=plain_gemm)


@pytest.mark.parametrize("recompute", [False, True])
def test_each_gemm_goes_to_its_module_and_pass(owner, recompute):
    torch.manual_seed(0)
    decoder = Decoder(
        [Layer(owner, recompute), Layer(owner, recompute, fp8=False), Layer(owner, recompute, wide_wgrad=True)]
    )
    found = {module.name: module for module in record(decoder, owner)}
    assert list(found) == [*(f"layers.{n}.{part}" for n in range(3) for part in ("qkv", "output")), "lm_head"]
    for part in ("qkv", "output"):
        fp8, wide, faulty = (found[f"layers.{n}.{part}"] for n in range(3))
        assert [fp8.operands(p) for p in ("fprop", "dgrad", "wgrad")] == [
            ("e4m3 x e4m3",),
            ("e4m3 x e5m2",),
            ("e4m3 x e5m2",),
        ]
        assert {pair for p in ("fprop", "dgrad", "wgrad") for pair in wide.operands(p)} == {"fp32 x fp32"}
        assert faulty.operands("dgrad") == ("e4m3 x e5m2",) and faulty.operands("wgrad") == ("fp32 x fp32",)
    head = found["lm_head"]
    assert head.told_by == "dtype" and head.operands("wgrad") == ("bf16 x bf16",)


def test_recording_changes_no_number_and_leaves_nothing_behind(owner):
    torch.manual_seed(0)
    decoder, x = Decoder([Layer(owner), Layer(owner)]), torch.randn(4, 16, requires_grad=True)
    decoder(x).sum().backward()
    before = [p.grad.clone() for p in decoder.layers.parameters()]
    decoder.zero_grad()
    with GemmRecorder(decoder).recording([owner]):
        decoder(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(decoder.layers.parameters(), before, strict=True))
    assert owner.general_gemm is plain_gemm
    assert not any(m._forward_pre_hooks or m._backward_pre_hooks for m in decoder.modules())
    with pytest.raises(ZeroDivisionError), GemmRecorder(decoder).recording([owner]):
        _ = 1 / 0
    assert owner.general_gemm is plain_gemm


def test_torchs_own_layers_are_told_by_autocast(owner):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    recorder = GemmRecorder(model)
    with recorder.recording([]), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 16)).sum().backward()
    assert [(m.told_by, m.kind, m.operands("dgrad")) for m in recorder.modules()] == [
        ("dtype", "Linear", ("bf16 x bf16",))
    ] * 2
    recorder = GemmRecorder(model)
    with recorder.recording([]):
        model(torch.randn(2, 16)).sum().backward()
    assert recorder.modules()[0].operands("fprop") == ("fp32 x fp32",)


def test_types_of_operands():
    tensor = torch.zeros(1, dtype=torch.bfloat16)
    assert operand_type(tensor) == operand_type(nn.Parameter(tensor)) == "bf16"
    assert operand_type(Float8TensorStorage(tensor, DType.kFloat8E5M2)) == "e5m2"
    assert operand_type(Float8BlockwiseQTensorStorage(tensor, DType.kFloat8E4M3)) == "e4m3/block"
    assert operand_type(MXFP8TensorStorage(tensor, DType.kFloat8E4M3)) == "e4m3/mxfp8"
    assert operand_type(NVFP4TensorStorage()) == "e2m1/nvfp4"
    assert operand_type(object()) == "object"


def test_no_seam_is_looked_for_where_transformer_engine_is_not_loaded():
    assert te_gemm_owners() == []


def test_identical_layers_are_one_line():
    wide = {"fprop": "bf16 x bf16", "dgrad": "bf16 x bf16", "wgrad": "bf16 x bf16"}
    modules = [
        module(f"model.layers.{n}.{part}", **(wide if n == 3 else {})) for n in range(5) for part in ("qkv", "mlp")
    ]
    groups = group_layers([*modules, module("lm_head", **wide)])
    assert [(g["module"], g["layers"]) for g in groups] == [
        ("qkv", "0-2, 4"),
        ("mlp", "0-2, 4"),
        ("qkv", "3"),
        ("mlp", "3"),
        ("lm_head", ""),
    ]
    assert groups[0]["dgrad"] == ["e4m3 x e5m2"] and groups[2]["dgrad"] == ["bf16 x bf16"]
    assert number_ranges(()) == "" and number_ranges((7,)) == "7" and number_ranges((0, 1, 3, 4, 9)) == "0-1, 3-4, 9"


def test_problems_name_the_module_and_the_pass():
    good, silent = module("model.layers.0.qkv"), "model.layers.1.qkv"
    assert precision_problems(FP8, [good], [good.name], "DelayedScaling") == []
    assert precision_problems(FP8, [good], [good.name, silent], "DelayedScaling") == [
        "model.layers.1.qkv: no GEMM was seen"
    ]
    faulty = module("model.layers.0.mlp", wgrad="bf16 x bf16; e4m3 x e5m2")
    (problem,) = precision_problems(FP8, [faulty], [faulty.name], "DelayedScaling")
    assert problem == "model.layers.0.mlp: wgrad multiplies bf16 x bf16, e4m3 x e5m2, not fp8"
    (problem,) = precision_problems(FP8, [module("a", wgrad="")], ["a"], "DelayedScaling")
    assert problem == "a: wgrad multiplies nothing, not fp8"
    assert any("no fp8 recipe" in problem for problem in precision_problems(FP8, [good], [good.name], "none"))
    fallen = PrecisionPlan("fp8", "fp8", "mxfp8", "delayed", fallback_reason="no Blackwell.")
    assert precision_problems(fallen, [good], [good.name], None) == [
        "--fp8_scenario mxfp8 was asked for and delayed runs: no Blackwell."
    ]
    assert precision_problems(BF16, [module("a", *["bf16 x bf16"] * 3)], [], "none") == []
    assert precision_problems(BF16, [good], [], None) == ["model.layers.0.qkv: fp8 GEMMs in a run that asked for bf16"]


def test_reasons_outside_fp8():
    census = Fp8Coverage(
        0,
        1,
        {},
        {
            "model.layers.*.qkv": "2 bf16",
            "lm_head": "1 bf16 (lm_head)",
            "odd": "1 bf16 (size 20 x 24 is not a multiple of 16)",
        },
        0.0,
        6.0,
    )
    why = reasons_outside_fp8(census, PrecisionConfig(mixed_precision="fp8", fp8_last_bf16_layers=2), FP8)
    assert why["model.layers.*.qkv"] == "2 bf16 (kept by --fp8_last_bf16_layers 2)"
    assert why["lm_head"] == "1 bf16 (lm_head)"
    assert (
        reasons_outside_fp8(census, PrecisionConfig(), BF16)["model.layers.*.qkv"]
        == "2 bf16 (--mixed_precision bf16 runs)"
    )
    assert left_out_problems(census) == ["odd: 1 bf16 (size 20 x 24 is not a multiple of 16), so it is not in fp8"]


@pytest.mark.parametrize(
    ("in_fp8", "expected"),
    [
        (0, ["bf16 x bf16", "bf16 x bf16", "bf16 x bf16"]),
        (2, ["bf16 x bf16", "e4m3 x e5m2", "e4m3 x e5m2"]),
        (3, ["e4m3 x e4m3", "e4m3 x e5m2", "e4m3 x e5m2"]),
    ],
)
def test_the_output_head_by_its_option(in_fp8, expected):
    recorder = GemmRecorder(nn.ModuleDict({"lm_head": nn.Linear(16, 32, bias=False)}))
    recorder.note_lm_head("lm_head", torch.bfloat16, in_fp8)
    (head,) = recorder.modules()
    assert [pair for name in PASSES for pair in head.operands(name)] == expected
    assert head.told_by == ("option" if in_fp8 else "dtype")
