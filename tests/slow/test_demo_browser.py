"""The demo's page in a real browser: Debian's chromium, driven by Playwright, without requests to other machines.

    PYTHONPATH=tests python tests/slow/test_demo_browser.py docs

writes the screenshots of the documentation.
"""

import base64
import os
import re
import sys
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest
from helpers.browser import CHROMIUM, require_chromium
from helpers.demo_clients import LONG, opened_page
from helpers.demo_steps import counted_steps
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from debias_diffusion.app.demo import device
from debias_diffusion.app.demo.live_generation import Step
from debias_diffusion.app.demo.toy_scenes import mark, random_scene
from debias_diffusion.eval.encoder_names import labels
from debias_diffusion.eval.options import TOYS
from debias_diffusion.pipelines.png import read_settings

require_chromium()
expect.set_options(timeout=30_000)  # a busy machine takes more than the usual 5 seconds

HOSTILE = "<img src=x onerror=window.hacked=1> ${window.hacked=1} {{window.hacked=1}}"
LABELS = labels(TOYS)
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}


@contextmanager
def opened():
    """(browser's context, address) of the demo. All pages share a context, and with it a cache."""
    with opened_page() as (_, url), sync_playwright() as playwright:
        # As root, as in containers, chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context()
        context.set_default_timeout(30_000)
        yield context, url
        browser.close()


@pytest.fixture(scope="module")
def demo():
    with opened() as found:
        yield found


@contextmanager
def visited(
    context: BrowserContext,
    url: str,
    ready=lambda page: page.locator("#tokens .hint"),
    viewport: dict = DESKTOP,
    color_scheme: str = "light",
):
    """A new page, which may write nothing to the console and request nothing from elsewhere."""
    page, said, asked = context.new_page(), [], []
    page.set_viewport_size(viewport)
    page.emulate_media(color_scheme=color_scheme)
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    expect(ready(page)).to_be_visible(timeout=90_000)  # the first page of a browser has an empty cache
    yield page
    assert said == []
    assert asked and all(address.startswith((url, "data:", "blob:")) for address in asked)
    page.close()


@pytest.fixture
def page(demo) -> Page:
    with visited(*demo) as found:
        yield found


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    return counted_steps(monkeypatch)


def ask(page: Page, prompt: str, steps: int) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    set_steps(page, steps)
    page.get_by_role("button", name="Generate").click()


def set_steps(page: Page, steps: int) -> None:
    number = page.get_by_label("number input for Steps")
    if not number.is_visible():
        page.get_by_role("button", name="Advanced settings").click()
        page.wait_for_timeout(300)  # what has just come into sight may yet be set to what it was
    number.fill(str(steps))
    number.press("Tab")
    expect(number).to_have_value(str(steps))


def finished(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("Done", timeout=300_000)


def downloaded(page: Page, label: str, path: Path) -> bytes:
    with page.expect_download() as download:
        page.get_by_role("link", name=f"Download PNG: {label}", exact=True).click()
    download.value.save_as(path)
    return path.read_bytes()


# ---- what it does


def test_tokens_are_counted_while_typing(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    prompt = page.get_by_label("Prompt", exact=True)
    prompt.press_sequentially("A large red ring. ", delay=20)
    expect(page.locator("#tokens")).to_contain_text("5 tokens in 1 sentence")
    assert len(asked) < 9  # and not one for each of 18 keys
    prompt.fill(LONG)
    expect(page.locator("#tokens")).to_contain_text("93 tokens in 9 sentences")
    expect(page.locator("ol.sentences .token.all")).to_have_count(75)
    expect(page.locator("ol.sentences .token.some")).to_have_count(18)
    expect(page.locator("ol.sentences > li")).to_have_count(9)
    for words in ("read by every encoder", "read by some encoders only", "read by no encoder"):
        expect(page.locator("ul.legend")).to_contain_text(words)
    # They follow the chosen encoders and how these read.
    page.get_by_role("button", name="Advanced settings").click()
    page.get_by_label("Cut: every encoder stops at 77 tokens").check()
    page.get_by_label("toy/clip, overlapping chunks", exact=True).uncheck()
    expect(page.locator("ol.sentences .token.none")).to_have_count(18)
    page.get_by_role("radio", name="Overlapping chunks").check()
    expect(page.locator("ol.sentences .token.all")).to_have_count(93)
    expect(page.locator("ol.sentences .token.chunk")).to_have_count(1)
    prompt.fill("")
    expect(page.locator("#tokens .hint")).to_be_visible()


def test_a_scene_is_drawn_by_all_encoders_and_marked(page, tmp_path):
    page.get_by_role("button", name="Example 1").click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(LONG)
    set_steps(page, 3)
    page.get_by_role("button", name="Generate").click()
    finished(page)
    expect(page.locator(".card figcaption > strong")).to_have_text(["Reference image", *LABELS])
    expect(page.locator(".card .score")).to_have_count(len(LABELS))
    expect(page.locator(".card").nth(1)).to_contain_text("reads the first 75 of 93 tokens")
    expect(page.locator(".card").nth(2)).to_contain_text("reads all 93 tokens in 2")
    expect(page.locator(".card").nth(3)).to_contain_text("reads all 93 tokens at once")
    files = {label: downloaded(page, label, tmp_path / f"{number}.png") for number, label in enumerate(LABELS)}
    assert len(set(files.values())) == len(LABELS)
    for number, label in enumerate(LABELS):
        settings = read_settings(tmp_path / f"{number}.png")
        assert settings["prompt"] == LONG and settings["steps"] == 3 and label in str(settings)
        with Image.open(tmp_path / f"{number}.png") as image:
            marks = mark(random_scene(3), image)
        card, right = page.locator(".card").nth(number + 1), sum(item.correct for item in marks.objects)
        expect(card.locator(".score")).to_contain_text(f"{right} of {len(marks.objects)} right")
        expect(card.locator("li.right")).to_have_count(right)
        expect(card.locator(".invented li")).to_have_text([f"+ {name}" for name in marks.invented])
        expect(card.get_by_text("wrong background")).to_have_count(int(marks.missing_background is not None))
    # Another prompt is none of the scene's.
    ask(page, "A red ring.", 1)
    expect(page.locator(".card")).to_have_count(len(LABELS))
    finished(page)
    expect(page.locator(".card .score")).to_have_count(0)


def test_random_scenes_differ(page):
    captions = set()
    for _ in range(2):
        page.get_by_role("button", name="Random scene").click()
        expect(page.get_by_label("Prompt", exact=True)).not_to_have_value(next(iter(captions), ""))
        captions.add(page.get_by_label("Prompt", exact=True).input_value())
    assert len(captions) == 2
    expect(page.locator(".card.original li").first).to_contain_text("sentence")


def test_stop_ends_it_within_a_step(page, steps):
    ask(page, LONG, 100)
    expect(page.locator("#status")).to_contain_text(re.compile(r"Encoder 1 of 5, step [1-9]\d* of 100"))
    expect(page.locator("#status progress")).to_have_count(1)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_contain_text("Stopped.")
    taken = len(steps)
    page.wait_for_timeout(1000)
    assert len(steps) <= taken + 1 < 150  # on a busy machine the step that was being made ends later
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    ask(page, LONG, 2)
    finished(page)


def test_who_waits_is_told_the_place_and_can_stop(demo, page, steps):
    ask(page, LONG, 100)
    expect(page.locator("#status progress")).to_have_count(1)
    with visited(*demo) as other:
        ask(other, LONG, 2)
        expect(other.locator("#status")).to_contain_text(re.compile(r"queue: 1/1"))
        other.get_by_label("Prompt", exact=True).fill("Tokens are counted meanwhile.")
        expect(other.locator("#tokens")).to_contain_text("tokens in 1 sentence")
        other.get_by_role("button", name="Stop").click()
        expect(other.locator("#status")).to_contain_text("Stopped.")
        expect(page.locator("#status progress")).to_have_count(1)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#status")).to_contain_text("Stopped.")
    assert all(step.steps == 100 for step in steps)


def test_a_picture_sets_everything_again(demo, page, tmp_path):
    page.get_by_label("toy/long-clip").uncheck()
    set_steps(page, 2)
    page.get_by_label("Seed", exact=True).fill("9223372036854775000")  # more than a browser's numbers hold
    page.get_by_label("Negative prompt").fill("a blue star")
    page.get_by_label("Cut: every encoder stops at 77 tokens").check()
    ask(page, LONG, 2)
    finished(page)
    png = downloaded(page, "toy/debias-clip", tmp_path / "picture.png")
    with visited(*demo) as fresh:
        fresh.get_by_label("Restore settings from a PNG").set_input_files(tmp_path / "picture.png")
        expect(fresh.locator("#status")).to_contain_text("All settings are restored")
        expect(fresh.locator("#tokens")).to_contain_text("93 tokens")
        expect(fresh.get_by_label("toy/long-clip")).not_to_be_checked()
        fresh.get_by_role("button", name="Generate").click()
        finished(fresh)
        expect(fresh.locator(".card")).to_have_count(len(LABELS) - 1)
        assert downloaded(fresh, "toy/debias-clip", tmp_path / "again.png") == png


def test_a_scenes_png_that_is_dropped_shows_its_marks_again(demo, page, tmp_path):
    page.get_by_role("button", name="Example 1").click()
    set_steps(page, 2)
    page.get_by_role("button", name="Generate").click()
    finished(page)
    png = downloaded(page, "toy/debias-clip", tmp_path / "picture.png")
    card = page.locator(".card").filter(has=page.get_by_text("toy/debias-clip", exact=True))
    score, objects = card.locator(".score").inner_text(), card.locator("li").all_inner_texts()
    with visited(*demo) as fresh:
        # Anywhere: on the heading.
        dropped = fresh.evaluate_handle(
            """png => {
                const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
                const transfer = new DataTransfer();
                transfer.items.add(new File([bytes], "picture.png", { type: "image/png" }));
                return transfer;
            }""",
            base64.b64encode(png).decode(),
        )
        fresh.dispatch_event("h1", "drop", {"dataTransfer": dropped})
        expect(fresh.locator("#status")).to_contain_text("All settings are restored")
        expect(fresh.locator(".card figcaption > strong")).to_have_text(["Reference image", "toy/debias-clip"])
        expect(fresh.locator(".card .score")).to_have_text(score)
        assert fresh.locator(".card").nth(1).locator("li").all_inner_texts() == objects
        assert downloaded(fresh, "toy/debias-clip", tmp_path / "again.png") == png


def test_what_is_read_is_shown(page):
    page.get_by_label("Prompt", exact=True).fill(LONG)
    page.get_by_role("button", name="Analyse this prompt").click()
    expect(page.locator("table.movement tbody tr")).to_have_count(10)
    expect(page.locator(".look h4")).to_have_text(LABELS)
    expect(page.locator(".look").nth(0)).to_contain_text("reads the first 75 of 93 tokens")
    expect(page.locator(".look").nth(1)).to_contain_text("reads all 93 tokens in 2 chunks")
    assert page.locator(".look").nth(1).locator("ol.words li.again").count() > 5
    expect(page.locator(".look").nth(2)).to_contain_text("reads all 93 tokens.")
    assert page.locator(".look").nth(2).locator("ol.words li").count() > 80
    page.get_by_role("button", name="Advanced settings").click()
    page.get_by_label("Cut: every encoder stops at 77 tokens").check()
    page.get_by_role("button", name="Analyse this prompt").click()
    expect(page.locator(".look").nth(2)).to_contain_text("reads the first 75 of 93 tokens")
    page.get_by_label("Prompt", exact=True).fill("A red ring.")
    page.get_by_role("button", name="Analyse this prompt").click()
    expect(page.locator("#movement [role=alert]")).to_contain_text("one sentence")


# ---- what it refuses


def test_bad_input_gets_a_message(page):
    page.get_by_role("button", name="Generate").click()
    alert = page.locator("#status [role=alert]")
    expect(alert).to_contain_text("prompt")
    ask(page, LONG, 2)
    finished(page)
    page.get_by_label("Seed", exact=True).fill("minus one")
    page.get_by_role("button", name="Generate").click()
    expect(alert).to_contain_text("minus one")
    page.get_by_label("Seed", exact=True).fill("0")
    for label in LABELS:
        page.get_by_label(label, exact=True).uncheck()
    page.get_by_role("button", name="Generate").click()
    expect(alert).to_contain_text("No encoder is chosen")
    page.get_by_label("Prompt", exact=True).fill("x" * 20_001)
    expect(page.locator("#tokens [role=alert]")).to_contain_text("20,000")


def test_a_fault_of_the_demo_is_told_and_does_not_last(page, monkeypatch):
    def faulty(*arguments):
        raise RuntimeError("secret of the machine")

    with monkeypatch.context() as patch:
        patch.setattr(device, "draw", faulty)
        ask(page, "A red ring.", 1)
        expect(page.locator("#status [role=alert]")).to_contain_text("Something went wrong")
    assert "secret" not in page.locator("body").inner_text()
    ask(page, "A red ring.", 1)
    finished(page)


def picture_saying(text: str, path: Path) -> Path:
    info = PngInfo()
    info.add_text("settings", text)
    Image.new("RGB", (8, 8)).save(path, format="PNG", pnginfo=info)
    return path


def test_hostile_input_stays_text(page, tmp_path):
    ask(page, HOSTILE, 1)
    finished(page)
    expect(page.locator("ol.sentences")).to_contain_text("onerror")
    page.get_by_role("button", name="Analyse this prompt").click()
    expect(page.locator("#attention")).to_contain_text("onerror")
    restore, alert = page.get_by_label("Restore settings from a PNG"), page.locator("#status [role=alert]")
    restore.set_input_files(picture_saying(f'{{"prompt": "a", "steps": "{HOSTILE}"}}', tmp_path / "a.png"))
    expect(alert).to_contain_text("onerror")
    (tmp_path / "b.png").write_text("no picture")
    restore.set_input_files(tmp_path / "b.png")
    expect(alert).to_contain_text("PNG")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_of_a_large_file_only_the_beginning_is_sent(page, tmp_path):
    sizes = []
    page.on("request", lambda request: sizes.append(len(request.post_data_buffer or b"")))
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(2**30)
    page.get_by_label("Restore settings from a PNG").set_input_files(tmp_path / "large.png")
    expect(page.locator("#status [role=alert]")).to_contain_text("PNG", timeout=60_000)
    assert 2**20 < max(sizes) < 2**21


# ---- for everybody


def test_a_password_is_asked_for(demo):
    with (
        opened_page(encoders=["toy/clip"], user="ann", password="secret") as (_, url),
        visited(demo[0], url, ready=lambda page: page.get_by_role("button", name="Login")) as visitor,
    ):
        visitor.get_by_label("username").fill("ann")
        visitor.get_by_label("password").fill("secret")
        visitor.get_by_role("button", name="Login").click()
        ask(visitor, "A red ring.", 1)
        finished(visitor)


def test_from_the_keyboard_alone(page):
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.type("A red ring.")
    for name, key in (("Advanced settings", "Enter"), ("number input for Steps", None), ("Generate", "Enter")):
        tab_to(page, name, back=name == "Generate")
        if key:
            page.keyboard.press(key)
        else:
            page.keyboard.type("2")
    finished(page)
    tab_to(page, "Enlarge: toy/clip")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Image: toy/clip")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert focused(page) == "Enlarge: toy/clip"


def focused(page: Page) -> str:
    return page.evaluate(
        "(({ariaLabel, innerText}) => (ariaLabel || innerText || '').split('\\n')[0].trim())(document.activeElement)"
    )


def tab_to(page: Page, name: str, back: bool = False) -> None:
    for _ in range(60):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if focused(page).startswith(name):
            return
    raise AssertionError(f"the tabulator does not come to {name!r}")


def test_everything_has_a_name_that_can_be_read_out(page):
    page.get_by_role("button", name="Example 1").click()
    set_steps(page, 1)
    page.get_by_role("button", name="Generate").click()
    finished(page)
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, a[href], input, textarea, select, progress, img, [role=region]")]
        .filter(its => its.checkVisibility())
        .filter(its => !(its.ariaLabel || its.alt || its.innerText?.trim() || its.title ||
                         [...(its.labels || [])].some(label => label.innerText.trim())))
        .map(its => its.outerHTML.slice(0, 200))"""
    )
    assert nameless == []
    assert page.get_by_label("Steps").count() and not page.get_by_label("Height in pixels").count()  # a toy's is fixed
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.locator("h1").count() == 1


def test_on_a_phone_in_the_light_and_in_the_dark(demo):
    with visited(*demo, viewport=PHONE, color_scheme="dark") as page:
        show(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert brightness(page) < 60
        page.emulate_media(color_scheme="light")
        page.reload()
        expect(page.locator("#tokens .hint")).to_be_visible()
        assert brightness(page) > 200


def brightness(page: Page) -> int:
    """Of red, which grey has as much of as of the others, from 0 to 255."""
    return int(re.search(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])


def show(page: Page, steps: int = 1, example: str = "Example 1") -> None:
    """Everything that the page has to show."""
    page.get_by_role("button", name=example).click()
    set_steps(page, steps)
    page.get_by_role("button", name="Advanced settings").click()
    page.get_by_role("button", name="Generate").click()
    finished(page)
    page.get_by_role("button", name="Analyse this prompt").click()
    expect(page.locator("table.movement")).to_be_visible()


def write_screenshots(folder: Path) -> None:
    expect.set_options(timeout=300_000)
    with opened() as demo:
        demo[0].set_default_timeout(300_000)
        for name, settings in {
            "desktop": {"viewport": {"width": 1280, "height": 1400}},
            "phone": {"viewport": {"width": 390, "height": 1500}, "color_scheme": "dark"},
        }.items():
            with visited(*demo, **settings) as page:
                show(page, steps=20, example="Example 3")  # where the encoders differ as on average: docs/app.md
                # On a phone the images stand below the prompt.
                first = page.get_by_role("heading", name="Images" if name == "phone" else "See what your encoder reads")
                first.evaluate("heading => heading.scrollIntoView()")
                picture = Image.open(BytesIO(page.screenshot()))
                picture.quantize(256, dither=Image.Dither.NONE).save(folder / f"app-{name}.png", optimize=True)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    write_screenshots(Path(sys.argv[1]))
