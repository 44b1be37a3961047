"""In which precision a run computes: resolved once, entered at one seam.

    plan = resolve_precision(config.precision, device)      # what was asked, what this machine gives, and why
    precision = Precision(plan)
    precision.attach(model)                                 # finds the TE modules; applies --fp8_first/last_bf16_layers
    with precision.context(first_microbatch=True):          # the only place that enters te.autocast
        loss = model(batch)

A bf16 run and an fp8 run differ in `plan.recipe` alone: None means that te.autocast is not entered and no fp8 kernel can run.

Scenarios (recipe classes of Transformer Engine 2.20):
- delayed: per-tensor scale from the maxima of past steps; the fastest; a spike beyond what the history saw is clipped.
- current: per-tensor scale from the tensor itself; one more pass over it.
- block: one scale per 128 values (1 x 128 for activations, 128 x 128 for weights); Hopper with CUDA 12.9 or later.
- mxfp8: one power-of-two scale per 32 values; Blackwell (compute capability 10).
- nvfp4: 4-bit values with a scale per 16; Blackwell (compute capability 10).
- default: delayed.

Those of torchao (--fp8_backend torchao) are in `llm_fp8.torchao_fp8`. Its modules compute in fp8 by themselves: nothing is entered for them, and the same
argument, `plan.recipe`, decides whether there are any.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llm_fp8 import torchao_fp8
from llm_fp8.config import PrecisionConfig
from llm_fp8.errors import UserError
from llm_fp8.fp8_head import Fp8Head
from llm_fp8.module_state import ModuleState
from llm_fp8.te_state import read_te_state

DEFAULT_SCENARIO = "delayed"
MIN_FP8_CAPABILITY = (8, 9)
TOKEN_MULTIPLE = {"delayed": 16, "current": 16, "block": 128, "mxfp8": 32, "nvfp4": 16}
"""The number of tokens of a micro-batch must be a multiple of this: the GEMM of the weight gradient runs along the tokens."""

INSTALL_TE = "pip install --no-build-isolation -r requirements-gpu.txt"


def require_te(why: str) -> Any:
    """Import and return `transformer_engine.pytorch`; a `UserError` that starts with `why` where that fails."""
    prefer_torchs_libraries()
    try:
        import transformer_engine.pytorch as te
    except ImportError as error:
        raise UserError(f"{why} needs Transformer Engine, which is not installed ({error}); run: {INSTALL_TE}") from error
    except (OSError, RuntimeError) as error:
        raise UserError(f"{why} needs Transformer Engine, which is installed but does not load: {error}") from error
    return te


def forget_delayed_scales() -> None:
    """Drop what Transformer Engine keeps for the whole process between runs of several models, whose maxima it would go on exchanging."""
    if "transformer_engine" in sys.modules:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


def prefer_torchs_libraries() -> None:
    """Let Transformer Engine load torch's own cuDNN and CUDA runtime, where others are there too; call it before whatever imports it."""
    _prefer_torchs_cudnn()
    if torch.version.cuda is not None:
        # Its cuDNN frontend takes the older of two runtimes, whose structs are not those that it was compiled with. flash-attn 3 brings a second one.
        major = torch.version.cuda.partition(".")[0]
        os.environ.setdefault("CUDNN_FRONTEND_CUDART_LIB_NAME", f"libcudart.so.{major}")


def _prefer_torchs_cudnn() -> None:
    """Let Transformer Engine load the cuDNN that torch brought, not an older one of the system.

    It looks for the system's first. With two versions in one process its fused attention fails its own check and it takes the unfused
    one without a word, which was 2.7 times slower on an H200. A CUDNN_HOME or CUDNN_PATH that the user set stays; an empty one counts
    as none, because Transformer Engine would search the whole file system for it. The first library of cuDNN loads its others by name
    when they are needed, from the system's folders too, so all of them are loaded here.
    """
    if "transformer_engine" in sys.modules or os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH"):
        return
    found = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    if found is not None and found.submodule_search_locations:
        folder = next(iter(found.submodule_search_locations))
        os.environ["CUDNN_HOME"] = folder
        os.environ.pop("CUDNN_PATH", None)
        for library in sorted(Path(folder, "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


PRODUCTS_OF_TRAINED = 3
"""GEMMs of a trained weight in a micro-batch: forward, gradient of the input, gradient of the weight."""


@dataclass(frozen=True)
class PrecisionPlan:
    """What was asked for and what runs; stored in run.json, the trackers' config and the summary."""

    requested: str
    effective: str
    """no, bf16, fp16 or fp8."""
    requested_scenario: str | None = None
    effective_scenario: str | None = None
    """delayed, current, block, mxfp8 or nvfp4, of torchao tensorwise, rowwise or rowwise_with_gw_hp; None outside fp8."""
    fallback_reason: str | None = None
    recipe: Any = field(default=None, repr=False)
    """Transformer Engine's recipe object or torchao's Float8LinearConfig; None outside fp8."""
    backend: str | None = None
    """te or torchao: whose modules compute in fp8; None outside fp8."""

    @property
    def te_recipe(self) -> Any:
        """The recipe for te.autocast; None in a run that does not enter it."""
        return None if self.backend == "torchao" else self.recipe

    @property
    def emulated(self) -> bool:
        """Whether operands are rounded to fp8 and multiplied in a wider type, as torchao does on a CPU."""
        return self.backend == "torchao" and self.recipe is not None and bool(self.recipe.emulate)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations between the linear layers."""
        return {"no": torch.float32, "fp16": torch.float16}.get(self.effective, torch.bfloat16)

    @property
    def compute_name(self) -> str:
        """What linear layers outside fp8 compute in: fp32, bf16 or fp16."""
        return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[self.compute_dtype]

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch on one GPU must be a multiple of; 1 outside fp8."""
        if self.backend == "torchao":
            return torchao_fp8.TOKEN_MULTIPLE
        return TOKEN_MULTIPLE.get(self.effective_scenario or "", 1)

    @property
    def name(self) -> str:
        """A short name for tables: 'bf16', 'fp8 delayed', ..."""
        return f"fp8 {self.effective_scenario}" if self.effective == "fp8" else self.effective

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return {
            "requested": self.requested,
            "effective": self.effective,
            "requested_scenario": self.requested_scenario,
            "effective_scenario": self.effective_scenario,
            "fallback_reason": self.fallback_reason,
            "recipe": None if self.recipe is None else repr(self.recipe),
            "backend": self.backend,
            "emulated": self.emulated,
        }


def describe_device(device: torch.device) -> str:
    """The device in words, for messages."""
    if device.type != "cuda":
        return "no CUDA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def resolve_precision(options: PrecisionConfig, device: torch.device) -> PrecisionPlan:
    """Check the request against the hardware and the installed TE. Raises `UserError`; prints nothing."""
    requested = options.mixed_precision
    if requested is None:
        requested = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "no"
    if requested != "fp8":
        _refuse_fp8_options(options, requested)
        if requested == "fp16" and device.type != "cuda":
            raise UserError("--mixed_precision fp16 needs a CUDA GPU; use bf16 or no on the CPU.")
        return PrecisionPlan(requested=requested, effective=requested)
    if options.fp8_backend == "torchao":
        return _resolve_torchao(options, device)
    require_fp8_gpu(device)
    te = require_te("--mixed_precision fp8")
    available, reason = te.is_fp8_available(return_reason=True)
    if not available:
        raise UserError(f"--mixed_precision fp8: Transformer Engine says fp8 cannot run here: {reason}")
    wanted = DEFAULT_SCENARIO if options.fp8_scenario == "default" else options.fp8_scenario
    effective, fallback = wanted, None
    available, reason = _scenario_available(te, wanted)
    if not available:
        alternatives = [name for name in TOKEN_MULTIPLE if _scenario_available(te, name)[0]]
        fallback = f"{wanted} is not available on {describe_device(device)}: {reason} Available here: {', '.join(alternatives)}."
        if options.fp8_strict:
            raise UserError(f"--fp8_scenario {wanted} with --fp8_strict: {fallback}")
        effective = DEFAULT_SCENARIO
    return PrecisionPlan(
        requested="fp8",
        effective="fp8",
        requested_scenario=options.fp8_scenario,
        effective_scenario=effective,
        fallback_reason=fallback,
        recipe=_build_recipe(options, wanted, effective),
        backend="te",
    )


def require_fp8_gpu(device: torch.device) -> None:
    """Raise a `UserError` where `device` is no GPU with fp8 units."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_FP8_CAPABILITY:
        raise UserError(
            f"--mixed_precision fp8 needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell); found "
            f"{describe_device(device)}. Use --mixed_precision bf16."
        )


def torchao_needs(device: torch.device) -> dict[str, Callable[[], None]]:
    """What torchao's recipes need: on a GPU their kernels, on a CPU, where they are emulated, torchao alone.

    Returns: by name what raises a `UserError` where it is lacking, in the order in which they are to be asked.
    """
    why = "--fp8_backend torchao"
    needs: dict[str, Callable[[], None]] = {"torchao": lambda: torchao_fp8.require_torchao(why)}
    if device.type == "cuda":
        needs["fp8 GPU"] = lambda: require_fp8_gpu(device)
        needs["Triton"] = lambda: torchao_fp8.require_triton(why)
        needs["C compiler"] = lambda: torchao_fp8.require_c_compiler(why)
    return needs


def _resolve_torchao(options: PrecisionConfig, device: torch.device) -> PrecisionPlan:
    """torchao's recipes fall back to nothing: all of them run on every GPU with fp8, and emulated on a CPU."""
    for require in torchao_needs(device).values():
        require()
    scenario = torchao_fp8.DEFAULT_SCENARIO if options.fp8_scenario == "default" else options.fp8_scenario
    return PrecisionPlan(
        requested="fp8",
        effective="fp8",
        requested_scenario=options.fp8_scenario,
        effective_scenario=scenario,
        recipe=torchao_fp8.build_config(scenario, emulate=device.type != "cuda"),
        backend="torchao",
    )


def _refuse_fp8_options(options: PrecisionConfig, precision: str) -> None:
    """Options of fp8 cannot take effect elsewhere; say so instead of ignoring them."""
    unset = PrecisionConfig()
    for name in vars(unset):
        if name != "mixed_precision" and getattr(options, name) != getattr(unset, name):
            raise UserError(f"--{name} has no effect with --mixed_precision {precision}; use --mixed_precision fp8 or drop it.")


def _scenario_available(te: Any, scenario: str) -> tuple[bool, str]:
    """TE's own verdict on a scenario and its reason."""
    checks = {
        "block": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
        "nvfp4": te.is_nvfp4_available,
    }
    return checks.get(scenario, te.is_fp8_available)(return_reason=True)


def _build_recipe(options: PrecisionConfig, wanted: str, effective: str) -> Any:
    """The TE recipe of `effective`. Options that it cannot take are errors, unless `wanted` fell back to it."""
    from transformer_engine.common import recipe as recipes

    delayed_only = {"amax_history_len": 1024, "amax_compute_algo": "max", "fp8_margin": 0}
    for name in delayed_only:
        if getattr(options, name) is not None and wanted != "delayed":
            raise UserError(
                f"--{name} belongs to delayed scaling and has no effect with --fp8_scenario {wanted}; drop one of them."
            )
    if options.fp8_format is not None and wanted == "nvfp4":
        raise UserError("--fp8_format has no effect with --fp8_scenario nvfp4; drop it.")
    chosen: dict[str, Any] = {}
    if options.fp8_format is not None:
        chosen["fp8_format"] = getattr(recipes.Format, options.fp8_format)
    if effective == "delayed":
        values = {name: getattr(options, name) for name in delayed_only}
        values = {name: default if values[name] is None else values[name] for name, default in delayed_only.items()}
        return recipes.DelayedScaling(margin=values.pop("fp8_margin"), **values, **chosen)
    if effective == "current":
        return recipes.Float8CurrentScaling(**chosen)
    if effective == "block":
        return recipes.Float8BlockScaling(**chosen)
    if effective == "mxfp8":
        return recipes.MXFP8BlockScaling(**chosen)
    return recipes.NVFP4BlockScaling()


def layers_kept_wide(options: PrecisionConfig, decoder_layers: nn.ModuleList) -> list[nn.Module]:
    """The decoder layers that --fp8_first_bf16_layers and --fp8_last_bf16_layers keep out of fp8; `UserError` where these leave none in it."""
    first, last = options.fp8_first_bf16_layers, options.fp8_last_bf16_layers
    if first + last >= len(decoder_layers) and first + last > 0:
        raise UserError(
            f"--fp8_first_bf16_layers {first} and --fp8_last_bf16_layers {last} leave none of the {len(decoder_layers)} decoder layers in fp8."
        )
    return [*decoder_layers[:first], *decoder_layers[len(decoder_layers) - last :]]


def linear_weights(module: nn.Module) -> list[Tensor]:
    """The GEMM weights that this module itself holds ([out, in] each), of torch's or TE's linear modules and of adapters; else empty."""
    if hasattr(module, "base_layer"):
        return []  # PEFT's: what it shows as its own is the layer's inside
    if isinstance(getattr(module, "lora_A", None), nn.ParameterDict):
        return [*module.lora_A.values(), *module.lora_B.values()]  # type: ignore[operator]
    names = ("fc1_weight", "fc2_weight") if hasattr(module, "fc1_weight") else ("weight",)
    if names == ("weight",) and not hasattr(module, "in_features"):
        return []
    return [getattr(module, name) for name in names]


def te_linears(model: nn.Module) -> list[nn.Module]:
    """The linear modules of Transformer Engine in `model`, fused ones among them."""
    return [module for module in model.modules() if hasattr(module, "fp8_meta") and linear_weights(module)]


def note_recipe_inside(module: nn.Module, note: Callable[[str], None]) -> None:
    """Have `note` called at the module's next forward pass with the class of the recipe in force there, or 'none'.

    Whatever wraps the model must not have lost it on the way. Transformer Engine is loaded already.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    def look(*_: object) -> None:
        handle.remove()
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        note(type(FP8GlobalStateManager.get_fp8_recipe()).__name__ if enabled else "none")

    handle = module.register_forward_pre_hook(look)


class Precision:
    """The seam: gives the context of a forward pass and owns what TE keeps between passes."""

    def __init__(self, plan: PrecisionPlan, options: PrecisionConfig, device: torch.device, parameter_dtype: torch.dtype) -> None:
        self.plan = plan
        self._options = options
        self._device = device
        # With parameters already in the compute dtype, torch.autocast would only add casts.
        self._torch_autocast = parameter_dtype != plan.compute_dtype
        self._caching_modules: list[nn.Module] = []
        self._fp8_modules: dict[str, nn.Module] = {}
        self._te_linears: list[nn.Module] = []
        self._torchao_linears: dict[str, nn.Module] = {}
        self._unseen: nn.Module | None = None
        self._num_casts_to_come: int | None = None
        self.fp8_head: Fp8Head | None = None
        """What computes the output head's products in fp8; None where --fp8_lm_head is none."""
        self.seen_inside: str | None = None
        """The recipe's class in force inside a Transformer Engine module when it first ran, or 'none'; None before, and without such modules."""

    def attach(self, model: nn.Module, decoder_layers: nn.ModuleList) -> None:
        """Find the fp8 modules of `model` and keep the first and last decoder layers in bf16 where asked to.

        torchao's are converted before, or left out (`llm_fp8.swap.convert_with_torchao`).
        """
        self._caching_modules = [m for m in model.modules() if hasattr(m, "is_first_microbatch")]
        self._te_linears = te_linears(model)
        self._torchao_linears = torchao_fp8.converted_modules(model)
        if self.plan.recipe is None:
            self._unseen = next(iter(self._caching_modules), None)
            return
        if self.plan.backend == "torchao":
            self._fp8_modules = self._torchao_linears
            if not self._fp8_modules:
                raise UserError(
                    "--fp8_backend torchao: no linear layer of the model could be converted, so nothing would run in fp8."
                )
            return
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

        kept: set[nn.Module] = set()
        for layer in layers_kept_wide(self._options, decoder_layers):
            kept.update(layer.modules())
            layer.forward = functools.partial(self._without_fp8, layer.forward)
        self._fp8_modules = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, TransformerEngineBaseModule) and linear_weights(module) and module not in kept
        }
        if not self._fp8_modules:
            raise UserError("--mixed_precision fp8: the model holds no Transformer Engine module, so nothing would run in fp8.")
        self._unseen = next(iter(self._fp8_modules.values()))
        if self._options.fp8_lm_head != "none":
            head: Any = model.get_output_embeddings()  # type: ignore[operator]
            self.fp8_head = Fp8Head(head, self._options.fp8_lm_head)

    def products_of_head(self, products: Mapping[nn.Module, int]) -> dict[nn.Module, int]:
        """The output head and how many of its products in a micro-batch run in fp8; empty where none does.

        `products`: `llm_fp8.lora.products_per_weight`.
        """
        if self.fp8_head is None:
            return {}
        head = self.fp8_head.module
        return {head: self.fp8_head.num_products(of=products.get(head, PRODUCTS_OF_TRAINED))}

    @property
    def fp8_modules(self) -> frozenset[nn.Module]:
        """The modules whose GEMMs run in fp8 in this run; the output head is none of them, whatever its products run in."""
        return frozenset(self._fp8_modules.values())

    @property
    def scales_lag(self) -> bool:
        """Whether a tensor's scale comes from earlier passes."""
        return self.plan.effective_scenario == "delayed"

    @property
    def num_fp8_products_per_weight(self) -> int:
        """How many of a trained weight's three products the recipe computes in fp8."""
        return torchao_fp8.num_fp8_products(self.plan.recipe) if self.plan.backend == "torchao" else PRODUCTS_OF_TRAINED

    def count_fp8_weights(self, within: Iterable[nn.Module] | None = None) -> int:
        """Weight matrices whose GEMMs run in fp8; of the modules `within` and what they hold, or of the whole model."""
        modules = self.fp8_modules
        if within is not None:
            modules &= {module for part in within for module in part.modules()}
        return sum(len(linear_weights(module)) for module in modules)

    def _note_recipe(self, name: str) -> None:
        self.seen_inside = name

    def module_state(self) -> ModuleState:
        """What the modules say of the step behind them: those in fp8, or in a run without fp8 all linear ones of Transformer Engine or torchao."""
        if self._torchao_linears:
            return torchao_fp8.read_state(self._torchao_linears.values())
        return read_te_state(self._fp8_modules.values() if self.plan.recipe is not None else self._te_linears)

    def keep_casts_of_frozen_weights(self) -> None:
        """From now on weights are cast to fp8 in the first training passes alone, because none of those in fp8 changes.

        Delayed scaling knows a weight's scale when it has seen the weight once, so there the second pass casts again.
        """
        self._num_casts_to_come = 2 if self.scales_lag else 1

    def _te_autocast(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        import transformer_engine.pytorch as te

        return te.autocast(enabled=enabled, recipe=self.plan.te_recipe)

    def _without_fp8(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with self._te_autocast(enabled=False):
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def context(self, first_microbatch: bool | None) -> Iterator[None]:
        """Enclose one forward pass of the whole model.

        `first_microbatch` True casts weights to fp8 and keeps the casts for the further micro-batches of the step, which pass False. None
        neither uses nor keeps casts: for evaluation, and for steps of a single micro-batch, where keeping costs memory and saves nothing.
        After `keep_casts_of_frozen_weights` it makes no difference to a training pass.
        """
        if self._num_casts_to_come is not None and torch.is_grad_enabled():
            first_microbatch = self._num_casts_to_come > 0
            self._num_casts_to_come = max(0, self._num_casts_to_come - 1)
        if self._unseen is not None and "transformer_engine" in sys.modules:
            note_recipe_inside(self._unseen, self._note_recipe)
            self._unseen = None
        for module in self._caching_modules:
            module.is_first_microbatch = first_microbatch  # type: ignore[assignment]
        if self.fp8_head is not None:
            self.fp8_head.is_first_microbatch = first_microbatch
        with contextlib.ExitStack() as stack:
            if self._torch_autocast:
                stack.enter_context(torch.autocast(self._device.type, self.plan.compute_dtype))
            if self.plan.te_recipe is not None:
                stack.enter_context(self._te_autocast(enabled=True))
            yield

    # --- state between steps: scales and histories of delayed scaling, as plain tensors --------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Scales fp32 [num_tensors] and amax histories fp32 [history, num_tensors] by module; empty for recipes without state.

        The tensors are TE's own, not copies. Modules that have not run yet are initialised first, so that the names are the same
        before and after training.
        """
        if not self.scales_lag:
            return {}
        state: dict[str, Tensor] = {}
        # Without no_grad, leaving the autocast would count as a forward pass and shift the histories.
        with torch.no_grad(), self._te_autocast(enabled=True):
            for name, module in self._fp8_modules.items():
                module.init_fp8_metadata(num_gemms=len(linear_weights(module)))  # type: ignore[operator]
                for direction in ("scaling_fwd", "scaling_bwd"):
                    meta: Any = module.fp8_meta[direction]  # type: ignore[index]
                    state[f"{name}.{direction}.scale"] = meta.scale
                    state[f"{name}.{direction}.amax_history"] = meta.amax_history
        return state

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Keep scales and histories as they are across forward passes that are not training.

        Even without gradients TE notes the largest values it meets in the first row of each history, where they would reach the next
        training step's scale.
        """
        current = list(self.state_tensors().values())
        kept = [tensor.clone() for tensor in current]
        try:
            yield
        finally:
            if current:
                torch._foreach_copy_(current, kept)
