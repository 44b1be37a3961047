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


_MAX_COLUMNS = 100
"""Of a line that no terminal shows."""
_LEFT_OUT_FIRST = ("model_tflops", "learning_rate", "grad_norm", "peak_memory_gib", "tokens_per_s")
"""Of a line that would be too long, in this order; metrics.jsonl has them."""


def format_step(
    record: Mapping[str, float], total_steps: int, time_left_s: float | None, columns: int = _MAX_COLUMNS
) -> str:
    """One step as text of at most `columns` characters where that is possible; figures that `record` lacks are left
    out.
    """
    texts = {"step": f"step {int(record['step']):>{len(str(total_steps))}}/{total_steps}"}
    shown = {
        "loss": "loss {:.4f}",
        "grad_norm": "grad norm {:.3g}",
        "learning_rate": "lr {:.2e}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "model_tflops": "{:.3g} TFLOP/s",
        "peak_memory_gib": "{:.1f} GiB",
    }
    texts |= {key: template.format(record[key]) for key, template in shown.items() if key in record}
    if time_left_s is not None:
        texts["time_left"] = f"{timedelta(seconds=round(time_left_s))} left"
    for key in _LEFT_OUT_FIRST:
        if len("  ".join(texts.values())) > columns:
            texts.pop(key, None)
    return "  ".join(texts.values())


def format_evaluation(record: Mapping[str, float]) -> str:
    """An evaluation as a line; metrics.jsonl has all of its figures."""
    shown = {
        "eval_loss": "loss {:.4f}",
        "eval_perplexity": "perplexity {:.4g}",
    }
    texts = [template.format(record[key], **record) for key, template in shown.items() if key in record]
    time_s = record.get("eval_time_s", 0.0)
    return f"evaluation at step {int(record['step'])}: {'  '.join([*texts, f'{time_s:,.1f} s'])}"


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
        self._bar_columns = min(16, self._console.width // 10)
        if self._console.is_terminal:
            self._bar = Progress(
                # On a narrow terminal the text wraps; otherwise it would push the bar out and lose its end.
                BarColumn(bar_width=self._bar_columns, table_column=Column(no_wrap=True)),
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
        columns = _MAX_COLUMNS if self._bar is None else self._console.width - self._bar_columns - 1
        text = format_step(record, self._total_steps, time_left_s, columns)
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
