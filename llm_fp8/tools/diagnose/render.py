"""The findings as tables on the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from llm_fp8.precision.plan import precision_name
from llm_fp8.tools.diagnose.gemm_operands import PASSES
from llm_fp8.utils.errors import EXIT_NO_GPU

_STAGES = {
    "forward": "the decoder's forward pass",
    "loss": "the loss",
    "loss_backward": "the loss's backward pass",
    "backward": "the decoder's backward pass",
    "step": "the optimizer's step",
}


def render(found: dict[str, Any], console: Console) -> None:
    """Print what `result.findings` returned; problems come last, where a reader's eye is."""
    precision, has_gpu = found["precision"], found["exit_code"] != EXIT_NO_GPU
    name = precision_name(precision["effective"], precision["effective_scenario"])
    console.print(
        f"{found['device']}; precision {name}; attention: {found['attention'] or 'not seen'}",
        markup=False,
    )
    if found["layers"]:
        columns = ("layers", "module", "class", *PASSES, "told by")
        _show(console, "operands of the GEMMs of one step", columns, map(_operand_row, found["layers"]))
    if found["census"] is not None:
        if precision["effective"] == "fp8":
            share, verb = found["census"]["fp8_linear_flop_share"], "in" if has_gpu else "would be in"
            console.print(f"{share:.1%} of linear FLOPs {verb} fp8", markup=False)
        if outside := found["census"]["outside_fp8"]:
            columns = ("module", "number, precision and reason")
            _show(console, "linear layers outside fp8", columns, outside.items())
    if found["time"] is not None:
        _show_time(console, found["time"])
    if found["memory"] is not None:
        _show_memory(console, found["memory"])
    if planned := found["planned_memory_gib"]:
        rows = [*planned.items(), ("together", sum(planned.values()))]
        title = "memory of the parameters, worked out"
        _show(console, title, ("kind", "GiB"), ((kind, f"{gib:.2f}") for kind, gib in rows), right=["GiB"])
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)
    for problem in found["problems"]:
        console.print(f"PROBLEM: {problem}", markup=False, style="bold red")
    if has_gpu and not found["problems"]:
        console.print("no problem: what was asked for is what runs", markup=False)


def _show(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()
) -> None:
    table = Table()
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # On a line of its own: as the table's title it would be folded to the table's width.
    console.print(f"\n{title}", markup=False, style="bold")
    console.print(table)


def _operand_row(layers: dict[str, Any]) -> list[str]:
    pairs = ("; ".join(layers[gemm_pass]) or "none" for gemm_pass in PASSES)
    return [layers["layers"] or "-", layers["module"], layers["kind"], *pairs, layers["told_by"]]


def _show_time(console: Console, time: dict[str, Any]) -> None:
    step_s = time["step_time_s"]

    def row(name: str, seconds: float, count: int | str = "", bound_s: float | None = None) -> tuple[str, ...]:
        bound = "" if bound_s is None else f"{bound_s * 1e3:.1f}"
        return name, str(count), f"{seconds * 1e3:.1f}", f"{seconds / step_s:.1%}", bound

    rows = []
    for name, taken in time["classes"].items():
        rows.append(row(name, taken["time_s"], taken["count"], taken["floor_s"]))
        if name == "gemm":
            rows += [
                row(f"  {kind} operands", gemms["time_s"], gemms["count"], gemms["floor_s"])
                for kind, gemms in time["gemms"].items()
            ]
    rows.append(row("gaps", time["gap_s"]))
    if time["overlap_s"] > 0.001 * step_s:
        rows.append(row("side by side", -time["overlap_s"]))
    title = f"one step: {step_s * 1e3:.1f} ms ({time['recorded_span_s'] * 1e3:.1f} ms while its kernels were recorded)"
    figures = ("number", "ms", "share", "lower bound ms")
    _show(console, title, ("kernels", *figures), rows, right=figures)
    _show(
        console,
        "largest bottlenecks that an option acts on",
        ("bottleneck", "ms", "share", "cause", "what to do"),
        (
            (one["name"], f"{one['lost_s'] * 1e3:.1f}", f"{one['share']:.1%}", one["cause"], one["advice"])
            for one in time["losses"][:3]
        ),
        right=("ms", "share"),
    )


def _show_memory(console: Console, memory: dict[str, Any]) -> None:
    stage, watched, peak, reserved = (memory[key] for key in ("stage", "watched_peak_gib", "peak_gib", "reserved_gib"))
    rows = [
        (kind, f"{gib:.2f}", f"{gib / watched:.1%}", memory["how_found"][kind])
        for kind, gib in memory["kinds_gib"].items()
    ]
    unused = "taken from the GPU and not in use at the peak; not part of it"
    rows.append(("allocator slack", f"{max(0, reserved - peak):.2f}", "", unused))
    title = (
        f"memory at the peak, in {_STAGES.get(stage, stage)}: {watched:.2f} GiB ({peak:.2f} when nothing is watched; "
        f"{reserved:.2f} taken from the GPU)"
    )
    _show(console, title, ("kind", "GiB", "share", "how it is found"), rows, right=("GiB", "share"))
