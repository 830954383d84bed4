"""`showcase` with the toy SDXL: images and pages, and what marks say."""

import json
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from debias_diffusion.app.sheet import CUT, SHARPENED, WAYS, WHOLE
from debias_diffusion.errors import UserError
from debias_diffusion.eval.intervals import wilson
from debias_diffusion.pipelines.rendering.png import read_settings
from research.options import ShowcaseConfig
from research.showcase import command

PROMPTS = command.read_showcase_prompts()
CONFIG = ShowcaseConfig(base="toy/sdxl", limit=2, steps=1, device="cpu")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    output = tmp_path_factory.mktemp("showcase")
    command.showcase(replace(CONFIG, output=str(output)))
    return output


def images_of(output) -> dict[str, bytes]:
    ways = [way.replace(" ", "-").lower() for way in WAYS]
    return {f"{way}/{file.name}": file.read_bytes() for way in ways for file in (output / way).glob("0*.png")}


def test_every_way_draws_what_it_is_called_from_the_same_noise(drawn):
    settings = {}
    for name in images_of(drawn):
        settings.setdefault(name.partition("/")[0], []).append(read_settings(drawn / name))
    read = {way: (values[0]["reading"], values[0].get("sharpen", 1.0)) for way, values in settings.items()}
    assert read == {
        "cut": ("cut", 1.0),
        "as-a1111-reads": ("a1111", 1.0),
        "whole": ("overlap", 1.0),
        "whole-and-sharpened": ("overlap", 2.0),
    }
    assert [[value["seed"] for value in values] for values in settings.values()] == [[0, 1]] * 4
    assert len(set(images_of(drawn).values())) == 8


def test_the_page_of_marks_tells_no_way(drawn):
    source = (drawn / "mark.html").read_text()
    items = json.loads(source.partition('id="items">')[2].partition("</script>")[0])
    facts = [[fact for _, fact in prompt.facts] for prompt in PROMPTS[:2]]
    assert [item["facts"] for item in items] == [given for given in facts for _ in WAYS]
    names = [item["image"] for item in items]
    assert names == sorted(names[:4]) + sorted(names[4:])  # of each prompt by checksum, not by way
    assert not any(name.split("/")[1] in source for name in images_of(drawn))
    shown = [drawn / "marking" / f"{name}.jpg" for name in names]
    shown[0].write_bytes(b"")  # as a full disk leaves it
    command.showcase(replace(CONFIG, output=str(drawn)))
    assert {*(drawn / "marking").iterdir()} == {*shown} and len({*shown}) == 8
    for path in shown:
        with Image.open(path) as image:
            assert image.size == (48, 48) and not {"settings", "parameters", "exif", "comment"} & image.info.keys()


def marks_for(prompts, **shares) -> dict:
    """Of each way, with underscores: the number of facts that are right, the first ones, for each prompt."""
    return {
        way: [
            None if right is None else [number < right for number in range(len(prompt.facts))]
            for prompt, right in zip(prompts, shares[way.replace(" ", "_")], strict=True)
        ]
        for way in WAYS
    }


def test_marks_give_shares_and_differences_by_sentence_in_closed_form():
    prompts = PROMPTS[:7]
    facts = [len(prompt.facts) for prompt in prompts]
    total = sum(facts[:6])  # the last prompt is not marked in all ways
    shares = {"as_A1111_reads": [*facts[:6], 0], "whole_and_sharpened": [*[1] * 6, None]}
    marks = marks_for(prompts, cut=[*[0] * 6, 3], whole=facts, **shares)
    result = command.summarize(marks, prompts)
    assert result["prompts"] == [prompt.name for prompt in prompts[:6]] and result["facts"] == total
    shares = {way: value["all"] for way, value in result["ways"].items()}
    low, high = wilson(6, 6)  # of whole prompts: all samples are alike
    assert shares[WHOLE] == {"facts": total, "right": total, "value": 100.0, "low": low, "high": high}
    assert shares[SHARPENED]["right"] == 6 and shares[SHARPENED]["value"] == pytest.approx(600 / total)
    assert shares[SHARPENED]["low"] < 600 / total < shares[SHARPENED]["high"]
    by_sentence = result["ways"][SHARPENED]["by_sentence"]
    assert [share["right"] for share in by_sentence.values()] == [6, *[0] * (len(by_sentence) - 1)]
    *_, compared = command.mark_tables(result)
    _, difference, p = compared.rows[1]
    assert difference == "+100.0 (no interval)" and float(p) < 0.05
    few = command.summarize({way: of_way[:5] for way, of_way in marks.items()}, prompts[:5])
    assert few["ways"][WHOLE]["all"]["low"] is None and few["compared"][WHOLE]["p"] > 0.05


def test_the_marks_of_a_folder_are_read_back_and_others_refused(drawn, tmp_path):
    result = json.loads((drawn / "showcase.json").read_text())["images"]
    marks = {
        digest[:16]: [way != CUT] * len(prompt.facts)
        for way, files in result.items()
        for digest, prompt in zip(files.values(), PROMPTS, strict=False)
    }
    (file := tmp_path / "marks.json").write_text(json.dumps({"marks": marks}))
    shutil.copytree(drawn, tmp_path / "a")
    command.showcase(replace(CONFIG, output=str(tmp_path / "a"), marks=str(file)))
    ways = json.loads((tmp_path / "a" / "showcase.json").read_text())["marks"]["ways"]
    assert [way["all"]["value"] for way in ways.values()] == [0.0, 100.0, 100.0, 100.0]
    pairs = {way: [(drawn, digest) for digest in files.values()] for way, files in result.items()}
    some = {name: [None, *given[1:]] for name, given in marks.items()}
    for content in ({"marks": []}, {"marks": some}):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match="marks all facts of none"):
            command.read_marks(str(file), PROMPTS[:2], pairs)


def test_a_judge_agrees_where_it_says_what_the_person_marked():
    marks = {way: [[True, False], None] for way in WAYS} | {CUT: [[False, False], [True]]}
    judged = {way: [[0.9, 0.2], [0.1]] for way in WAYS}  # right but for two facts of the cut images
    found = command.agreement(judged, marks)
    assert found["mean_p"] == pytest.approx([(4 * 0.2 + 0.9) / 5, (3 * 0.9 + 0.1) / 4])
    assert (found["asked"], found["wrong"]) == ([5, 4], [1, 1])
