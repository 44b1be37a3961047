"""A tiny model, its tokenizer and a dataset that the repository carries, so that every script runs without a network.

`model/` and `dataset/` are laid out as the Hugging Face hub lays them out and are written by `generate.py`.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
DATASET_DIR = Path(__file__).parent / "dataset"
