"""The page of the toy world in Debian's chromium, on a desktop and a phone: what is marked where, and what fits."""

import pytest
from helpers.browser import CHROMIUM, require_chromium
from helpers.story import page_of, results
from playwright.sync_api import sync_playwright

from debias_diffusion.eval.story import tell
from debias_diffusion.toyworld.scenes import PLACES, scene

require_chromium()
# Visible elements whose content does not fit; `.hidden` is for screen readers alone.
CLIPPED = """[...document.querySelectorAll("main *")].filter(
    element => element.checkVisibility() && getComputedStyle(element).display != "inline"
        && !element.closest(".hidden, svg") && element.scrollWidth > element.clientWidth + 1
).map(element => element.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # As root, as in containers, chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [390, 1300, 1920])
def test_marks_stand_in_their_places_and_everything_fits(browser, tmp_path, width):
    page_of(tell(results(tmp_path / "results")), tmp_path)
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto((tmp_path / "report.html").as_uri())
    # Nothing is wider than the screen, or clipped; on a desktop the page is short.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(CLIPPED) == []
    assert width < 1300 or page.evaluate("document.documentElement.scrollHeight") <= 6000
    image = page.locator(".marked").nth(1)  # of the first example, drawn with the first encoder
    box = image.bounding_box()
    assert box["width"] >= 136 and box["width"] == pytest.approx(box["height"], abs=1)
    places = {thing.place: "#mark-right" for thing in scene("test", 0).things}
    places[scene("test", 0).things[-1].place] = "#mark-wrong"
    found = {}
    for mark in image.locator("use[href^='#mark']").all():
        of_mark = mark.bounding_box()
        column, row = (
            (of_mark[start] + of_mark[size] / 2 - box[start]) / box["width"] * 3
            for start, size in (("x", "width"), ("y", "height"))
        )
        place = next(place for place, cell in PLACES.items() if cell == (int(column), int(row)))
        found[place] = mark.get_attribute("href")
        assert of_mark["width"] >= 10 and of_mark["x"] + of_mark["width"] <= box["x"] + box["width"]
    assert found == places
    page.close()
