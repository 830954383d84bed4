"""The page of `showcase` on which a person marks facts, in a real browser, by keyboard alone."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from debias_diffusion.app.sheet import CUT, WHOLE
from research.options import ShowcaseConfig
from research.showcase.command import read_showcase_prompts, showcase

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROMPTS = read_showcase_prompts()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    output = str(tmp_path_factory.mktemp("showcase"))
    settings = ShowcaseConfig(base="toy/sdxl", output=output, limit=2, steps=1, device="cpu")
    showcase(settings)
    return settings


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None and "CI" not in os.environ:
        pytest.skip("there is no chromium here (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [390, 1300])
def test_facts_are_marked_by_keyboard_alone_and_give_the_numbers(config, browser, width, tmp_path):
    page = browser.new_page(viewport={"width": width, "height": 844})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"file://{config.output}/mark.html")
    result = json.loads((Path(config.output) / "showcase.json").read_text())["images"]
    cut = {digest[:16] for digest in result[CUT].values()}
    ids = json.loads(page.locator("#items").text_content())
    status = page.get_by_role("status")
    for number, item in enumerate(ids):
        expect(status).to_have_text(f"Image {number + 1} of 8; {number} complete.")
        image = page.get_by_alt_text("the image to mark")
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 48
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for fact in item["facts"]:
            focused = page.locator("fieldset:focus-within")
            assert focused.inner_text().startswith(fact)
            top, bottom = focused.evaluate("field => [field.getBoundingClientRect().top, innerHeight]")
            box = image.bounding_box()
            assert 0 <= top < bottom and (width > 720 or top >= box["y"] + box["height"]), fact  # not under the image
            page.keyboard.press("w" if item["image"] in cut else "r")
    expect(status).to_have_text("Image 8 of 8; 8 complete.")
    page.reload()  # marks stay in the browser
    expect(status).to_have_text("Image 1 of 8; 8 complete.")
    with page.expect_download() as download:
        page.keyboard.press("s")
    download.value.save_as(tmp_path / "marks.json")
    page.close()
    assert errors == []
    showcase(replace(config, marks=str(tmp_path / "marks.json")))
    marks = json.loads((Path(config.output) / "showcase.json").read_text())["marks"]
    assert marks["facts"] == sum(len(prompt.facts) for prompt in PROMPTS[:2])
    assert {name: way["all"]["value"] for name, way in marks["ways"].items()}.items() >= {CUT: 0, WHOLE: 100}.items()
