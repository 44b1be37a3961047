"""The page of a comparison in a real browser: what it shows, what it hides, what it asks of the network."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from llm_fp8.tools.compare.page import render_page
from llm_fp8.tools.compare.report import Comparison, Failure, compare
from tests.support.browser import complaints_of, full_screenshot, open_browser, requests_of, set_dark, set_width
from tests.support.made_up_runs import made_up_run, precision_of

VARIANTS = {"bf16": 100_000.0, "delayed": 131_000.0, "current": 126_000.0, "block": 112_000.0}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Six variants: four with three seeds, one that fell back, one whose runs failed; with answers, energy, memory and
    flags.
    """
    runs = []
    for variant, rate in VARIANTS.items():
        for seed in (1, 2, 3):
            loss = 1 + 0.03 * seed + {"bf16": 0.0, "block": 0.1}.get(variant, 0.001 * (seed - 2))
            answers = {f"problem {number}": (number * 7 + seed + len(variant)) % 3 > 0 for number in range(60)}
            runs.append(
                made_up_run(variant, seed, rate, loss, answers=answers, source=f"/data/<runs>/a&b/{variant}-{seed}")
            )
    runs.append(made_up_run("mxfp8", 1, 130_000, precision=precision_of("mxfp8", "delayed")))
    failure = Failure("nvfp4", 1, "exit code 1: error: </script><script>alert(1)</script>", "logs/nvfp4-seed1.log")
    return compare(runs, [failure], [("block seed 1", "block seed 2")], [*VARIANTS, "mxfp8", "nvfp4"])


@pytest.fixture(scope="module")
def page(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as a file."""
    path = tmp_path_factory.mktemp("page") / "comparison.html"
    path.write_text(render_page(comparison), encoding="utf-8")
    return path


def test_the_page_is_whole_and_safe(page, comparison):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"'](?!data:)", text), (
        "nothing outside the file"
    )
    assert "<script>alert" not in text and "&lt;/script&gt;" in text, "what a log says is text"
    assert "/data/&lt;runs&gt;/a&amp;b/bf16-1" in text
    for verdict in comparison.verdicts.values():
        assert verdict.conclusion in text
    # Charts have their values as tables: the mean gap of a variant, to four digits.
    (current,) = [variant for variant in comparison.arms if variant.arm == "current"]
    assert f"<td>{current.loss_gap.mean:+.4f}</td>" in text


def picture(png: bytes) -> NDArray[np.uint8]:
    """A PNG's pixels, [height, width, 3]."""
    return (imread(io.BytesIO(png))[:, :, :3] * 255).round().astype(np.uint8)


VISIBLE = """
const shown = {};
for (const chart of document.querySelectorAll(".chart")) {
  shown[chart.id] = {};
  // What plotly made of each trace; one that it hides keeps nothing of its own there but the number.
  for (const made of chart._fullData) (shown[chart.id][chart.data[made.index].meta] ??= []).push(made.visible === true);
}
return shown;
"""
DRAWN = "return document.querySelectorAll('#chart-loss-step .scatterlayer .trace').length"
CHART_SIZES = """
return [...document.querySelectorAll(".chart")].map(chart => {
  const drawn = chart.querySelector("svg.main-svg").getBoundingClientRect();
  return [drawn.width, drawn.height, chart.clientWidth, chart.clientHeight];
});
"""
OVERFLOW = """
const wide = [...document.querySelectorAll("body *")].filter(
  e => !e.closest(".scroll, svg, .figures thead") && e.getBoundingClientRect().right > innerWidth + 1);
return [document.documentElement.scrollWidth, innerWidth, wide.map(e => e.tagName + "." + e.className).slice(0, 5)];
"""


@pytest.mark.slow
def sizes_on_screen(browser: Any) -> list[list[float]]:
    """`CHART_SIZES` once every chart fills its place: plotly draws some time behind a change of size."""

    from selenium.webdriver.support.wait import WebDriverWait  # where there is none, the test is skipped

    def settled(browser: Any) -> list[list[float]] | None:
        sizes = browser.execute_script(CHART_SIZES)
        return sizes if all(abs(drawn - room) < 1 for drawn, _, room, _ in sizes) else None

    return WebDriverWait(browser, 20, poll_frequency=0.1).until(settled)


def test_the_page_in_a_browser(page, tmp_path):
    with open_browser(tmp_path / "profile") as browser:
        browser.get("about:blank")
        requests_of(browser), complaints_of(browser)  # the browser's own first tab
        for width in (360, 1280):
            set_width(browser, width)
            browser.get(page.as_uri())
            pixels = picture(full_screenshot(browser, tmp_path / f"{width}.png"))
            num_colours = len(set(map(bytes, pixels[::4, ::2].reshape(-1, 3))))
            assert pixels.shape[1] == width and pixels.shape[0] > 2000 and num_colours > 200, "it is drawn"
            scroll_width, inner_width, wide = browser.execute_script(OVERFLOW)
            assert scroll_width <= inner_width == width and wide == [], "nothing runs over the side"
            assert browser.execute_script(
                "return [...document.querySelectorAll('.chart')].every(c => c.querySelector('svg.main-svg'))"
            )
        title = browser.find_element("css selector", "h1").text
        assert title.startswith("Llama-3.2-1B: bf16, fp8 delayed, fp8 current")
        first = browser.find_element("css selector", ".verdict")
        assert (
            first.text.startswith("fp8 delayed: use it")
            and "faster, at 1.3" in first.text
            and first.get_attribute("data-conclusion") == "use it"
        )

        # A variant's button takes its curves out of every chart, and brings them back.
        shown, drawn = browser.execute_script(VISIBLE), browser.execute_script(DRAWN)
        assert len(shown) == 10 and all(all(states) for chart in shown.values() for states in chart.values())
        button = browser.find_element("css selector", ".toggle[data-arm=delayed]")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        hidden = browser.execute_script(VISIBLE)
        for chart, variants in hidden.items():
            assert not any(variants.get("delayed", [])), chart
            assert all(all(states) for variant, states in variants.items() if variant != "delayed"), chart
        assert browser.execute_script(DRAWN) == drawn - 6, (
            "three seeds, each a line and its eval points, are gone from the drawing"
        )
        button.click()
        assert browser.execute_script(VISIBLE) == shown and browser.execute_script(DRAWN) == drawn

        # A table beside a chart opens by keyboard.
        summary = browser.find_element("css selector", "figure details summary")
        summary.send_keys("\n")
        assert browser.find_element("css selector", "figure details table").is_displayed()

        set_dark(browser, True)
        dark = picture(full_screenshot(browser, tmp_path / "dark.png"))
        assert dark[2, 2].sum() < 150, "a dark ground"
        text_colour = "return getComputedStyle(document.querySelector('#chart-loss-step text.xtitle')).fill"
        assert sum(map(int, re.findall(r"\d+", browser.execute_script(text_colour))[:3])) > 600, (
            "with light words in the charts"
        )
        set_dark(browser, False)

        # The variant's heading comes before all else, also on a phone, and the gap's axis holds the zero that is bf16.
        set_width(browser, 360, 740)
        bottom = "return document.querySelector('.verdict .conclusion').getBoundingClientRect().bottom + scrollY"
        assert browser.execute_script(bottom) < 740
        low, high = browser.execute_script("return document.getElementById('chart-gap-step')._fullLayout.yaxis.range")
        assert low <= 0 <= high
        set_width(browser, 1280)

        # On paper every chart has the room that it was drawn for, and on screen again afterwards.
        screen = sizes_on_screen(browser)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        browser.execute_script("dispatchEvent(new Event('beforeprint'))")
        assert (
            browser.execute_script("return getComputedStyle(document.querySelector('.figures td')).display")
            == "table-cell"
        )
        assert all(drawn_in[1] <= drawn_in[3] and drawn_in[0] < 700 for drawn_in in browser.execute_script(CHART_SIZES))
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_script("dispatchEvent(new Event('afterprint'))")
        assert sizes_on_screen(browser) == screen
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
        (tmp_path / "page.pdf").write_bytes(pdf)
        assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 3

        assert complaints_of(browser) == []
        assert set(requests_of(browser)) == {page.as_uri()}, "the page asks the network for nothing"
