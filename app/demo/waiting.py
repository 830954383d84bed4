"""The queue: gradio's, with an end to answers that nobody reads, and a share of the places for each visitor."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import orjson
from gradio import queueing
from gradio.server_messages import HeartbeatMessage
from gradio.utils import run_coro_in_background
from starlette.exceptions import HTTPException

from .visitors import visitor

UNREAD = 60.0  # seconds that an answer waits for somebody who reads it
MOST_UNREAD = 64 * 2**20  # bytes of answers that wait to be read, of all visitors
MOST_SESSIONS = 2000  # that are open at once
MOST_NAME = 100  # characters of the name that a session gives itself


class Mailbox(asyncio.Queue):
    """Messages to one session that it has not read yet.

    An answer is kept as JSON, which takes a tenth of the memory that gradio's objects take.

    Attributes:
        size: bytes of the answers.
        last_read: when a message was last taken, or the mailbox made, by `time.monotonic`.
    """

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self.size, self.last_read = 0, time.monotonic()

    def _put(self, message: Any) -> None:
        if isinstance(message, HeartbeatMessage) and not self.empty():
            return  # who reads nothing needs no sign of life
        answer = None
        if getattr(message, "output", None):
            answer = orjson.dumps(message.output, default=_plain, option=orjson.OPT_NON_STR_KEYS)
            message = message.model_copy(update={"output": {}})
            self.size += len(answer)
        super()._put((message, answer))

    def _get(self) -> Any:
        message, answer = super()._get()
        self.last_read = time.monotonic()
        if answer is not None:
            self.size -= len(answer)
            message.output = orjson.loads(answer)
        return message


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


class _Mailboxes(dict):
    """By session. gradio puts queues of its own kind in, and takes out some that are gone."""

    def __setitem__(self, session: str, _: Any) -> None:
        super().__setitem__(session, Mailbox())

    def __delitem__(self, session: str) -> None:
        self.pop(session, None)


class _WholeAnswer(Coroutine):
    """The answer to some requests, which begins and ends as it should wherever a cancel meets it.

    gradio frees a request's place in the line, and forgets the request, where its answer ends. A cancel between taking
    the request and beginning the answer would end it before it begins, and nobody behind it would ever have a turn. A
    cancel while the end of the answer waits for something would leave the request known for ever.
    """

    def __init__(self, answer: Coroutine, events: list[queueing.Event], known: dict[str, queueing.Event]):
        self._answer, self._events, self._known, self._begun = answer, events, known, False

    def send(self, value: Any) -> Any:
        self._begun = True
        return self._continue(self._answer.send, value)

    def throw(self, *error: Any) -> Any:
        if self._begun:
            return self._continue(self._answer.throw, *error)
        for event in self._events:
            event.alive = False  # so that nothing is done for it
        return self.send(None)

    def _continue(self, step: Callable, *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except BaseException:  # the end: StopIteration, or an error
            for event in self._events:
                self._known.pop(event._id, None)
            raise

    def close(self) -> None:
        self._answer.close()

    def __await__(self) -> Iterator:
        return self._answer.__await__()


class Queue(queueing.Queue):
    """gradio's queue, that forgets those who do not read what it has for them.

    A session that has read nothing for `UNREAD` seconds, and has something to read, is forgotten: its requests that
    wait are left out, what is drawn for it ends with its step, and its answers are freed. Where all answers that wait
    take more than `MOST_UNREAD` bytes, the session that has not read for longest is forgotten at once.

    A visitor has as many places at most as are still free, so that there is always one for somebody else; and requests
    are answered in turn: the first of every visitor before the second of any.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.pending_messages_per_session = _Mailboxes()
        self.ANALYTICS_MAX_EVENTS = 100  # gradio makes a table of them after every request

    def start(self) -> None:
        super().start()
        run_coro_in_background(self._forget_in_time)

    async def push(self, body, request, username):
        """As gradio's. Raises HTTPException for what cannot wait here."""
        self._check(body, visitor(request.client))
        # As a name of its own: gradio's would be known only after the request has its place.
        body.session_hash = body.session_hash or uuid.uuid4().hex
        self.pending_messages_per_session.setdefault(body.session_hash, Mailbox())
        self._make_room(body.session_hash)
        success, event_id, state = await super().push(body, request, username)
        if success and event_id in self.event_ids_to_events:
            self._take_turns(self.event_ids_to_events[event_id])
        return success, event_id, state

    def process_events(self, events, batch, begin_time, fn):
        answer = super().process_events(events, batch, begin_time, fn)
        return _WholeAnswer(answer, events, self.event_ids_to_events)

    def send_message(self, event, event_message) -> None:
        super().send_message(event, event_message)
        self._make_room(event.session_hash)

    def _check(self, body, name: str) -> None:
        if body.fn_index not in self.blocks.fns:
            raise HTTPException(400, f"There is no function {body.fn_index!r} here. See /gradio_api/info for what is.")
        if len(body.session_hash or "") > MOST_NAME:
            raise HTTPException(400, f"A session's name has at most {MOST_NAME} characters here.")
        own = sum(visitor(event.request.client) == name for event in self._waiting())
        if self.max_size is not None and 0 < self.max_size - len(self) <= own:
            raise HTTPException(
                429,
                f"You have {own:,} requests that wait here, and {self.max_size - len(self):,} places are left, which "
                "are for others. Send this again when some of yours are answered.",
            )

    def _waiting(self) -> list[queueing.Event]:
        return [event for line in self.event_queue_per_concurrency_id.values() for event in line.queue]

    def _take_turns(self, event: queueing.Event) -> None:
        """Puts a request that has come last before all whose visitors have an earlier one that waits with it."""
        line = self.event_queue_per_concurrency_id[event.concurrency_id].queue
        if event not in line:
            return
        line.remove(event)
        names = [visitor(other.request.client) for other in line]
        turn = names.count(visitor(event.request.client))
        # Those with as many of the same visitor before them come later.
        later = (place for place, name in enumerate(names) if names[:place].count(name) > turn)
        place = next(later, len(line))
        line.insert(place, event)
        if place + 1 < len(line):
            self.broadcast_estimations(event.concurrency_id, place)

    def _make_room(self, keep: str) -> None:
        """Forgets those who have not read for longest, where there are too many sessions or bytes."""
        boxes = self.pending_messages_per_session
        while len(boxes) > MOST_SESSIONS or sum(box.size for box in boxes.values()) > MOST_UNREAD:
            others = [session for session, box in boxes.items() if session != keep and self._can_go(session, box)]
            if not others:
                return
            self.forget(min(others, key=lambda session: boxes[session].last_read))

    def _can_go(self, session: str, box: Mailbox) -> bool:
        """Whether a session has something to read, or nothing to come."""
        ids = self.pending_event_ids_session.get(session, ())
        return not box.empty() or not any(event_id in self.event_ids_to_events for event_id in ids)

    def forget(self, session: str) -> None:
        """Frees what is kept for a session, and ends what it waits for."""
        self.pending_messages_per_session.pop(session, None)
        for event_id in self.pending_event_ids_session.pop(session, ()):
            event = self.event_ids_to_events.get(event_id)
            if event is None:
                continue
            event.alive = False  # what is drawn for it ends with its step
            line = self.event_queue_per_concurrency_id[event.concurrency_id].queue
            if event in line:
                line.remove(event)
                del self.event_ids_to_events[event_id]

    async def _forget_in_time(self) -> None:
        while not self.stopped:
            await asyncio.sleep(UNREAD / 10)
            before = time.monotonic() - UNREAD
            boxes = self.pending_messages_per_session
            for session, box in list(boxes.items()):
                if box.last_read < before and self._can_go(session, box):
                    self.forget(session)
            for session in [its for its in self.pending_event_ids_session if its not in boxes]:
                self.forget(session)
