"""Who reaches the demo: by which names, from which pages, and with which password; and what errors say."""

import base64
import json
import re
import socket
import sys
import threading

import httpx
import pytest
from helpers.demo_clients import LONG, Visitor, drawing, opened_page, wait_until
from starlette.routing import Route

from debias_diffusion.app import cli
from debias_diffusion.app.demo import guard, launch, visitors
from debias_diffusion.app.demo.visitors import LONGEST_WAIT, MOST_VISITORS, Logins
from debias_diffusion.errors import UserError


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def url():
    with opened_page(encoders=["toy/clip"]) as (_, url):
        yield url


@pytest.fixture(scope="module")
def locked():
    """(page, address) of a demo for which one needs a password."""
    with opened_page(encoders=["toy/clip"], user="ann", password="secret") as found:
        yield found


def raw(url: str, head: str) -> bytes:
    """The first line of the answer to a request as it stands."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n")
        return connection.recv(10_000).splitlines()[0]


# ---- names of the server

LOCAL = ["localhost", "LOCALHOST", "localhost:1", "127.0.0.1:65535", "127.1.2.3", "[::1]", "[::1]:7860"]
OTHERS = "evil.com 127.0.0.1:evil.com 127.0.0.1:7860:evil.com 127.0.0.1: 127.0.0.1:99999 127.1 localhost."
OTHERS += " localhost.evil.com a@localhost localhost:1@evil.com localhost/ [::1 ::1 [::2] [::1]evil.com [localhost]"
OTHERS += " localhost,evil.com 0.0.0.0 0x7f.0.0.1 é"


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_this_machine_lead_to_it(url, host):
    assert b" 200 " in raw(url, f"GET /config HTTP/1.1\nHost: {host}")


@pytest.mark.parametrize("host", ["", "127.0.0.1 evil.com", *OTHERS.split()])
def test_no_other_names_lead_to_it(url, host):
    assert re.search(rb" 40[03] ", raw(url, f"GET /config HTTP/1.1\nHost: {host}"))


@pytest.mark.parametrize("headers", ["\nHost: localhost\nHost: evil.com", "\nHost: evil.com\nHost: localhost"])
def test_one_name_is_given(url, headers):
    assert re.search(rb" 40[03] ", raw(url, f"GET /config HTTP/1.1{headers}"))
    assert re.search(rb" 40[03] ", raw(url, "GET /config HTTP/1.0"))


@pytest.mark.parametrize(
    "host", ["127.0.0.2", "localhost", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]
)
def test_every_address_of_this_machine_alone_is_guarded(host):
    with opened_page(encoders=["toy/clip"], host=host) as (_, url):
        assert httpx.get(f"{url}config").status_code == 200
        assert httpx.get(f"{url}config", headers={"host": "evil.com"}).status_code == 403
        for origin, allowed in (("http://evil.com", False), ("null", False), (url.rstrip("/"), True)):
            for response in (
                httpx.get(f"{url}config", headers={"origin": origin}),
                httpx.options(f"{url}config", headers={"origin": origin, "access-control-request-method": "POST"}),
            ):
                assert (response.headers.get("access-control-allow-origin") == origin) is allowed
        assert Visitor(url).ask("tokens", [LONG, False])[0]["count"] == 93


def test_other_sites_read_nothing_with_a_visitors_login(locked):
    _, url = locked
    with httpx.Client(base_url=url) as client:
        client.post("login", data={"username": "ann", "password": "secret"})
        assert client.get("config").status_code == 200
        response = client.get("config", headers={"origin": "http://evil.com"})
        assert "access-control-allow-origin" not in response.headers
        assert "access-control-allow-credentials" not in response.headers
        own = client.get("config", headers={"origin": url.rstrip("/")})
        assert own.headers["access-control-allow-origin"] == url.rstrip("/")


def test_a_port_that_is_taken_elsewhere_on_this_machine_is_passed_over():
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        assert launch._free_port("127.0.0.2", port) > port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert launch._free_port("127.0.0.2", port) > port  # gradio wants it here too


# ---- passwords


def test_the_password_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "password"
    file.write_text("from a file \nanother line\n")

    def password(**settings) -> str | None:
        return launch._check(launch.AppConfig(user="ann", **settings))[1]

    assert password(password_file=str(file)) == "from a file "
    assert password(password="given") == "given"
    monkeypatch.setenv("DEBIAS_DIFFUSION_PASSWORD", "from the environment")
    assert password() == "from the environment"
    assert password(password_file=str(file)) == "from a file "
    assert launch._check(launch.AppConfig()) == ("127.0.0.1", None)  # without a user it is not for this run


@pytest.mark.parametrize(
    "content, message",
    [(None, "cannot be read"), (b"", "got 0"), (b"\nx", "got 0"), (b"x" * 2000, "1 to 1,000"), (b"\xff", "read")],
)
def test_password_files_that_cannot_be_used(tmp_path, content, message):
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        launch.open_app(launch.AppConfig(user="ann", password_file=str(file)))
    with pytest.raises(UserError, match="Give one of them"):
        launch.open_app(launch.AppConfig(user="ann", password="a", password_file=str(file)))


def test_what_lets_others_in_is_warned_of(capsys, monkeypatch):
    def warnings(**settings) -> str:
        launch._check(launch.AppConfig(**settings))
        return capsys.readouterr().err

    for host in ("0.0.0.0", "::"):
        assert "Anyone who can reach this machine" in warnings(host=host)
        assert warnings(host=host, user="ann", password="secret") == ""
    assert warnings() == ""
    monkeypatch.setattr(sys, "argv", ["debias-diffusion", "app", "--password=secret"])
    assert "process list" in warnings(user="ann", password="secret")
    with pytest.raises(UserError, match="host is empty"):
        launch._check(launch.AppConfig(host=""))


@pytest.mark.parametrize(
    "settings, warned",
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "user": "ann", "password": "secret"}, False),
        ({"host": "127.0.0.2"}, False),
    ],
)
def test_the_page_says_that_it_has_no_password(settings, warned):
    with opened_page(encoders=["toy/clip"], **settings) as (page, _):
        (status,) = [block for block in page.blocks.values() if block.elem_id == "status"]
    assert ("Anyone who can reach this machine can use the demo. It has no password." in status.value) is warned


def routes(some: list) -> list[Route]:
    """Those of nested routers too."""
    found = []
    for route in some:
        router = getattr(route, "original_router", None) or getattr(route, "app", None)
        nested = [] if isinstance(route, Route) else getattr(router, "routes", [])
        found += [route] if isinstance(route, Route) else routes(nested)
    return found


def test_every_address_needs_the_login(locked):
    """Whatever gradio's own routes ask for: a new one that asks for nothing is shut until somebody opens it."""
    page, url = locked
    asked = set()
    for route in routes(page.app.routes):
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        for method in route.methods or ():
            status = httpx.request(method, url.rstrip("/") + path).status_code
            is_open = path in guard._OPEN or path.startswith(guard._OPEN_FOLDERS)
            assert is_open or status in (401, 403), (method, path, status)
            asked.add(path)
    assert {"/gradio_api/cancel", "/gradio_api/reset", "/gradio_api/heartbeat/x", "/config", "/"} <= asked
    assert len(asked) > 40
    assert httpx.get(f"{url}no/such/page").status_code == 401


def test_what_is_open_tells_nothing(locked):
    _, url = locked
    for path in guard._OPEN:
        assert "toy/" not in httpx.get(url.rstrip("/") + path).text, path


def test_who_logs_in_gets_answers(locked):
    _, url = locked
    visitor = Visitor(url, "203.0.113.77")
    assert visitor.call("tokens", [LONG, False]).status_code == 401
    assert visitor.http.post("login", data={"username": "ann", "password": "secret"}).status_code == 200
    assert visitor.ask("tokens", [LONG, False])[0]["count"] == 93
    assert visitor.http.post("gradio_api/reset", json={"event_id": "x"}).status_code == 200
    with visitor.http.stream("GET", "gradio_api/heartbeat/x") as stream:
        assert next(stream.iter_lines()) == "data: ALIVE"
    visitor.http.cookies.set(next(iter(visitor.http.cookies)), "guessed")
    for cookie in list(visitor.http.cookies.jar):
        cookie.value = "guessed"
    assert visitor.http.get("config").status_code == 401


def test_wrong_passwords_are_slowed_and_the_right_one_is_not(locked, monkeypatch):
    _, url = locked
    for module in (visitors, guard):
        monkeypatch.setattr(module, "LONGEST_WAIT", 2.0)

    def log_in(address: str, password: str) -> httpx.Response:
        visitor = Visitor(url, address)
        return visitor.http.post("login", data={"username": "ann", "password": password})

    refused, looked_at = [], []

    def guess() -> None:
        response = log_in("198.51.100.1", "wrong")
        (refused if response.status_code == 429 else looked_at).append(response)

    threads = [threading.Thread(target=guess, daemon=True) for _ in range(60)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(refused) >= 40)
    assert len(looked_at) < 15 and {response.status_code for response in looked_at} <= {400}
    assert all(int(response.headers["retry-after"]) > 0 for response in refused)
    assert "Too many wrong passwords" in refused[0].json()["detail"]
    assert log_in("198.51.100.2", "secret").status_code == 200
    for thread in threads:
        thread.join()  # or closing the server would wait for them


def test_guesses_are_slowed_each_and_all():
    logins = Logins()
    assert [logins.wait("a", 0.0) for _ in range(5)] == [0.0] * 5
    assert [logins.wait("a", 0.0) for _ in range(6)] == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0]
    assert logins.wait("a", 0.0) == 31.0 > LONGEST_WAIT  # which is refused, and not counted
    assert logins.wait("a", 31.0) == 0.0
    assert logins.wait("b", 31.0) == 0.0
    logins.right("a")
    assert logins.wait("a", 31.0) == 0.0
    # In an hour of guessing as fast as it is let.
    now, looked_at = 1000.0, 0
    while now < 4600:
        looked_at += logins.wait("c", now) <= LONGEST_WAIT
        now += 0.5
    assert looked_at < 140


def test_guesses_from_many_addresses_are_slowed_and_those_who_were_right_are_not():
    logins = Logins()
    assert logins.wait("ann", 0.0) == 0.0
    logins.right("ann")
    waits = [logins.wait(str(number), 1.0) for number in range(1000)]
    assert waits[:100] == [0.0] * 100 and 0 < waits[110] < 20 and waits[-1] > LONGEST_WAIT
    assert logins.wait("ann", 1.0) == 0.0
    assert logins.wait("another", 1.0 + LONGEST_WAIT + 2) < LONGEST_WAIT  # who has not been here is let in in time


def test_guesses_take_a_bounded_part_of_memory():
    logins = Logins()
    for number in range(MOST_VISITORS + 50):
        logins.wait(str(number), float(number))
        logins.right(str(number))
        logins.wait(str(number), float(number))
    assert len(logins._each) == len(logins._known) == MOST_VISITORS


# ---- what errors say

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def quiet(capfd):
    """Holds that the server prints no traceback."""
    yield
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said, said


def bad_requests(number: int) -> dict[str, tuple[str, object]]:
    """Path and body of requests to the raw API that cannot be answered."""
    data = [LONG, False]
    return {
        "too few": ("run/tokens", {"data": []}),
        "of other types": ("run/tokens", {"data": [{"a": [1]}, "perhaps"]}),
        "no endpoint": ("run/nothing", {"data": data}),
        "no endpoint to call": ("call/nothing", {"data": data}),
        "no endpoint by names": ("call/v2/nothing", {"prompt": LONG}),
        "no such name": ("call/v2/tokens", {"nothing": 1}),
        "no function": ("run/tokens", {"data": data, "fn_index": 10**6}),
        "no function to join": ("queue/join", {"data": data, "fn_index": 10**6, "session_hash": "x"}),
        "no number": ("queue/join", {"data": data, "session_hash": "x"}),
        "no session": ("queue/join", {"data": data, "fn_index": number}),
        "no data": ("run/tokens", {}),
        "no object": ("run/tokens", [1, 2]),
        "no picture": ("run/settings", {"data": [7]}),
        "not to pass the queue": ("run/generate", {"data": drawing()}),
    }


@pytest.mark.parametrize("name", bad_requests(0))
def test_errors_of_the_raw_api_say_what_is_wrong(url, name, quiet):
    visitor = Visitor(url)
    path, body = bad_requests(visitor.number("tokens"))[name]
    response = visitor.http.post(f"gradio_api/{path}", json=body)
    assert response.status_code >= 400
    said = response.json()
    assert said.get("error") or said.get("detail") or said.get("data"), said


TOO_LONG = "word " * 20_000
# tests/test_demo_core.py checks every setting.
CALLS = {
    "too few": ("tokens", [], "enough input values"),
    "of other types": ("generate", [LONG, "toy/clip", 1, "a", {}, [], None, None, "x", 7, "maybe", 8], "must be"),
    "no prompt": ("generate", drawing(prompt=""), "prompt"),
    "100,000 characters": ("generate", drawing(prompt=TOO_LONG), "20,000"),
    "as many tokens": ("tokens", [TOO_LONG, False], "20,000"),
    "as many words": ("attention", [TOO_LONG, None], "20,000"),
    "no text": ("generate", drawing(prompt={"a": 1}), "must be text"),
    "too many steps": ("generate", drawing(steps=10**9), "steps"),
    "odd size": ("generate", drawing(height="tall"), "height"),
    "guidance": ("generate", drawing(guidance_scale=1e30), "guidance"),
    "not a policy": ("generate", drawing(long_prompts="../.."), "long_prompts"),
    "no list": ("generate", drawing(encoders="toy/clip"), "toy/clip"),
    "path": ("generate", drawing(encoders=["/etc/passwd"]), "Choose one of"),
    "no encoder": ("attention", [LONG, ["/etc/passwd"]], "Choose one of"),
    "HTML": ("generate", drawing(encoders=[HOSTILE]), "&lt;img"),
    "no file": ("settings", [None], "PNG"),
    "empty file": ("settings", [""], "PNG"),
    "no base64": ("settings", ["é"], "PNG"),
    "no PNG": ("settings", [base64.b64encode(b"GIF89a").decode()], "PNG"),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_calls_say_what_is_wrong(url, name, quiet):
    endpoint, data, message = CALLS[name]
    with pytest.raises(RuntimeError) as raised:
        Visitor(url).ask(endpoint, data)
    error = json.loads(str(raised.value))["error"]
    assert message in error and len(error) > 20 and "<img" not in error


def test_functions_of_the_page_say_what_is_wrong_too(url, quiet):
    visitor = Visitor(url)
    functions = visitor.http.get("config").json()["dependencies"]
    for function in functions:
        for data in ([], [{"a": 1}] * 3, [None] * len(function["inputs"]), [[HOSTILE]] * len(function["inputs"])):
            body = {"data": data, "fn_index": function["id"], "session_hash": "x", "trigger_id": 10**6, "event_data": 7}
            said = visitor.http.post(f"gradio_api/run/{function['api_name']}", json=body).json()
            assert said.get("data") is not None or said.get("error") or said.get("detail"), (function, said)
            assert "<img" not in str(said.get("error"))


def test_the_command_says_what_it_does_with_passwords(capsys):
    cli.main(["app", "--help"])
    text = capsys.readouterr().out
    for word in ("--password-file", "DEBIAS_DIFFUSION_PASSWORD", "--budget"):
        assert word in text
