"""The findings as tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from llm_fp8.observability.metrics import GIB
from llm_fp8.tools.diagnose.gemm_operands import PASSES, LayerGroup
from llm_fp8.tools.diagnose.memory import HOW_FOUND
from llm_fp8.tools.diagnose.result import Diagnosis, MemoryFindings, TimeFindings

NUM_BOTTLENECKS = 3
"""In the table; the JSON file has all."""

_STAGES = {
    "forward": "the decoder's forward pass",
    "loss": "the loss",
    "loss_backward": "the loss's backward pass",
    "backward": "the decoder's backward pass",
    "step": "the optimizer's step",
}


def render(found: Diagnosis, console: Console) -> None:
    """Print everything that was found; problems come last, where a reader's eye is."""
    scenario = found.precision["effective_scenario"]
    console.print(
        f"{found.device}; precision {found.precision['effective']}{f' {scenario}' if scenario else ''}; attention: "
        f"{found.attention or 'not seen'}",
        markup=False,
    )
    if found.groups:
        _show(operand_table(found.groups), console)
    _print_coverage(found, console)
    if found.time is not None:
        _show(time_table(found.time), console)
        _show(bottleneck_table(found.time), console)
    if found.memory is not None:
        _show(memory_table(found.memory), console)
    if found.planned_memory is not None:
        _show(planned_memory_table(found.planned_memory), console)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    for problem in found.problems:
        console.print(f"PROBLEM: {problem}", markup=False, style="bold red")
    if found.has_gpu and not found.problems:
        console.print("no problem: what was asked for is what runs", markup=False)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _show(table: Table, console: Console) -> None:
    """The title on a line of its own: as the table's it would be folded to the table's width."""
    console.print(f"\n{table.title}", markup=False, style="bold")
    table.title = None
    console.print(table)


def operand_table(groups: list[LayerGroup]) -> Table:
    table = _table("operands of the GEMMs of one step", "layers", "module", "class", *PASSES, "told by")
    for group in groups:
        pairs = ("; ".join(group.operands[gemm_pass]) or "none" for gemm_pass in PASSES)
        table.add_row(group.layer_ranges or "-", group.module, group.kind, *pairs, group.told_by)
    return table


def _print_coverage(found: Diagnosis, console: Console) -> None:
    if found.coverage is None:
        return
    if found.precision["effective"] == "fp8":
        verb = "would be in" if not found.has_gpu else "in"
        console.print(f"{found.coverage.fp8_linear_flop_share:.1%} of linear FLOPs {verb} fp8", markup=False)
    if found.outside_fp8:
        table = _table("linear layers outside fp8", "module", "number, precision and reason")
        for pattern, reason in found.outside_fp8.items():
            table.add_row(pattern, reason)
        _show(table, console)


def time_table(found: TimeFindings) -> Table:
    step = found.step
    title = (
        f"one step: {step.step_s * 1e3:.1f} ms ({step.recorded_span_s * 1e3:.1f} ms while its kernels were recorded)"
    )
    table = _table(
        title, "kernels", "number", "ms", "share", "lower bound ms", right=("number", "ms", "share", "lower bound ms")
    )

    def add(name: str, count: int | None, seconds: float, bound_s: float | None) -> None:
        shown = "" if bound_s is None else f"{bound_s * 1e3:.1f}"
        table.add_row(
            name, "" if count is None else str(count), f"{seconds * 1e3:.1f}", f"{seconds / step.step_s:.1%}", shown
        )

    for name, taken in step.classes.items():
        add(name, taken.count, taken.time_s, found.bounds_s.get(name))
        if name == "gemm":
            for kind, gemms in step.gemms.items():
                add(f"  {kind} operands", gemms.count, gemms.time_s, found.gemm_bounds_s.get(kind))
    add("gaps", None, step.gap_s, None)
    if step.overlap_s > 0.001 * step.step_s:
        add("side by side", None, -step.overlap_s, None)
    return table


def bottleneck_table(found: TimeFindings) -> Table:
    title = "largest bottlenecks that an option acts on"
    table = _table(title, "bottleneck", "ms", "share", "cause", "what to do", right=("ms", "share"))
    for one in found.bottlenecks[:NUM_BOTTLENECKS]:
        share = one.lost_s / found.step.step_s
        table.add_row(one.name, f"{one.lost_s * 1e3:.1f}", f"{share:.1%}", one.cause, one.advice)
    return table


def memory_table(found: MemoryFindings) -> Table:
    title = (
        f"memory at the peak, in {_STAGES.get(found.at_peak.stage, found.at_peak.stage)}: "
        f"{found.at_peak.peak / GIB:.2f} GiB ({found.unwatched_peak / GIB:.2f} when nothing is watched; "
        f"{found.reserved / GIB:.2f} taken from the GPU)"
    )
    table = _table(title, "kind", "GiB", "share", "how it is found", right=("GiB", "share"))
    for kind, num_bytes in found.at_peak.kinds.items():
        table.add_row(kind, f"{num_bytes / GIB:.2f}", f"{num_bytes / found.at_peak.peak:.1%}", HOW_FOUND[kind])
    slack = max(0, found.reserved - found.unwatched_peak)
    table.add_row(
        "allocator slack", f"{slack / GIB:.2f}", "", "taken from the GPU and not in use at the peak; not part of it"
    )
    return table


def planned_memory_table(planned: dict[str, int]) -> Table:
    """Memory that follows from the number of parameters."""
    table = _table("memory of the parameters, worked out", "kind", "GiB", right=("GiB",))
    for kind, num_bytes in planned.items():
        table.add_row(kind, f"{num_bytes / GIB:.2f}")
    table.add_row("together", f"{sum(planned.values()) / GIB:.2f}")
    return table
