"""The demo's page in a real browser, Debian's chromium, without requests to other machines.

    PYTHONPATH=tests python tests/slow/test_browser.py docs/app-desktop.png

writes the screenshot of the documentation.
"""

import os
import re
import shutil
import sys
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest
from helpers.demo_clients import LONG, opened_page
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Page, expect, sync_playwright

from debias_diffusion.eval.options import TOYS
from debias_diffusion.pipelines.rendering.png import read_settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None and "CI" not in os.environ:  # where CI cannot start it, it fails
    pytest.skip("there is no chromium here (apt-get install chromium)", allow_module_level=True)
expect.set_options(timeout=60_000)  # a busy machine takes more than the usual 5 seconds

HOSTILE = "<img src=x onerror=window.hacked=1> ![a](http://elsewhere.example/a.png)"
LABELS = ["toy/clip, cut at 77 tokens", *TOYS[1:]]  # in PNGs
TITLES = ["SDXL as it is (cut at 77)", "SDXL, whole prompt (with_long_prompts)", "Long-CLIP", "DeBias-CLIP"]
TITLES.append("DeBias-CLIP for SDXL")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1300, "height": 1000}


@contextmanager
def opened():
    """(browser's context, address) of the demo. All pages share a context, and with it a cache."""
    with opened_page() as (_, url), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # as root, it has none
        context = browser.new_context()
        context.set_default_timeout(60_000)
        yield context, url
        browser.close()


@pytest.fixture(scope="module")
def demo():
    with opened() as context_and_url:
        yield context_and_url


@contextmanager
def visited(context, url: str, viewport: dict = DESKTOP):
    """A new page, which may write no error to the console and request nothing from elsewhere."""
    page, said, asked = context.new_page(), [], []
    page.set_viewport_size(viewport)
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    expect(page.get_by_role("button", name="Generate")).to_be_visible(timeout=90_000)  # with an empty cache
    yield page
    assert said == []
    assert asked and all(address.startswith((url, "data:", "blob:")) for address in asked)
    page.close()


@pytest.fixture
def page(demo) -> Page:
    with visited(*demo) as visit:
        yield visit


def set_steps(page: Page, steps: int) -> None:
    number = page.get_by_label("number input for Steps")
    if not number.is_visible():
        page.get_by_role("button", name="Advanced settings").click()
        page.wait_for_timeout(300)  # what has just come into sight may yet be set to what it was
    number.fill(str(steps))
    number.press("Tab")
    expect(number).to_have_value(str(steps))


def generate(page: Page, prompt: str | None, steps: int) -> None:
    if prompt is not None:
        page.get_by_label("Prompt", exact=True).fill(prompt)
    set_steps(page, steps)
    page.get_by_role("button", name="Generate").click()


def finished(page: Page, images: int) -> None:
    expect(page.locator("#images .caption-label")).to_have_count(images, timeout=300_000)
    expect(page.get_by_text("Done.", exact=True)).to_be_visible()


def test_a_scene_is_generated_analysed_and_restored_from_its_png(page, tmp_path):
    page.get_by_role("button", name="Two rings").click()
    expect(page.locator("#images .caption-label")).to_have_count(1)
    generate(page, None, 3)
    finished(page, 6)
    captions = page.locator("#images .caption-label").all_inner_texts()
    assert captions[0].startswith("Reference image: ")
    for title, caption in zip(TITLES, captions[1:], strict=True):
        assert caption.startswith(f"{title}, seed 0: reads ") and "objects right." in caption
    # A PNG is the file itself, with its settings.
    page.locator("#images .thumbnail-lg").nth(5).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").or_(page.get_by_label("Download")).first.click()
    download.value.save_as(tmp_path / "image.png")
    assert read_settings(tmp_path / "image.png")["encoder"] == LABELS[4]
    page.get_by_label("Close").first.click()
    # An analysis goes when another prompt is chosen.
    page.get_by_role("button", name="Analyse this prompt").click()
    expect(analysis := page.get_by_text("sentence 2 removed").first).to_be_visible()
    page.get_by_role("button", name="Six on black").click()
    expect(analysis).not_to_be_visible()
    # The PNG sets everything again.
    set_steps(page, 1)
    page.locator("input[type=file]").first.set_input_files(tmp_path / "image.png")
    expect(page.get_by_text("All settings are restored.")).to_be_visible()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(LONG)
    expect(page.get_by_label("number input for Steps")).to_have_value("3")
    assert page.locator("#images .caption-label").all_inner_texts()[1].partition(". ")[2] in captions[5]


def test_stop_ends_it_and_the_next_request_runs(page):
    generate(page, LONG, 100)
    expect(page.get_by_text(re.compile("step [1-9][0-9]* of 100")).first).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.", exact=True)).to_be_visible()
    generate(page, LONG, 1)
    finished(page, 5)


def test_what_is_refused_says_why_and_hostile_text_stays_text(page, tmp_path):
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_text("The prompt is empty")).to_be_visible()
    generate(page, HOSTILE, 1)
    finished(page, 5)
    page.get_by_role("button", name="Analyse this prompt").click()
    expect(page.get_by_text("onerror").nth(2)).to_be_visible()
    page.get_by_label("Seed", exact=True).fill(HOSTILE)
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_text("The seed must be a whole number from 0 to 2^63 - 1, got '<img")).to_be_visible()
    info = PngInfo()
    info.add_text("settings", f'{{"prompt": "a", "scheduler": "{HOSTILE}", "base": "{HOSTILE}"}}')
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    page.locator("input[type=file]").first.set_input_files(tmp_path / "a.png")
    expect(page.get_by_text("There is no scheduler '<img")).to_be_visible()
    assert page.evaluate("window.hacked") is None and page.locator("img[src=x]").count() == 0


def test_everything_fits_a_phone(demo):
    with visited(*demo, viewport=PHONE) as page:
        show(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#images")).to_be_in_viewport()  # it is far below the button
        finished(page, 6)


def show(page: Page, steps: int = 1, example: str = "Two rings") -> None:
    page.get_by_role("button", name=example).click()
    generate(page, None, steps)
    finished(page, 6)
    page.get_by_role("button", name="Analyse this prompt").click()
    expect(page.get_by_text("sentence 2 removed").first).to_be_visible()


def write_screenshot(file: Path) -> None:
    with opened() as demo, visited(*demo, viewport={"width": 1300, "height": 1250}) as page:
        show(page, steps=20, example="Circles and a star")  # where the encoders differ as on average: docs/app.md
        page.evaluate("scrollTo(0, 0)")
        image = Image.open(BytesIO(page.screenshot()))
        image.quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    write_screenshot(Path(sys.argv[1]))
