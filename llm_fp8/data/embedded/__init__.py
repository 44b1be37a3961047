"""A tiny model, its tokenizer and a dataset, included so that every script runs without a network.

`model/` and `dataset/` have the layout of the Hugging Face hub. The rows have the columns of nvidia/OpenMathInstruct-2;
no two have the same problem. The tokenizer is a byte-level BPE trained on these rows. It splits numbers into digits.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
DATASET_DIR = Path(__file__).parent / "dataset"
