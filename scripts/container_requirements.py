#!/usr/bin/env python
"""What pip installs into an image that brings its own torch, and what it has to leave alone there. The Dockerfile runs
it.

    python scripts/container_requirements.py write FOLDER     FOLDER/constraints.txt: packages that stay, at installed
                                                               versions;
                                                              FOLDER/requirements.txt: what the requirements files pin,
                                                              without those
    python scripts/container_requirements.py check FOLDER     whether they are still installed at these
                                                               versions; exit code 1 where not

NVIDIA's images build torch, Transformer Engine and what is compiled against them together. One of them taken from the
package index would break the others. Standard library and packaging only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.verify.versions import REQUIREMENTS, TE_PARTS, installed, pins_of, read_pins
from llm_fp8.utils.packages import REPOSITORY

KEPT = ("torch", "torchvision", "torchaudio", "torchao", "triton", "pytorch-triton", "numpy", "flash-attn", *TE_PARTS)
"""Stay as the image has them: torch, and what is compiled against it or it against them."""
NEEDED = ("torch", "transformer-engine")
"""Without which the image is none that this project can be built on."""


def constraints(found: dict[str, str]) -> str:
    """The lines of constraints.txt for the packages that were found."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def requirements(found: dict[str, str]) -> str:
    """The lines of requirements.txt: every pin whose marker holds here, and whose package is not among those found."""
    return "".join(f"{pin}\n" for pin in read_pins() if pin.name not in found)


def changed(text: str, found: dict[str, str]) -> list[str]:
    """A sentence for each package of a constraints file that is not installed as it says."""
    sentences = []
    for pin in pins_of(text):
        there = found.get(pin.name)
        if there is None or not pin.specifier.contains(there, prereleases=True):
            sentences.append(f"{pin} became {there or 'not installed'}")
    return sentences


def main(argv: list[str]) -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    found, file = installed(KEPT), options.folder / "constraints.txt"
    if options.action == "write":
        if missing := [name for name in NEEDED if name not in found]:
            print(
                f"error: the image has no {' and no '.join(missing)}; build on one of nvcr.io/nvidia/pytorch.",
                file=sys.stderr,
            )
            return 2
        options.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(constraints(found))
        (options.folder / "requirements.txt").write_text(requirements(found))
        print(
            f"kept: {', '.join(file.read_text().split())}; the rest of {', '.join(REQUIREMENTS)} in {REPOSITORY} is "
            "installed"
        )
        return 0
    if not file.is_file():
        print(
            f"error: {file}: no such file; run '{Path(__file__).name} write {options.folder}' before pip.",
            file=sys.stderr,
        )
        return 2
    sentences = changed(file.read_text(), found)
    for sentence in sentences:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
