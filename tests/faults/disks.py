"""Disks that fill at random moments of random runs on the CPU; each run is resumed once there is room. Needs the right
to mount a tmpfs.

    python -m tests.faults.disks --seed 0 --count 100 --output disks.json

A start is `unexplained` where it ends with another code than 0 or 2, or with 2 and without one line that says why; a
run is `different` where it does not become, bit for bit, the run that always had room.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.utils.json_files import write_json_atomic
from tests.faults.kills import SCENARIOS, SmallRuns, first_difference, outcome
from tests.support.processes import exit_code

NEEDED_MIB = 8.0
"""More than the largest of the runs takes."""


def mount(options: str, folder: Path) -> None:
    """A tmpfs with these options."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def campaign(seed: int, count: int, scratch: Path) -> dict[str, Any]:
    """`count` runs on disks with too little room for some of them, in bytes or in files."""
    draw, runs = random.Random(seed), SmallRuns(scratch)
    codes, unexplained, different = Counter[str](), [], []
    disk = scratch / "disk"
    disk.mkdir()
    for number in range(count):
        scenario = draw.choice(list(SCENARIOS))
        expected, _, _ = runs.undisturbed(scenario)
        room = f"size={int(draw.uniform(0.05, 1) * NEEDED_MIB * 2**10)}k"
        if draw.random() < 0.3:
            room = f"size={int(NEEDED_MIB)}m,nr_inodes={draw.randint(4, 60)}"
        mount(room, disk)
        try:
            before = len(runs.log.read_text())
            code = exit_code(runs.start(scenario, disk / "run"))
            codes[str(code)] += 1
            said = runs.log.read_text()[before:]
            errors = [line for line in said.splitlines() if line.startswith("error: ")]
            if code not in (0, 2) or (code == 2) != (len(errors) == 1) or "Traceback" in said:
                unexplained.append({"scenario": scenario, "room": room, "code": code, "said": said[-2000:]})
            mount(f"remount,size={4 * int(NEEDED_MIB)}m,nr_inodes=10000", disk)
            if code and (code := exit_code(runs.start(scenario, disk / "run"))):
                unexplained.append({"scenario": scenario, "room": "enough", "code": code})
            elif difference := first_difference(outcome(disk / "run"), expected):
                different.append({"scenario": scenario, "room": room, "run": number, "difference": difference})
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return {
        "seed": seed,
        "num_runs": count,
        "exit_codes": dict(codes),
        "unexplained": unexplained,
        "different": different,
    }


def main() -> None:
    """Run a campaign and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="runs")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = campaign(options.seed, options.count, Path(scratch))
    print(json.dumps(found, indent=1))
    if options.output:
        write_json_atomic(options.output, {"provenance": collect_provenance(sys.argv), **found})


if __name__ == "__main__":
    main()
