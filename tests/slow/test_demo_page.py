"""The demo as programs use it: endpoints, queue, and refusals. tests/slow/test_demo_browser.py tests the page."""

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import yaml
from gradio_client import Client, handle_file
from gradio_client.utils import QueueError
from helpers.demo_clients import LONG, Visitor, drawing, opened_page, wait_until
from helpers.demo_steps import counted_steps
from helpers.modules import ROOT
from helpers.tiny_sdxl import build_tiny_sdxl
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from debias_diffusion.app.demo import device, launch, markup
from debias_diffusion.app.demo.analysis import Movement, PromptTokens, Token, attention, movement, tokens
from debias_diffusion.app.demo.live_generation import Drawn, Step, draw
from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.demo.prompt_reading import PromptChunk, PromptReading
from debias_diffusion.app.demo.request import Request
from debias_diffusion.app.demo.restore import request_of_png
from debias_diffusion.app.demo.toy_scenes import Marks, ObjectMark, mark, random_scene
from debias_diffusion.errors import UserError

QUICK = {"encoders": ["toy/clip"], "steps": 2}
LENGTHY = {"steps": 100}  # by five encoders: 500 steps
SPACE = ROOT / "app" / "space"
HOSTILE = "<img src=x onerror=\"alert('a')\">${alert(1)}{{x}}"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Where gradio puts what it writes: nothing, whatever the tests of this module ask for."""
    folder = tmp_path_factory.mktemp("gradio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        yield folder
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.fixture(scope="module")
def models() -> DemoModels:
    """The same models as the demo's, to draw alone with."""
    config = launch.AppConfig()
    return DemoModels(config.base, config.encoders, launch.pick_device("cpu"))


@pytest.fixture(scope="module")
def demo(files):
    """(page, address) of a demo."""
    with opened_page() as found:
        yield found


@pytest.fixture(scope="module")
def url(demo) -> str:
    return demo[1]


@pytest.fixture(scope="module")
def client(url) -> Client:
    return Client(url, verbose=False)


@pytest.fixture(scope="module")
def visitor(url) -> Visitor:
    """A plain HTTP client, much faster than gradio's."""
    return Visitor(url)


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    return counted_steps(monkeypatch)


def generate(visitor: Visitor, prompt: str = LONG, **settings) -> list[dict]:
    return visitor.ask("generate", drawing(prompt, **(QUICK | settings)))[0]


def alone(models: DemoModels, prompt: str = LONG, **changes) -> list[bytes]:
    """The files that the same settings give without any demo."""
    settings = QUICK | changes
    request = replace(models.defaults, prompt=prompt, **settings | {"encoders": tuple(settings["encoders"])})
    return [news.png for news in draw(models, request, lambda: False) if isinstance(news, Drawn)]


def pngs(pictures: list[dict]) -> list[bytes]:
    return [base64.b64decode(picture["png"]) for picture in pictures]


# ---- endpoints


def test_endpoints_are_documented(client):
    endpoints = client.view_api(print_info=False, return_format="dict")["named_endpoints"]
    assert set(endpoints) == {"/generate", "/tokens", "/attention", "/settings"}
    assert all(endpoint["description"] for endpoint in endpoints.values())
    needed = [p["parameter_name"] for p in endpoints["/generate"]["parameters"] if not p["parameter_has_default"]]
    assert needed == ["prompt"]


def test_pictures_are_those_drawn_alone(visitor, models):
    settings = {"encoders": ["toy/debias-clip", "toy/clip"], "seed": 5, "images": 2, "negative_prompt": "a red ring"}
    pictures = generate(visitor, **settings)
    assert pngs(pictures) == alone(models, **settings)
    assert [(picture["label"], picture["seed"]) for picture in pictures] == [
        ("toy/debias-clip", 5),
        ("toy/clip", 5),
        ("toy/debias-clip", 6),
        ("toy/clip", 6),
    ]
    assert "75 of 93" in pictures[1]["read"]


def test_what_is_not_given_is_as_the_page_has_it(client, models):
    (first, *others) = client.predict(LONG, steps=1, api_name="/generate")
    assert [first["label"], *(picture["label"] for picture in others)] == models.labels
    request, _ = request_of_png(base64.b64decode(first["png"]), models)
    assert request == replace(models.defaults, prompt=LONG, steps=1)


def test_a_picture_says_what_it_was_asked_for_with(client, visitor):
    (picture,) = generate(visitor, seed=9)
    found = client.predict(picture["png"], api_name="/settings")
    assert found["notes"] == []
    assert found["request"]["prompt"] == LONG and found["request"]["seed"] == 9
    (again,) = client.predict(api_name="/generate", **found["request"])
    assert again["png"] == picture["png"]


def test_tokens_are_counted(visitor, models):
    found = visitor.ask("tokens", [LONG, False])[0]
    assert found["count"] == len(found["tokens"]) == tokens(models, LONG).count
    assert [Token(**token) for token in found["tokens"]] == list(tokens(models, LONG).tokens)
    assert found["readings"]["toy/clip"] == {"tokens": 93, "read": 75, "chunks": [{"first": 0, "new": 0, "end": 75}]}
    cut = visitor.ask("tokens", [LONG, False, ["toy/debias-clip"], "cut"])[0]
    assert list(cut["readings"]) == ["toy/debias-clip"] and cut["tokens"][80]["read_by"] == "none"
    assert visitor.ask("tokens", ["", False])[0]["count"] == 0


def test_what_is_read_is_told(visitor, models):
    found = visitor.ask("attention", [LONG, ["toy/clip", "toy/debias-clip"]])[0]
    expected = attention(models, LONG, ["toy/clip", "toy/debias-clip"])
    assert found["attention"] == expected
    assert [Movement(**row) for row in found["movement"]] == movement(models, LONG, ["toy/clip", "toy/debias-clip"])
    chunks = visitor.ask("attention", [LONG, ["toy/clip"], False, "chunks"])[0]
    assert chunks["attention"] == attention(models, LONG, ["toy/clip"], long_prompts="chunks") != expected
    single = visitor.ask("attention", ["A red ring.", None])[0]
    assert single["movement"] == [] and list(single["attention"]) == models.labels


def test_a_dropped_png_brings_its_marks_back(visitor, models):
    functions = visitor.http.get("config").json()["dependencies"]
    restore = next(each for each in functions if each["api_name"] == "_restore")
    request = replace(models.defaults, prompt=LONG, encoders=("toy/clip",), steps=1, scene=3)
    (drawn,) = [item for item in draw(models, request, lambda: False) if isinstance(item, Drawn)]
    event = {"png": base64.b64encode(drawn.png).decode()}
    body = {"data": [], "fn_index": restore["id"], "session_hash": "dropped", "event_data": event}
    shown = str(visitor.http.post("gradio_api/run/_restore", json=body).json()["data"])
    marks = mark(random_scene(3), drawn.image)
    right = sum(item.correct for item in marks.objects)
    assert "All settings are restored." in shown and f"<b>{right} of {len(marks.objects)}</b> right" in shown
    assert shown.count("data:image/png") == 2 and "Reference image" in shown  # beside what was asked for


# ---- each image is sent once


def stream(visitor: Visitor, function: int, data: list, session: str) -> str:
    """All that a page gets until its request is answered."""
    visitor.join(function, data, session).raise_for_status()
    with visitor.http.stream("GET", "gradio_api/queue/data", params={"session_hash": session}) as stream:
        return "\n".join(stream.iter_lines())


def test_the_page_gets_each_image_once(demo, models):
    page, url = demo
    visitor = Visitor(url)
    functions = visitor.http.get("config").json()["dependencies"]
    (button,) = [block._id for block in page.blocks.values() if getattr(block, "value", None) == "Example 1"]
    example = next(each for each in functions if [button, "click"] in each["targets"])
    body = {"data": [], "fn_index": example["id"], "session_hash": "once"}
    scene = visitor.http.post(f"gradio_api/run/{example['api_name']}", json=body).text
    assert scene.count("data:image/png") == 1  # the reference image
    encoders, images = ["toy/clip", "toy/debias-clip"], 2
    values = replace(models.defaults, prompt=LONG, steps=1, images=images)
    drawing = next(each for each in functions if each["api_name"] == "_draw")
    names = ("negative_prompt", "seed", "steps", "guidance_scale", "height", "width", "images", "scheduler")
    settings = [getattr(values, name) for name in (*names, "long_prompts", "weighting")]
    settings[1] = str(settings[1])
    sent = stream(visitor, drawing["id"], [None, None, LONG, encoders, *settings], "once")
    expected = alone(models, encoders=encoders, steps=1, images=images, scene=3)
    assert "Done: seed 0, 1 steps." in sent and len(expected) == 4
    # The reference image is on the page already.
    assert sent.count("data:image/png") == len(expected)
    assert [sent.count(base64.b64encode(png).decode()) for png in expected] == [1] * len(expected)
    # Another prompt takes the reference image away.
    sent = stream(visitor, drawing["id"], [None, None, "A red ring.", encoders, *settings], "once")
    assert sent.count("data:image/png") == 4


def test_a_program_gets_each_image_once(visitor, models):
    event = visitor.call("generate", drawing(**QUICK)).json()["event_id"]
    sent = visitor.http.get(f"gradio_api/call/generate/{event}").text
    (png,) = alone(models)
    assert sent.count(base64.b64encode(png).decode()) == 1 and "event: generating" in sent


# ---- the queue


def test_one_at_a_time_and_each_is_told_its_place(client, steps):
    first = client.submit(LONG, api_name="/generate", **LENGTHY)
    wait_until(lambda: steps)
    waiting = [client.submit(LONG, seed=seed, api_name="/generate", **QUICK) for seed in range(3)]
    wait_until(lambda: sorted(job.status().rank or 0 for job in waiting) == [0, 1, 2])
    # Tokens are counted meanwhile.
    assert client.predict(LONG, api_name="/tokens")["count"] == 93
    assert not first.done() and not any(job.done() for job in waiting)
    first.cancel()
    assert [job.result()[0]["seed"] for job in waiting] == [0, 1, 2]
    # Of the one that was cancelled only a few were taken, and none while another drew.
    own = [step for step in steps if step.steps == 100]
    assert 0 < len(own) < 250
    place = steps.index(own[-1])
    assert all(step.steps == 2 for step in steps[place + 1 :])


def test_who_goes_away_is_not_drawn_for(visitor, url, steps, models):
    visitor.join(visitor.number("generate"), drawing(steps=100), "gone").raise_for_status()
    with httpx.stream("GET", f"{url}gradio_api/queue/data", params={"session_hash": "gone"}) as stream:
        next(line for line in stream.iter_lines() if "process_generating" in line)
    assert pngs(generate(visitor)) == alone(models)
    assert len([step for step in steps if step.steps == 100]) < 250


def test_nobody_passes_those_who_wait(url):
    named = {"fn_index": Visitor(url).number("generate")}
    for path, body in (("run/generate", {}), ("api/generate", {}), ("run/tokens", named)):
        response = httpx.post(f"{url}gradio_api/{path}", json={"data": drawing()} | body)
        assert response.status_code == 404 and "queue" in response.text
    # What needs no turn is answered there.
    counted = httpx.post(f"{url}gradio_api/run/tokens", json={"data": [LONG, False]})
    assert counted.json()["data"][0]["count"] == 93


def test_closing_a_drawing_returns_at_once_and_the_next_waits_for_its_end(models, monkeypatch):
    happened, pictures = [], []

    def slowly_ended(*arguments):
        happened.append("begins")
        try:
            yield from draw(*arguments)
        finally:
            time.sleep(0.2)
            happened.append("ends")

    monkeypatch.setattr(device, "draw", slowly_ended)
    mine, request = device.Device(models), replace(models.defaults, prompt=LONG, steps=50)
    quick = replace(request, steps=2, encoders=("toy/clip",))
    first = mine.draw(request)
    next(first)
    following = threading.Thread(target=lambda: pictures.extend(mine.draw(quick)))
    following.start()
    time.sleep(0.1)
    first.close()
    assert happened == ["begins"]
    following.join()
    with mine.alone() as same:
        assert same is models
    assert happened == ["begins", "ends"] * 2
    assert [news.png for news in pictures if isinstance(news, Drawn)] == alone(models)


def test_memory_that_does_not_suffice_is_told_and_frees_the_device(models):
    mine = device.Device(models)
    with pytest.raises(UserError, match="cpu is out of memory"), mine.alone():
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")
    with mine.alone() as same:
        assert same is models


def together(url: str, seeds: range) -> list[list[bytes]]:
    """Everybody asks at once, each with another seed and connection."""

    def ask(seed: int) -> list[bytes]:
        return pngs(generate(Visitor(url), seed=seed))

    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(ask, seeds))


def test_nobody_gets_anothers_picture(url, models):
    assert together(url, range(4)) == [alone(models, seed=seed) for seed in range(4)]


def test_fifty_at_once(url, models):
    found = together(url, range(50))
    expected = [alone(models, seed=seed) for seed in range(50)]
    assert len({png for (png,) in expected}) == 50
    assert found == expected


def test_memory_stays_flat(visitor):
    def resident() -> int:
        return psutil.Process().memory_info().rss

    def ask(count: int) -> None:
        for seed in range(count):
            generate(visitor, seed=seed)
            visitor.ask("tokens", [LONG, False])

    ask(40)  # what is loaded and cached once
    before = resident()
    ask(100)
    assert resident() - before < 30 * 2**20


# ---- other models


def test_models_of_ones_own(files, tmp_path):
    base = build_tiny_sdxl(tmp_path / "base")
    with opened_page(base=str(base), encoders=["original"]) as (_, url):
        (picture,) = generate(Visitor(url), "A red cat.", encoders=None, steps=1, height=32, width=48)
        with Image.open(BytesIO(base64.b64decode(picture["png"]))) as image:
            assert image.size == (48, 32)
        assert {"Height in pixels", "Width in pixels", "Harbour", "Workshop"} <= named(url)
        assert "Random scene" not in named(url)


def test_a_toy_has_scenes(url):
    assert {"Random scene", "Example 1"} <= named(url) and "Harbour" not in named(url)


def named(url: str) -> set[str]:
    """Labels of the page's visible parts, and texts of its buttons."""
    parts = [part["props"] for part in httpx.get(f"{url}config").json()["components"]]
    return {str(part.get("label") or part.get("value")) for part in parts if part.get("visible", True) is True}


# ---- what is refused


def test_bad_requests_harm_no_other(url, models):
    def bad(settings: dict) -> str:
        with pytest.raises(RuntimeError) as raised:
            generate(Visitor(url), **settings)
        return str(raised.value)

    with ThreadPoolExecutor(4) as pool:
        good = pool.submit(together, url, range(2))
        messages = set(pool.map(bad, [{"prompt": ""}, {"prompt": "a" * 20_001}, {"height": "tall"}, {"steps": 0}]))
    assert good.result() == [alone(models, seed=seed) for seed in range(2)]
    assert len(messages) == 4


def test_hostile_settings_of_a_picture_are_refused(visitor):
    file, info = BytesIO(), PngInfo()
    info.add_text("settings", '{"prompt": "a", "steps": "<img src=x>"}')
    Image.new("RGB", (8, 8)).save(file, format="PNG", pnginfo=info)
    with pytest.raises(RuntimeError, match="steps") as raised:
        visitor.ask("settings", [base64.b64encode(file.getvalue()).decode()])
    assert "<img" not in str(raised.value)


WRITES = ["upload", "upload/", "/upload", "process_recording", "component_server", "vibe-edit", "stream/x"]


def test_what_writes_or_fetches_is_closed(url):
    for path in [*(f"gradio_api/{path}" for path in WRITES), *WRITES]:
        response = httpx.post(url + path, files={"files": ("a.png", b"x"), "video": ("a.mp4", b"x")})
        assert (response.status_code, response.text) == (403, "This path is closed."), path
    fetched = ["proxy=http://127.0.0.1/", "file=/etc/passwd", "file=app/a.py"]
    for path in [*(f"gradio_api/{path}" for path in fetched), "file=x"]:
        assert httpx.get(url + path).status_code == 403


def test_nothing_is_uploaded(client, tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(Exception, match="403"):
        client.predict(handle_file(tmp_path / "a.png"), api_name="/tokens")


def test_a_gigabyte_is_refused_before_it_is_read(url, visitor):
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=20) as connection:
        connection.sendall(
            b"POST /gradio_api/queue/join HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1073741824\r\n\r\n{"
        )
        assert b" 413 " in connection.recv(1000).splitlines()[0]
    # Nor is it kept where it is not said beforehand how much it is.
    before = psutil.Process().memory_info().rss
    body = (b" " * 2**20 for _ in range(2**8))
    response = httpx.post(f"{url}gradio_api/queue/join", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 413, response.text
    assert psutil.Process().memory_info().rss - before < 2**26
    assert generate(visitor)


def test_no_file_is_fetched(url):
    file = {"path": "http://127.0.0.1/a.png", "meta": {"_type": "gradio.FileData"}}
    for value in (file, [file], {"a": [1, {"b": file}]}):
        response = httpx.post(f"{url}gradio_api/run/tokens", json={"data": [value, False]})
        assert response.json()["error"] == "Files are not accepted."


def test_what_a_visitor_was_shown_is_not_kept(demo):
    page, url = demo
    (picture,) = generate(Visitor(url))
    sessions = page.state_holder.session_data.values()
    kept = str([list(session.components) for session in sessions])
    assert sessions and picture["png"] not in kept and LONG not in kept


# ---- who gets in


def test_the_demo_is_for_this_machine_unless_told_otherwise(url):
    port = httpx.URL(url).port
    with socket.create_connection(("127.0.0.1", port)):
        pass
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port)):
        pass


def test_no_telemetry(url):
    config = httpx.get(f"{url}config").json()
    assert config["analytics_enabled"] is False
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_a_password_and_a_full_queue(files, monkeypatch, models):
    monkeypatch.setattr(launch, "MOST_WAITING", 4)  # of which one visitor has two
    access = {"host": "0.0.0.0", "user": "ann", "password": "secret"}
    with opened_page(encoders=["toy/clip"], **access) as (_, served):
        url = f"http://127.0.0.1:{httpx.URL(served).port}/"
        # A server for others answers to every name.
        assert httpx.get(url, headers={"host": "elsewhere.example"}).status_code == 200
        assert httpx.get(f"{url}config").status_code == 401
        body = {"data": [LONG], "fn_index": 0, "session_hash": "x"}
        assert httpx.post(f"{url}gradio_api/queue/join", json=body).status_code == 401
        with pytest.raises(Exception, match="login"):
            Client(url, auth=("ann", "wrong"), verbose=False)
        client = Client(url, auth=("ann", "secret"), verbose=False)
        jobs = [client.submit(LONG, steps=100, api_name="/generate")]
        wait_until(lambda: jobs[0].status().code.name == "ITERATING")
        jobs += [client.submit(LONG, api_name="/generate", **QUICK) for _ in range(2)]
        wait_until(lambda: [job.status().rank for job in jobs[1:]] in ([0, 1], [1, 0]))
        with pytest.raises(Exception, match="429"):
            client.predict(LONG, api_name="/generate")
        headers = [{"x-forwarded-for": address} for address in "ab"]
        neighbours = [Client(url, auth=("ann", "secret"), headers=each, verbose=False) for each in headers]
        jobs += [neighbour.submit(LONG, api_name="/generate", **QUICK) for neighbour in neighbours]
        wait_until(lambda: sorted(job.status().rank or 0 for job in jobs[1:]) == [0, 1, 2, 3])
        with pytest.raises(QueueError, match="full"):
            neighbours[0].predict(LONG, api_name="/generate")
        jobs[0].cancel()
        assert [pngs(job.result()) for job in jobs[1:]] == [alone(models)] * 4


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"user": "ann"}, "together"),
        ({"password": "secret"}, "together"),
        ({"port": 0}, "port"),
        ({"port": 65536}, "65536"),
        ({"host": "no such host"}, "no such host"),
        ({"host": "192.0.2.1"}, "192.0.2.1"),
        ({"encoders": ["toy/none"]}, "toy/none"),
        ({"encoders": ["toy/clip"] * 6}, "at most 5|twice"),
    ],
)
def test_settings_that_cannot_be_used(settings, message):
    with pytest.raises(UserError, match=message):
        launch.open_app(launch.AppConfig(**settings))


# ---- what the page shows


class Parsed(HTMLParser):
    """Tags, attributes and text of HTML, as a browser has them."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, text):
        self.text += text


def shown() -> dict[str, str]:
    """All that the page shows of what comes from outside, with hostile text wherever there is text."""
    scene = replace(random_scene(0), objects=[(HOSTILE, 1)])
    picture = Drawn(HOSTILE, 1, 0, Image.new("RGB", (8, 8)), b"png", HOSTILE)
    word = {"word": HOSTILE, "position": 1, "tokens": 1, "before_softmax": 0.0, "after_softmax": 0.5}
    end = {"before_softmax": 0.0, "after_softmax": 0.1}
    chunk = {"first": 0, "new": 0, "end": 1, "sot": end, "eot": end, "words": [word]}
    looked = {"tokens": 3, "read": 1, "chunks": [chunk]}
    reading = PromptReading(1, 1, (PromptChunk(0, 0, 1),))
    request = Request(prompt=HOSTILE, encoders=(HOSTILE,))
    return {
        "message": markup.message(HOSTILE),
        "note": markup.note(HOSTILE),
        "tokens": markup.token_list(PromptTokens((Token(HOSTILE, 1, "none"),), 1, {HOSTILE: reading})),
        "progress": markup.progress(Step(HOSTILE, 1, 1, 2, 0.5), request),
        "original": markup.original(scene, b"png"),
        "drawn": markup.drawn(picture, Marks((ObjectMark(HOSTILE, True, HOSTILE),), (HOSTILE,), HOSTILE)),
        "waiting": markup.waiting(HOSTILE),
        "attention": markup.attention({HOSTILE: looked}),
        "movement": markup.movement([Movement(HOSTILE, HOSTILE, {HOSTILE: 0.5})]),
    }


@pytest.mark.parametrize("name", shown())
def test_text_from_outside_stays_text(name):
    found = Parsed(shown()[name])
    assert HOSTILE in found.text
    assert "onerror" not in found.attributes and "script" not in found.tags
    assert "img" not in found.tags or name in ("original", "drawn")


def test_marks_are_said_in_words_and_signs():
    picture = Drawn("a", 1, 0, Image.new("RGB", (8, 8)), b"png", "reads all")
    objects = (
        ObjectMark("star, top", True),
        ObjectMark("ring, left", True, "large"),
        ObjectMark("cross, right", False),
    )
    text = Parsed(markup.drawn(picture, Marks(objects, ("circle, top", "something unclear, left"), "grey"))).text
    for words in (
        "2 of 3 right, 2 that nobody asked for",
        "✓ right: star, top✓ right: ring, left (wrong size: large)✗ missed: cross, right",
        "Nobody asked for:+ circle, top+ something unclear, left",
        "✗ wrong background: grey was asked for",
    ):
        assert words in text
    text = Parsed(markup.drawn(picture, Marks(objects))).text
    assert "2 of 3 right" in text and "asked for" not in text and "background" not in text
    assert "right" not in Parsed(markup.drawn(picture)).text


def test_tokens_are_shown_by_sentence_and_reader():
    some = PromptReading(3, 2, (PromptChunk(0, 0, 1), PromptChunk(0, 1, 2)))
    readings = {"clip": PromptReading(3, 1, (PromptChunk(0, 0, 1),)), "long": some, "longer": some}
    prompt = PromptTokens((Token("a ", 1, "all"), Token("b", 1, "some"), Token("c", 2, "none")), 2, readings)
    html = markup.token_list(prompt)
    assert "<strong>3 tokens</strong> in 2 sentences" in html
    assert '<li value="1"><span class="token all">a </span><span class="token some chunk">b</span></li>' in html
    assert '<li value="2"><span class="token none">c</span></li>' in html
    text = Parsed(html).text
    assert "1 read by every encoder1 read by some encoders only1 read by no encoder" in text
    assert "clip: reads the first 1 of 3 tokens" in text
    assert "long, longer: reads the first 2 of 3 tokens: 1 to 1, 1 to 2" in text
    assert "next chunk" in text
    whole = replace(prompt, readings={"clip": PromptReading(3, 3, (PromptChunk(0, 0, 3),))})
    assert "next chunk" not in markup.token_list(whole)
    assert "clip: reads all 3 tokens at once" in Parsed(markup.token_list(whole)).text


def test_words_are_shown_by_chunk():
    end = {"before_softmax": 0.0, "after_softmax": 0.1}
    words = [{"word": word, "position": place, "after_softmax": 0.2} for place, word in enumerate("abc", 1)]
    chunks = [
        {"first": 0, "new": 0, "end": 2, "sot": end, "eot": end, "words": words[:2]},
        {"first": 1, "new": 2, "end": 3, "sot": end, "eot": end, "words": words[1:]},
    ]
    html = markup.attention({"clip": {"tokens": 3, "read": 3, "chunks": chunks}})
    text = Parsed(html).text
    assert "reads all 3 tokens in 2 chunks." in text
    assert "Chunk 2, tokens 2 to 3. Grey words, up to token 2, are read again for their context." in text
    assert html.count('<li class="again"') == 1 and html.count("<tr><td>b</td>") == 1
    alone = Parsed(markup.attention({"clip": {"tokens": 9, "read": 2, "chunks": chunks[:1]}})).text
    assert "reads the first 2 of 9 tokens." in alone and "Chunk" not in alone


def test_progress_says_which_encoder_and_step():
    request = Request(prompt="", encoders=("a", "b", "c"), images=2)
    html = markup.progress(Step("b", 2, 7, 20, 0.625), request)
    assert "Encoder 2 of 3, image 2 of 2, step 7 of 20" in html and 'value="0.625"' in html
    assert "image" not in markup.progress(Step("b", 1, 7, 20, 0.5), replace(request, images=1))


# ---- as a Space


def test_a_space_has_what_it_needs():
    _, front, text = (SPACE / "README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["sdk"] == "gradio" and (SPACE / front["app_file"]).is_file() and text.strip()
    assert front["sdk_version"].split(".")[0] == version("gradio").split(".")[0]
    assert len(front["short_description"]) <= 60
    (needed,) = [line for line in (SPACE / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert re.match(r"[\w-]+", needed)[0] == "debias-diffusion"


def test_a_space_opens_and_is_ended_by_an_interrupt(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "GRADIO_TEMP_DIR": str(tmp_path)}
    command = [sys.executable, str(SPACE / "app.py")]
    settings = {"stdout": subprocess.PIPE, "env": environment, "text": True, "cwd": tmp_path}
    # What a shell starts in the background ignores interrupts, and so would what is started here.
    with subprocess.Popen(
        command, **settings, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    ) as process:
        try:
            line = next(line for line in process.stdout if "demo is at" in line)
            port = int(re.search(r"http://\S+:(\d+)", line)[1])
            assert "See what your encoder reads" in httpx.get(f"http://127.0.0.1:{port}/").text
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) in (0, 130)
        finally:
            process.kill()  # or leaving this block would wait for it for ever
