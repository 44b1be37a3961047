"""The page of a comparison: its text and charts, and how a real browser shows it on a screen, a phone and paper."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from benchmarks.comparison_page import PAGE, sample
from llm_fp8.tools.compare.charts import Scale, speed_chart
from llm_fp8.tools.compare.page import render_page, without_folders
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
    assert not re.findall(r"<script|(?:src|href)=[\"'](?!data:|#mark-)", text), (
        "no script, and nothing outside the file"
    )
    assert len(text) < 200_000
    assert "&lt;/script&gt;&lt;script&gt;alert" in text, "what a log says is text"
    assert "<code>bf16-1</code>" in text and "/data" not in text, "of a folder its name alone"
    for verdict in comparison.verdicts.values():
        assert verdict.conclusion in text
    (current,) = [variant for variant in comparison.arms if variant.arm == "current"]
    assert f"{current.loss_gap.mean:+.4f} (" in text
    for fact in ("1,000 million parameters", "16 sequences of 1,024 tokens a step", "1 x NVIDIA H200"):
        assert f"<li>{fact}</li>" in text


def test_a_run_on_a_cpu_has_no_gpu_and_an_old_one_no_batch(comparison):
    first = {**comparison.provenance["of_first_run"], "gpus": []}
    bare = {**comparison.provenance, "of_first_run": first, "global_batch_size": None, "num_parameters": None}
    text = render_page(dataclasses.replace(comparison, provenance=bare))
    assert "<dt>GPUs</dt><dd><code>not applicable</code>" in text and "<li>CPU</li>" in text
    assert (
        "<li>from random weights</li>" not in text
        and "parameters</li>" not in text
        and "tokens a step" not in text
        and ">none<" not in text
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/runs/bf16-1", "bf16-1"),
        ("python ~/a/train.py --output_dir=/b/c", "python train.py --output_dir=c"),
        ("runs/bf16-1", "runs/bf16-1"),
        ("HF_ENDPOINT=https://host/models, 5 tokens/s", "HF_ENDPOINT=https://host/models, 5 tokens/s"),
        ("[Errno 2] No such file: '/etc/x/y.json'", "[Errno 2] No such file: 'y.json'"),
    ],
)
def test_of_a_folder_the_page_shows_the_name_alone(text, shown):
    assert without_folders(text) == shown


def test_speed_is_shown_with_what_is_known_of_quality(comparison):
    bars = {bar.arm: bar for bar in speed_chart(comparison).bars}
    assert list(bars) == ["bf16", "delayed", "current", "block", "mxfp8"], "nothing ran for nvfp4"
    assert bars["bf16"].note == "baseline" and re.fullmatch(r"1\.3\d times bf16; quality as good", bars["delayed"].note)
    assert bars["block"].note == "speed not comparable; quality worse"
    assert bars["mxfp8"].note.endswith("fell back; quality not shown")
    assert [arm for arm, bar in bars.items() if bar.is_doubtful] == ["block", "mxfp8"]
    rates = {variant.arm: variant.tokens_per_s.value for variant in comparison.arms if variant.tokens_per_s}
    longest = max(bars.values(), key=lambda bar: bar.length)
    for arm, bar in bars.items():
        assert bar.start == 0 and bar.length / longest.length == pytest.approx(
            rates[arm] / rates[longest.arm], abs=1e-3
        )


@pytest.mark.parametrize(
    ("values", "from_zero", "low", "labels"),
    [
        ([18_000.0, 12_000.0], True, 0, ["0", "5,000", "10,000", "15,000"]),
        ([0.02, 1.9], False, 0, ["0", "0.5", "1.0", "1.5"]),
        ([3.9, 12.5], False, 3.47, ["4", "6", "8", "10", "12"]),
        ([-0.03, 0.1, math.nan], True, -0.0365, ["0", "0.05", "0.10"]),
        ([1_600_000.0], True, 0, ["0", "0.5M", "1.0M", "1.5M"]),
        ([3.0, math.inf, -1e300, 3.0], False, 2.85, ["2.9", "3.0", "3.1"]),
        ([5e-324], True, 0, ["0", "0.01", "0.02", "0.03", "0.04", "0.05"]),
        ([], True, 0, ["0", "0.01", "0.02", "0.03", "0.04", "0.05"]),
    ],
)
def test_an_axis_has_round_numbers_and_goes_below_zero_only_where_a_value_does(values, from_zero, low, labels):
    scale = Scale.of(values, from_zero)
    assert scale.low == pytest.approx(low)
    assert [label for _, label in scale.ticks()] == labels
    places = [place for place, _ in scale.ticks()]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 100


def test_the_sample_page_is_what_its_record_gives():
    assert PAGE.read_text(encoding="utf-8") == render_page(sample()), "run python benchmarks/comparison_page.py"
    assert PAGE.stat().st_size < 300_000
    assert "<li>from random weights</li>" in PAGE.read_text(encoding="utf-8"), "as its command says"


def picture(png: bytes) -> NDArray[np.uint8]:
    """A PNG's pixels, [height, width, 3]."""
    return (imread(io.BytesIO(png))[:, :, :3] * 255).round().astype(np.uint8)


SHOWN = """
const isShown = (e) => getComputedStyle(e).display !== "none";
return Object.fromEntries([...document.querySelectorAll("figure")].map(figure => [figure.id,
  [...figure.querySelectorAll("[data-arm]")].filter(isShown).map(e => e.dataset.arm)]));
"""
BAR_LENGTHS = "return [...document.querySelectorAll('.headline .length')].map(e => e.getBoundingClientRect().width)"
OVERFLOW = """
const wide = [...document.querySelectorAll("body *")].filter(
  e => !e.closest(".figures thead") && e.getBoundingClientRect().right > innerWidth + 1);
return [document.documentElement.scrollWidth, document.documentElement.clientWidth,
  wide.map(e => e.tagName + "." + e.getAttribute("class")).slice(0, 5)];
"""
# Of every text, on the nearest ground that is not transparent: contrast (WCAG 2) and size in pixels.
TEXTS = """
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (rgb) => rgb.slice(0, 3).map(c => c / 255)
  .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (e) => { const c = numbers(getComputedStyle(e).backgroundColor);
  return c[3] === 0 ? (e.parentElement ? ground(e.parentElement) : [255, 255, 255]) : c; };
const found = [];
for (const e of document.querySelectorAll("body *")) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || !e.getClientRects().length) continue;
  if (e.tagName === "title") continue;
  const style = getComputedStyle(e);
  const [a, b] = [light(numbers(e.closest("svg") ? style.fill : style.color)), light(ground(e))].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), parseFloat(style.fontSize), e.textContent.trim().slice(0, 30)]);
}
return found;
"""


def check_layout(browser: Any, how: str) -> None:
    """Nothing runs over the side, bars are seen in their proportions, and every text can be read."""
    scroll_width, width, wide = browser.execute_script(OVERFLOW)
    assert scroll_width <= width and wide == [], how
    lengths = browser.execute_script(BAR_LENGTHS)
    assert len(lengths) == 5 and min(lengths) > 0.5 * width and max(lengths) < width, (how, lengths)
    assert lengths[1] / lengths[0] == pytest.approx(1.31, abs=0.02), how
    texts = browser.execute_script(TEXTS)
    assert len(texts) > 100
    assert [text for text in texts if text[0] < 4.5 or text[1] < 11.5] == [], how


@pytest.mark.slow
def test_the_page_in_a_browser(page, tmp_path):
    with open_browser(tmp_path / "profile") as browser:
        browser.get("about:blank")
        requests_of(browser), complaints_of(browser)  # the browser's own first tab
        for width in (360, 800, 1280):
            set_width(browser, width)
            browser.get(page.as_uri())
            pixels = picture(full_screenshot(browser, tmp_path / f"{width}.png"))
            num_colours = len(set(map(bytes, pixels[::4, ::2].reshape(-1, 3))))
            assert pixels.shape[1] == width and pixels.shape[0] > 2000 and num_colours > 100, "it is drawn"
            check_layout(browser, f"{width} pixels")
            set_dark(browser, True)
            check_layout(browser, f"{width} pixels, dark")
            set_dark(browser, False)
        assert browser.find_element("css selector", "h1").text.startswith(
            "Llama-3.2-1B: bf16, fp8 delayed, fp8 current"
        )
        first = browser.find_element("css selector", ".verdict")
        assert first.text.startswith("fp8 delayed: use it") and "is faster: 1.3" in first.text
        assert first.get_attribute("data-conclusion") == "use it"

        # A variant's box takes it out of every chart but the headline, and brings it back.
        shown = browser.execute_script(SHOWN)
        assert len(shown) == 10 and all("delayed" in arms for arms in shown.values())
        box = browser.find_element("css selector", ".toggle.v1 input")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
        box.click()
        hidden = browser.execute_script(SHOWN)
        assert hidden.pop("speed") == shown["speed"]
        assert hidden == {id: [arm for arm in arms if arm != "delayed"] for id, arms in shown.items() if id != "speed"}
        box.click()
        assert browser.execute_script(SHOWN) == shown

        set_dark(browser, True)
        dark = picture(full_screenshot(browser, tmp_path / "dark.png"))
        assert dark[2, 2].sum() < 150, "a dark ground"

        # On paper it is light, whatever the screen is.
        set_width(browser, 700)
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
        check_layout(browser, "paper")
        assert picture(full_screenshot(browser, tmp_path / "paper.png"))[2, 2].sum() == 3 * 255
        display = "return getComputedStyle(document.querySelector('.figures td')).display"
        assert browser.execute_script(display) == "table-cell"
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
        (tmp_path / "page.pdf").write_bytes(pdf)
        assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
        assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 3

        assert complaints_of(browser) == []
        assert set(requests_of(browser)) == {page.as_uri()}, "the page asks the network for nothing"
