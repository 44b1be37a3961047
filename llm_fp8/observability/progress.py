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

from llm_fp8.utils.console import surviving_closed_output

_STEP = {
    "loss": "loss {:.4f}",
    "grad_norm": "grad norm {:.3g}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "peak_memory_gib": "{:.1f} GiB",
}
_EVALUATION = {"eval_loss": "loss {:.4f}", "eval_perplexity": "perplexity {:.4g}", "eval_time_s": "{:,.1f} s"}


def _figures(record: Mapping[str, float], templates: Mapping[str, str]) -> str:
    return "  ".join(template.format(record[key]) for key, template in templates.items() if key in record)


class ProgressDisplay:
    """Shows the steps of one run on `stream`; `first_step` of them were taken before this process."""

    def __init__(self, total_steps: int, first_step: int = 0, log_every: int = 1, stream: TextIO | None = None) -> None:
        self._total_steps, self._first_step, self._log_every = total_steps, first_step, log_every
        self._stream = stream = stream or sys.stdout
        self._recent_s: deque[float] = deque(maxlen=50)  # their median gives the time left: no single slow step counts
        layout = {"bar_format": "{bar:10} {desc}", "dynamic_ncols": True, "desc": "before the first step"}
        self._bar = tqdm(total=total_steps, initial=first_step, file=stream, disable=not stream.isatty(), **layout)

    @surviving_closed_output()
    def step(self, record: Mapping[str, float]) -> None:
        """Show one optimizer step; `record` has the keys of `metrics.METRICS`, `step` and `step_time_s` among them."""
        step, total = int(record["step"]), self._total_steps
        self._recent_s.append(record["step_time_s"])
        left = timedelta(seconds=round(statistics.median(self._recent_s) * (total - step)))
        text = f"step {step:>{len(str(total))}}/{total}  {_figures(record, _STEP)}  {left} left"
        if not self._bar.disable:
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self._log_every == 0 or step in (self._first_step + 1, total):
            self.print(text)

    def evaluation(self, record: Mapping[str, float]) -> None:
        self.print(f"evaluation at step {int(record['step'])}: {_figures(record, _EVALUATION)}")

    @surviving_closed_output()
    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        with tqdm.external_write_mode(file=self._stream):
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()
