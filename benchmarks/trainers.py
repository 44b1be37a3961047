#!/usr/bin/env python
"""Print the table of other trainers' fp8 in docs/tools.md, with their versions."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "trainers_certificate.json"
ENTRIES = ("trainer_te", "trainer_flag", "trl_flag", "llamafactory_fp8", "axolotl_fp8")


def table() -> str:
    recorded = json.loads(RESULTS.read_text())
    entries = {entry["name"]: entry for entry in recorded["entries"]}
    lines = ["| trainer | fp8 asked for by | GEMMs in fp8 | certificate |", "|---|---|---|---|"]
    for entry in map(entries.__getitem__, ENTRIES):
        package, certificate = entry["package"], entry["certificate"]
        version = recorded["versions"][package][package]
        reason = "".join(f": {text.partition(' (')[0].partition(', such')[0]}" for text in certificate["reasons"])
        count = f"{certificate['num_fp8_gemm_kernels']} of {certificate['num_gemm_kernels']}"
        lines.append(f"| {package} {version} | `{entry['how']}` | {count} | {certificate['verdict']}{reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
