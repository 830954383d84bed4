"""docs/quickstart.png: the top of the page that the quickstart leaves, with the objects right as a text of the PNG.

    python -m research.studies.quickstart [--output runs/quickstart]

Runs what the quickstart has not done yet. The picture is taken by chromium (`make chromium`).
"""

import json
import shutil
from io import BytesIO
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import sync_playwright

from debias_diffusion.app.options import QuickstartConfig
from debias_diffusion.app.quickstart import RESULTS_FOLDER, quickstart
from debias_diffusion.files import read_json_object

from .harness import read_options

PICTURE, NUMBERS, WIDTH = Path(__file__).parents[2] / "docs" / "quickstart.png", "objects right, %", 1100

if __name__ == "__main__":
    output = read_options(__doc__, output="runs/quickstart").output
    report = quickstart(QuickstartConfig(output))
    encoders = read_json_object(Path(output, RESULTS_FOLDER, "generation.json"))["encoders"]
    info, right = PngInfo(), {name: of["scores"]["objects_right"]["value"] for name, of in encoders.items()}
    info.add_text(NUMBERS, json.dumps(right))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": WIDTH})
        page.goto(report.resolve().as_uri())
        box = page.locator(".images").first.bounding_box()
        top = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"]}
        image = Image.open(BytesIO(page.screenshot(full_page=True, clip=top)))
        browser.close()
    image.quantize(256, dither=Image.Dither.NONE).save(PICTURE, optimize=True, pnginfo=info)
