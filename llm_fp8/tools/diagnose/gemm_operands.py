"""Operand types of every linear layer's GEMMs, seen where the GEMM is called.

    recorder = GemmRecorder(model)
    with recorder.recording(te_gemm_owners()):
        ...one step...
    recorder.modules()   ->   [ModuleGemms("model.layers.0.qkv", fprop {"e4m3 x e4m3"}, dgrad {"e4m3 x e5m2"}), ...]

Transformer Engine's modules call `general_gemm(A, B, layout=...)`, which is wrapped in the namespace of their source
file during a recording. The layout tells the pass (BLAS letters, column-major):

    TN   fprop   A = weight, B = input
    NN   dgrad   A = weight, B = gradient of the output
    NT   wgrad   A = input,  B = gradient of the output

Hooks tell which module is running: the last whose forward began (fprop), or whose output's gradient arrived (dgrad and
wgrad); two names, because recomputation runs forwards in the middle of a backward.

torchao's modules call torch.mm with operands that carry type and role. The calls are seen where torch dispatches them,
in a step whose layers run uncompiled. 'e4m3/row' has one scale per row.

The GEMMs of torch's own linear layers are not seen. They run in autocast's dtype, or that of their input, and autograd
takes the same dtype for both gradients; that is noted for them, and marked so (`told_by`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from llm_fp8.config.recipes import RECIPES
from llm_fp8.precision.modules import linear_weights
from llm_fp8.precision.torchao import is_converted

Pass = Literal["fprop", "dgrad", "wgrad"]
PASSES: tuple[Pass, ...] = get_args(Pass)
_PASS_OF_LAYOUT: dict[str, Pass] = {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}

_PASS_OF_ROLES: dict[Any, Pass] = {
    ("input", "weight"): "fprop",
    ("grad_output", "weight"): "dgrad",
    ("grad_output", "input"): "wgrad",
}
"""torchao's names of the roles of both operands."""
_LOW_PRECISION = re.compile(r"e\dm\d")
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def operand_type(operand: Any) -> str:
    """'bf16', 'e4m3' (one scale per tensor), 'e4m3/block', 'e4m3/mxfp8', 'e2m1/nvfp4'; else the class's name."""
    kind = type(operand).__name__
    if kind == "Float8TrainingTensor":
        return f"{short_dtype(operand._data.dtype)}{'' if operand._axiswise_dim is None else '/row'}"
    scaled = next((row for row in RECIPES.values() if row.operand_class and row.operand_class in kind), None)
    scaling = f"/{scaled.operand}" if scaled else ""
    if scaled and not scaled.has_fp8_peak:
        return f"e2m1{scaling}"
    # Transformer Engine's enumeration names its members kFloat8E4M3, kFloat8E5M2.
    found = _LOW_PRECISION.search(getattr(getattr(operand, "_fp8_dtype", None), "name", "").lower())
    if found:
        return found.group() + scaling
    if type(operand) in (Tensor, nn.Parameter):
        return short_dtype(operand.dtype)
    return kind


def short_dtype(dtype: torch.dtype) -> str:
    fp8 = _LOW_PRECISION.search(str(dtype))
    return fp8.group() if fp8 else _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def is_low_precision(operands: str) -> bool:
    """Both sides of 'A x B' have 8 bits or fewer."""
    return all(_LOW_PRECISION.search(side) for side in operands.split(" x "))


@dataclass
class ModuleGemms:
    """Operand pairs ('A x B') of a module by pass; more than one in a pass where its GEMMs differ."""

    name: str
    kind: str
    """The module's class."""
    told_by: str = "general_gemm"
    """general_gemm, mm: seen at the call. dtype: torch's rule for its own linear layers."""
    passes: dict[Pass, set[str]] = field(default_factory=lambda: {name: set() for name in PASSES})

    def operands(self, gemm_pass: Pass) -> tuple[str, ...]:
        """The operand pairs of a pass; empty where it ran no GEMM."""
        return tuple(sorted(self.passes[gemm_pass]))


class _SeenGemms(TorchDispatchMode):
    """Calls `note(left, right)` for every torch.mm that is dispatched, in the backward pass too."""

    def __init__(self, note: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._note(*args[:2])
        return func(*args, **(kwargs or {}))


def te_gemm_owners() -> list[Any]:
    """The source files of Transformer Engine's linear modules; empty where the run has not loaded it."""
    if "transformer_engine" not in sys.modules:
        return []
    names = ("linear", "layernorm_linear", "layernorm_mlp")
    return [importlib.import_module(f"transformer_engine.pytorch.module.{name}") for name in names]


class GemmRecorder:
    """Notes the GEMMs of the linear modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {name: module for name, module in model.named_modules() if linear_weights(module)}
        self._found: dict[str, ModuleGemms] = {}
        self._forward = self._backward = ""
        """Name of the fp8 module that is running."""

    def modules(self) -> list[ModuleGemms]:
        return [self._found[name] for name in self._modules if name in self._found]

    def note_lm_head(self, name: str, dtype: torch.dtype) -> None:
        """lm_head, which the loss computes without its module, in `dtype`."""
        for gemm_pass in PASSES:
            self._note(name, gemm_pass, f"{short_dtype(dtype)} x {short_dtype(dtype)}", told_by="dtype")

    @contextlib.contextmanager
    def recording(self, owners: Sequence[Any]) -> Iterator[None]:
        """Note what runs in this block; `owners` are the namespaces that hold a `general_gemm`."""
        with contextlib.ExitStack() as undo:
            for owner in owners:
                real = owner.general_gemm
                undo.callback(setattr, owner, "general_gemm", real)
                owner.general_gemm = functools.partial(self._general_gemm, real)
            if any(is_converted(module) for module in self._modules.values()):
                undo.enter_context(_SeenGemms(self._note_mm))
            for name, module in self._modules.items():
                if type(module) is nn.Linear:
                    handle: Any = module.register_forward_pre_hook(functools.partial(self._note_torch, name))
                    undo.callback(handle.remove)
                    continue
                for handle in (
                    module.register_forward_pre_hook(functools.partial(self._set, "_forward", name)),
                    module.register_full_backward_pre_hook(functools.partial(self._set, "_backward", name)),
                ):
                    undo.callback(handle.remove)
            yield

    def _note(self, name: str, gemm_pass: Pass, operands: str, told_by: str = "general_gemm") -> None:
        if name:
            kind = type(self._modules[name]).__name__
            self._found.setdefault(name, ModuleGemms(name, kind, told_by)).passes[gemm_pass].add(operands)

    def _set(self, attribute: str, name: str, *_: object) -> None:
        setattr(self, attribute, name)

    def _running(self, gemm_pass: Pass | None) -> str:
        return self._forward if gemm_pass == "fprop" else self._backward

    def _general_gemm(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        left = args[0] if args else kwargs["A"]
        right = args[1] if len(args) > 1 else kwargs["B"]
        gemm_pass = _PASS_OF_LAYOUT[kwargs.get("layout", "TN")]
        self._note(self._running(gemm_pass), gemm_pass, f"{operand_type(left)} x {operand_type(right)}")
        return real(*args, **kwargs)

    def _note_mm(self, left: Any, right: Any) -> None:
        """A torch.mm: torchao's if an operand carries a role, or the bf16 wgrad that some recipes compute."""
        roles = tuple(getattr(getattr(operand, "_gemm_input_role", None), "value", None) for operand in (left, right))
        gemm_pass = _PASS_OF_ROLES.get(roles)
        name = self._running(gemm_pass)
        if gemm_pass is None:
            module: Any = self._modules.get(name)
            shape = (left.shape[0], right.shape[1])
            if module is None or not is_converted(module) or shape != tuple(module.weight.shape):
                return
            gemm_pass = "wgrad"
        self._note(name, gemm_pass, f"{operand_type(left)} x {operand_type(right)}", told_by="mm")

    def _note_torch(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return  # the first pass of a recomputed layer, which comes again
        device_type = inputs[0].device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else inputs[0].dtype
        for gemm_pass in PASSES:
            self._note(name, gemm_pass, f"{short_dtype(dtype)} x {short_dtype(dtype)}", told_by="dtype")


_NUMBER = re.compile(r"^(?P<before>.*?\.)(?P<number>\d+)\.(?P<after>.*)$")


def number_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: (0, 1, 2, 5) as '0-2, 5'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def group_layers(modules: Iterable[ModuleGemms]) -> list[dict[str, Any]]:
    """Lines of the table, in the order of the modules: one for those at the same place in several decoder layers, of
    one class and with the same operand types.

    Keys: module (the name inside the layer, or the full name), layers ('0-3, 5', or empty), kind, told_by, and for each
    pass its operand pairs.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for module in modules:
        match = _NUMBER.match(module.name)
        before, name = (match["before"], match["after"]) if match else ("", module.name)
        operands = tuple(module.operands(gemm_pass) for gemm_pass in PASSES)
        numbers = groups.setdefault((before, name, module.kind, module.told_by, operands), [])
        if match:
            numbers.append(int(match["number"]))
    return [
        {
            "module": name,
            "layers": number_ranges(sorted(numbers)),
            "kind": kind,
            "told_by": told_by,
            **{gemm_pass: list(pairs) for gemm_pass, pairs in zip(PASSES, operands, strict=True)},
        }
        for (_, name, kind, told_by, operands), numbers in groups.items()
    ]
