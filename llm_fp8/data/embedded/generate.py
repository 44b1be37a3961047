"""Writes the embedded dataset and tokenizer, the same bytes every time.

    python -m llm_fp8.data.embedded.generate [--out DIR]

- `dataset/data/{train,validation}-*.jsonl`: rows in the columns of nvidia/OpenMathInstruct-2, no problem twice. The
  families (problems.py) take turns, so every prefix is balanced.
- `model/tokenizer.json`: a byte-level BPE trained on the training split, digits split singly, BOS before every text.
- `model/config.json`, `tokenizer_config.json`: written by hand, copied to DIR. A Llama of 1.7 million parameters whose
  sizes are multiples of 128, as the block-scaled fp8 recipe needs. It has no weights: every run initialises them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.embedded.problems import FAMILIES

SEED = 20240607
NUM_TRAIN_ROWS = 6000
NUM_VALIDATION_ROWS = 300
NUM_TRAIN_SHARDS = 4
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"


def make_rows(num_rows: int) -> list[dict[str, str]]:
    """`num_rows` rows with as many different problems, the families taking turns."""
    rng = Random(SEED)
    families = list(FAMILIES.items())
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < num_rows:
        name, family = families[len(rows) % len(families)]
        row = family(rng)
        rows.setdefault(row["problem"], {**row, "problem_source": name})
    return list(rows.values())


def train_tokenizer(texts: Iterator[str]) -> dict[str, Any]:
    """A byte-level BPE trained on `texts`, as the content of its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=json.loads((MODEL_DIR / "config.json").read_bytes())["vocab_size"],
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return json.loads(tokenizer.to_str())


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
    tokenizer = json.dumps(train_tokenizer(texts), ensure_ascii=False, indent=1) + "\n"
    (model / "tokenizer.json").write_bytes(tokenizer.encode())
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_bytes((MODEL_DIR / name).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the embedded dataset and tokenizer.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="Folder to write to (default: the package)."
    )
    generate(parser.parse_args().out)


if __name__ == "__main__":
    main()
