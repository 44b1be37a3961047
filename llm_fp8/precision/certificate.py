"""The certificate of a run: the check that the kernels of a recorded step are those that the run was asked for.

Three independent sources are compared: the kernels that must run by options and fp8 coverage (`ExpectedKernels`), those
that ran (`llm_fp8.observability.kernel_trace`), and the modules' own account (`ModuleState`).

The kernels decide. A GEMM whose name does not tell its types counts for neither side; a kernel that no rule knows may
be a GEMM too. The verdict is "undetermined" where such kernels could be the missing fp8 ones and no module denies that
it computed in fp8, or where they could be fp8 ones in a run without fp8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import nn

from llm_fp8.config.recipes import RECIPES, gemms_in_fp8
from llm_fp8.observability.kernel_trace import (
    LOW_PRECISION,
    KernelClass,
    KernelTime,
    KernelTimes,
    gemm_kernels,
    time_by_class,
)
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import GEMMS_PER_WEIGHT, Fp8Coverage, ModuleState, linear_weights

Verdict = Literal["certified", "undetermined", "failed"]

UNRECOGNISED_SHARE = 0.01
"""From this share of the time of all GEMMs and kernels that no rule knows, a verdict may rest on the unrecognised ones.
One layer of 8B's 32 has 3% of its linear FLOPs."""
_LISTED_LENGTH = 80  # characters of a kernel's name in a reason: template arguments take hundreds


@dataclass(frozen=True)
class ExpectedKernels:
    """The kernels that each GPU has to run in one optimizer step; `precision` is its name: 'bf16', 'fp8 delayed'."""

    precision: str
    compute: str
    """The dtype of linear layers outside fp8: fp32, bf16 or fp16."""
    scenario: str | None = None
    """The fp8 scenario in effect; None outside fp8."""
    num_fp8_gemms: int = 0
    """The least number of fp8 GEMM kernels in a micro-batch; a GEMM may take several kernels."""
    fp8_linear_flop_share: float = 0.0

    @classmethod
    def of_model(
        cls,
        precision: Precision,
        coverage: Fp8Coverage,
        recomputed: Sequence[nn.Module] = (),
        gemms: Mapping[nn.Module, int] = MappingProxyType({}),
    ) -> ExpectedKernels:
        """The kernels of a model to which `precision` is attached; `gemms`: see `gemms_per_weight`. The
        modules in `recomputed` compute fprop once more, unless torch.compile decides about that.
        """
        plan, scenario = precision.plan, precision.plan.effective_scenario
        parts = recomputed if precision.backend.recomputes_fprop else ()
        twice = {module for part in parts for module in part.modules()}
        num_gemms = {
            module: min(gemms.get(module, GEMMS_PER_WEIGHT), gemms_in_fp8(scenario)) + (module in twice)
            for module in precision.fp8_modules
        }
        return cls(
            precision=plan.name,
            compute=plan.compute_name,
            scenario=scenario,
            num_fp8_gemms=sum(len(linear_weights(module)) * number for module, number in num_gemms.items()),
            fp8_linear_flop_share=coverage.fp8_linear_flop_share,
        )

    @property
    def without_fp8(self) -> ExpectedKernels:
        """The kernels of the same model after the steps in fp8."""
        return ExpectedKernels(self.compute, self.compute)


@dataclass(frozen=True)
class Certificate:
    """A verdict and what it rests on: one rank's recorded step."""

    verdict: Verdict
    precision: str
    reasons: list[str]
    """Why the verdict is not 'certified'."""
    remarks: list[str]
    num_gemm_kernels: int
    num_fp8_gemm_kernels: int
    num_expected_fp8_gemm_kernels: int
    num_unknown_gemm_kernels: int
    gemm_kernels_by_type: dict[str, int]
    unknown_gemm_names: list[str]
    other_kernel_names: list[str]
    """Kernels that no rule of `kernel_trace` knows, the longest first."""
    unrecognised_time_share: float | None
    """Share of these two kinds in the time of all GEMMs and kernels that no rule knows; None without any."""
    fp8_gemm_time_share: float | None
    """Share of the time of all GEMM kernels; None where none was recorded."""
    fp8_linear_flop_share: float
    attention: str | None
    modules: ModuleState
    num_micro_batches: int
    rank: int = 0
    time_s_by_class: dict[KernelClass, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for certificate.json and summary.json."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """One line for the terminal."""
        num_fp8 = self.num_fp8_gemm_kernels
        is_fp8 = num_fp8 > 0 or self.num_expected_fp8_gemm_kernels > 0
        kernels = f"{num_fp8 if is_fp8 else 'none'} of {self.num_gemm_kernels} GEMM kernels in fp8"
        if is_fp8 and self.fp8_gemm_time_share is not None:
            flops = f"{self.fp8_linear_flop_share:.1%} of linear FLOPs"
            kernels += f" ({self.fp8_gemm_time_share:.1%} of GEMM time), {flops}"
        verdict = "" if self.verdict == "certified" else f"{self.verdict.upper()}, "
        attention = f", attention {self.attention}" if self.attention else ""
        remarks = f" ({'; '.join(self.remarks)})" if self.remarks else ""
        return f"certificate: {verdict}{self.precision}, {kernels}{attention}{remarks}"

    def failure(self, path: Path, otherwise: str = "--no_certify trains all the same") -> str:
        """The error message of a failed certificate, which is kept at `path`; `otherwise`: how to train without it."""
        reasons = f"the GPU does not run what was asked for ({self.precision}): {'; '.join(self.reasons)}"
        return f"{reasons} (on rank {self.rank}). See {path}; {otherwise}."


def certify(
    expected: ExpectedKernels,
    kernels: KernelTimes,
    state: ModuleState,
    *,
    num_micro_batches: int,
    attention: str | None = None,
    rank: int = 0,
) -> Certificate:
    """Compare what should have run on one GPU in a recorded step of `num_micro_batches` with the kernels that ran.

    `state` is of the modules expected in fp8; in a run without fp8 of all linear modules that might be.
    `attention`: the implementation that attention has.
    """
    seen = _Evidence(expected, kernels, state, num_micro_batches)
    (seen.judge_fp8 if expected.scenario else seen.judge_without_fp8)()
    if attention is not None and "unfused" in attention:
        seen.remarks.append("attention is unfused, several times slower")
    return Certificate(
        verdict="failed" if seen.failures else "undetermined" if seen.doubts else "certified",
        precision=expected.precision,
        reasons=[*seen.failures, *seen.doubts],
        remarks=seen.remarks,
        num_gemm_kernels=seen.num_gemms,
        num_fp8_gemm_kernels=seen.num_low,
        num_expected_fp8_gemm_kernels=num_micro_batches * expected.num_fp8_gemms,
        num_unknown_gemm_kernels=seen.unknown.count,
        gemm_kernels_by_type=seen.by_type,
        unknown_gemm_names=list(seen.unknown.names),
        other_kernel_names=list(seen.other.names),
        unrecognised_time_share=seen.unrecognised_share,
        fp8_gemm_time_share=seen.low_share,
        fp8_linear_flop_share=expected.fp8_linear_flop_share,
        attention=f"sdpa ({attention_library(kernels)})" if attention == "sdpa" else attention,
        modules=state,
        num_micro_batches=num_micro_batches,
        rank=rank,
        time_s_by_class={name: found.time_s for name, found in seen.by_class.items()},
    )


def worst(certificates: Sequence[Certificate]) -> Certificate:
    """The first with the worst verdict: that of the launch."""
    return max(certificates, key=lambda certificate: get_args(Verdict).index(certificate.verdict))


def attention_library(kernels: KernelTimes) -> str:
    """The library of the longest attention kernel, for models without TE's attention; 'math' without any."""
    attention = time_by_class(kernels).get("attention")
    if attention is None:
        return "math"
    longest = next(iter(attention.names)).lower()
    libraries = {"cudnn": "cuDNN", "flash": "flash", "fmha_cutlass": "memory-efficient"}
    return next((words for part, words in libraries.items() if part in longest), "a library of its own")


class _Evidence:
    """The counts of kernels and modules, and the failures, doubts and remarks that follow from them."""

    def __init__(
        self, expected: ExpectedKernels, kernels: KernelTimes, state: ModuleState, num_micro_batches: int
    ) -> None:
        self.expected, self.state, self.num_micro_batches = expected, state, num_micro_batches
        self.failures: list[str] = []
        self.doubts: list[str] = []
        self.remarks: list[str] = []
        self.by_class, gemms = time_by_class(kernels), gemm_kernels(kernels)
        self.by_type = {str(kind): found.count for kind, found in gemms.items()}
        self.num_gemms = sum(self.by_type.values())
        self.num_low = sum(self.by_type.get(kind, 0) for kind in LOW_PRECISION)
        self.unknown = gemms.get("unknown", KernelTime())
        self.other = self.by_class.get("other", KernelTime())
        gemms_s = sum(found.time_s for found in gemms.values())
        low_s = sum(gemms[kind].time_s for kind in LOW_PRECISION if kind in gemms)
        self.low_share = low_s / gemms_s if gemms_s else None
        possible_s, unrecognised_s = gemms_s + self.other.time_s, self.unknown.time_s + self.other.time_s
        self.unrecognised_share = unrecognised_s / possible_s if possible_s else None
        self.unrecognised_counts = (self.unrecognised_share or 0.0) >= UNRECOGNISED_SHARE
        # Kernels that no rule knows are seldom GEMMs, so they may be the missing ones only where their time counts.
        self.num_possible = self.unknown.count + (self.other.count if self.unrecognised_counts else 0)
        gemm_counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.by_type.items()))
        self.gemm_words = f"all GEMM kernels: {gemm_counts or 'none'}"
        recipes = f" by {', '.join(state.recipes)}" if state.recipes else ""
        said = "computed in fp8" if state.library == "Transformer Engine" else "are set up for fp8"
        self.state_words = (
            f"of {state.num_modules} modules of {state.library} {state.num_in_fp8} say they {said}{recipes}"
        )

    def judge_fp8(self) -> None:
        """Judge a run in fp8."""
        expected, state, row = self.expected, self.state, RECIPES[self.expected.scenario or ""]
        num_expected = self.num_micro_batches * expected.num_fp8_gemms
        num_own = self.by_type.get("fp8" if row.has_fp8_peak else "fp4", 0)
        missing = num_expected - num_own
        if self.num_gemms == 0:
            # Modules alone prove no fp8, but they can deny it.
            (self.failures if state.num_outside_fp8 else self.doubts).append(self.describe_nothing())
        elif missing > 0:
            words = f"expected at least {num_expected} fp8 GEMM kernels, and {num_own} ran ({self.gemm_words}); "
            words += self.state_words
            if self.num_possible >= missing and state.num_modules and not state.num_outside_fp8:
                self.doubts.append(f"{words}; the others may be among {self.describe_unrecognised()}")
            else:
                self.failures.append(words)
        elif state.num_outside_fp8 or not state.num_modules:
            self.doubts.append(f"the kernels are those of fp8, but {self.state_words}")
        elif self.unrecognised_counts:
            self.remarks.append(self.describe_unrecognised())

        if others := [name for name in state.recipes if name != row.recipe_class]:
            self.failures.append(f"expected the recipe {row.recipe_class}, and modules had {', '.join(others)}")
        if state.num_without_amax:
            self.failures.append(f"{state.num_without_amax} modules have an empty amax history after the step")
        if state.num_recipe_unreadable:
            words = f"modules of {state.library} do not say by which recipe they computed"
            self.remarks.append(f"{state.num_recipe_unreadable} {words}")

    def judge_without_fp8(self) -> None:
        """Judge a run in bf16, fp16 or fp32."""
        if self.num_low:
            self.failures.append(f"expected no fp8 GEMM kernel, and {self.num_low} ran ({self.gemm_words})")
        if self.state.num_in_fp8:
            self.failures.append(f"expected no module in fp8, and {self.state_words}")
        if self.num_gemms == 0:
            self.doubts.append(self.describe_nothing())
        elif not self.by_type.get(self.expected.compute):
            words = f"expected GEMM kernels in {self.expected.compute}, and none was recognised ({self.gemm_words})"
            (self.doubts if self.num_possible else self.failures).append(words)
        elif self.unrecognised_counts:
            self.doubts.append(f"{self.describe_unrecognised()}, which may be in fp8")
        elif self.unknown.count:
            self.remarks.append(f"{self.unknown.count} GEMM kernels of unknown type")

    def describe_unrecognised(self) -> str:
        kinds = (("GEMM kernels of unknown type", self.unknown), ("kernels that no rule knows", self.other))
        counted = " and ".join(f"{found.count} {words}" for words, found in kinds if found.count)
        longest = next(iter(self.unknown.names | self.other.names), "")[:_LISTED_LENGTH]
        return f"{counted} ({self.unrecognised_share or 0.0:.1%} of the time of such and GEMMs; {longest})"

    def describe_nothing(self) -> str:
        """Why there is no GEMM to count."""
        nothing = "the profiler recorded no GEMM kernel (CUPTI is missing, or profiling is not permitted here)"
        if self.other.count:
            nothing = f"no GEMM kernel was recognised, and there are {self.describe_unrecognised()}"
        return f"{nothing}; {self.state_words}"
