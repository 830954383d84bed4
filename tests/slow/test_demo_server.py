"""The demo's endpoints, its login and what it refuses, on one server."""

import io
import threading

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
from debias_diffusion.app.demo.request import Request
from debias_diffusion.devices import pick_device

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


@pytest.fixture
def visitor(url):
    with httpx.Client(base_url=url, timeout=60) as http:
        http.post("login", data={"username": LOGIN[0], "password": LOGIN[1]})
        yield http


def test_programs_get_the_page_s_images_and_restore_their_settings(client, tmp_path):
    models = DemoModels("toy/sdxl", launch.AppConfig().encoders, pick_device("cpu"))
    _, scene, [(_, reference)] = choose(3)
    encoders, small = [CUT, "toy/debias-clip"], {"guidance_scale": 3.0, "height": 48, "width": 48}
    request = Request(LONG, encoders, steps=2, seed=7, scene=scene, **small)
    shown = client.predict(LONG, steps=2, encoders=encoders, seed="7", api_name="/generate")
    assert [image["caption"] for image in shown] == [
        "SDXL as it is (cut at 77), seed 7: reads the first 75 of 93 tokens",
        "DeBias-CLIP, seed 7: reads all 93 tokens at once",
    ]
    expected = [item for item in render_request(models, request) if isinstance(item, RenderedImage)]
    for image, item in zip(shown, expected, strict=True):
        with Image.open(image["image"]) as opened:
            assert opened.tobytes() == item.image.tobytes()
    # Of a scene, its marks are restored too.
    png = handle_file(expected[1].save(tmp_path))
    status, shown, prompt, restored, *settings = client.predict(png, api_name="/settings")
    assert status == "All settings are restored." and (prompt, restored) == (LONG, encoders)
    assert settings == ["", "7", 2, 3, 48, 48, 1, "Euler", "", "overlap", 1.0, False, 0]
    assert shown[0]["caption"] == reference and "objects right" in shown[1]["caption"]


@pytest.mark.parametrize(
    "name, values, message",
    [
        ("/generate", {"prompt": "a", "seed": HOSTILE}, "got '&lt;img src=x onerror"),
        ("/generate", {"prompt": "a", "steps": "many"}, "steps is 'many'"),
        ("/attention", {"prompt": "a", "reading": [3]}, r"reading is \[3\]"),
        ("/settings", {"path": 3}, "not uploaded"),
        ("/generate", {"prompt": LONG, "images": 8, "steps": 100}, "may take 1,000 here"),
        ("/attention", {"prompt": " "}, "The prompt is empty"),
    ],
)
def test_errors_say_what_was_given_and_what_is_allowed(client, name, values, message, capfd):
    with pytest.raises(AppError, match=message) as caught:
        client.predict(**values, api_name=name)
    assert "<img" not in str(caught.value) and "Traceback" not in capfd.readouterr().err


def test_the_login_is_asked_for(url):
    paths = ("config", "gradio_api/info", "gradio_api/queue/data?session_hash=a", "gradio_api/file=/etc/passwd")
    assert [httpx.get(f"{url}{path}").status_code for path in paths] == [401] * 4
    body = {"data": ["a", ["toy/clip"], "", "overlap"]}
    assert httpx.post(f"{url}gradio_api/call/tokens", json=body).status_code == 401
    assert httpx.post(f"{url}login", data={"username": "ann", "password": "guess"}).status_code == 400


def test_other_hosts_are_refused(url):
    hosts = {"127.0.0.1:7860": 200, "localhost": 200, "LOCALHOST:1": 200}
    hosts |= dict.fromkeys(("elsewhere.example", "127.0.0.1.elsewhere.example", "localhost@elsewhere.example"), 400)
    assert {host: httpx.get(url, headers={"host": host}).status_code for host in hosts} == hosts


@pytest.mark.parametrize("path", ["call/generate", "queue/join", "upload"])
def test_other_sites_are_refused(visitor, path):
    asked = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in visitor.options(f"gradio_api/{path}", headers=asked).headers
    body = {"files": {"files": io.BytesIO(b"a")}} if path == "upload" else {"json": {"data": ["a"], "fn_index": 3}}
    for headers in ({"origin": asked["origin"]}, {"sec-fetch-site": "cross-site"}):
        assert visitor.post(f"gradio_api/{path}", headers=headers, **body).status_code == 403
    assert visitor.post(f"gradio_api/{path}", headers={"origin": str(visitor.base_url)}, **body).status_code != 403


def test_no_path_reaches_the_file_system_and_no_file_but_a_png_is_taken(visitor, client, tmp_path):
    for path in ("/etc/passwd", __file__, "../../../../etc/passwd"):
        assert visitor.get(f"gradio_api/file={path}").status_code in (403, 404)
        with pytest.raises(AppError) as caught:
            client.predict({"path": path, "meta": {"_type": "gradio.FileData"}}, api_name="/settings")
        assert "root:" not in str(caught.value) and "with settings" not in str(caught.value)
    large = io.BytesIO(bytes(33 * 2**20))
    assert visitor.post("gradio_api/upload", files={"files": large}).status_code == 413
    (tmp_path / "no.png").write_text(HOSTILE)
    with pytest.raises(AppError, match="The settings in the image"):
        client.predict(handle_file(tmp_path / "no.png"), api_name="/settings")


def test_a_full_queue_refuses_and_tokens_are_counted_meanwhile(visitor, client, monkeypatch):
    free, started = threading.Event(), threading.Event()

    def waiting(*arguments):
        started.set()
        free.wait(60)
        yield from ()

    monkeypatch.setattr("debias_diffusion.app.demo.page.render_request", waiting)
    body = {"data": ["a", ["toy/clip"], "", "0", 1, 3, 48, 48, 1, "Euler", "", "overlap", 1.0, False, 0]}
    try:
        assert visitor.post("gradio_api/call/generate", json=body).is_success
        wait_until(started.is_set)
        asked = [visitor.post("gradio_api/call/generate", json=body) for _ in range(WAITING + 1)]
        assert [answer.status_code for answer in asked] == [200] * WAITING + [503]
        assert "Queue is full" in asked[-1].text
        # As the page counts.
        counted = visitor.post("gradio_api/run/tokens", json={"data": [LONG, ["toy/clip"], "", "overlap"]})
        tokens = counted.json()["data"][0]
        assert tokens["label"] == "Tokens: 93, sentences: 9; ✂ an encoder's next chunk"
        assert sum(part["token"] == "✂" for part in tokens["value"]) == 1
    finally:
        free.set()
    client.predict("a", api_name="/generate")  # those who waited had their turns
