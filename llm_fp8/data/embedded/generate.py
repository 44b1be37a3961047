"""Writes the embedded dataset, tokenizer and model configuration, the same bytes every time.

    python -m llm_fp8.data.embedded.generate [--out DIR]

- `dataset/data/{train,validation}-*.jsonl`: rows in the columns of nvidia/OpenMathInstruct-2 (`problem`,
  `generated_solution`, `expected_answer`, `problem_source`). No two rows hold the same problem, so no problem of the
  validation split is in the training split. The families (problems.py) take turns, so every prefix is balanced.
- `model/tokenizer.json`, `tokenizer_config.json`: a byte-level BPE trained on the training split, digits split singly
  as arithmetic wants it, a BOS put before every text as the tokenizers of Llama do.
- `model/config.json`: a Llama of 1.7 million parameters with grouped-query attention, tied embeddings and every size a
  multiple of 128, which even the block-scaled fp8 recipe can run. It carries no weights: they are drawn at the start.

Nothing here depends on the hash seed, the locale or the version of Python.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llm_fp8.data.embedded.problems import FAMILIES

SEED = 20240607
NUM_TRAIN_ROWS = 6000
NUM_VALIDATION_ROWS = 300
NUM_TRAIN_SHARDS = 4
VOCAB_SIZE = 1024
MAX_POSITIONS = 1024
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": MAX_POSITIONS,
    "padding_side": "right",
}


def make_rows(num_rows: int, seed: int = SEED) -> list[dict[str, str]]:
    """`num_rows` rows with as many different problems, the families taking turns."""
    rng = Random(seed)
    families = list(FAMILIES.items())
    seen: set[str] = set()
    rows: list[dict[str, str]] = []
    while len(rows) < num_rows:
        name, family = families[len(rows) % len(families)]
        problem = family(rng)
        if problem.text in seen:
            continue
        seen.add(problem.text)
        rows.append(
            {
                "problem": problem.text,
                "generated_solution": problem.solution,
                "expected_answer": problem.answer_text,
                "problem_source": name,
            }
        )
    return rows


def train_tokenizer(texts: Iterator[str]) -> dict[str, Any]:
    """A byte-level BPE of `VOCAB_SIZE` entries trained on `texts`, as the content of its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return json.loads(tokenizer.to_str())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes((json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode())


def _write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes("".join(lines).encode())


def generate(out: Path) -> None:
    """Write `model/` and `dataset/` below `out`."""
    data, model = out / "dataset" / "data", out / "model"
    data.mkdir(parents=True, exist_ok=True)
    model.mkdir(parents=True, exist_ok=True)

    rows = make_rows(NUM_VALIDATION_ROWS + NUM_TRAIN_ROWS)
    validation, train = rows[:NUM_VALIDATION_ROWS], rows[NUM_VALIDATION_ROWS:]
    _write_rows(data / "validation-00000-of-00001.jsonl", validation)
    shard_rows = -(-len(train) // NUM_TRAIN_SHARDS)
    for shard in range(NUM_TRAIN_SHARDS):
        part = train[shard * shard_rows : (shard + 1) * shard_rows]
        _write_rows(data / f"train-{shard:05d}-of-{NUM_TRAIN_SHARDS:05d}.jsonl", part)

    texts = (text for row in train for text in (row["problem"], row["generated_solution"]))
    _write_json(model / "tokenizer.json", train_tokenizer(texts))
    _write_json(model / "tokenizer_config.json", TOKENIZER_CONFIG)
    _write_json(model / "config.json", MODEL_CONFIG)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the embedded dataset, tokenizer and model configuration.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="Folder to write to (default: the package)."
    )
    generate(parser.parse_args().out)


if __name__ == "__main__":
    main()
