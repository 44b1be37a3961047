"""A script that talks to the hub, for a Python that has its imports (`tests.support.warm_python`): huggingface_hub
reads the environment when it is imported, and here once more. It tries as often as always, with shorter pauses.

    python tests/support/at_the_hub.py SCRIPT WORDS
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from huggingface_hub import constants, hf_api
from huggingface_hub.utils import http_backoff

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    importlib.reload(constants)
    hf_api.api.endpoint = constants.ENDPOINT  # of the one that whoami() and the other functions are methods of
    http_backoff.__kwdefaults__["base_wait_time"] = 0.01  # a second, which doubles with each try: 23 s in all
    runpy.run_path(sys.argv[0], run_name="__main__")
