"""Write an exported model in fp8 for inference, and measure its cost in eval loss."""

from __future__ import annotations

from pathlib import Path

from llm_fp8.config.parser import is_adapter_folder
from llm_fp8.utils.errors import OneSentenceParser, UserError, positive


def main() -> int:
    """Write the fp8 model, measure its loss if --data is given, and print the results."""
    parser = OneSentenceParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="FINAL_DIR", help="exported model, or another Hugging Face folder")
    parser.add_argument("--output", type=Path, required=True, help="folder for the fp8 checkpoint, new or empty")
    parser.add_argument("--data", help="measure the loss before and after on this dataset (as for --dataset_name)")
    parser.add_argument("--max_seq_length", type=positive, help="with --data: longer rows are truncated (default 1024)")
    options = parser.parse_args()
    if options.data is None and options.max_seq_length is not None:
        raise UserError("--max_seq_length has no effect without --data; add --data or drop --max_seq_length.")
    if not options.folder.is_dir():
        raise UserError(f"FINAL_DIR {options.folder}: no such folder; give the final/ of a run.")
    if is_adapter_folder(options.folder):
        raise UserError(f"FINAL_DIR {options.folder} holds an adapter; merge it first (scripts/merge_adapter.py).")
    # Imported here, so that --help and wrong options do not wait for torch.
    from llm_fp8.config.options import Config, DataConfig, ModelConfig
    from llm_fp8.data.load import find_splits
    from llm_fp8.data.prepare import prepare_data
    from llm_fp8.models.source import load_tokenizer, resolve_source
    from llm_fp8.observability.metrics import GIB
    from llm_fp8.observability.reporter import quiet_libraries
    from llm_fp8.tools.compressed_tensors import eval_loss, export_fp8

    quiet_libraries()
    if options.data is not None:  # before the export, so that a wrong --data fails early
        length = options.max_seq_length or DataConfig.max_seq_length
        data_options = DataConfig(options.data, max_seq_length=length, overlong="truncate", batch_size=1)
        config = Config(model=ModelConfig(model_name=str(options.folder)), data=data_options)
        if not find_splits(data_options)[1]:  # without a validation split, measure on all rows
            config = config.with_options(validation_fraction=0.0)
        tokenizer, _ = load_tokenizer(config.model, resolve_source(config.model))
        data = prepare_data(config, tokenizer)
    before, after = export_fp8(options.folder, options.output)
    print(f"{options.output}: {after / GIB:.3g} GiB of weights, {before / GIB:.3g} GiB before", flush=True)
    if options.data is not None:
        loss_before, num_tokens, dtype = eval_loss(options.folder, data)
        fp8_loss, _, _ = eval_loss(options.output, data, round_inputs=True)
        print(f"eval loss over {num_tokens} tokens of {options.data}: {loss_before:.5f} before, {fp8_loss:.5f} in fp8")
        print(f"  computed in {dtype}; for fp8, linear layers' weights and inputs are rounded to fp8 and back")
    return 0
