"""What a person sees of a running job.

On a terminal one bar stays at the bottom and printed lines scroll above it. Elsewhere (log file, CI, pipe) there is one
plain line every `log_every` steps.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO

from tqdm import tqdm

_SHOWN = {
    "loss": "loss {:.4f}",
    "grad_norm": "grad norm {:.3g}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "peak_memory_gib": "{:.1f} GiB",
}


def format_step(record: Mapping[str, float], total_steps: int, time_left_s: float | None) -> str:
    """One step as a line; figures that `record` lacks are left out, and metrics.jsonl has more."""
    texts = [f"step {int(record['step']):>{len(str(total_steps))}}/{total_steps}"]
    texts += [template.format(record[key]) for key, template in _SHOWN.items() if key in record]
    if time_left_s is not None:
        texts.append(f"{timedelta(seconds=round(time_left_s))} left")
    return "  ".join(texts)


def format_evaluation(record: Mapping[str, float]) -> str:
    """An evaluation as a line; metrics.jsonl has all of its figures."""
    shown = {"eval_loss": "loss {:.4f}", "eval_perplexity": "perplexity {:.4g}", "eval_time_s": "{:,.1f} s"}
    texts = [template.format(record[key]) for key, template in shown.items() if key in record]
    return f"evaluation at step {int(record['step'])}: {'  '.join(texts)}"


class ProgressDisplay:
    """Shows the steps of one run on `stream` (default: standard output)."""

    def __init__(self, total_steps: int, first_step: int = 0, log_every: int = 1, stream: TextIO | None = None) -> None:
        """`first_step` is the number of steps taken before this process (after a resume), else 0."""
        self._total_steps = total_steps
        self._first_step = first_step
        self._log_every = log_every
        self._stream = stream or sys.stdout
        self._recent_s: deque[float] = deque(maxlen=50)  # their median gives the time left: no single slow step counts
        self._bar = tqdm(
            desc="before the first step",
            total=total_steps,
            initial=first_step,
            bar_format="{bar:10} {desc}",
            file=self._stream,
            dynamic_ncols=True,
            disable=not self._stream.isatty(),
        )

    def step(self, record: Mapping[str, float]) -> None:
        """Show one optimizer step; `record` has the keys of `metrics.METRICS`, `step` among them."""
        step = int(record["step"])
        if "step_time_s" in record:
            self._recent_s.append(record["step_time_s"])
        time_left_s = statistics.median(self._recent_s) * (self._total_steps - step) if self._recent_s else None
        text = format_step(record, self._total_steps, time_left_s)
        if not self._bar.disable:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self._log_every == 0 or step in (self._first_step + 1, self._total_steps):
            self.print(text)

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        with tqdm.external_write_mode(file=self._stream):
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()
