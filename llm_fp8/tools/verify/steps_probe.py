"""The training steps of llm_fp8/tools/verify/steps.py and torchao_steps.py in a process of their own.

    python -m llm_fp8.tools.verify.steps_probe RESULT.json MODEL_FOLDER CHECK

The folder is made, with the small model's config. CHECK: steps or torchao_steps.

The file is rewritten as each precision begins and ends, so that one that ends the process is known by name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.nn.functional import cosine_similarity

from llm_fp8.distributed.process_group import own_device
from llm_fp8.tools.verify.recipes import availability, usable
from llm_fp8.tools.verify.steps import BASELINE, LIBRARIES, TORCHAO, precision_of, take_steps, write_architecture
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.json_files import write_json_atomic


def main(result: Path, model_folder: Path, check: str) -> None:
    """bf16, then every recipe of the check's library that this GPU has; torchao's can all be had, or the check does
    not start this.
    """
    library = LIBRARIES[check]
    quiet_libraries()
    write_architecture(model_folder)
    record: dict[str, Any] = {"under_way": None, "found": {}}
    reference = None
    recipes = library.fp8_products if library is TORCHAO else usable(availability(own_device()))
    for name in (BASELINE, *recipes):
        record["under_way"] = name
        write_json_atomic(result, record)
        evidence, gradient = take_steps(model_folder, precision_of(name), use_te=library.use_te)
        if reference is None:
            reference = gradient
        else:
            evidence.cosine = float(cosine_similarity(gradient, reference, dim=0))
        record["found"][name] = vars(evidence)
    record["under_way"] = None
    write_json_atomic(result, record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
