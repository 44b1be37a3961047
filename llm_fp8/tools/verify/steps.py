"""Training steps of a small decoder in bf16 and in each recipe: the loss, the gradient, and which kernels ran.

    python -m llm_fp8.tools.verify.steps RESULT.json MODEL_FOLDER te|torchao

runs them in a process of its own, with Transformer Engine's decoder or with a Hugging Face decoder that torchao
converts and that is compiled as in a run. It makes the folder, with the model's config. It writes the file before each
precision, so that one that crashes the process is known by name.

Without a GPU the embedded model trains on the CPU: in bf16, and in torchao's recipes, whose GEMMs are emulated. That
shows what rounding does to loss and gradient, and nothing of kernels.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import RECIPES, Backend, recipe_names
from llm_fp8.observability.kernel_trace import LOW_PRECISION
from llm_fp8.tools.verify.gpu import availability, torchao_problem
from llm_fp8.tools.verify.processes import Ended, start_probe
from llm_fp8.tools.verify.result import Problems, Result, Setup, model_config
from llm_fp8.tools.verify.versions import reinstall
from llm_fp8.utils.packages import BASE_REQUIREMENTS, DIAGNOSE, GPU_REQUIREMENTS, VERIFY

if TYPE_CHECKING:
    from torch import Tensor

PROBE: tuple[str, ...] = ("-m", "llm_fp8.tools.verify.steps")
CHECKS: dict[Backend, str] = {"te": "steps", "torchao": "torchao_steps"}
TIMEOUT_S: dict[Backend, float] = {"te": 180.0, "torchao": 300.0}
"""torchao's is longer: torch.compile compiles the decoder layer for each recipe."""
REINSTALL: dict[Backend, str] = {
    "te": f"python -m pip install --no-build-isolation --force-reinstall --no-deps -r {GPU_REQUIREMENTS}",
    "torchao": reinstall("torchao"),
}
BASELINE = "bf16"
NUM_LAYERS = 2
WEIGHTS_PER_LAYER: dict[Backend, int] = {"te": 4, "torchao": 7}
"""Linear weights of a decoder layer: Transformer Engine's has QKV in one, and gate and up in one."""
WARM_STEPS = 2
"""So that losses after updates are compared too, and the gradient is of weights that fp8 steps have changed."""
MAX_LOSS_DIFFERENCE = 0.02
MIN_COSINE = 0.9
"""Rounding to e4m3 and e5m2 turns a gradient by far less; a wrong scale, layout or weight turns it by much more."""
MAX_CPU_LOSS_DIFFERENCE = 0.1
"""Random weights of standard deviation 0.02 give nearly the loss of a uniform guess."""


@dataclass
class Evidence:
    """What the steps of one precision gave."""

    losses: list[float]
    """Nats per token, of each warm step and the measured one."""
    gemm_kernels: dict[str, int] = field(default_factory=dict)
    """GEMM kernels of the measured forward and backward pass by operand type."""
    recipe_inside: str | None = None
    """Transformer Engine: the recipe's class in force inside a module. torchao: the recipe that all modules have."""
    cosine: float | None = None
    """Of the measured gradient with bf16's; None for bf16 itself."""


def fp8_gemms(backend: Backend) -> dict[str, int]:
    """Recipe -> its number of fp8 GEMMs in a micro-batch."""
    num_weights = NUM_LAYERS * WEIGHTS_PER_LAYER[backend]
    return {name: num_weights * RECIPES[name].gemms_in_fp8 for name in recipe_names(backend)}


def precision_of(name: str) -> PrecisionConfig:
    """The options of the baseline or of a recipe."""
    if name == BASELINE:
        return PrecisionConfig(mixed_precision="bf16")
    backend = RECIPES[name].backend
    strict = backend == "te"  # torchao's recipes have no fallback
    return PrecisionConfig(mixed_precision="fp8", fp8_backend=backend, fp8_scenario=name, fp8_strict=strict)


def _listed(kernels: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(kernels.items())) or "none"


def judge_kernels(name: str, found: Evidence, problems: Problems, backend: Backend) -> None:
    """fp8 kernels in fp8, none in bf16."""
    again = f"{VERIFY} --only {CHECKS[backend]} --verbose"
    low = sum(found.gemm_kernels.get(kind, 0) for kind in LOW_PRECISION)
    ran = _listed(found.gemm_kernels)
    if name == BASELINE:
        if low:
            problems.fail(f"a bf16 step ran {low} fp8 GEMM kernels ({ran})", again, REINSTALL[backend])
        if not found.gemm_kernels.get("bf16"):
            problems.warn(f"a bf16 step ran no GEMM kernel that is known as bf16 ({ran})", again)
        return
    wanted = fp8_gemms(backend)[name]
    if low < wanted:
        sentence = f"{name}: {low} fp8 GEMM kernels ran, and {wanted} GEMMs should be in fp8 ({ran})"
        if low + found.gemm_kernels.get("unknown", 0) >= wanted:
            problems.warn(f"{sentence}; the names of the others do not tell their type", again)
        else:
            problems.fail(sentence, again, REINSTALL[backend])
    if found.recipe_inside in (None, "none"):
        problems.fail(f"{name}: no recipe is in force inside the modules", again)
    elif backend == "torchao" and found.recipe_inside != name:
        problems.fail(f"{name}: the modules' recipe is {found.recipe_inside}", again)


def judge_numbers(name: str, found: Evidence, baseline: Evidence, problems: Problems) -> None:
    """Losses are finite and near bf16's, the gradient points where bf16's does."""
    compare = DIAGNOSE
    if not all(map(math.isfinite, found.losses)):
        problems.fail(f"{name}: the loss is not finite ({found.losses})", compare)
        return
    if name == BASELINE:
        return
    away = max(abs(ours / theirs - 1) for ours, theirs in zip(found.losses, baseline.losses, strict=True))
    if away > MAX_LOSS_DIFFERENCE:
        problems.fail(f"{name}: the loss is {away:.1%} from bf16's ({found.losses} against {baseline.losses})", compare)
    if found.cosine is not None and not found.cosine >= MIN_COSINE:
        problems.fail(f"{name}: the gradient's cosine with bf16's is {found.cosine:.3f}, below {MIN_COSINE}", compare)


def judge(found: dict[str, Evidence], backend: Backend = "te", process: dict[str, Any] | None = None) -> Result:
    """All precisions, bf16 among them. `process`: how the one that ran them ended; None on the CPU, whose GEMMs are
    emulated.
    """
    problems, details = Problems(), []
    for name, evidence in found.items():
        if process is not None:
            judge_kernels(name, evidence, problems, backend)
        judge_numbers(name, evidence, found[BASELINE], problems)
        cosine = "" if evidence.cosine is None else f", cosine of the gradient with bf16's {evidence.cosine:.4f}"
        details.append(
            f"{name}: loss {evidence.losses[-1]:.4f}{cosine}; GEMM kernels: {_listed(evidence.gemm_kernels)}"
        )
    success = f"{', '.join(found)}: losses agree"
    if process is None:
        success += "; emulated on the CPU, so nothing is said of fp8 kernels"
    elif len(found) > 1:
        success += ", fp8 kernels in fp8, none in bf16"
    precisions = {name: asdict(evidence) for name, evidence in found.items()}
    facts = {"precisions": precisions, **({"emulated": True} if process is None else {"process": process})}
    return problems.result("" if problems.failures else success, details, facts)


def judge_probe(ended: Ended, seen: dict[str, Any] | None, backend: Backend = "te") -> Result:
    """What the process wrote by its end; where it did not end well, the precision that was under way failed."""
    seen = seen or {"under_way": None, "found": {}}
    found = {name: Evidence(**evidence) for name, evidence in seen["found"].items()}
    result = judge(found, backend, ended.facts)
    if ended.code == 0 and found:
        return result
    before = (result.summary, *result.details) if found else ()
    summary = f"{seen['under_way'] or 'before the first'}: the steps did not end: {ended.why()}"
    again = f"{VERIFY} --only imports,{CHECKS[backend]} --verbose"
    return Result("failed", summary, (*before, *ended.evidence), (again,), result.facts)


def judge_cpu_steps(losses: list[float], gradient_norm: float, vocab_size: int) -> Result:
    """Losses in nats per token of bf16 steps from random weights, and the gradient's norm after them."""
    problems, expected = Problems(), math.log(vocab_size)
    fix = f"python -m pip install --force-reinstall -r {BASE_REQUIREMENTS}"
    if not all(abs(loss / expected - 1) < MAX_CPU_LOSS_DIFFERENCE for loss in losses):  # false for NaN too
        problems.fail(f"losses {losses}, and random weights over {vocab_size} tokens should give {expected:.2f}", fix)
    if not 0 < gradient_norm < math.inf:
        problems.fail(f"the gradient's norm is {gradient_norm}", fix)
    facts = {"losses": losses, "gradient_norm": gradient_norm, "expected_loss": expected}
    return problems.result(f"{len(losses)} steps of the embedded model in bf16, loss {losses[-1]:.2f}", facts=facts)


def write_architecture(folder: Path) -> None:
    """The config of a small Llama whose sizes every recipe takes."""
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


def take_steps(
    model_folder: Path, options: PrecisionConfig, *, use_te: bool = False, batch_size: int = 4
) -> tuple[Evidence, Tensor]:
    """Train, then measure one more forward and backward pass; the evidence, and the gradient as one fp32 vector."""
    import torch
    from accelerate.state import AcceleratorState

    from llm_fp8.config.options import Config, ModelConfig
    from llm_fp8.observability.kernel_trace import gemm_kernels, kernel_times, record_kernels
    from llm_fp8.tools.bench.ours import OurTraining
    from llm_fp8.tools.bench.workload import Workload
    from llm_fp8.utils.te_import import forget_delayed_scales

    # Precisions differ in what they ask of Accelerate's singleton.
    AcceleratorState._reset_state(reset_partial_state=True)
    forget_delayed_scales()
    is_torchao = options.fp8_backend == "torchao"
    if is_torchao:
        torch.compiler.reset()  # each recipe is compiled anew
    work = Workload(str(model_folder), batch_size=batch_size, seq_length=256, micro_batches=2, num_steps=WARM_STEPS)
    training = OurTraining(work, work.config(Config(ModelConfig(use_te=use_te), options)))
    training.take(WARM_STEPS)
    losses = list(training.recorder.losses)
    # A step without the optimizer's update, which would free the gradient.
    loader: Any = training.loop.loader
    batch = loader.batches[0]
    training.loop.optimizer.zero_grad()

    def forward_backward() -> float:
        with training.precision.context(first_microbatch=None):
            loss_sum, _ = training.loop.model(batch)
            loss = loss_sum / batch.num_supervised_tokens
        loss.backward()
        return float(loss.detach())

    kernels: dict[str, int] = {}
    if batch.input_ids.device.type == "cuda":
        with record_kernels() as recorded:
            losses.append(forward_backward())
        kernels = {kind: found.count for kind, found in gemm_kernels(kernel_times(recorded)).items()}
    else:
        losses.append(forward_backward())
    parameters = dict(training.model.named_parameters())
    gradients = [parameters[name].grad for name in sorted(parameters)]
    vector = torch.cat([gradient.float().flatten() for gradient in gradients if gradient is not None])
    precision = training.precision
    inside = "+".join(precision.module_state().recipes) if is_torchao else precision.recipe_inside_modules
    return Evidence(losses, kernels, inside or None), vector


def take_all(
    model_folder: Path,
    recipes: Iterable[str],
    before: Callable[[str, dict[str, Evidence]], None] = lambda name, found: None,
    **shape: Any,
) -> dict[str, Evidence]:
    """`take_steps` in bf16, then in each recipe; `before` is told the next precision and the evidence so far."""
    from torch.nn.functional import cosine_similarity

    found: dict[str, Evidence] = {}
    for name in (BASELINE, *recipes):
        before(name, found)
        found[name], gradient = take_steps(model_folder, precision_of(name), **shape)
        if name == BASELINE:
            reference = gradient
        else:
            found[name].cosine = float(cosine_similarity(gradient, reference, dim=0))
    return found


def run_all(result: Path, model_folder: Path, backend: Backend) -> None:
    """In the process: bf16, then every recipe that this GPU has, and the file. torchao's can all be had, or the check
    does not wait for this process.
    """
    from llm_fp8.distributed.process_group import own_device
    from llm_fp8.utils.console import quiet_libraries
    from llm_fp8.utils.json_files import write_json_atomic

    def write(under_way: str | None, found: dict[str, Evidence]) -> None:
        write_json_atomic(result, {"under_way": under_way, "found": {name: vars(each) for name, each in found.items()}})

    quiet_libraries()
    write_architecture(model_folder)
    recipes = recipe_names("torchao")
    if backend == "te":
        recipes = tuple(name for name, reason in availability(own_device()).items() if reason is None)
    write(None, take_all(model_folder, recipes, write, use_te=backend == "te"))


def start(setup: Setup, checks: Collection[str]) -> None:
    for backend, check in CHECKS.items():
        if check in checks:
            words = (str(setup.scratch / f"architecture-{check}"), backend)
            setup.processes[check] = start_probe(check, setup.scratch, PROBE, *words)


def check_steps(setup: Setup) -> Result:
    return judge_probe(*setup.processes["steps"].findings(TIMEOUT_S["te"]))


def check_torchao_steps(setup: Setup) -> Result:
    """bf16 and every recipe of torchao. A missing requirement is a warning: an option needs it, and not every run."""
    from llm_fp8.data.embedded import MODEL_DIR

    problem = torchao_problem(setup.device)
    if problem is not None:
        if setup.num_gpus:
            setup.processes["torchao_steps"].kill()
        reason, fix = problem
        return Result("warning", reason, fixes=(fix,), facts={"precisions": {}})
    if not setup.num_gpus:
        return judge(take_all(MODEL_DIR, recipe_names("torchao"), batch_size=1), "torchao")
    return judge_probe(*setup.processes["torchao_steps"].findings(TIMEOUT_S["torchao"]), "torchao")


def check_cpu_steps(setup: Setup) -> Result:
    from llm_fp8.data.embedded import MODEL_DIR

    evidence, gradient = take_steps(MODEL_DIR, precision_of(BASELINE), batch_size=1)
    return judge_cpu_steps(evidence.losses, float(gradient.norm()), model_config(str(MODEL_DIR)).vocab_size)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), Path(sys.argv[2]), "torchao" if sys.argv[3] == "torchao" else "te")
