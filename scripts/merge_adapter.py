#!/usr/bin/env python
"""Add a PEFT adapter to the weights of its base model and write an ordinary Hugging Face checkpoint.

    python scripts/merge_adapter.py --adapter runs/x/final --output merged

adapter_config.json names the base model, unless --base_model overrides it. Weights keep the dtype of the base model's
files. Each sum is computed in fp32 and rounded once. Tokenizer and generation settings come from the adapter if it has
them, else from the base model. The merge runs on the CPU and needs memory for the whole model. See docs/lora.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script
from llm_fp8.utils.errors import OneSentenceParser, UserError, reading


def parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--adapter", type=Path, required=True, help="folder of the adapter, as runs/x/final")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint, which must not exist")
    parser.add_argument("--base_model", type=os.path.expanduser, help="default: from adapter_config.json")
    return parser.parse_args(argv)


def as_list(entry: int | list[int] | None) -> list[int]:
    """Return the token ids in an `eos_token_id`, which may be None, one id or a list."""
    return [] if entry is None else entry if isinstance(entry, list) else [entry]


def main() -> int:
    """Load the base model, merge the adapter into it, and write the result."""
    options = parse(sys.argv[1:])
    # Imported after parsing, so that --help and wrong options do not wait for torch.
    from llm_fp8.models.build import model_on_meta, without_towers
    from llm_fp8.models.export import export_hf
    from llm_fp8.models.model import Model
    from llm_fp8.models.side_files import Origin
    from llm_fp8.models.source import ModelSource, checkpoint_of
    from llm_fp8.observability.reporter import quiet_libraries
    from llm_fp8.tools.exported import adapter_base, load_exported, merged_by_peft, tokenizer_of
    from llm_fp8.utils.json_files import read_json

    quiet_libraries()
    from peft import load_peft_weights
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    base = options.base_model or adapter_base(options.adapter)
    if base is None:
        raise UserError(f"--adapter {options.adapter} holds no PEFT adapter (adapter_config.json); give its folder.")
    if options.output.exists():
        raise UserError(f"--output {options.output} exists already; give a new folder.")
    module, trained_ends = load_exported(base, None, "auto"), None
    with reading("--adapter", options.adapter, "the adapter"):
        if read_json(options.adapter / "adapter_config.json").get("layer_replication"):
            raise ValueError("it repeats layers (layer_replication), which the base model's config.json does not")
        adapted = [name.removeprefix("base_model.model.") for name in load_peft_weights(str(options.adapter), "cpu")]
        if (options.adapter / GENERATION_CONFIG_NAME).is_file():  # without it the trained EOS tokens are unknown
            trained_ends = GenerationConfig.from_pretrained(options.adapter).eos_token_id
    model, plain = Model(module), model_on_meta(module.config)
    if plain.left_out and not plain.left_out_of(adapted):  # export the towers unchanged
        source = ModelSource(base, base, is_random=False)
        model = replace(without_towers(module), stored=checkpoint_of(source, module.config))
    module = merged_by_peft(module, options.adapter, "--adapter")
    card = {"base model": base, "adapter": options.adapter, "merged by": "scripts/merge_adapter.py"}
    ends, base_ends = map(as_list, (trained_ends, module.generation_config.eos_token_id))
    new_ends = list(itertools.takewhile(lambda token: token not in base_ends, ends)) or ends[:1]
    origin = Origin(base, tuple(new_ends))
    shared = {"dtype": module.dtype, "card": card, "origin": origin, "advice": "Give another --output."}
    export_hf(replace(model, module=module), tokenizer_of(options.adapter, base), options.output, **shared)
    print(f"{base} with the adapter of {options.adapter}: {options.output}")
    return 0


if __name__ == "__main__":
    run_script(main)
