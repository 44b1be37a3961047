"""A script that talks to the hub, for a Python that has its imports (`tests.support.warm_python`): huggingface_hub
reads the environment when it is imported, and here once more.

    python tests/support/at_the_hub.py SCRIPT WORDS
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from huggingface_hub import constants, hf_api

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    importlib.reload(constants)
    hf_api.api.endpoint = constants.ENDPOINT  # of the one that whoami() and the other functions are methods of
    runpy.run_path(sys.argv[0], run_name="__main__")
