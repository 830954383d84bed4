"""The demo's endpoints, its login and what it refuses, on one server."""

import json
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from helpers.demo_clients import LONG, opened_page, wait_until
from PIL import Image

from debias_diffusion.app.demo import launch
from debias_diffusion.app.demo.models import DemoModels
from debias_diffusion.app.demo.page import choose
from debias_diffusion.app.demo.rendering import RenderedImage, render_request
from debias_diffusion.app.demo.request import Request, from_png
from debias_diffusion.devices import pick_device
from debias_diffusion.pipelines.png import read_settings

LOGIN = ("ann", "secret")
WAITING = 3  # places in the queue
HOSTILE = "<img src=x onerror=alert(1)>"
CUT = "toy/clip, cut at 77 tokens"  # the first of the encoders


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "MOST_WAITING", WAITING)
        patch.setenv(launch.PASSWORD, LOGIN[1])
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("gradio")))
        with opened_page(user=LOGIN[0]) as (_, url):
            yield url


@pytest.fixture
def client(url, tmp_path) -> Client:
    return Client(url, auth=LOGIN, verbose=False, download_files=tmp_path)


@pytest.fixture(scope="module")
def models() -> DemoModels:
    return DemoModels("toy/sdxl", launch.AppConfig().encoders, pick_device("cpu"))


@contextmanager
def visitor(url: str):
    with httpx.Client(base_url=url, timeout=60) as http:
        http.post("login", data=dict(zip(("username", "password"), LOGIN, strict=True)))
        yield http


def images(models: DemoModels, request: Request) -> list[RenderedImage]:
    return [item for item in render_request(models, request) if isinstance(item, RenderedImage)]


def test_programs_get_the_page_s_images(client, models):
    shown = client.predict(LONG, steps=2, encoders=[CUT, "toy/debias-clip"], seed="7", api_name="/generate")
    assert [image["caption"] for image in shown] == [
        f"{CUT}, seed 7: reads the first 75 of 93 tokens",
        "toy/debias-clip, seed 7: reads all 93 tokens at once",
    ]
    request, _ = from_png(shown[1]["image"], models)
    assert (request.prompt, request.steps, request.seed, request.encoders) == (LONG, 2, 7, [CUT, "toy/debias-clip"])
    for image, item in zip(shown, images(models, request), strict=True):
        with Image.open(image["image"]) as opened:
            assert opened.tobytes() == item.image.tobytes() and opened.info["settings"] == item.text["settings"]


def test_tokens_and_attention(client):
    tokens, readings = client.predict(LONG, api_name="/tokens")
    assert tokens["label"] == "Tokens: 93, sentences: 9" and len(tokens["value"]) == 93
    assert readings.splitlines()[0] == f"- **{CUT}** reads the first 75 of 93 tokens" and readings.count("\n") == 4
    *shares, movement = client.predict(LONG, encoders=[CUT], api_name="/attention")
    assert shares[0]["label"] == f"{CUT} reads the first 75 of 93 tokens" and not shares[1]["visible"]
    assert movement["value"]["headers"] == ["1 - cosine after", CUT] and len(movement["value"]["data"]) == 10


def test_a_png_restores_its_settings_and_the_marks_of_its_scene(models, client, tmp_path):
    prompt, scene, [(reference, caption)] = choose(3)
    assert prompt == LONG and caption.startswith("Reference image: ") and reference.size == (48, 48)
    assert choose("a cat") == ("a cat", None, [])
    request = Request(LONG, ["toy/clip"], steps=1, guidance_scale=3.0, height=48, width=48, scene=scene)
    (item,) = images(models, request)
    assert from_png(item.save(tmp_path), models) == (request, [])
    status, shown, prompt, encoders, *settings = client.predict(handle_file(item.save(tmp_path)), api_name="/settings")
    assert status == "All settings are restored." and prompt == LONG and encoders == ["toy/clip"]
    assert settings == ["", "0", 1, 3, 48, 48, 1, "Euler", False, "overlap"]
    assert shown[0]["caption"] == caption and "objects right" in shown[1]["caption"]


@pytest.mark.parametrize(
    "name, values, message",
    [
        ("/generate", {"prompt": ""}, "The prompt is empty"),
        ("/generate", {"prompt": "a", "seed": HOSTILE}, "seed must be a whole number .* got '&lt;img src=x onerror"),
        ("/generate", {"prompt": "a", "steps": 10_000}, "10000"),
        ("/generate", {"prompt": "a", "encoders": []}, "No encoder is chosen"),
        ("/generate", {"prompt": "a", "encoders": ["toy/x"]}, "not in the list of choices"),
        ("/generate", {"prompt": "a", "scheduler": "x"}, "not in the list of choices"),
        ("/generate", {"prompt": LONG, "images": 8, "steps": 100}, "one request may take 1,000 here"),
        ("/attention", {"prompt": " "}, "The prompt is empty"),
    ],
)
def test_errors_say_what_was_given_and_what_is_allowed(client, name, values, message):
    with pytest.raises(AppError, match=message) as caught:
        client.predict(**values, api_name=name)
    assert "<img" not in str(caught.value)


def test_the_login_is_asked_for(url):
    paths = ("config", "gradio_api/info", "gradio_api/queue/data?session_hash=a", "gradio_api/file=/etc/passwd")
    assert [httpx.get(f"{url}{path}").status_code for path in paths] == [401] * 4
    body = {"data": ["a", ["toy/clip"], False, "overlap"]}
    assert httpx.post(f"{url}gradio_api/call/tokens", json=body).status_code == 401
    assert httpx.post(f"{url}login", data={"username": "ann", "password": "guess"}).status_code == 400


def test_other_hosts_are_refused(url):
    hosts = {"127.0.0.1:7860": 200, "localhost": 200, "LOCALHOST:1": 200}
    hosts |= dict.fromkeys(("elsewhere.example", "127.0.0.1.elsewhere.example", "localhost@elsewhere.example"), 400)
    assert {host: httpx.get(url, headers={"host": host}).status_code for host in hosts} == hosts


def test_other_sites_are_refused(url):
    """A browser sends no script's request after such a preflight, and what needs none is no JSON."""
    with visitor(url) as http:
        asked = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
        for path in ("gradio_api/call/tokens", "gradio_api/queue/join", "gradio_api/upload"):
            assert "access-control-allow-origin" not in http.options(path, headers=asked).headers
            simple = {"origin": asked["origin"], "content-type": "text/plain"}
            assert http.post(path, headers=simple, content=json.dumps({"data": ["a"]})).status_code in (400, 422)


def test_no_path_of_a_visitor_reaches_the_file_system(url, client):
    for path in ("/etc/passwd", __file__, "../../../../etc/passwd"):
        with visitor(url) as http:
            assert http.get(f"gradio_api/file={path}").status_code in (403, 404)
        with pytest.raises(AppError) as caught:
            client.predict({"path": path, "meta": {"_type": "gradio.FileData"}}, api_name="/settings")
        assert "root:" not in str(caught.value) and "with settings" not in str(caught.value)


def test_files_that_are_too_large_or_no_png_are_refused(url, client, tmp_path):
    (tmp_path / "large.png").write_bytes(bytes(33 * 2**20))
    with visitor(url) as http, (tmp_path / "large.png").open("rb") as file:
        assert http.post("gradio_api/upload", files={"files": file}).status_code == 413
    (tmp_path / "no.png").write_text(HOSTILE)
    with pytest.raises(AppError, match="The file is no PNG with settings"):
        client.predict(handle_file(tmp_path / "no.png"), api_name="/settings")


def test_a_full_queue_refuses_and_tokens_are_counted_meanwhile(url, client, monkeypatch):
    free, started = threading.Event(), threading.Event()

    def waiting(*arguments):
        started.set()
        free.wait(60)
        yield from ()

    monkeypatch.setattr("debias_diffusion.app.demo.page.render_request", waiting)
    body = {"data": ["a", ["toy/clip"], "", "0", 1, 3, 48, 48, 1, "Euler", False, "overlap"]}
    with visitor(url) as http:
        try:
            assert http.post("gradio_api/call/generate", json=body).is_success
            wait_until(started.is_set)
            asked = [http.post("gradio_api/call/generate", json=body) for _ in range(WAITING + 1)]
            assert [answer.status_code for answer in asked] == [200] * WAITING + [503]
            assert "Queue is full" in asked[-1].text
            # As the page counts.
            counted = http.post("gradio_api/run/tokens", json={"data": [LONG, ["toy/clip"], False, "overlap"]})
            assert counted.json()["data"][0]["label"] == "Tokens: 93, sentences: 9"
        finally:
            free.set()
    client.predict("a", api_name="/generate")  # those who waited had their turns


def test_who_goes_away_is_not_generated_for(client, monkeypatch):
    steps = []

    def counted(*arguments):
        for item in render_request(*arguments):
            steps.append(item)
            yield item

    monkeypatch.setattr("debias_diffusion.app.demo.page.render_request", counted)
    job = client.submit(LONG, steps=100, api_name="/generate")
    wait_until(lambda: len(steps) > 3)
    assert job.cancel()
    taken = len(steps)
    client.predict("a", encoders=["toy/clip"], steps=1, api_name="/generate")  # which waits for its step
    assert len([item for item in steps[taken:] if "of 100" in getattr(item, "place", "")]) <= 2


def test_the_space_has_what_it_needs():
    root = Path(launch.__file__).parents[1] / "space"
    assert "sdk: gradio" in (root / "README.md").read_text() and "app_file: app.py" in (root / "README.md").read_text()
    assert compile((root / "app.py").read_text(), "app.py", "exec") and read_settings(root / "README.md") is None
