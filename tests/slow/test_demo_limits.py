"""Limits for one visitor of the demo: memory, places in the queue, and time of the device."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest
from gradio import queueing
from gradio.server_messages import HeartbeatMessage, ProcessCompletedMessage
from helpers.demo_clients import LARGE, LONG, Visitor, drawing, opened_page, wait_until
from helpers.demo_steps import counted_steps

from debias_diffusion.app.demo import fair_queue, guard, launch
from debias_diffusion.app.demo.visitors import visitor
from debias_diffusion.errors import UserError


@pytest.fixture(scope="module")
def demo():
    """(page, visitor) of a demo."""
    with opened_page(encoders=["toy/clip"]) as (page, url):
        yield page, Visitor(url)


@pytest.fixture(scope="module")
def small():
    """A demo with a short queue and a small budget."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "MOST_WAITING", 8)
        with opened_page(encoders=["toy/clip"], budget=100) as found:
            yield found


def kept(page) -> dict[str, int]:
    """How much gradio keeps for visitors who may come to fetch it."""
    queue = page._queue
    return {
        "messages": len(queue.pending_messages_per_session),
        "requests": len(queue.event_ids_to_events),
        "sessions": len(queue.pending_event_ids_session),
        "drawings": len(page.app.iterators),
        "bytes": sum(box.size for box in queue.pending_messages_per_session.values()),
    }


def settle(page) -> None:
    """Waits until nothing is kept."""
    try:
        wait_until(lambda: not any(kept(page).values()))
    except AssertionError:
        raise AssertionError(str(kept(page))) from None


# ---- answers that nobody fetches


def test_guards_lean_on_what_gradio_has(demo):
    """What is changed here of gradio has to be there, and used: else the guards would do nothing, without a word."""
    page, _ = demo
    queue = page._queue
    assert type(queue) is fair_queue.Queue and isinstance(queue.pending_messages_per_session, fair_queue._Mailboxes)
    assert type(page.app) is guard.Server and type(page.app.middleware_stack) is guard.Guard
    for name in ("push", "send_message", "start", "broadcast_estimations"):
        assert callable(getattr(queueing.Queue, name))
    for name in ("event_ids_to_events", "pending_event_ids_session", "event_queue_per_concurrency_id"):
        assert isinstance(getattr(queue, name), dict)


def test_an_answer_is_kept_for_who_fetches_it_later(demo):
    page, visitor = demo
    events = [visitor.call("tokens", [LONG, False]).json()["event_id"] for _ in range(3)]
    wait_until(lambda: not page._queue.event_ids_to_events)
    expected = visitor.http.post("gradio_api/run/tokens", json={"data": [LONG, False]}).json()["data"]
    assert [visitor.fetch("tokens", event) for event in events] == [expected] * 3
    assert visitor.ask("generate", drawing(encoders=["toy/clip"]))[0][0]["label"] == "toy/clip"


def test_answers_that_nobody_fetches_are_forgotten(demo, monkeypatch):
    page, visitor = demo
    monkeypatch.setattr(fair_queue, "UNREAD", 0.5)
    assert {visitor.abandon("tokens", [LARGE, False]) for _ in range(3)} == {200}
    visitor.abandon("generate", drawing(encoders=["toy/clip"]))
    number = visitor.number("tokens")
    for session in range(4):
        visitor.join(number, [LONG, False], f"session {session}")
        visitor.cancel(number, [LONG, False], f"cancelled {session}")
    assert kept(page)["messages"] > 0
    settle(page)
    assert visitor.ask("tokens", [LONG, False])[0]["count"] == 93


def test_a_drawing_that_nobody_waits_for_ends(demo, monkeypatch):
    page, visitor = demo
    steps = counted_steps(monkeypatch)
    monkeypatch.setattr(fair_queue, "UNREAD", 0.5)
    visitor.abandon("generate", drawing(steps=100, prompt=LONG * 20))
    wait_until(lambda: steps)
    settle(page)
    assert visitor.ask("generate", drawing())[0][0]["read"]
    assert 0 < len([step for step in steps if step.steps == 100]) < 100


def test_answers_that_wait_take_a_bounded_part_of_memory(demo, monkeypatch):
    page, visitor = demo
    monkeypatch.setattr(fair_queue, "MOST_UNREAD", 200_000)
    most = 0
    for _ in range(10):
        event = visitor.call("tokens", ["a " * 1000, False]).json()["event_id"]
        wait_until(lambda: not page._queue.event_ids_to_events)
        most = max(most, kept(page)["bytes"])
    one = len(str(visitor.fetch("tokens", event)))  # the last is still there
    assert 30_000 < one < most < 200_000 + one


def test_sessions_are_bounded_and_those_that_are_read_are_kept(demo, monkeypatch):
    page, visitor = demo
    monkeypatch.setattr(fair_queue, "MOST_SESSIONS", 5)
    mailboxes, events = page._queue.pending_messages_per_session, []
    before = set(mailboxes)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(Visitor(visitor.url).ask, "generate", drawing(steps=40))
        wait_until(lambda: page.app.iterators and set(mailboxes) - before)
        (session,) = set(mailboxes) - before
        for _ in range(10):
            wait_until(mailboxes[session].empty)  # on a busy machine its reader may be late, and would count as gone
            events.append(visitor.call("tokens", [LONG, False]).json()["event_id"])
        wait_until(lambda: not set(events) & set(page._queue.event_ids_to_events))
        assert kept(page)["messages"] <= 6
        assert visitor.fetch("tokens", events[-1])[0]["count"] == 93
        with pytest.raises(RuntimeError):
            visitor.fetch("tokens", events[0])
        assert patient.result()[0][0]["label"] == "toy/clip"


def test_a_cancel_in_the_wrong_moment_stops_nobody(demo, monkeypatch):
    page, visitor = demo
    begin, cancelled = queueing.run_coro_in_background, []

    def cancel_at_once(function, *arguments):
        task = begin(function, *arguments)
        if function.__name__ == "process_events" and not cancelled:
            cancelled.append(task.cancel())
        return task

    monkeypatch.setattr(queueing, "run_coro_in_background", cancel_at_once)
    lost = visitor.call("tokens", [LONG, False]).json()["event_id"]
    assert visitor.ask("tokens", [LONG, False])[0]["count"] == 93
    assert cancelled == [True] and lost not in page._queue.event_ids_to_events


def test_a_cancel_in_the_end_of_an_answer_leaves_nothing(demo, monkeypatch):
    page, visitor = demo
    ending, cancelled = queueing.Queue.reset_iterators, []

    async def cancelled_there(queue, event_id):
        if not cancelled:
            cancelled.append((event_id, asyncio.current_task().cancel()))
        await asyncio.sleep(0)
        await ending(queue, event_id)

    monkeypatch.setattr(queueing.Queue, "reset_iterators", cancelled_there)
    assert visitor.ask("tokens", [LONG, False])[0]["count"] == 93
    wait_until(lambda: cancelled)
    wait_until(lambda: not page._queue.event_ids_to_events, 5)
    assert cancelled[0][1] and visitor.ask("tokens", [LONG, False])[0]["count"] == 93


def test_a_mailbox_gives_back_what_was_put_in():
    async def through() -> list:
        box = fair_queue.Mailbox()
        outputs = [{"data": [{"a": 1.5, "b": "ü", "c": [None, True, 2**63 - 1]}]}, {}, {"error": "x"}]
        for output in outputs:
            box.put_nowait(ProcessCompletedMessage(output=output, success=True))
            box.put_nowait(HeartbeatMessage())  # which says nothing while something waits
        assert box.qsize() == 3 and box.size > 50
        return [(await box.get()).output for _ in outputs] + [box.size], outputs

    (*found, size), outputs = anyio.run(through)
    assert found == outputs and size == 0


def test_names_of_sessions_are_short(demo):
    page, visitor = demo
    name = "x" * 100_000
    before = len(page.state_holder.session_data)
    response = visitor.join(visitor.number("tokens"), [LONG, False], name)
    assert response.status_code == 400 and "100 characters" in response.json()["detail"]
    body = {"data": [LONG, False], "session_hash": name}
    response = visitor.http.post("gradio_api/run/tokens", json=body)
    assert "100 characters" in response.json()["error"]
    assert len(page.state_holder.session_data) == before


# ---- clients that neither read nor go


def test_who_never_reads_is_cut_off(demo, monkeypatch):
    page, visitor = demo
    monkeypatch.setattr(guard, "PATIENCE", 0.5)
    connections = page.server.server_state.connections
    before = len(connections)
    stuck = visitor.never_read(visitor.number("tokens"), [LARGE, False], "stuck", times=15)
    wait_until(lambda: len(connections) > before)
    wait_until(lambda: len(connections) <= before)
    stuck.close()
    assert visitor.ask("tokens", [LONG, False])[0]["count"] == 93


def test_who_never_sends_is_cut_off(demo, monkeypatch):
    _, visitor = demo
    monkeypatch.setattr(guard, "PATIENCE", 0.5)
    head = "POST /gradio_api/queue/join HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with visitor.send(f"{head}Content-Length: 1000\r\n\r\n{{") as connection:
        assert b" 408 " in connection.recv(1000).splitlines()[0]


def test_long_answers_are_handed_over_in_pieces():
    sent = []

    async def send(message):
        sent.append(message)

    async def through() -> None:
        connection = guard._Connection(None, send, lambda headers: None, lambda status: None)
        await connection.send({"type": "http.response.start", "status": 200, "headers": []})
        for body, more in ((b"a" * 200_000, True), (b"", True), (b"b" * 65_537, False)):
            await connection.send({"type": "http.response.body", "body": body, "more_body": more})
        await connection.finish()  # which has nothing left to do

    anyio.run(through)
    bodies = sent[1:]
    assert b"".join(message["body"] for message in bodies) == b"a" * 200_000 + b"b" * 65_537
    assert max(len(message["body"]) for message in bodies) <= 2**16
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]


# ---- shares of the queue


def test_the_budget_is_an_option_and_nothing_is_drawn_beyond_it(small, monkeypatch):
    steps = counted_steps(monkeypatch)
    visitor = Visitor(small[1])
    assert visitor.ask("generate", drawing())[0][0]["png"] and len(steps) == 3
    with pytest.raises(RuntimeError, match="takes 102 steps .*may take 100 here"):
        visitor.ask("generate", drawing(steps=51, images=2))
    assert len(steps) == 3
    with pytest.raises(UserError, match="at least 1 step, got 0"):
        launch.open_app(launch.AppConfig(budget=0))


@pytest.fixture
def busy(small):
    """(page, address) of a demo that draws for a visitor who does not wait for it, and at the end draws no more."""
    page, url = small
    Visitor(url, "203.0.113.99").call("generate", drawing(steps=100)).raise_for_status()
    wait_until(lambda: page.app.iterators)
    yield page, url
    for session in list(page._queue.pending_messages_per_session):
        page._queue.forget(session)
    settle(page)


def test_a_visitor_cannot_fill_the_queue_and_others_come_in_between(busy):
    page, url = busy
    one, other, third = Visitor(url, "203.0.113.1"), Visitor(url, "203.0.113.2"), Visitor(url, "2001:db8::1")
    statuses = [one.abandon("generate", drawing()) for _ in range(5)]
    assert statuses == [200] * 4 + [429]
    refused = one.call("generate", drawing())
    assert "4 waiting requests, and the 4 places left" in refused.json()["detail"]
    assert [other.abandon("generate", drawing()) for _ in range(3)] == [200, 200, 429]
    assert third.abandon("generate", drawing()) == 200
    waiting_names = [visitor(event.request.client) for event in page._queue._line("device")]
    a, b, c = "203.0.113.1", "203.0.113.2", "2001:db8::"
    assert waiting_names == [a, b, c, a, b, a, a]


def test_a_visitor_with_many_tabs_has_one_share(busy):
    """Of drawings and analyses together, as the page's tabs ask for them: each with a session and a connection."""
    _, url = busy
    named = Visitor(url).number
    functions = {named("generate"): drawing(), named("attention"): [LONG, None]}
    tabs = [(tab, *item) for tab, item in enumerate(list(functions.items()) * 3)]
    answers = [Visitor(url, "203.0.113.1").join(number, data, f"tab {tab}") for tab, number, data in tabs]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2


def test_tokens_and_settings_are_answered_while_the_queue_is_full(busy):
    page, url = busy
    visitors = [Visitor(url, f"203.0.113.{number}") for number in range(8)]
    assert [each.abandon("generate", drawing()) for each in visitors] == [200] * 8
    newcomer = Visitor(url, "203.0.113.50")
    refused = newcomer.call("generate", drawing())
    assert refused.status_code == 503 and "full" in refused.json()["detail"]
    for each in (visitors[0], newcomer):  # who waits for a drawing, and who may not
        assert each.ask("tokens", [LONG, False])[0]["count"] == 93
        with pytest.raises(RuntimeError, match="cannot be read as a PNG"):
            each.ask("settings", [""])
    assert len(page._queue._line("device")) == 8


@pytest.mark.parametrize(
    "client, name",
    [
        (("203.0.113.9", 1), "203.0.113.9"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::"),
        (("::ffff:203.0.113.9", 1), "203.0.113.9"),
        (("fe80::1%eth0", 1), "fe80::"),
        (("unix socket", 0), "unix socket"),
        (None, ""),
    ],
)
def test_visitors_are_told_apart_by_their_address(client, name):
    assert visitor(client) == name


def test_prompts_are_short_wherever_they_are_counted(demo):
    _, visitor = demo
    with pytest.raises(RuntimeError, match="at most 20,000"):
        visitor.ask("tokens", ["&" * 20_001, False])
    prompts = ("&" * 20_001, "&" + "amp;" * 4999)
    refused, counted = (visitor.http.post("gradio_api/run/tokens", json={"data": [text, False]}) for text in prompts)
    assert "at most 20,000" in refused.json()["error"] and counted.status_code == 200
