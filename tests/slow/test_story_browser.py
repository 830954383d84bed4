"""The page of the toy world in Debian's chromium, on a desktop and a phone: what is marked where, and what fits."""

import pytest
from helpers.browser import CHROMIUM, require_chromium
from helpers.story import WITH_CHUNKS, page_of, results
from playwright.sync_api import sync_playwright

from debias_diffusion.eval.story import tell
from debias_diffusion.toyworld.scenes import PLACES, scene

require_chromium()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # As root, as in containers, chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_marks_stand_in_their_places_and_everything_fits(browser, tmp_path, width):
    page_of(tell(results(tmp_path / "results", WITH_CHUNKS)), tmp_path)
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing is wider than the screen
    for table in page.locator("section table").all():
        if table.is_visible():
            assert table.bounding_box()["width"] <= width
    image = page.locator(".marked").nth(1)  # of the first example, drawn with the first encoder
    box = image.bounding_box()
    assert box["width"] >= 192 and box["width"] == pytest.approx(box["height"], abs=1)
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
        assert of_mark["width"] >= 14 and of_mark["x"] + of_mark["width"] <= box["x"] + box["width"]
    assert found == places
    page.close()
