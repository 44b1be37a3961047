"""The certificate of a run: whether what the GPU ran in a recorded step is what the run was asked for.

Three witnesses that do not know of each other are compared:

- the promise: what the options and the census say must run (`ExpectedKernels`);
- the kernels: the names of what the GPU ran, with counts and times (`llm_fp8.observability.kernel_trace`);
- the modules: Transformer Engine's account of the recipe and the quantizers of the step
  (`llm_fp8.precision.module_state`), or torchao's of how they are set up (`llm_fp8.precision.torchao`).

The kernels decide. A GEMM whose name does not tell its types counts for nobody, and so does a kernel that no rule
knows, which may be a GEMM too. Where such kernels could be the fp8 ones that are missing, and no module denies that it
computed in fp8, or where they could be fp8 ones in a run outside fp8, the verdict is "undetermined".
docs/certificate.md says what each witness can and cannot see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

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
from llm_fp8.precision.module_state import ModuleState
from llm_fp8.precision.modules import GEMMS_PER_WEIGHT, linear_weights

Verdict = Literal["certified", "undetermined", "failed"]
_SEVERITY: tuple[Verdict, ...] = ("certified", "undetermined", "failed")

UNRECOGNISED_SHARE = 0.01
"""Of the time of all GEMMs and of kernels that no rule knows: what GEMMs of unknown type and such kernels may take
before a verdict rests on them.

No step under benchmarks/results has a GEMM of unknown type, and one has kernels that no rule knew, with unfused
attention; one layer of 8B's 32 has 3% of its linear FLOPs.
"""
_NUM_LISTED, _LISTED_LENGTH = 3, 80
"""Kernels that a reason names, and the characters of each."""

_ATTENTION_LIBRARIES = (("cudnn", "cuDNN"), ("flash", "flash"), ("fmha_cutlass", "memory-efficient"))


@dataclass(frozen=True)
class ExpectedKernels:
    """What a run says that each of its GPUs computes in one optimizer step."""

    precision: str
    """As in tables: 'bf16', 'fp8 delayed'."""
    compute: str
    """What linear layers outside fp8 compute in: fp32, bf16 or fp16."""
    scenario: str | None = None
    """The fp8 scenario in effect; None outside fp8."""
    num_fp8_weights: int = 0
    """Weight matrices whose products run in fp8."""
    num_recomputed_fp8_weights: int = 0
    """Those of them whose forward product runs again in the backward pass; 0 where torch.compile decides what is
    computed again.
    """
    num_fp8_gemms_per_weight: int = GEMMS_PER_WEIGHT
    fp8_linear_flop_share: float = 0.0
    """Share of the linear layers' FLOPs that these weights have: the census's."""
    num_spared_fp8_gemms: int = 0
    """Products that frozen ones of them do without: the gradient of the weight, and where nothing trained lies below
    that of the input.
    """
    num_fp8_lm_head_gemms: int = 0
    """Products of the output head in fp8 (--fp8_lm_head)."""

    @classmethod
    def of_model(
        cls,
        precision: Precision,
        census: Fp8Coverage,
        recomputed: Sequence[nn.Module] = (),
        products: Mapping[nn.Module, int] = MappingProxyType({}),
    ) -> ExpectedKernels:
        """That of the model which `precision` is attached to, whose layers `recomputed` run again in the backward pass.

        `products`: `llm_fp8.models.lora.gemms_per_weight`.
        """
        plan = precision.plan
        by_torchao = plan.backend == "torchao"
        return cls(
            precision=plan.name,
            compute=plan.compute_name,
            scenario=plan.effective_scenario,
            num_fp8_weights=precision.count_fp8_weights(),
            num_recomputed_fp8_weights=0 if by_torchao else precision.count_fp8_weights(within=recomputed),
            num_fp8_gemms_per_weight=precision.num_fp8_gemms_per_weight,
            fp8_linear_flop_share=census.fp8_linear_flop_share,
            num_spared_fp8_gemms=sum(
                len(linear_weights(module)) * (GEMMS_PER_WEIGHT - products.get(module, GEMMS_PER_WEIGHT))
                for module in precision.fp8_modules
            ),
            num_fp8_lm_head_gemms=sum(precision.lm_head_gemms(products).values()),
        )

    def num_fp8_gemms(self, num_micro_batches: int) -> int:
        """The least number of fp8 GEMM kernels of a step; a product may take several kernels, not less than one."""
        own = self.num_fp8_gemms_per_weight * self.num_fp8_weights - self.num_spared_fp8_gemms
        return num_micro_batches * (own + self.num_recomputed_fp8_weights + self.num_fp8_lm_head_gemms)


@dataclass(frozen=True)
class Certificate:
    """A verdict and what it rests on. Everything is of one rank's recorded step."""

    verdict: Verdict
    precision: str
    reasons: list[str]
    """In words, why the verdict is not 'certified'."""
    remarks: list[str]
    """What should be known beside the verdict."""
    num_gemm_kernels: int
    num_fp8_gemm_kernels: int
    num_expected_fp8_gemm_kernels: int
    num_unknown_gemm_kernels: int
    gemm_kernels_by_type: dict[str, int]
    unknown_gemm_names: list[str]
    other_kernel_names: list[str]
    """Of kernels that no rule of `llm_fp8.observability.kernel_trace` knows, the longest first."""
    unrecognised_time_share: float | None
    """That of these two kinds in the time of all GEMMs and kernels that no rule knows; None without any."""
    fp8_gemm_time_share: float | None
    """Of the time of all GEMM kernels; None where none was recorded."""
    fp8_linear_flop_share: float
    """The census's; kernel names do not give sizes."""
    attention: str | None
    """The kernels that attention runs on."""
    recipe_inside_modules: str | None
    """The recipe in force inside a module of Transformer Engine at its first forward pass; 'none' outside fp8, None
    without such a module.
    """
    modules: ModuleState
    num_micro_batches: int
    rank: int = 0
    """The rank whose step this is."""
    time_s_by_class: dict[KernelClass, float] = field(default_factory=dict)
    """Time of the step's kernels by what they are there for."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for certificate.json and summary.json."""
        return dataclasses.asdict(self)

    def describe(self) -> str:
        """One line for the terminal."""
        if self.num_expected_fp8_gemm_kernels or self.num_fp8_gemm_kernels:
            kernels = f"{self.num_fp8_gemm_kernels} of {self.num_gemm_kernels} GEMM kernels in fp8"
            if self.fp8_gemm_time_share is not None:
                kernels += (
                    f" ({self.fp8_gemm_time_share:.1%} of GEMM time), {self.fp8_linear_flop_share:.1%} of linear FLOPs"
                )
        else:
            kernels = f"none of {self.num_gemm_kernels} GEMM kernels in fp8"
        verdict = "" if self.verdict == "certified" else f"{self.verdict.upper()}, "
        attention = f", attention {self.attention}" if self.attention else ""
        remarks = f" ({'; '.join(self.remarks)})" if self.remarks else ""
        return f"certificate: {verdict}{self.precision}, {kernels}{attention}{remarks}"

    def failure(self, path: Path, otherwise: str = "--no_certify trains all the same") -> str:
        """The sentence on which a run with a failed certificate ends; `path` is where it is kept, `otherwise` how to
        go on without it.
        """
        where = f" (on rank {self.rank})" if self.rank else ""
        return (
            f"the GPU does not run what was asked for ({self.precision}): {'; '.join(self.reasons)}{where}. Look at "
            f"{path}, and at what wraps or patches the model in this environment; {otherwise}."
        )


def certify(
    promise: ExpectedKernels,
    kernels: KernelTimes,
    state: ModuleState,
    *,
    num_micro_batches: int,
    recipe_inside_modules: str | None = None,
    attention: str | None = None,
    rank: int = 0,
) -> Certificate:
    """Compare the witnesses of one recorded step.

    Args:
        promise: what should have run.
        kernels: what the GPU ran.
        state: of the modules that should have computed in fp8, or outside fp8 of all linear modules of Transformer
            Engine or torchao.
        num_micro_batches: of the step, on one GPU.
        recipe_inside_modules: `llm_fp8.precision.context.Precision.seen_inside`.
        attention: which kernels attention runs on.
        rank: whose step it is.
    """
    gemms = gemm_kernels(kernels)
    by_type = {str(kind): found.count for kind, found in gemms.items()}
    total_s = sum(found.time_s for found in gemms.values())
    low_s = sum(gemms[kind].time_s for kind in LOW_PRECISION if kind in gemms)
    num_gemms, num_low = sum(by_type.values()), sum(by_type.get(kind, 0) for kind in LOW_PRECISION)
    by_class = time_by_class(kernels)
    unknown, other = gemms.get("unknown", KernelTime()), by_class.get("other", KernelTime())
    possible_s = total_s + other.time_s
    unrecognised_share = (unknown.time_s + other.time_s) / possible_s if possible_s else None
    seen = _Seen(
        by_type,
        num_gemms,
        num_low,
        unknown,
        other,
        unrecognised_share or 0.0,
        num_micro_batches,
        state,
        recipe_inside_modules,
    )
    judge = _judge_fp8 if promise.scenario else _judge_without_fp8
    failures, doubts, remarks = judge(promise, seen)
    if attention is not None and "unfused" in attention:
        remarks.append("attention is unfused, several times slower")
    return Certificate(
        verdict="failed" if failures else "undetermined" if doubts else "certified",
        precision=promise.precision,
        reasons=[*failures, *doubts],
        remarks=remarks,
        num_gemm_kernels=num_gemms,
        num_fp8_gemm_kernels=num_low,
        num_expected_fp8_gemm_kernels=promise.num_fp8_gemms(num_micro_batches),
        num_unknown_gemm_kernels=unknown.count,
        gemm_kernels_by_type=by_type,
        unknown_gemm_names=list(unknown.names),
        other_kernel_names=list(other.names),
        unrecognised_time_share=unrecognised_share,
        fp8_gemm_time_share=low_s / total_s if total_s else None,
        fp8_linear_flop_share=promise.fp8_linear_flop_share,
        attention=attention,
        recipe_inside_modules=recipe_inside_modules,
        modules=state,
        num_micro_batches=num_micro_batches,
        rank=rank,
        time_s_by_class={name: found.time_s for name, found in by_class.items()},
    )


def worst(certificates: Sequence[Certificate]) -> Certificate:
    """That of several ranks which speaks for all: the first of the worst verdict."""
    return max(certificates, key=lambda certificate: _SEVERITY.index(certificate.verdict))


def attention_library(kernels: KernelTimes) -> str:
    """The library of the attention kernels that took longest, where the model and not Transformer Engine chose it;
    'math' without any.
    """
    attention = time_by_class(kernels).get("attention")
    if attention is None:
        return "math"
    longest = next(iter(attention.names)).lower()
    return next((words for part, words in _ATTENTION_LIBRARIES if part in longest), "a library of its own")


# --- judging
# ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """The witnesses' accounts, counted."""

    by_type: dict[str, int]
    num_gemms: int
    num_low: int
    unknown: KernelTime
    """GEMMs of unknown type."""
    other: KernelTime
    """Kernels that no rule knows."""
    unrecognised_share: float
    """Of both kinds in the time of all GEMMs and kernels that no rule knows."""
    num_micro_batches: int
    state: ModuleState
    recipe_inside_modules: str | None

    @property
    def unrecognised_counts(self) -> bool:
        """Whether they take so much that a verdict could rest on them."""
        return self.unrecognised_share >= UNRECOGNISED_SHARE

    @property
    def num_possible(self) -> int:
        """Kernels that may be GEMMs of the type that is missed. Those that no rule knows are no GEMMs as a rule, so
        they count where their time does.
        """
        return self.unknown.count + (self.other.count if self.unrecognised_counts else 0)

    def describe_unrecognised(self) -> str:
        kinds = (f"{self.unknown.count} GEMM kernels of unknown type", f"{self.other.count} kernels that no rule knows")
        counted = " and ".join(
            words for words, found in zip(kinds, (self.unknown, self.other), strict=True) if found.count
        )
        times = self.unknown.names | self.other.names
        longest = [_cut(name) for name in sorted(times, key=lambda name: -times[name])[:_NUM_LISTED]]
        return (
            f"{counted} ({self.unrecognised_share:.1%} of the time of GEMMs and kernels that no rule knows; "
            f"{'the longest' if len(times) > len(longest) else 'namely'}: {', '.join(longest)})"
        )

    def describe_gemms(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.by_type.items())) or "none"

    def describe_state(self) -> str:
        state = self.state
        if not state.num_modules:
            return f"the model has no linear module of {state.library} to ask"
        recipes = f" by {', '.join(state.recipes)}" if state.recipes else ""
        said = "computed in fp8" if state.library == "Transformer Engine" else "are set up for fp8"
        return f"of {state.num_modules} modules of {state.library} {state.num_in_fp8} say that they {said}{recipes}"


_Findings = tuple[list[str], list[str], list[str]]
"""What shows the promise to be broken, what leaves it open, and what is only worth knowing."""


def _nothing_recorded(seen: _Seen) -> str:
    if seen.other.count:
        return f"no GEMM kernel was recognised, and there are {seen.describe_unrecognised()}; {seen.describe_state()}"
    return (
        "the profiler recorded no GEMM kernel (CUPTI is missing, or profiling is not permitted here); "
        f"{seen.describe_state()}"
    )


def _judge_fp8(promise: ExpectedKernels, seen: _Seen) -> _Findings:
    failures: list[str] = []
    doubts: list[str] = []
    remarks: list[str] = []
    state, expected = seen.state, promise.num_fp8_gemms(seen.num_micro_batches)
    row = RECIPES[promise.scenario or ""]
    recipe, quantizer = row.recipe_class, row.quantizer
    quantizers = {known.quantizer for known in RECIPES.values() if known.quantizer is not None}
    missing = expected - seen.num_low
    if seen.num_gemms == 0:
        # The modules' word alone is no proof of fp8; where they themselves deny it, nothing speaks for it.
        (failures if state.num_outside_fp8 else doubts).append(_nothing_recorded(seen))
    elif missing > 0 and seen.num_possible >= missing and state.num_modules and not state.num_outside_fp8:
        doubts.append(
            f"{seen.describe_unrecognised()}: {seen.num_low} of the {expected} expected fp8 GEMM kernels were "
            f"recognised, and {seen.describe_state()}, so these may be theirs under names that are not known here"
        )
    elif missing > 0:
        failures.append(
            f"expected at least {expected} fp8 GEMM kernels ({_product(promise, seen)}), and {seen.num_low} ran (all "
            f"GEMM kernels: {seen.describe_gemms()}); {seen.describe_state()}"
        )
    elif state.num_outside_fp8 or not state.num_modules:
        doubts.append(f"the kernels are those of fp8, but {seen.describe_state()}")
    elif seen.unrecognised_counts:
        # As many fp8 kernels as promised were recognised; nothing that others are takes one of them away.
        remarks.append(seen.describe_unrecognised())
    if others := {name: count for name, count in state.recipes.items() if name != recipe}:
        failures.append(f"expected the recipe {recipe}, and modules computed by {_listed(others)}")
    elif seen.recipe_inside_modules not in (None, recipe) and not failures:
        failures.append(f"expected the recipe {recipe} inside the modules, and it was {seen.recipe_inside_modules}")
    if others := {name: count for name, count in state.quantizers.items() if name in quantizers - {quantizer}}:
        failures.append(f"expected quantizers of the class {quantizer}, and there are {_listed(others)}")
    if state.num_without_maxima:
        failures.append(
            f"the history of maxima of {state.num_without_maxima} of {state.num_modules} modules is empty after the "
            "step, so their scales never move"
        )
    if state.num_unreadable:
        remarks.append(f"{state.num_unreadable} modules of {state.library} do not say what they computed in")
    if state.num_recipe_unreadable:
        remarks.append(
            f"{state.num_recipe_unreadable} modules of {state.library} do not say by which recipe they computed"
        )
    if unknown := {name: count for name, count in state.quantizers.items() if name not in quantizers}:
        remarks.append(f"quantizers of classes not known here: {_listed(unknown)}")
    return failures, doubts, remarks


def _judge_without_fp8(promise: ExpectedKernels, seen: _Seen) -> _Findings:
    failures: list[str] = []
    doubts: list[str] = []
    remarks: list[str] = []
    if seen.num_low:
        failures.append(
            f"expected no fp8 GEMM kernel, and {seen.num_low} ran (all GEMM kernels: {seen.describe_gemms()})"
        )
    if seen.state.num_in_fp8:
        failures.append(f"expected no module in fp8, and {seen.describe_state()}")
    elif seen.recipe_inside_modules not in (None, "none"):
        failures.append(f"expected no fp8 recipe inside the modules, and it was {seen.recipe_inside_modules}")
    if seen.num_gemms == 0:
        doubts.append(_nothing_recorded(seen))
    elif not seen.by_type.get(promise.compute):
        words = (
            f"expected GEMM kernels in {promise.compute}, and none was recognised (all GEMM kernels: "
            f"{seen.describe_gemms()})"
        )
        if seen.num_possible:
            doubts.append(f"{words}; {seen.describe_unrecognised()} may be in any")
        else:
            failures.append(words)
    elif seen.unrecognised_counts:
        doubts.append(f"{seen.describe_unrecognised()}, which may be in fp8")
    elif seen.unknown.count:
        remarks.append(f"{seen.unknown.count} GEMM kernels of unknown type")
    return failures, doubts, remarks


def _product(promise: ExpectedKernels, seen: _Seen) -> str:
    """How the expected number comes about."""
    spared = f" less {promise.num_spared_fp8_gemms} that frozen weights spare" if promise.num_spared_fp8_gemms else ""
    again = (
        f" and {promise.num_recomputed_fp8_weights} products computed again"
        if promise.num_recomputed_fp8_weights
        else ""
    )
    head = f" and {promise.num_fp8_lm_head_gemms} of the output head's" if promise.num_fp8_lm_head_gemms else ""
    micro_batches = f" in each of {seen.num_micro_batches} micro-batches" if seen.num_micro_batches > 1 else ""
    return (
        f"{promise.num_fp8_weights} weights x {promise.num_fp8_gemms_per_weight} "
        f"products{spared}{again}{head}{micro_batches}"
    )


def _cut(name: str) -> str:
    """The start of a kernel's name: with its template arguments it may have hundreds of characters."""
    return name if len(name) <= _LISTED_LENGTH else f"{name[:_LISTED_LENGTH]}..."


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())
