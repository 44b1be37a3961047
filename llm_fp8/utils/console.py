"""Other libraries' words on the console."""

from __future__ import annotations

import sys


def quiet_libraries() -> None:
    """Leave the console to the run's own lines; on a terminal, bars of downloads and of tokenising stay."""
    # Here, because they take long to import: --help imports this module.
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it prints errors that it raises, too
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
