"""What a person sees of a running job.

On a terminal one bar stays at the bottom and printed lines scroll above it. Elsewhere (log file, CI, pipe) there is one
plain line every `log_every` steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

_RECENT_STEPS = 50
"""Steps whose median gives the time left: a single slow one does not count."""


def format_step(record: Mapping[str, float], total_steps: int, time_left_s: float | None) -> str:
    """One step as text; figures that `record` lacks are left out."""
    width = len(str(total_steps))
    parts = [f"step {int(record['step']):>{width}}/{total_steps}"]
    shown = {
        "loss": "loss {:.4f}",
        "grad_norm": "grad norm {:.3g}",
        "learning_rate": "lr {:.2e}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "model_tflops": "{:.3g} TFLOP/s",
        "peak_memory_gib": "{:.1f} GiB",
    }
    parts += [template.format(record[key]) for key, template in shown.items() if key in record]
    if time_left_s is not None:
        parts.append(f"{timedelta(seconds=round(time_left_s))} left")
    return "  ".join(parts)


class ProgressDisplay:
    """Shows the steps of one run on `console` (default: standard output)."""

    def __init__(
        self, total_steps: int, first_step: int = 0, log_every: int = 1, console: Console | None = None
    ) -> None:
        """`first_step` is the number of steps taken before this process (after a resume), else 0."""
        self._total_steps = total_steps
        self._first_step = first_step
        self._log_every = log_every
        self._console = console or Console(highlight=False)
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                # On a narrow terminal the text wraps; otherwise it would push the bar out and lose its end.
                BarColumn(bar_width=16, table_column=Column(no_wrap=True)),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=False)),
                console=self._console,
            )
            self._task = self._bar.add_task("waiting for the first step", total=total_steps, completed=first_step)
            self._bar.start()

    def step(self, record: Mapping[str, float]) -> None:
        """Show one optimizer step; `record` has the keys of `metrics.METRICS`, `step` among them."""
        step = int(record["step"])
        if "step_time_s" in record:
            self._recent_s.append(record["step_time_s"])
        time_left_s = statistics.median(self._recent_s) * (self._total_steps - step) if self._recent_s else None
        text = format_step(record, self._total_steps, time_left_s)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._log_every == 0 or step in (self._first_step + 1, self._total_steps):
            self.print(text)

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
