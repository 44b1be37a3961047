"""Which attention Transformer Engine takes at the user's shape and why not another, and whether one cuDNN was loaded.

    NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 python -m llm_fp8.tools.verify.attention RESULT.json MODEL BATCH_SIZE LENGTH
    packed|padded

runs one decoder layer of a model forward and backward, in a process of its own, because Transformer Engine reads its
debug variables when it is imported. Both checks judge what that process found.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llm_fp8.tools.verify.processes import Ended, start_probe
from llm_fp8.tools.verify.result import Result, Setup, model_config
from llm_fp8.utils.packages import VERIFY

TIMEOUT_S = 180.0
PROBE = ("-m", "llm_fp8.tools.verify.attention")
FAST = ("fused (cuDNN)", "flash-attn")
VOCAB_SIZE = 1024

_DEBUG_LINE = re.compile(r"^\[(?:DEBUG|WARNING)\s*\| DotProductAttention\s*\]: (?P<message>.*)$", re.MULTILINE)
_DISABLING = re.compile(
    r"Disabling (?P<kind>FusedAttention|UnfusedDotProductAttention|FlashAttention(?: \d)?|all backends)\b\s*"
)
_NO_FLASH = re.compile(r"Available backends = \{FlashAttention=False\b")
_FLASH_VERSION = re.compile(r"'flash_attn(?:_\d)?_version': '([^']*)'")
_SELECTED = re.compile(r"Selected backend = (?P<name>[^.(\n]+?)(?: \((?P<detail>[^)]*)\))?\.")
_CUDNN = re.compile(r"libcudnn(_\w+)?\.so(\.[\d.]+)?")
_CUDNN_VERSION = re.compile(r"\.so\.(\d+(?:\.\d+)+)$")


# --- the process ---------------------------------------------------------------------------------------------


def start(setup: Setup, checks: Collection[str]) -> None:
    """Start it where one of the checks needs it."""
    if not {"attention", "cudnn"}.isdisjoint(checks):
        words = (setup.model_name, str(setup.batch_size), str(setup.max_seq_length), _form(setup))
        environ = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}
        setup.processes["attention"] = start_probe("attention", setup.scratch, PROBE, *words, **environ)


def _form(setup: Setup) -> str:
    return "packed" if setup.packing else "padded"


def layers_with_every_window(windows: tuple[int | None, ...]) -> int:
    """How many of the first layers hold every sliding window that the model has."""
    return max(windows.index(window) for window in set(windows)) + 1


def mapped_libraries(maps: str, word: str) -> list[str]:
    """Paths of the files in the text of /proc/self/maps whose file name holds `word`."""
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    return sorted({line[5] for line in lines if len(line) == 6 and word in line[5].rpartition("/")[2]})


def run_layer(result: Path, model_name: str, batch_size: int, length: int, form: str) -> None:
    import torch

    import te_llama
    from llm_fp8.models.loss_model import TrainingModel
    from llm_fp8.tools.bench.workload import Workload, in_rows, random_batch
    from llm_fp8.utils.json_files import write_json_atomic
    from llm_fp8.utils.te_import import require_te

    require_te("the attention check")
    config = model_config(model_name)
    config.num_hidden_layers = layers_with_every_window(te_llama.decoder_spec(config).windows)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.vocab_size, config.pad_token_id = VOCAB_SIZE, None  # attention does not depend on them; both cost memory
    device = torch.device("cuda", 0)
    model = te_llama.build_te_model(config, torch.bfloat16, device)
    te_llama.initialize_weights_(model, torch.Generator(device=device).manual_seed(0))
    batch = random_batch(Workload(model_name, batch_size, length, 1, 1), VOCAB_SIZE, seed=0)
    if form == "padded":  # the second half of each sequence
        batch = in_rows(batch, batch_size, num_real=max(1, length // 2))
    loss, _ = TrainingModel(model, length, torch.bfloat16)(batch.to(device))
    loss.backward()
    torch.cuda.synchronize()
    record = {
        "backend": te_llama.attention_backend(),
        "loss": float(loss.detach()) / batch.num_supervised_tokens,
        "num_layers": config.num_hidden_layers,
        "cudnn": mapped_libraries(Path("/proc/self/maps").read_text(), "libcudnn"),
    }
    write_json_atomic(result, record)


# --- attention -----------------------------------------------------------------------------------------------


def parse_debug(text: str) -> tuple[str | None, dict[str, list[str]]]:
    """Read the lines that NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 adds to a process's output.

    Returns: the last attention that was selected, with version or sub-backend (None: no line), and for each kind why
    it was ruled out. Transformer Engine gives no reason where flash-attn is not installed, only that there is no
    version of it.
    """
    selected, reasons = None, dict[str, list[str]]()
    for line in _DEBUG_LINE.finditer(text):
        message = line["message"]
        if chosen := _SELECTED.search(message):
            selected = f"{chosen['name']} {chosen['detail'] or ''}".strip()
        elif ruled_out := _DISABLING.match(message):
            known = reasons.setdefault(ruled_out["kind"], [])
            reason = message[ruled_out.end() :].rstrip(". ")
            if reason not in known:
                known.append(reason)
    has_reason = any(kind.startswith("FlashAttention") for kind in reasons)
    if not has_reason and _NO_FLASH.search(text) and set(_FLASH_VERSION.findall(text)) == {"not installed"}:
        reasons["FlashAttention"] = ["not installed"]
    return selected, reasons


def judge_attention(ended: Ended, seen: dict[str, Any] | None, shape: str) -> Result:
    """A fast kind must have run."""
    selected, reasons = parse_debug(ended.output)
    details = tuple(f"{kind}: {reason}" for kind, given in reasons.items() for reason in given)
    facts = {"seen": seen, "selected": selected, "reasons": reasons, "shape": shape, **ended.facts}
    if seen is None or ended.code != 0:
        again = f"{VERIFY} --only attention --verbose"
        return Result("failed", f"no attention ran ({shape}): {ended.why()}", ended.evidence, (again,), facts)
    backend = seen["backend"]
    if backend not in FAST:
        fixes: tuple[str, ...] = (
            f"{VERIFY} --only cudnn --verbose",
            "MAX_JOBS=4 python -m pip install --no-build-isolation flash-attn==2.8.3.post2",
        )
        if any("NVTE_" in reason for reason in details):
            fixes = ("unset NVTE_FUSED_ATTN NVTE_FLASH_ATTN",)
        summary = f"attention is {backend or 'unknown'}, several times slower than cuDNN's ({shape})"
        return Result("failed", summary, details, fixes, facts)
    others = "; ".join(f"not {kind}: {given[0]}" for kind, given in reasons.items())
    return Result("passed", f"{backend} for {shape}{f' ({others})' if others else ''}", details, facts=facts)


def check_attention(setup: Setup) -> Result:
    """Wait for the process, which was started before the first check."""
    shape = f"{setup.batch_size} {_form(setup)} sequences of {setup.max_seq_length} tokens, {setup.model_name}"
    return judge_attention(*setup.processes["attention"].findings(TIMEOUT_S), shape)


# --- cuDNN ---------------------------------------------------------------------------------------------------


def folders_of(libraries: list[str]) -> dict[str, list[str]]:
    """Folder -> names of cuDNN's libraries in it."""
    folders: dict[str, list[str]] = {}
    for library in libraries:
        folder, _, name = library.rpartition("/")
        if _CUDNN.fullmatch(name):
            folders.setdefault(folder, []).append(name)
    return folders


def cudnn_version(folder: str) -> str | None:
    """The full version where a file name tells it: links end in .so.9, what they point to in .so.9.10.2; pip's files
    do not.
    """
    names = [path.resolve().name for path in Path(folder).glob("libcudnn*.so*")]
    return next((match[1] for name in names if (match := _CUDNN_VERSION.search(name))), None)


def judge_cudnn(libraries: list[str], versions: dict[str, str | None], torch_version: str | None) -> Result:
    """One process must hold one cuDNN: with a second, fused attention may fail its own check, and a slow one runs.

    `libraries`: paths mapped in the process after attention ran. `versions`: of each of their folders, where known.
    """
    folders = folders_of(libraries)
    facts = {"folders": folders, "versions": versions, "torch": torch_version}
    details = tuple(
        f"{folder}{f' ({versions[folder]})' if versions.get(folder) else ''}: {len(names)} libraries"
        for folder, names in folders.items()
    )
    if not folders:
        return Result("info", "no library of cuDNN was loaded: attention did not need it", facts=facts)
    if len(folders) == 1:
        of_torch = "" if torch_version is None else f" {torch_version}"
        return Result("passed", f"cuDNN{of_torch} from {next(iter(folders))}", details, facts=facts)
    summary = f"a process holds cuDNN from {len(folders)} folders, so fused attention may be lost or wrong"
    fixes = (
        "unset CUDNN_HOME CUDNN_PATH   # the scripts then load torch's own",
        'export LD_LIBRARY_PATH=$(python -c "import nvidia.cudnn as c; print(list(c.__path__)[0])")/lib:'
        "$LD_LIBRARY_PATH",
    )
    return Result("failed", summary, details, fixes, facts)


def check_cudnn(setup: Setup) -> Result:
    import torch

    ended, seen = setup.processes["attention"].findings(TIMEOUT_S)
    if seen is None:
        return Result("skipped", f"attention {ended.how()}, so the loaded cuDNN is not known")
    version = torch.backends.cudnn.version()
    dotted = None if version is None else f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return judge_cudnn(seen["cudnn"], {folder: cudnn_version(folder) for folder in folders_of(seen["cudnn"])}, dotted)


if __name__ == "__main__":
    run_layer(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
