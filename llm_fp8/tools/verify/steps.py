"""A real training step of a small decoder in bf16 and in each recipe: the loss, the gradient, and which kernels ran.

Of Transformer Engine's decoder here. The check of torchao's, `llm_fp8.tools.verify.torchao_steps`, takes and judges its
steps by the same functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import RECIPES, Backend, recipe_names
from llm_fp8.observability.kernel_trace import LOW_PRECISION
from llm_fp8.tools.verify.imports import reinstall
from llm_fp8.tools.verify.processes import Ended, Probe
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_S = 180.0
PROBE: tuple[str, ...] = ("-m", "llm_fp8.tools.verify.steps_probe")

BASELINE = "bf16"
NUM_LAYERS = 2


@dataclass(frozen=True)
class Library:
    """Whose linear layers train, and what must be seen of them."""

    check: str
    """The name of the check."""
    backend: Backend
    weights_per_layer: int
    """Linear weights of a decoder layer: 4 where QKV is one and gate and up are one, else 7."""
    reinstall: str
    use_te: bool = False

    @property
    def fp8_products(self) -> dict[str, int]:
        """Recipe -> the GEMMs of a micro-batch that it has in fp8."""
        num_weights = NUM_LAYERS * self.weights_per_layer
        return {name: num_weights * RECIPES[name].gemms_in_fp8 for name in recipe_names(self.backend)}


def precision_of(name: str) -> PrecisionConfig:
    """The options of the baseline or of a recipe."""
    if name == BASELINE:
        return PrecisionConfig(mixed_precision="bf16")
    backend = RECIPES[name].backend
    strict = backend == "te"  # torchao's recipes fall back to nothing
    return PrecisionConfig(mixed_precision="fp8", fp8_backend=backend, fp8_scenario=name, fp8_strict=strict)


TE = Library(
    "steps",
    "te",
    4,
    "python -m pip install --no-build-isolation --force-reinstall --no-deps -r requirements-gpu.txt",
    use_te=True,
)
TORCHAO = Library("torchao_steps", "torchao", 7, reinstall("torchao"))
LIBRARIES = {library.check: library for library in (TE, TORCHAO)}
WARM_STEPS = 2
"""So that losses behind updates are compared too, and the gradient is of weights that fp8 has moved."""

MAX_LOSS_DIFFERENCE = 0.02
MIN_COSINE = 0.9
"""Rounding to e4m3 and e5m2 turns a gradient by far less; a wrong scale, layout or weight turns it by much more."""


@dataclass
class Evidence:
    """What the steps of one precision gave."""

    losses: list[float]
    """Nats per token, of each warm step and the measured one."""
    gemm_kernels: dict[str, int] = field(default_factory=dict)
    """GEMM kernels of the measured forward and backward pass by operand type."""
    recipe_inside: str | None = None
    """The recipe's class in force inside a Transformer Engine module; of torchao's modules, the recipe that all of
    them have.
    """
    cosine: float | None = None
    """Of the measured gradient with bf16's; None for bf16 itself."""


def judge_kernels(name: str, found: Evidence, problems: Problems, library: Library = TE) -> None:
    """fp8 kernels in fp8, none in bf16."""
    again = f"python scripts/verify_fp8.py --only {library.check} --verbose"
    low = sum(found.gemm_kernels.get(kind, 0) for kind in LOW_PRECISION)
    ran = ", ".join(f"{kind} {count}" for kind, count in sorted(found.gemm_kernels.items())) or "none"
    if name == BASELINE:
        if low:
            problems.fail(f"a bf16 step ran {low} fp8 GEMM kernels ({ran})", again, library.reinstall)
        if not found.gemm_kernels.get("bf16"):
            problems.warn(f"a bf16 step ran no GEMM kernel that is known as bf16 ({ran})", again)
        return
    wanted = library.fp8_products[name]
    if low < wanted:
        sentence = f"{name}: {low} fp8 GEMM kernels ran, and {wanted} products should be in fp8 ({ran})"
        if low + found.gemm_kernels.get("unknown", 0) >= wanted:
            problems.warn(f"{sentence}; the names of the others do not tell their type", again)
        else:
            problems.fail(sentence, again, library.reinstall)
    if found.recipe_inside in (None, "none"):
        problems.fail(f"{name}: no recipe is in force inside the modules", again)
    elif not library.use_te and found.recipe_inside != name:
        problems.fail(f"{name}: the modules' recipe is {found.recipe_inside}", again)


def judge_numbers(name: str, found: Evidence, baseline: Evidence, problems: Problems) -> None:
    """Losses are finite and near bf16's, the gradient points where bf16's does."""
    compare = "python scripts/diagnose_fp8.py"
    if not all(math.isfinite(loss) for loss in found.losses):
        problems.fail(f"{name}: the loss is not finite ({found.losses})", compare)
        return
    if name == BASELINE:
        return
    away = max(abs(ours / theirs - 1) for ours, theirs in zip(found.losses, baseline.losses, strict=True))
    if away > MAX_LOSS_DIFFERENCE:
        problems.fail(f"{name}: the loss is {away:.1%} from bf16's ({found.losses} against {baseline.losses})", compare)
    if found.cosine is not None and not found.cosine >= MIN_COSINE:
        problems.fail(f"{name}: the gradient's cosine with bf16's is {found.cosine:.3f}, below {MIN_COSINE}", compare)


def judge(found: dict[str, Evidence], process: dict[str, Any] | None = None, library: Library = TE) -> Result:
    """All precisions, bf16 among them; `process`: how the one that ran them ended."""
    problems, details = Problems(), []
    baseline = found[BASELINE]
    for name, evidence in found.items():
        judge_kernels(name, evidence, problems, library)
        judge_numbers(name, evidence, baseline, problems)
        kernels = ", ".join(f"{kind} {count}" for kind, count in sorted(evidence.gemm_kernels.items()))
        turned = "" if evidence.cosine is None else f", cosine of the gradient with bf16's {evidence.cosine:.4f}"
        details.append(f"{name}: loss {evidence.losses[-1]:.4f}{turned}; GEMM kernels: {kernels}")
    summary = f"{', '.join(found)}: losses agree" + (", fp8 kernels in fp8, none in bf16" if len(found) > 1 else "")
    facts = {"precisions": {name: dict(vars(evidence)) for name, evidence in found.items()}, "process": process}
    return problems.result("" if problems.failures else summary, details, facts)


def judge_probe(ended: Ended, seen: dict[str, Any] | None, library: Library = TE) -> Result:
    """What the probe wrote by its end; where it did not end well, the precision that was under way failed."""
    found = {
        name: Evidence(
            losses=[float(loss) for loss in evidence["losses"]],  # JSON has no NaN, the files have it as a word
            gemm_kernels=evidence["gemm_kernels"],
            recipe_inside=evidence["recipe_inside"],
            cosine=None if evidence["cosine"] is None else float(evidence["cosine"]),
        )
        for name, evidence in (seen or {}).get("found", {}).items()
    }
    if ended.code == 0 and found:
        return judge(found, ended.facts, library)
    under_way = (seen or {}).get("under_way") or "before the first"
    partly = judge(found, ended.facts, library) if found else Result("info", "", facts={"process": ended.facts})
    summary = f"{under_way}: the steps did not end: {ended.why()}"
    again = f"python scripts/verify_fp8.py --only imports,{library.check} --verbose"
    before = (partly.summary,) if partly.summary else ()
    return Result("failed", summary, (*before, *partly.details, *ended.evidence), (again,), partly.facts)


def write_architecture(folder: Path) -> Path:
    """A folder with the config of a small Llama whose sizes every recipe takes."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
    ).save_pretrained(folder)
    return folder


def take_steps(
    model_folder: Path, options: PrecisionConfig, *, use_te: bool, batch_size: int = 4
) -> tuple[Evidence, Tensor]:
    """Train a little and measure one more forward and backward pass; the evidence, and the gradient as one vector
    (fp32).
    """
    import torch
    from accelerate.state import AcceleratorState

    from llm_fp8.config.options import Config, ModelConfig
    from llm_fp8.observability.kernel_trace import gemm_kernels, record_kernels
    from llm_fp8.tools.bench.ours import OurTraining
    from llm_fp8.tools.bench.workload import Workload
    from llm_fp8.utils.te_import import forget_delayed_scales

    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # precisions differ in what they ask of Accelerate's singleton
    forget_delayed_scales()
    is_torchao = options.fp8_backend == "torchao"
    if is_torchao:
        torch.compiler.reset()  # of one recipe's compiled layers nothing is left for the next to be measured against
    work = Workload(str(model_folder), batch_size=batch_size, seq_length=256, micro_batches=2, num_steps=WARM_STEPS)
    training = OurTraining(work, work.config(Config(ModelConfig(use_te=use_te), options)))
    training.take(WARM_STEPS)
    losses = list(training.recorder.losses)
    # Everything but the optimizer's step once more, so that the gradient is there to be looked at.
    loader: Any = training.loop.loader
    batch = loader.batches[0]
    training.loop.optimizer.zero_grad()

    def forward_backward() -> float:
        with training.precision.context(first_microbatch=None):
            loss = training.loop.model(batch) / batch.num_supervised_tokens
        loss.backward()
        return float(loss.detach())

    kernels: dict[str, int] = {}
    if batch.input_ids.device.type == "cuda":
        with record_kernels() as recorded:
            losses.append(forward_backward())
        kernels = {kind: found.count for kind, found in gemm_kernels(recorded).items()}
    else:
        losses.append(forward_backward())
    parameters = dict(training.model.named_parameters())
    gradients = [parameters[name].grad for name in sorted(parameters)]
    vector = torch.cat([gradient.float().flatten() for gradient in gradients if gradient is not None])
    precision = training.precision
    inside = "+".join(precision.module_state().recipes) if is_torchao else precision.recipe_inside_modules
    return Evidence(losses, kernels, inside or None), vector


def start(setup: Setup, library: Library = TE) -> Probe:
    """`llm_fp8.tools.verify.steps_probe` under way."""
    return Probe(
        library.check, setup.scratch, PROBE, (str(setup.scratch / f"architecture-{library.check}"), library.check)
    )


def check(setup: Setup) -> Result:
    """bf16 and every recipe that this GPU has."""
    ended, seen = setup.probes["steps"].wait(TIMEOUT_S)
    return judge_probe(ended, seen)
