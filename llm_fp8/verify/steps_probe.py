"""The training steps of llm_fp8/verify/steps.py in a process of their own.

    python -m llm_fp8.verify.steps_probe RESULT.json MODEL_FOLDER

The folder is made, with the small model's config.

The file is rewritten as each precision begins and ends, so that one that ends the process is known by name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.nn.functional import cosine_similarity

from llm_fp8.json_files import write_json_atomic
from llm_fp8.process_group import own_device
from llm_fp8.quiet import quiet_libraries
from llm_fp8.verify.recipes import availability
from llm_fp8.verify.steps import BASELINE, PRECISIONS, take_steps, write_architecture


def main(result: Path, model_folder: Path) -> None:
    """bf16, then every recipe that this GPU has."""
    quiet_libraries()
    write_architecture(model_folder)
    record: dict[str, Any] = {"under_way": None, "found": {}}
    reference = None
    for name in (BASELINE, *(name for name, reason in availability(own_device()).items() if reason is None)):
        record["under_way"] = name
        write_json_atomic(result, record)
        evidence, gradient = take_steps(model_folder, PRECISIONS[name], use_te=True)
        if reference is None:
            reference = gradient
        else:
            evidence.cosine = float(cosine_similarity(gradient, reference, dim=0))
        record["found"][name] = vars(evidence)
    record["under_way"] = None
    write_json_atomic(result, record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
