"""Operand types of every linear layer's GEMMs, seen where the GEMM is called.

    recorder = GemmRecorder(model)
    with recorder.recording(te_gemm_owners()):
        ...one step...
    recorder.modules()   ->   [ModuleGemms("model.layers.0.qkv", fprop {"e4m3 x e4m3"}, dgrad {"e4m3 x e5m2"}), ...]

Transformer Engine's modules call `general_gemm(A, B, layout=...)`, a name in the namespace of their source file. During
a recording that name is a function that notes the operands and calls the real one. The layout tells the pass (BLAS
letters, column-major):

    TN   fprop   A = weight, B = input
    NN   dgrad   A = weight, B = gradient of the output
    NT   wgrad   A = input,  B = gradient of the output

Hooks tell which module is at work: the last whose forward began (fprop), or whose output's gradient arrived (dgrad and
wgrad); kept apart because recomputation runs forwards in the middle of a backward.

torchao's modules call torch.mm with operands that carry type and role; they are seen where torch dispatches it, in a
step whose layers run uncompiled. 'e4m3/row' has one scale per row.

torch's own linear layers have no such place. Their GEMMs run in autocast's dtype, or that of their input, and autograd
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
from llm_fp8.kernels import fp8_lm_head as fp8_head
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
_OWNERS = ("linear", "layernorm_linear", "layernorm_mlp")
_LOW_PRECISION = re.compile(r"e\dm\d")
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def operand_type(operand: Any) -> str:
    """'bf16', 'e4m3' (one scale per tensor), 'e4m3/block', 'e4m3/mxfp8', 'e2m1/nvfp4'; else the class's name."""
    kind = type(operand).__name__
    if kind == "Float8TrainingTensor":
        found = _LOW_PRECISION.search(str(operand._data.dtype))
        return f"{found.group() if found else operand._data.dtype}{'' if operand._axiswise_dim is None else '/row'}"
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
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def short_format(dtype: torch.dtype) -> str:
    found = _LOW_PRECISION.search(str(dtype))
    assert found is not None
    return found.group()


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
    """general_gemm, mm: seen at the call. dtype: torch's rule for its own linear layers. option: --fp8_lm_head."""
    passes: dict[Pass, set[str]] = field(default_factory=lambda: {name: set() for name in PASSES})

    def add(self, gemm_pass: Pass, operands: str) -> None:
        self.passes[gemm_pass].add(operands)

    def operands(self, gemm_pass: Pass) -> tuple[str, ...]:
        """The operand pairs of a pass; empty where it ran no GEMM."""
        return tuple(sorted(self.passes[gemm_pass]))

    @property
    def is_fp8(self) -> bool:
        """Whether all three passes ran, in fp8 or fewer bits alone."""
        return all(self.passes[name] and all(map(is_low_precision, self.passes[name])) for name in PASSES)


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
    return [importlib.import_module(f"transformer_engine.pytorch.module.{name}") for name in _OWNERS]


class GemmRecorder:
    """Notes the GEMMs of the linear modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {name: module for name, module in model.named_modules() if linear_weights(module)}
        self._found: dict[str, ModuleGemms] = {}
        self._forward = self._backward = ""
        """Name of the Transformer Engine module at work."""

    def modules(self) -> list[ModuleGemms]:
        return [self._found[name] for name in self._modules if name in self._found]

    def note_lm_head(self, name: str, dtype: torch.dtype, num_fp8_gemms: int = 0) -> None:
        """lm_head, which the loss computes without its module: in `dtype`, the last `num_fp8_gemms` of three in fp8."""
        num_high_precision = len(PASSES) - num_fp8_gemms
        for number, gemm_pass in enumerate(PASSES):
            left = right = short_dtype(dtype)
            if number >= num_high_precision:
                left = right = short_format(fp8_head.OPERAND_FORMAT)
                right = right if gemm_pass == "fprop" else short_format(fp8_head.GRADIENT_FORMAT)
            self._of(name, told_by="option" if num_fp8_gemms else "dtype").add(gemm_pass, f"{left} x {right}")

    @contextlib.contextmanager
    def recording(self, owners: Sequence[Any]) -> Iterator[None]:
        """Note what runs in this block; `owners` are the namespaces that hold a `general_gemm`."""
        with contextlib.ExitStack() as undo:
            for owner in owners:
                real = owner.general_gemm
                undo.callback(setattr, owner, "general_gemm", real)
                owner.general_gemm = functools.partial(self._note, real)
            if any(is_converted(module) for module in self._modules.values()):
                undo.enter_context(_SeenGemms(self._note_gemm))
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

    def _of(self, name: str, told_by: str = "general_gemm") -> ModuleGemms:
        return self._found.setdefault(name, ModuleGemms(name, type(self._modules[name]).__name__, told_by))

    def _set(self, attribute: str, name: str, *_: object) -> None:
        setattr(self, attribute, name)

    def _note(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        left = args[0] if args else kwargs["A"]
        right = args[1] if len(args) > 1 else kwargs["B"]
        gemm_pass = _PASS_OF_LAYOUT[kwargs.get("layout", "TN")]
        name = self._forward if gemm_pass == "fprop" else self._backward
        if name:
            self._of(name).add(gemm_pass, f"{operand_type(left)} x {operand_type(right)}")
        return real(*args, **kwargs)

    def _note_gemm(self, left: Any, right: Any) -> None:
        """A torch.mm: torchao's if an operand carries a role, or the bf16 wgrad that some recipes compute."""
        roles = tuple(getattr(getattr(operand, "_gemm_input_role", None), "value", None) for operand in (left, right))
        gemm_pass = _PASS_OF_ROLES.get(roles)
        name = self._forward if gemm_pass == "fprop" else self._backward
        if gemm_pass is None:
            module: Any = self._modules.get(name)
            shape = (left.shape[0], right.shape[1])
            if module is None or not is_converted(module) or shape != tuple(module.weight.shape):
                return
            gemm_pass = "wgrad"
        if name:
            self._of(name, told_by="mm").add(gemm_pass, f"{operand_type(left)} x {operand_type(right)}")

    def _note_torch(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return  # the first pass of a recomputed layer, which comes again
        device_type = inputs[0].device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else inputs[0].dtype
        for gemm_pass in PASSES:
            self._of(name, told_by="dtype").add(gemm_pass, f"{short_dtype(dtype)} x {short_dtype(dtype)}")


_NUMBER = re.compile(r"^(?P<before>.*?\.)(?P<number>\d+)\.(?P<after>.*)$")


@dataclass(frozen=True)
class LayerGroup:
    """Modules at the same place in several decoder layers with the same operand types: one line of the table."""

    module: str
    """Name inside the layer ('qkv', 'self_attn.q_proj'), or the full name outside the layers."""
    layers: tuple[int, ...]
    """Numbers of the layers in order; empty outside the layers."""
    kind: str
    told_by: str
    operands: dict[Pass, tuple[str, ...]]

    @property
    def layer_ranges(self) -> str:
        """'0-31', '0-3, 5'; empty outside the layers."""
        return number_ranges(self.layers)


def number_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: (0, 1, 2, 5) as '0-2, 5'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def group_layers(modules: Iterable[ModuleGemms]) -> list[LayerGroup]:
    """One group for each place, class and set of operand types, in the order of the modules."""
    groups: dict[tuple[object, ...], tuple[ModuleGemms, list[int], str]] = {}
    for module in modules:
        match = _NUMBER.match(module.name)
        before, name = (match["before"], match["after"]) if match else ("", module.name)
        formats = tuple(module.operands(gemm_pass) for gemm_pass in PASSES)
        _, numbers, _ = groups.setdefault((before, name, module.kind, module.told_by, formats), (module, [], name))
        if match:
            numbers.append(int(match["number"]))
    return [
        LayerGroup(name, tuple(sorted(numbers)), module.kind, module.told_by, {p: module.operands(p) for p in PASSES})
        for module, numbers, name in groups.values()
    ]
