"""The certificate of a run: the check that the kernels of a recorded step are those that the run was asked for.

Three sources that do not know of each other are compared:

- the expected kernels: what must run by options and fp8 coverage (`ExpectedKernels`);
- the kernels that ran: names, counts and times (`llm_fp8.observability.kernel_trace`);
- the modules' state: recipe and quantizers of the step in Transformer Engine (`llm_fp8.precision.modules`), or
  torchao's configuration (`llm_fp8.precision.torchao`).

The kernels decide. A GEMM whose name does not tell its types counts for neither side; a kernel that no rule knows may
be a GEMM too. The verdict is "undetermined" where such kernels could be the missing fp8 ones and no module denies that
it computed in fp8, or where they could be fp8 ones in a run without fp8. docs/monitoring.md says what each source can
and cannot see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import nn

from llm_fp8.config.recipes import RECIPES
from llm_fp8.observability.kernel_trace import (
    LOW_PRECISION,
    KernelClass,
    KernelTime,
    KernelTimes,
    gemm_kernels,
    time_by_class,
)
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import Fp8Coverage
from llm_fp8.precision.modules import GEMMS_PER_WEIGHT, ModuleState, linear_weights

Verdict = Literal["certified", "undetermined", "failed"]

UNRECOGNISED_SHARE = 0.01
"""From this share of the time of all GEMMs and kernels that no rule knows, a verdict may rest on the unrecognised ones.
One layer of 8B's 32 has 3% of its linear FLOPs."""
_NUM_LISTED, _LISTED_LENGTH = 3, 80  # kernels that a reason names, and characters: template arguments take hundreds


@dataclass(frozen=True)
class ExpectedKernels:
    """What each GPU has to compute in one optimizer step."""

    precision: str
    """Its name in tables: 'bf16', 'fp8 delayed'."""
    compute: str
    """What linear layers outside fp8 compute in: fp32, bf16 or fp16."""
    scenario: str | None = None
    """The fp8 scenario in effect; None outside fp8."""
    num_fp8_weights: int = 0
    """Weight matrices whose GEMMs run in fp8."""
    num_recomputed_fp8_weights: int = 0
    """Those whose fprop GEMM is recomputed in the backward pass; 0 where torch.compile decides about that."""
    num_fp8_gemms_per_weight: int = GEMMS_PER_WEIGHT
    fp8_linear_flop_share: float = 0.0
    """`Fp8Coverage.fp8_linear_flop_share`."""
    num_spared_fp8_gemms: int = 0
    """GEMMs that frozen weights do without: wgrad, and dgrad where nothing below them is trained."""

    @classmethod
    def of_model(
        cls,
        precision: Precision,
        coverage: Fp8Coverage,
        recomputed: Sequence[nn.Module] = (),
        gemms: Mapping[nn.Module, int] = MappingProxyType({}),
    ) -> ExpectedKernels:
        """What a model to which `precision` is attached needs; `gemms`: `llm_fp8.models.lora.gemms_per_weight`."""
        plan = precision.plan
        by_torchao = plan.backend == "torchao"
        return cls(
            precision=plan.name,
            compute=plan.compute_name,
            scenario=plan.effective_scenario,
            num_fp8_weights=precision.count_fp8_weights(),
            num_recomputed_fp8_weights=0 if by_torchao else precision.count_fp8_weights(within=recomputed),
            num_fp8_gemms_per_weight=precision.num_fp8_gemms_per_weight,
            fp8_linear_flop_share=coverage.fp8_linear_flop_share,
            num_spared_fp8_gemms=sum(
                len(linear_weights(module)) * (GEMMS_PER_WEIGHT - gemms.get(module, GEMMS_PER_WEIGHT))
                for module in precision.fp8_modules
            ),
        )

    def num_fp8_gemms(self, num_micro_batches: int) -> int:
        """The least number of fp8 GEMM kernels in a step; a GEMM may take several kernels."""
        own = self.num_fp8_gemms_per_weight * self.num_fp8_weights - self.num_spared_fp8_gemms
        return num_micro_batches * (own + self.num_recomputed_fp8_weights)

    def describe_fp8_gemms(self, num_micro_batches: int) -> str:
        """How their number comes about."""
        parts = f"{self.num_fp8_weights} weights x {self.num_fp8_gemms_per_weight} GEMMs"
        if self.num_spared_fp8_gemms:
            parts += f" less {self.num_spared_fp8_gemms} that frozen weights spare"
        if self.num_recomputed_fp8_weights:
            parts += f" and {self.num_recomputed_fp8_weights} recomputed ones"
        return parts + (f" in each of {num_micro_batches} micro-batches" if num_micro_batches > 1 else "")


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
    """Kernels that no rule of `llm_fp8.observability.kernel_trace` knows, the longest first."""
    unrecognised_time_share: float | None
    """Share of these two kinds in the time of all GEMMs and kernels that no rule knows; None without any."""
    fp8_gemm_time_share: float | None
    """Share of the time of all GEMM kernels; None where none was recorded."""
    fp8_linear_flop_share: float
    """`Fp8Coverage.fp8_linear_flop_share`; kernel names do not give sizes."""
    attention: str | None
    recipe_inside_modules: str | None
    """`llm_fp8.precision.context.Precision.recipe_inside_modules`."""
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
        where = f" (on rank {self.rank})" if self.rank else ""
        return (
            f"the GPU does not run what was asked for ({self.precision}): {'; '.join(self.reasons)}{where}. Look at "
            f"{path}, and at what wraps or patches the model in this environment; {otherwise}."
        )


def certify(
    expected: ExpectedKernels,
    kernels: KernelTimes,
    state: ModuleState,
    *,
    num_micro_batches: int,
    recipe_inside_modules: str | None = None,
    attention: str | None = None,
    rank: int = 0,
) -> Certificate:
    """Compare what should have run on one GPU in a recorded step of `num_micro_batches` with the kernels that ran.

    `state` is of the modules expected in fp8; in a run without fp8 of all linear modules of Transformer Engine or
    torchao. `attention` says which kernels attention runs on. The others are as in `Certificate`.
    """
    seen = _Evidence(expected, kernels, state, num_micro_batches, recipe_inside_modules)
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
        num_expected_fp8_gemm_kernels=expected.num_fp8_gemms(num_micro_batches),
        num_unknown_gemm_kernels=seen.unknown.count,
        gemm_kernels_by_type=seen.by_type,
        unknown_gemm_names=list(seen.unknown.names),
        other_kernel_names=list(seen.other.names),
        unrecognised_time_share=seen.unrecognised_share,
        fp8_gemm_time_share=seen.low_share,
        fp8_linear_flop_share=expected.fp8_linear_flop_share,
        attention=attention,
        recipe_inside_modules=recipe_inside_modules,
        modules=state,
        num_micro_batches=num_micro_batches,
        rank=rank,
        time_s_by_class={name: found.time_s for name, found in seen.by_class.items()},
    )


def worst(certificates: Sequence[Certificate]) -> Certificate:
    """The first with the worst verdict: that of the launch."""
    return max(certificates, key=lambda certificate: get_args(Verdict).index(certificate.verdict))


def attention_library(kernels: KernelTimes) -> str:
    """The library of the longest attention kernel, for models without Transformer Engine's attention; 'math' without
    any.
    """
    attention = time_by_class(kernels).get("attention")
    if attention is None:
        return "math"
    longest = next(iter(attention.names)).lower()
    libraries = {"cudnn": "cuDNN", "flash": "flash", "fmha_cutlass": "memory-efficient"}
    return next((words for part, words in libraries.items() if part in longest), "a library of its own")


class _Evidence:
    """What kernels and modules show, counted, and what follows from it: failures, doubts and remarks."""

    def __init__(
        self,
        expected: ExpectedKernels,
        kernels: KernelTimes,
        state: ModuleState,
        num_micro_batches: int,
        recipe_inside: str | None,
    ) -> None:
        self.expected, self.state, self.recipe_inside = expected, state, recipe_inside
        self.num_micro_batches = num_micro_batches
        self.failures: list[str] = []
        self.doubts: list[str] = []
        self.remarks: list[str] = []
        self.by_class, gemms = time_by_class(kernels), gemm_kernels(kernels)
        self.by_type = {str(kind): found.count for kind, found in gemms.items()}
        self.num_gemms = sum(self.by_type.values())
        self.num_low = sum(self.by_type.get(kind, 0) for kind in LOW_PRECISION)
        is_fp4 = expected.scenario is not None and not RECIPES[expected.scenario].has_fp8_peak
        self.num_own = self.by_type.get("fp4" if is_fp4 else "fp8", 0)
        """GEMMs of the type that the recipe has."""
        self.unknown = gemms.get("unknown", KernelTime())
        """GEMMs of unknown type."""
        self.other = self.by_class.get("other", KernelTime())
        """Kernels that no rule knows."""
        gemms_s = sum(found.time_s for found in gemms.values())
        low_s = sum(gemms[kind].time_s for kind in LOW_PRECISION if kind in gemms)
        self.low_share = low_s / gemms_s if gemms_s else None
        possible_s, unrecognised_s = gemms_s + self.other.time_s, self.unknown.time_s + self.other.time_s
        self.unrecognised_share = unrecognised_s / possible_s if possible_s else None
        self.unrecognised_counts = (self.unrecognised_share or 0.0) >= UNRECOGNISED_SHARE
        # Kernels that no rule knows are seldom GEMMs, so they count only where their time does.
        self.num_possible = self.unknown.count + (self.other.count if self.unrecognised_counts else 0)
        """Kernels that may be the missing GEMMs."""

    def judge_fp8(self) -> None:
        """Judge a run in fp8."""
        expected, state = self.expected, self.state
        num_expected = expected.num_fp8_gemms(self.num_micro_batches)
        missing = num_expected - self.num_own
        if self.num_gemms == 0:
            # Modules alone prove no fp8, but they can deny it.
            (self.failures if state.num_outside_fp8 else self.doubts).append(self.describe_nothing())
        elif missing > 0 and self.num_possible >= missing and state.num_modules and not state.num_outside_fp8:
            self.doubts.append(
                f"{self.describe_unrecognised()}: {self.num_own} of the {num_expected} expected fp8 GEMM kernels were "
                f"recognised, and {self.describe_state()}, so these may be theirs under names not known here"
            )
        elif missing > 0:
            how_many = expected.describe_fp8_gemms(self.num_micro_batches)
            self.failures.append(
                f"expected at least {num_expected} fp8 GEMM kernels ({how_many}), and {self.num_own} ran "
                f"({self.describe_gemms()}); {self.describe_state()}"
            )
        elif state.num_outside_fp8 or not state.num_modules:
            self.doubts.append(f"the kernels are those of fp8, but {self.describe_state()}")
        elif self.unrecognised_counts:
            # All expected fp8 kernels were recognised, whatever the others are.
            self.remarks.append(self.describe_unrecognised())

        row = RECIPES[expected.scenario or ""]
        known = {recipe.quantizer for recipe in RECIPES.values() if recipe.quantizer is not None}
        if others := _listed(state.recipes, lambda name: name != row.recipe_class):
            self.failures.append(f"expected the recipe {row.recipe_class}, and modules computed by {others}")
        elif self.recipe_inside not in (None, row.recipe_class) and not self.failures:
            self.failures.append(f"expected the recipe {row.recipe_class} in the modules, not {self.recipe_inside}")
        if others := _listed(state.quantizers, lambda name: name in known - {row.quantizer}):
            self.failures.append(f"expected quantizers of the class {row.quantizer}, and there are {others}")
        if state.num_without_amax:
            empty = f"{state.num_without_amax} of {state.num_modules} modules have an empty amax history after the step"
            self.failures.append(f"{empty}, so their scales never move")
        modules = f"modules of {state.library} do not say"
        if state.num_unreadable:
            self.remarks.append(f"{state.num_unreadable} {modules} what they computed in")
        if state.num_recipe_unreadable:
            self.remarks.append(f"{state.num_recipe_unreadable} {modules} by which recipe they computed")
        if unknown := _listed(state.quantizers, lambda name: name not in known):
            self.remarks.append(f"quantizers of classes not known here: {unknown}")

    def judge_without_fp8(self) -> None:
        """Judge a run in bf16, fp16 or fp32."""
        if self.num_low:
            self.failures.append(f"expected no fp8 GEMM kernel, and {self.num_low} ran ({self.describe_gemms()})")
        if self.state.num_in_fp8:
            self.failures.append(f"expected no module in fp8, and {self.describe_state()}")
        elif self.recipe_inside not in (None, "none"):
            self.failures.append(f"expected no fp8 recipe in the modules, not {self.recipe_inside}")
        if self.num_gemms == 0:
            self.doubts.append(self.describe_nothing())
        elif not self.by_type.get(self.expected.compute):
            compute = self.expected.compute
            words = f"expected GEMM kernels in {compute}, and none was recognised ({self.describe_gemms()})"
            if self.num_possible:
                self.doubts.append(f"{words}; {self.describe_unrecognised()} may be in any")
            else:
                self.failures.append(words)
        elif self.unrecognised_counts:
            self.doubts.append(f"{self.describe_unrecognised()}, which may be in fp8")
        elif self.unknown.count:
            self.remarks.append(f"{self.unknown.count} GEMM kernels of unknown type")

    def describe_unrecognised(self) -> str:
        kinds = (("GEMM kernels of unknown type", self.unknown), ("kernels that no rule knows", self.other))
        counted = " and ".join(f"{found.count} {words}" for words, found in kinds if found.count)
        times = self.unknown.names | self.other.names
        longest = sorted(times, key=lambda name: -times[name])[:_NUM_LISTED]
        names = ", ".join(name if len(name) <= _LISTED_LENGTH else f"{name[:_LISTED_LENGTH]}..." for name in longest)
        share = f"{self.unrecognised_share or 0.0:.1%} of the time of GEMMs and kernels that no rule knows"
        return f"{counted} ({share}; the longest: {names})"

    def describe_gemms(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.by_type.items()))
        return f"all GEMM kernels: {counts or 'none'}"

    def describe_state(self) -> str:
        state = self.state
        if not state.num_modules:
            return f"the model has no linear module of {state.library} to ask"
        recipes = f" by {', '.join(state.recipes)}" if state.recipes else ""
        said = "computed in fp8" if state.library == "Transformer Engine" else "are set up for fp8"
        return f"of {state.num_modules} modules of {state.library} {state.num_in_fp8} say that they {said}{recipes}"

    def describe_nothing(self) -> str:
        """Why there is no GEMM to count."""
        nothing = "the profiler recorded no GEMM kernel (CUPTI is missing, or profiling is not permitted here)"
        if self.other.count:
            nothing = f"no GEMM kernel was recognised, and there are {self.describe_unrecognised()}"
        return f"{nothing}; {self.describe_state()}"


def _listed(counts: Mapping[str, int], is_wanted: Callable[[str], bool]) -> str:
    """The wanted names with their counts; empty where there are none."""
    return ", ".join(f"{name} ({count})" for name, count in counts.items() if is_wanted(name))
