"""The final weights as an ordinary Hugging Face checkpoint: safetensors, config, tokenizer and a model card.

Written beside its place and renamed, so that `final/` is whole or absent. A TE model is written in Hugging Face's layout
(`te_llama.export_state_dict`). Tensors have the dtype of the model that training began with, so that exporting what was just loaded gives the
same bits; the fp32 that training keeps is in the checkpoints.
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import te_llama
from llm_fp8.errors import UserError
from llm_fp8.models import decoder_layers


def export_hf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, dtype: torch.dtype, card: dict[str, Any]
) -> None:
    """Write `model` and `tokenizer` to `folder` (replaced if it exists), tensors as `dtype`; `card` fills README.md.

    Raises `UserError` where the folder cannot be written; what was there before is still there then.
    """
    if isinstance(decoder_layers(model)[0], te_llama.TEDecoderLayer):
        weights = te_llama.export_state_dict(model)
    else:
        # TE's modules add what they keep between steps, under names that no other program knows.
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
    weights = {name: tensor.to("cpu", dtype) for name, tensor in weights.items()}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        model.save_pretrained(temporary, state_dict=weights)
        config = copy.deepcopy(model.config)  # save_pretrained wrote the dtype of training into it
        config.dtype = dtype
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(model_card(card))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The trained model could not be written to {folder} ({error}). Make room; if a checkpoint was saved, the same command with "
            "--resume_from latest then writes the model from it."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def model_card(card: dict[str, Any]) -> str:
    """A short README.md for the exported folder: how the model was trained, from run facts alone."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in card.items())
    return (
        f"---\nlibrary_name: transformers\nbase_model: {card['base model']}\n---\n\n"
        f"# {card['base model']}, fine-tuned\n\n"
        "Trained with the llm-fp8 scripts; `run.json` and `summary.json` of the run hold the whole configuration and outcome.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n"
        "Load it with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` on this folder.\n"
    )
