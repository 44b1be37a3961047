"""Check packages, environment variables and GPUs. A check receives a `Setup` and returns a `Result`.

The rules for variables cover settings that guides to fp8 training recommend, and settings that silently break or slow a
run. They follow the source of torch 2.13, accelerate 1.15 and Transformer Engine 2.20. docs/multi_gpu.md explains them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llm_fp8.utils.packages import FOLDER, SHIPPED, USED, package_version

if TYPE_CHECKING:
    import torch

VERIFY = "llm-fp8 verify" if FOLDER else "python scripts/verify_fp8.py"  # the command of this program
REQUIREMENTS = ("requirements.txt", "requirements-deepspeed.txt")
GPU_REQUIREMENTS = "requirements-gpu.txt"  # the versions that all GPU tests ran with
TE = "transformer-engine"
_REQUIRED = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", TE)
_OF_OPTIONS = tuple(name for name in USED if name not in (*_REQUIRED, "huggingface-hub", f"{TE}-torch"))
OPTIONAL = (*_OF_OPTIONS, "wandb-workspaces", "nvidia-ml-py")
"""Packages that only an option, the dashboard or the energy figures need."""
IMPORTED = (*_REQUIRED, *_OF_OPTIONS)
"""Packages to import if they are installed. Transformer Engine is imported only on a machine with a GPU."""
_PIP = f"{sys.executable} -m pip"

GEMM_SIZE = 8192
NUM_GEMMS = 100
KNOWN_TFLOPS = {"NVIDIA H100 80GB HBM3": {"bf16": 680.1, "fp8": 1281.5}, "NVIDIA H200": {"bf16": 687.3, "fp8": 1309.8}}
"""Name of a GPU -> a recorded result of `measure_tflops`. Other GPUs are not judged."""
MIN_SHARE = 0.85  # a lower share of the recorded rate is a warning


@dataclass
class Result:
    """The result of one check. `fail` and `warn` add a sentence and the command that fixes the problem."""

    summary: str = ""
    details: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # the evidence, as plain JSON values
    skipped: bool = False
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fixes: list[str] = field(default_factory=list)  # commands for a shell in the repository
    name: str = ""
    wall_s: float = 0.0

    def fail(self, sentence: str, fix: str) -> None:
        self.failures.append(sentence)
        self.fixes.append(fix)

    def warn(self, sentence: str, fix: str) -> None:
        self.warnings.append(sentence)
        self.fixes.append(fix)

    @property
    def status(self) -> str:
        return "failed" if self.failures else "warning" if self.warnings else "skipped" if self.skipped else "passed"


@dataclass
class Setup:
    """Input of all checks: model, sequence length and batch size for their short runs, and environment variables."""

    model_name: str
    max_seq_length: int
    batch_size: int
    environ: dict[str, str]  # the environment before the program removed any variable
    scratch: Path  # an empty folder for files of the checks

    @functools.cached_property
    def num_gpus(self) -> int:
        """The number of GPUs that torch can use. 0 if torch does not load, which `check_packages` reports."""
        try:
            import torch
        except (ImportError, OSError):
            return 0
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pins_of(text: str) -> list[Requirement]:
    """Parse a requirements file. Return the requirements whose markers match this machine, with normalised names."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pins = [Requirement(line) for line in lines if line and not line.startswith("-")]
    for pin in pins:
        pin.name = canonicalize_name(pin.name)
    return [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]


def read_pins(has_gpu: bool) -> list[Requirement]:
    """Read the requirements that are pinned for this machine. With a GPU, pins for GPUs override the general pins."""
    files = (*REQUIREMENTS, GPU_REQUIREMENTS) if has_gpu else REQUIREMENTS
    return list({pin.name: pin for file in files for pin in pins_of((SHIPPED / file).read_text())}.values())


def judge_packages(pins: list[Requirement], installed: dict[str, str], errors: dict[str, str]) -> Result:
    """Fail for a missing or broken package that every run needs. Warn about a version that differs from its pin, and
    about a broken package that only an option needs. `installed` maps packages to versions, `errors` to import errors.
    """
    result = Result()
    for pin in pins:
        version = installed.get(pin.name)
        # Transformer Engine must be built against the installed torch. The flag does not matter to other packages.
        fix = f"{_PIP} install --no-build-isolation '{str(pin).partition(';')[0]}'"
        if version is None and pin.name not in OPTIONAL:
            result.fail(f"{pin.name} is not installed", fix)
        elif version is None:
            result.details.append(f"{pin.name} is not installed")
        elif not pin.specifier.contains(version, prereleases=True):
            result.warn(f"{pin.name} is {version}, but tests ran with {pin.specifier}", fix)
    for name, error in errors.items():
        report = result.warn if name in OPTIONAL else result.fail
        report(f"{name} does not load: {error}", f"{_PIP} uninstall -y {name}   # and install it again for this torch")
    return result


def check_packages(setup: Setup) -> Result:
    """Compare the installed versions with the pins, and import the packages."""
    from llm_fp8.utils.te_internals import require_te

    pins, errors = read_pins(setup.num_gpus > 0), {}
    names = (*(pin.name for pin in pins), *IMPORTED)
    installed = {name: version for name in names if (version := package_version(name)) is not None}
    to_import = [name for name in IMPORTED if name in installed and (name != TE or setup.num_gpus)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name in to_import:
            try:
                # A run loads Transformer Engine with torch's cuDNN.
                require_te("fp8") if name == TE else importlib.import_module(name.replace("-", "_"))
            except Exception as error:  # a broken package may raise anything
                errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    result = judge_packages(pins, installed, errors)
    result.summary = ", ".join(f"{name} {installed[name]}" for name in to_import if name not in errors)
    result.facts = installed
    return result


class Rule(NamedTuple):
    """An environment variable to report. `RULES` has patterns for name and value, and a finding the actual ones."""

    name: str
    value: str
    level: str
    effect: str


_OTHERS, _LAUNCHED = yaml.safe_load(Path(__file__).with_name("variables.yaml").read_text()).values()
RULES = tuple(Rule(*entries) for entries in (*_OTHERS, *_LAUNCHED))
LAUNCHED = re.compile("|".join(name for name, *_ in _LAUNCHED))  # variables that a launcher sets for its processes


def judge_variables(environ: Mapping[str, str]) -> list[Rule]:
    """Return a finding for each variable in `environ` that matches one of `RULES`. Harmful variables come first."""
    findings: dict[str, Rule] = {}
    for rule, (name, value) in itertools.product(RULES, environ.items()):
        if re.fullmatch(rule.name, name) and re.fullmatch(rule.value, value.strip(), re.I | re.S):
            findings.setdefault(name, rule._replace(name=name, value=value))
    return sorted(findings.values(), key=lambda rule: (rule.level, rule.name))


def check_variables(setup: Setup) -> Result:
    """Check the user's environment variables against the rules: fail for harmful ones, warn about other matches."""
    findings = judge_variables(setup.environ)
    result = Result("" if findings else "no variable that harms a run, slows it or has no effect")
    for rule in findings:
        report = result.fail if rule.level == "harmful" else result.warn
        report(f"{rule.name}={rule.value} {rule.effect}", f"unset {rule.name}")
        result.facts[rule.name] = {"value": rule.value, "level": rule.level}
    return result


def check_gpu(setup: Setup) -> Result:
    """Fail if torch cannot use the driver's GPUs. On a machine without a GPU the check is skipped."""
    import torch

    from llm_fp8.observability.provenance import output_of

    gpus = (output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
    cuda = torch.version.cuda
    result = Result(facts={"driver_gpus": gpus, "torch": torch.__version__, "torch_cuda": cuda})
    if setup.num_gpus:
        name, cudnn = torch.cuda.get_device_name(0), torch.backends.cudnn.version()
        driver = "".join(gpus[:1]).rpartition(", ")[2]
        result.summary = f"{setup.num_gpus} x {name}, driver {driver}, CUDA {cuda}, cuDNN {cudnn}"
    elif not gpus:
        result.summary = "no NVIDIA GPU: nvidia-smi lists none, torch finds none"
        result.skipped = True
    elif (visible := setup.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        result.fail(f"torch finds no GPU: CUDA_VISIBLE_DEVICES is '{visible}'", "unset CUDA_VISIBLE_DEVICES")
    else:
        fix = "nvidia-smi   # 'CUDA Version' is the driver's newest; install a newer driver, or a torch for it"
        result.fail(f"torch {torch.__version__} (CUDA {cuda}) cannot use the driver's {gpus[0]}", fix)
    return result


def measure_tflops(device: torch.device) -> dict[str, float]:
    """Measure the TFLOP/s of square GEMMs of size `GEMM_SIZE` in bf16 and, if the GPU has it, fp8 (e4m3, one scale per
    tensor, bf16 result). Data are random normal, since zeros draw less power and keep clocks higher than training does.
    """
    import torch
    from torch.nn.functional import ScalingType, scaled_mm
    from torch.utils.benchmark import Timer

    from llm_fp8.precision.plan import MIN_FP8_CAPABILITY

    def tflops(launch: Callable[[], object]) -> float:
        timer = Timer("launch()", globals={"launch": launch})  # Timer synchronises
        timer.timeit(NUM_GEMMS)  # a warm-up, until clocks settle
        return 2 * GEMM_SIZE**3 / timer.timeit(NUM_GEMMS).mean / 1e12

    with torch.cuda.device(device):
        a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
        result = torch.empty_like(a)
        rates = {"bf16": tflops(lambda: torch.mm(a, b, out=result))}
        if torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY:
            a_fp8 = a.to(torch.float8_e4m3fn)
            scaling = torch.ones((), device=device), ScalingType.TensorWise
            b_fp8 = b.t().contiguous().to(torch.float8_e4m3fn).t()  # the kernel requires column-major
            rates["fp8"] = tflops(lambda: scaled_mm(a_fp8, b_fp8, *scaling, *scaling, use_fast_accum=True))
    return rates


def judge_tflops(measured: dict[str, float], gpu_name: str) -> Result:
    """Warn if a rate in `measured` is below `MIN_SHARE` of the rate in `KNOWN_TFLOPS` for the GPU `gpu_name`."""
    recorded = KNOWN_TFLOPS.get(gpu_name, measured)
    share = min(value / recorded[name] for name, value in measured.items())
    result = Result(", ".join(f"{name} {value:,.0f} TFLOP/s" for name, value in measured.items()))
    result.facts = {"measured": measured, "known": KNOWN_TFLOPS.get(gpu_name)}
    if share < MIN_SHARE:
        fix = "nvidia-smi; nvidia-smi -q -d PERFORMANCE,POWER,CLOCK   # while the GPU is busy"
        result.warn(f"{share:.0%} of an {gpu_name}'s known rate: its clocks are lowered, or other programs use it", fix)
    return result


def check_rates(setup: Setup) -> Result:
    import torch

    device = torch.device("cuda", 0)
    return judge_tflops(measure_tflops(device), torch.cuda.get_device_name(device))


def check_other_trainers(_: Setup) -> Result:
    """Say what fp8 would be in Accelerate and LLaMA-Factory here, by benchmarks/results/trainers_certificate.json."""
    from accelerate.utils import is_torchao_available, is_transformer_engine_available

    takes = "finds neither torchao nor Transformer Engine and ends with an error"
    if is_torchao_available():
        takes = "takes torchao's layers, whose weights the optimizer then lacks"
    elif is_transformer_engine_available():
        takes = "takes Transformer Engine's layers"
    return Result(f"accelerate launch --mixed_precision fp8 {takes}; LLaMA-Factory 0.9.5's fp8: true computes in fp32")
