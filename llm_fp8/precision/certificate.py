"""The certificate of a run: a check that the kernels in a recorded training step had the requested precision.

It compares three independent sources: the kernels that options and fp8 coverage require (`ExpectedKernels`), the
kernels that ran (`llm_fp8.observability.kernel_trace`), and the state that modules report (`ModuleState`).

The kernels determine the verdict. Some GEMM kernels have names without their types, and some kernels of unknown names
may be GEMMs. They make the verdict "undetermined" in two cases. In an fp8 run, fewer fp8 kernels than expected have
been recognised, these could be the missing ones, and no module reports that it computed outside fp8. In a run without
fp8, they could be fp8 kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from llm_fp8.config.recipes import row_of
from llm_fp8.observability import kernel_trace
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import Fp8Coverage, ModuleState, linear_weights
from llm_fp8.precision.te import format_name

Verdict = Literal["certified", "undetermined", "failed"]

UNRECOGNISED_SHARE = 0.01
"""Unrecognised kernels affect the verdict if they take at least this fraction of the time of all GEMMs and unrecognised
kernels. For comparison, one of the 32 layers of an 8B model has 3% of the linear FLOPs."""
_LISTED_LENGTH = 80  # characters of a kernel's name in a reason; template arguments can have hundreds


@dataclass(frozen=True)
class ExpectedKernels:
    """Kernels that each GPU must run in an optimizer step."""

    precision: str  # name of the precision, for example 'bf16' or 'fp8 delayed'
    compute: str  # precision of linear layers outside fp8: fp32, bf16 or fp16
    scenario: str | None = None  # the fp8 scenario in effect, or None in a run without fp8
    num_fp8_gemms: int = 0  # minimum number of fp8 GEMM kernels per micro-batch; a GEMM may run several kernels
    most_fp8_gemms: float = math.inf  # maximum of the same, if fprop is in bf16
    fp8_linear_flop_share: float = 0.0
    fp8_format: str | None = None  # the recipe's format, such as "HYBRID"; None for the default of the row in `RECIPES`

    @classmethod
    def of_model(
        cls, precision: Precision, coverage: Fp8Coverage, recomputed: Sequence[nn.Module] = ()
    ) -> ExpectedKernels:
        """Return the kernels of a model with the given `precision` and `coverage`. Modules in `recomputed` run fprop
        twice, unless torch.compile chooses the operations to recompute.
        """
        plan = precision.plan
        fprop_in_fp8 = "fprop" in row_of(plan.effective_scenario).gemms_in_fp8
        parts = recomputed if precision.backend.recomputes_fprop and fprop_in_fp8 else ()
        twice = precision.fp8_modules.intersection(module for part in parts for module in part.modules())
        most = sum(1 + weight.requires_grad for module in precision.fp8_modules for weight in linear_weights(module))
        return cls(
            precision=plan.name,
            compute=plan.compute_name,
            scenario=plan.effective_scenario,
            num_fp8_gemms=coverage.num_fp8_gemms + sum(len(linear_weights(module)) for module in twice),
            fp8_linear_flop_share=coverage.fp8_linear_flop_share,
            fp8_format=format_name(plan.recipe),
            most_fp8_gemms=math.inf if fprop_in_fp8 else most,
        )


@dataclass(frozen=True)
class Certificate:
    """Verdict on a recorded step of one rank, with the evidence."""

    verdict: Verdict
    precision: str
    reasons: list[str]  # reasons why the verdict is not 'certified'
    remarks: list[str]
    num_gemm_kernels: int
    num_fp8_gemm_kernels: int
    num_expected_fp8_gemm_kernels: int
    num_unknown_gemm_kernels: int
    gemm_kernels_by_type: dict[str, int]
    unknown_gemm_names: list[str]
    other_kernel_names: list[str]  # kernels that match no rule of `kernel_trace`, sorted by decreasing time
    unrecognised_time_share: float | None
    """Time of unknown GEMMs and other kernels / time of all GEMMs and other kernels; None if there are none."""
    fp8_gemm_time_share: float | None  # time of fp8 GEMM kernels / of all GEMM kernels; None if no GEMM was recorded
    fp8_linear_flop_share: float
    attention: str | None
    modules: ModuleState
    num_micro_batches: int
    rank: int = 0
    time_s_by_class: dict[kernel_trace.KernelClass, float] = field(default_factory=dict)
    version: int = 1  # of the fields, which docs/certificate.schema.json describes

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for certificate.json and summary.json."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """Summarise the certificate in one line for the terminal."""
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
        """Return the error message for a failed certificate stored at `path`. It ends with the advice `otherwise`."""
        reasons = f"the certificate failed ({self.precision}): {'; '.join(self.reasons)}"
        return f"{reasons} (on rank {self.rank}). See {path}; {otherwise}."


def certify(
    expected: ExpectedKernels,
    kernels: kernel_trace.KernelTimes,
    state: ModuleState,
    *,
    num_micro_batches: int,
    attention: str | None = None,
    rank: int = 0,
) -> Certificate:
    """Compare the kernels that one GPU must run in a step of `num_micro_batches` with the `kernels` of a recorded step.

    `state` describes the modules that must be in fp8 or, in a run without fp8, all linear modules that could be in fp8.
    `attention` is the name of the model's attention implementation.
    """
    by_class, gemms = kernel_trace.time_by_class(kernels), kernel_trace.gemm_kernels(kernels)
    unknown, other = gemms.get("unknown", kernel_trace.KernelTime()), kernel_trace.unrecognised_kernels(kernels)
    possible_s = sum(gemm.time_s for gemm in gemms.values()) + other.time_s
    figures: Any = {"fp8_gemm_time_share": None} | kernel_trace.StepProfile(kernels=kernels).figures()
    step = Certificate(
        verdict="certified",
        precision=expected.precision,
        reasons=[],
        remarks=[],
        num_expected_fp8_gemm_kernels=num_micro_batches * expected.num_fp8_gemms,
        gemm_kernels_by_type={str(kind): gemm.count for kind, gemm in gemms.items()},
        unknown_gemm_names=list(unknown.names),
        other_kernel_names=list(other.names),
        unrecognised_time_share=(unknown.time_s + other.time_s) / possible_s if possible_s else None,
        fp8_linear_flop_share=expected.fp8_linear_flop_share,
        attention=f"sdpa ({kernel_trace.attention_library(kernels)})" if attention == "sdpa" else attention,
        modules=state,
        num_micro_batches=num_micro_batches,
        rank=rank,
        time_s_by_class={name: times.time_s for name, times in by_class.items()},
        **figures,
    )
    judge = _Judge(step, expected, other.count)
    (judge.judge_fp8 if expected.scenario else judge.judge_without_fp8)()
    if not expected.scenario and (low := [name for name in kernels if kernel_trace.LOW_PRECISION_NAME.search(name)]):
        judge.failures.append(f"expected no kernel in fp8 or fp4, but {len(low)} ran: {low[0][:_LISTED_LENGTH]}")
    if attention is not None and "unfused" in attention:
        judge.remarks.append("attention is unfused, several times slower")
    verdict: Verdict = "failed" if judge.failures else "undetermined" if judge.doubts else "certified"
    return dataclasses.replace(step, verdict=verdict, reasons=[*judge.failures, *judge.doubts], remarks=judge.remarks)


def worst(certificates: Sequence[Certificate]) -> Certificate:
    """Return the certificate with the worst verdict. If several have this verdict, return the first of them."""
    return max(certificates, key=lambda certificate: get_args(Verdict).index(certificate.verdict))


class _Judge:
    """Collects failures, doubts and remarks about the kernels and modules of a step."""

    def __init__(self, step: Certificate, expected: ExpectedKernels, num_other: int) -> None:
        self.step, self.expected, self.state, self.num_other = step, expected, step.modules, num_other
        self.failures, self.doubts, self.remarks = list[str](), list[str](), list[str]()
        self.unrecognised_counts = (step.unrecognised_time_share or 0.0) >= UNRECOGNISED_SHARE
        # Kernels that match no rule are seldom GEMMs, so they are counted only if their time is significant.
        self.num_possible = step.num_unknown_gemm_kernels + (num_other if self.unrecognised_counts else 0)
        gemm_counts = ", ".join(f"{count} {kind}" for kind, count in sorted(step.gemm_kernels_by_type.items()))
        self.gemm_summary = f"all GEMM kernels: {gemm_counts or 'none'}"
        state, recipes = step.modules, ", ".join(step.modules.recipes)
        account = "report that they ran in fp8" if state.library == "Transformer Engine" else "are set up for fp8"
        self.state_summary = f"{state.num_in_fp8} of {state.num_modules} modules of {state.library} {account}"
        self.state_summary += f" by {recipes}" if recipes else ""

    def judge_fp8(self) -> None:
        """Judge a run in fp8."""
        state, row = self.state, row_of(self.expected.scenario)
        num_expected = self.step.num_expected_fp8_gemm_kernels
        num_of_recipe = self.step.gemm_kernels_by_type.get("fp8" if row.has_fp8_peak else "fp4", 0)
        missing = num_expected - num_of_recipe
        if self.step.num_gemm_kernels == 0:
            # Reports of modules alone are no proof of fp8, but they can disprove it.
            (self.failures if state.num_outside_fp8 else self.doubts).append(self.describe_nothing())
        elif missing > 0:
            message = f"expected at least {num_expected} fp8 GEMM kernels, but {num_of_recipe} ran "
            message += f"({self.gemm_summary}); {self.state_summary}"
            if self.num_possible >= missing and state.num_modules and not state.num_outside_fp8:
                self.doubts.append(f"{message}; the missing ones may be among {self.describe_unrecognised()}")
            else:
                self.failures.append(message)
        elif state.num_outside_fp8 or not state.num_modules:
            self.doubts.append(f"enough fp8 kernels ran, but {self.state_summary}")
        elif self.unrecognised_counts:
            self.remarks.append(self.describe_unrecognised())

        if others := [name for name in state.recipes if name != row.recipe_class]:
            self.failures.append(f"expected the recipe {row.recipe_class}, but modules had {', '.join(others)}")
        if num_of_recipe > (most := self.expected.most_fp8_gemms * self.step.num_micro_batches):
            kernels = "fp8 GEMM kernels, since the forward pass is in bf16"
            self.failures.append(f"expected at most {most} {kernels}, but {num_of_recipe} ran ({self.gemm_summary})")
        expected_format = self.expected.fp8_format or row.defaults.get("fp8_format")
        if expected_format and (others := [name for name in state.formats if name != expected_format]):
            self.failures.append(f"expected the fp8 format {expected_format}, but modules had {', '.join(others)}")
        if state.num_without_amax:
            self.failures.append(f"{state.num_without_amax} modules have an empty amax history after the step")
        if count := state.num_recipe_unreadable:
            self.remarks.append(f"{count} modules of {state.library} do not report which recipe they used")

    def judge_without_fp8(self) -> None:
        """Judge a run in bf16, fp16 or fp32."""
        if num_fp8 := self.step.num_fp8_gemm_kernels:
            self.failures.append(f"expected no fp8 GEMM kernel, but {num_fp8} ran ({self.gemm_summary})")
        if self.state.num_in_fp8:
            self.failures.append(f"expected no module in fp8, but {self.state_summary}")
        if self.step.num_gemm_kernels == 0:
            self.doubts.append(self.describe_nothing())
        elif not self.step.gemm_kernels_by_type.get(self.expected.compute):
            message = f"expected GEMM kernels in {self.expected.compute}, but none was recognised ({self.gemm_summary})"
            (self.doubts if self.num_possible else self.failures).append(message)
        elif self.unrecognised_counts:
            self.doubts.append(f"{self.describe_unrecognised()}, which may be in fp8")
        elif num_unknown := self.step.num_unknown_gemm_kernels:
            self.remarks.append(f"{num_unknown} GEMM kernels of unknown type")

    def describe_unrecognised(self) -> str:
        """Return the number of unrecognised kernels, their share of the time, and the name of the slowest one."""
        step = self.step
        kinds = ("GEMM kernels of unknown type", "kernels that match no rule")
        counts = zip((step.num_unknown_gemm_kernels, self.num_other), kinds, strict=True)
        numbers = " and ".join(f"{count} {kind}" for count, kind in counts if count)
        longest = next(iter([*step.unknown_gemm_names, *step.other_kernel_names]), "")[:_LISTED_LENGTH]
        return f"{numbers} ({step.unrecognised_time_share or 0.0:.1%} of the time of these and all GEMMs; {longest})"

    def describe_nothing(self) -> str:
        """Return the reason why no GEMM kernel was counted."""
        nothing = "the profiler recorded no GEMM kernel (CUPTI is missing, or profiling is not permitted here)"
        if self.num_other:
            nothing = f"no GEMM kernel was recognised, but there are {self.describe_unrecognised()}"
        return f"{nothing}; {self.state_summary}"
