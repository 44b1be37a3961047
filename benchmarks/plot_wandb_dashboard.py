"""The sections and panels of the W&B view as a picture, drawn from the layout that the code declares: no figures.

python benchmarks/plot_wandb_dashboard.py
"""

from __future__ import annotations

import sys
import textwrap
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.wandb_dashboard import SECTIONS, Bars, Curve, Panel
from llm_fp8.utils.errors import OneSentenceParser, run_script

PICTURE = Path(__file__).resolve().parent / "plots" / "wandb_dashboard.svg"
COLUMNS, WIDTH, HEIGHT, GAP, TITLE = 6, 176, 96, 8, 28
"""Panels in a row; sizes in pixels of a panel, of the room between panels, and of a section's title."""
ICONS: dict[type, str] = {
    Curve: '<path d="M8 88C48 60 76 80 104 66S150 62 168 56" fill="none" stroke="#2f81f7" stroke-width="2"/>'
    '<path d="M8 80C48 74 76 62 104 72S150 50 168 64" fill="none" stroke="#d9730d" stroke-width="2"/>',
    Bars: '<path d="M8 60h130" stroke="#2f81f7" stroke-width="8"/>'
    '<path d="M8 72h100" stroke="#d9730d" stroke-width="8"/><path d="M8 84h150" stroke="#0f9d6b" stroke-width="8"/>',
}
TABLE = '<path d="M8 58h160M8 70h160M8 82h160M66 52v36M118 52v36" stroke="#7c8591" stroke-width="1.5"/>'


def draw_panel(panel: Panel, x: int, y: int) -> str:
    """A panel with its title and the kind of its chart."""
    lines = "".join(
        f'<text x="8" y="{18 + 13 * number}">{escape(line)}</text>'
        for number, line in enumerate(textwrap.wrap(panel.title, 25))
    )
    frame = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="4" fill="#ffffff" stroke="#d0d7de"/>'
    return f'<g transform="translate({x} {y})">{frame}{lines}{ICONS.get(type(panel), TABLE)}</g>'


def draw() -> str:
    """The view as an SVG."""
    parts, y = [], GAP
    for section in SECTIONS:
        closed = "" if section.is_open else " (closed at first)"
        parts.append(f'<text x="{GAP}" y="{y + 18}" font-size="14" font-weight="bold">{section.title}{closed}</text>')
        y += TITLE
        for number, panel in enumerate(section.panels):
            row, column = divmod(number, COLUMNS)
            parts.append(draw_panel(panel, GAP + column * (WIDTH + GAP), y + row * (HEIGHT + GAP)))
        y += -(-len(section.panels) // COLUMNS) * (HEIGHT + GAP)
    width = GAP + COLUMNS * (WIDTH + GAP)
    size = f'width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
    style = 'font-family="sans-serif" font-size="11" fill="#1b1f24"'
    ground = f'<rect width="{width}" height="{y}" fill="#f6f8fa"/>'
    body = "\n".join([ground, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def main() -> int:
    """Writes the picture."""
    OneSentenceParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    PICTURE.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_script(main)
