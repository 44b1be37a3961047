"""On the main process, write a run's numbers to metrics.jsonl, trackers, the screen and summary.json (monitoring.md).

A line is printed every `log_every` steps. If the output folder is moved or deleted, the run ends at its next report.

A resumed run repeats the steps after its checkpoint. It removes their lines from metrics.jsonl and then continues the
file. In W&B it continues the same run. Trackers cannot delete steps, so steps that they already have are not sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import transformers

from llm_fp8.config.options import Config
from llm_fp8.observability.metrics import throughput_summary
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import json_line, read_json, write_json_atomic, write_text_atomic
from llm_fp8.utils.output import say, surviving_closed_output

_STEP = {
    "loss": "loss {:.4f}",
    "grad_norm": "grad norm {:.3g}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "peak_memory_gib": "{:.1f} GiB",
}
_EVALUATION = {"eval_loss": "loss {:.4f}", "eval_perplexity": "perplexity {:.4g}", "eval_time_s": "{:,.1f} s"}


def quiet_libraries() -> None:
    """Turn off messages of Hugging Face's libraries. On a terminal, keep bars for downloads and tokenisation."""
    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also prints errors that it raises
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def _figures(record: Mapping[str, float], templates: Mapping[str, str]) -> str:
    return "  ".join(template.format(record[key]) for key, template in templates.items() if key in record)


class ProgressDisplay:
    """Shows the steps of a run. `first_step` is the number of steps that earlier processes took."""

    def __init__(self, total_steps: int, first_step: int = 0, log_every: int = 1) -> None:
        self._total_steps, self._first_step, self._log_every = total_steps, first_step, log_every
        self._recent_s: deque[float] = deque(maxlen=50)  # the time left is predicted from their median

    @surviving_closed_output()
    def step(self, record: Mapping[str, float]) -> None:
        """Show one optimizer step. `record` has keys of metrics.jsonl, including `step` and `step_time_s`."""
        step, total = int(record["step"]), self._total_steps
        is_first, time_left = step == self._first_step + 1, ""
        if not is_first:  # the first step takes longer
            self._recent_s.append(record["step_time_s"])
            time_left = f"  {timedelta(seconds=round(statistics.median(self._recent_s) * (total - step)))} left"
        if step % self._log_every == 0 or is_first or step == total:
            say(f"step {step:>{len(str(total))}}/{total}  {_figures(record, _STEP)}{time_left}")


def truncate_metrics(path: Path, last_step: int, keep_evaluation: bool = True) -> int:
    """Remove the lines of steps after `last_step` and an incomplete last line from the metrics.jsonl at `path`. If
    `keep_evaluation` is False, also remove the evaluation after `last_step`. Return the last step before, or 0.
    """
    with reading("--output_dir", path, advice="Move the file away to resume without the earlier metrics."):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        steps = [(int(record["step"]), "eval_loss" in record) for record in map(json.loads, lines)]
    # (step, is_evaluation) sorts a step before its evaluation.
    end = (last_step, keep_evaluation)
    write_text_atomic(path, "".join(line for line, step in zip(lines, steps, strict=True) if step <= end))
    return steps[-1][0] if steps else 0


class RunReporter(contextlib.AbstractContextManager["RunReporter"]):
    """Reports the numbers of one run. Every rank has a reporter. As a context manager it closes files and trackers."""

    def __init__(
        self, is_main: bool, config: Config, folder: Path, total_steps: int, resume_step: int, evaluates_again: bool
    ) -> None:
        """Open the files in `folder`. `resume_step` is the step of the checkpoint that is continued, or 0 for a new
        run. `evaluates_again` is True if the run repeats the evaluation after that step.
        """
        self._is_main = is_main
        self._trackers: dict[str, Any] = {}  # Accelerate's trackers by name, imported only if a run has any
        self._config = config
        self._resume_step = self._last_step = resume_step
        self._folder, self._total_steps = folder, total_steps
        self._reported_step = 0  # last step that an earlier process reported
        if not self._is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics.jsonl"
        if resume_step > 0 and metrics.exists():
            self._reported_step = truncate_metrics(metrics, resume_step, keep_evaluation=not evaluates_again)
        stale = ["summary.json", *(["certificate.json"] if resume_step == 0 else [])]  # these will be written again
        stale += ["exact_match.json"] if resume_step < total_steps else []  # answers of the model that trains on
        for name in stale:
            (folder / name).unlink(missing_ok=True)
        # Opened for reading too, since `finish` computes the summary from it.
        self._file = open(metrics, "a+" if resume_step > 0 else "w+", encoding="utf-8", buffering=1)
        self._display = ProgressDisplay(total_steps, resume_step, config.run.log_every)

    def start_trackers(self, record: dict[str, Any]) -> None:
        """Start the trackers of --report_to. A resumed run continues its W&B run. `record` is run.json's content."""
        options, path = self._config.run, self._folder / "trackers.json"
        if not self._is_main or not options.trackers:
            return
        from llm_fp8.observability.trackers import start_tracker

        continues = self._resume_step > 0 and path.exists()
        state: dict[str, Any] = read_json(path) if continues else {"last_step": 0, "runs": {}}
        self._reported_step = max(state["last_step"], self._reported_step)
        for name in options.trackers:
            run_id = state["runs"].get(name)
            self._trackers[name], state["runs"][name] = start_tracker(name, options, self._folder, record, run_id)
        write_json_atomic(path, state | {"last_step": self._reported_step})

    def _to_trackers(self, send: Callable[[str, Any], object]) -> None:
        """Call `send` for each tracker. If one fails, for instance on a full disk, warn and drop it."""
        for name, tracker in list(self._trackers.items()):
            try:
                send(name, tracker)
            except Exception as error:
                del self._trackers[name]
                self.print(f"WARNING: {name} receives no more of this run ({type(error).__name__}: {error})")

    def step(self, record: dict[str, float]) -> None:
        """Report one optimizer step. `record` has keys of metrics.jsonl. Steps must be reported in order."""
        if self._is_main:
            self._last_step = int(record["step"])
            self._write(record)
            self._display.step(record)
            self._require_metrics()

    def _require_metrics(self) -> None:
        """Raise `UserError` if the folder has moved or another file replaces metrics.jsonl. If gone, begin anew."""
        path = self._folder / "metrics.jsonl"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(path), os.fstat(self._file.fileno())):
                return
        if not path.exists() and (self._folder / "run.json").exists():
            self.print(f"WARNING: {path} was deleted; it continues without the earlier steps")
            self._file.close()
            self._file = open(path, "a+", encoding="utf-8", buffering=1)
            return
        advice = "continue with --resume_from latest and the folder's present path as --output_dir"
        raise UserError(f"--output_dir: {path} was moved or deleted while the run wrote to it; {advice}.")

    def evaluation(self, record: dict[str, float]) -> None:
        """Report an evaluation after the last reported step. `record` has that `step` and the `eval_` keys."""
        if self._is_main:
            self._write(record)
            self.print(f"evaluation at step {self._last_step}: {_figures(record, _EVALUATION)}")

    def _write(self, record: dict[str, float]) -> None:
        self._file.write(json_line(record))
        step = record["step"]
        is_evaluation = "eval_loss" in record
        is_logged = is_evaluation or step % self._config.run.log_every == 0 or step == self._total_steps
        # A postponed or repeated evaluation has the checkpoint's step, and must still be sent.
        if self._trackers and step > self._reported_step - is_evaluation:
            from llm_fp8.observability.trackers import send_record

            self._to_trackers(lambda name, tracker: send_record(name, tracker, record, is_logged))

    def print(self, text: str) -> None:
        if self._is_main:
            say(text)

    def track(self, summary: dict[str, Any]) -> None:
        """Send `summary`, entries of summary.json, to W&B now, so that W&B has them even if the run is killed later."""
        if self._trackers:
            from llm_fp8.observability.trackers import send_summary

            self._to_trackers(lambda name, tracker: send_summary(name, tracker, summary))

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json from the last step, last evaluation, median speeds and `summary`. Return its content."""
        steps = self.steps_of_process()
        last = {"eval_loss" in record: record for record in self._records()}
        full = {
            "steps": self._last_step,
            "total_steps": self._total_steps,
            "last_step": last.get(False),
            "last_evaluation": last.get(True),
            "throughput": throughput_summary(steps),
            **next(({"energy_j": step["energy_j"]} for step in reversed(steps) if "energy_j" in step), {}),
            **summary,
        }
        if self._is_main:
            write_json_atomic(self._folder / "summary.json", full)
            self.track(full)
        return full

    def steps_of_process(self) -> list[dict[str, float]]:
        """Return the records of the steps since this process started. Only the main rank has records."""
        return [step for step in self._records() if step["step"] > self._resume_step and "eval_loss" not in step]

    def _records(self) -> Iterator[dict[str, float]]:
        """Yield all records of metrics.jsonl, also of earlier processes. All ranks but the main one yield none."""
        if self._is_main:
            self._file.seek(0)
            yield from map(json.loads, self._file)
            self._file.seek(0, os.SEEK_END)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._is_main:
            self._file.close()
        if error_type is None:
            self._to_trackers(lambda name, tracker: tracker.finish())
        else:  # W&B must release the console for a process that continues, such as a notebook
            self._to_trackers(lambda name, tracker: name == "wandb" and tracker.tracker.finish(exit_code=1))
