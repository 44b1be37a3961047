"""One decoder layer of a model, forward and backward, in a process of its own: which attention ran, and which cuDNN it
brought along.

    NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 python -m llm_fp8.tools.verify.attention_probe RESULT.json MODEL ROWS LENGTH
    packed|padded

A process of its own because Transformer Engine reads its debug variables when it is imported, and because it starts as
a run starts.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

import te_llama
from llm_fp8.data.collate import Batch
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.tools.bench.workload import Workload, random_batch
from llm_fp8.tools.verify.setup import model_config
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.te_import import require_te

VOCAB_SIZE = 1024


def one_of_each_window(windows: tuple[int | None, ...]) -> int:
    """How many of the first layers hold every sliding window that the model has."""
    return max(windows.index(window) for window in set(windows)) + 1


def padded(batch: Batch, rows: int, length: int) -> Batch:
    """The tokens of a packed batch as rows, the second half of each of them padding."""
    mask = torch.arange(length).expand(rows, -1) < max(1, length // 2)
    return dataclasses.replace(
        batch,
        input_ids=batch.input_ids.view(rows, length),
        labels=batch.labels.view(rows, length),
        position_ids=batch.position_ids.view(rows, length),
        attention_mask=mask,
        cu_seqlens=None,
    )


def mapped_libraries(maps: str, word: str) -> list[str]:
    """Paths of the files in the text of /proc/self/maps whose file name holds `word`."""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if word in path.rpartition("/")[2])


def main(result: Path, model_name: str, rows: int, length: int, form: str) -> None:
    """Run it and write what was seen."""
    require_te("the attention check")
    config = model_config(model_name)
    config.num_hidden_layers = one_of_each_window(te_llama.decoder_spec(config).windows)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.vocab_size, config.pad_token_id = VOCAB_SIZE, None  # neither matters to attention; both cost memory
    device = torch.device("cuda", 0)
    model = te_llama.build_te_model(config, torch.bfloat16, device)
    te_llama.initialize_weights_(model, torch.Generator(device=device).manual_seed(0))
    batch = random_batch(Workload(model_name, rows, length, 1, 1), VOCAB_SIZE, seed=0)
    batch = batch if form == "packed" else padded(batch, rows, length)
    loss = TrainingModel(model, length, torch.bfloat16)(batch.to(device))
    loss.backward()
    torch.cuda.synchronize()
    record = {
        "backend": te_llama.attention_backend(),
        "loss": float(loss.detach()) / batch.num_supervised_tokens,
        "num_layers": config.num_hidden_layers,
        "cudnn": mapped_libraries(Path("/proc/self/maps").read_text(), "libcudnn"),
    }
    write_json_atomic(result, record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
