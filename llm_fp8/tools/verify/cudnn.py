"""One process must hold one cuDNN: with a second, Transformer Engine's fused attention may fail its own check, and a
slow one takes its place.
"""

from __future__ import annotations

import re
from pathlib import Path

from llm_fp8.tools.verify import attention
from llm_fp8.tools.verify.result import Result
from llm_fp8.tools.verify.setup import Setup

_LIBRARY = re.compile(r"libcudnn(_\w+)?\.so(\.[\d.]+)?")
_VERSION = re.compile(r"\.so\.(\d+(?:\.\d+)+)$")


def folders_of(libraries: list[str]) -> dict[str, list[str]]:
    """Folder -> names of the libraries of cuDNN in it."""
    folders: dict[str, list[str]] = {}
    for library in libraries:
        folder, _, name = library.rpartition("/")
        if _LIBRARY.fullmatch(name):
            folders.setdefault(folder, []).append(name)
    return folders


def version_of(folder: str) -> str | None:
    """The full version where a file name in the folder tells it: links end in .so.9, what they point to in
    .so.9.10.2; pip's do not.
    """
    names = [path.resolve().name for path in Path(folder).glob("libcudnn*.so*")]
    return next((match[1] for name in names if (match := _VERSION.search(name))), None)


def judge(libraries: list[str], versions: dict[str, str | None], torch_version: str | None) -> Result:
    """`libraries`: paths mapped in a process after attention ran; `versions`: of each of their folders, where known."""
    folders = folders_of(libraries)
    facts = {"folders": folders, "versions": versions, "torch": torch_version}

    def described(folder: str) -> str:
        version = versions.get(folder)
        return f"{folder}{f' ({version})' if version else ''}: {len(folders[folder])} libraries"

    details = tuple(described(folder) for folder in folders)
    if len(folders) > 1:
        return Result(
            "failed",
            f"a process holds cuDNN from {len(folders)} folders, so fused attention may be lost or wrong",
            details,
            (
                "unset CUDNN_HOME CUDNN_PATH   # the scripts then load torch's own",
                'export LD_LIBRARY_PATH=$(python -c "import nvidia.cudnn as c; '
                'print(list(c.__path__)[0])")/lib:$LD_LIBRARY_PATH',
            ),
            facts,
        )
    if not folders:
        return Result("info", "no library of cuDNN was loaded: attention did not need it", facts=facts)
    return Result(
        "passed", f"cuDNN {torch_version or ''} from {next(iter(folders))}".replace("  ", " "), details, facts=facts
    )


def check(setup: Setup) -> Result:
    """The libraries of the process that ran attention."""
    import torch

    ended, seen = setup.probes["attention"].wait(attention.TIMEOUT_S)
    if seen is None:
        return Result("skipped", f"attention {ended.how()}, so cuDNN was not seen at work")
    version = torch.backends.cudnn.version()
    dotted = None if version is None else f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return judge(seen["cudnn"], {folder: version_of(folder) for folder in folders_of(seen["cudnn"])}, dotted)
