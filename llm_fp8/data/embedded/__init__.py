"""A tiny model, its tokenizer and a dataset that the repository carries, so that every script runs without a network.

`model/` and `dataset/` are laid out as the Hugging Face hub lays them out. The rows have the columns of
nvidia/OpenMathInstruct-2 and no problem twice; the tokenizer is a byte-level BPE trained on them, digits split singly.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
DATASET_DIR = Path(__file__).parent / "dataset"
