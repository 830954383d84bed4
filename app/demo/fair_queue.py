"""gradio's queue, with a share of the places for each visitor and an end to unread answers."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import orjson
from gradio import queueing
from gradio.server_messages import HeartbeatMessage, ProcessGeneratingMessage
from gradio.utils import run_coro_in_background
from starlette.exceptions import HTTPException

from .visitors import visitor

UNREAD = 60.0  # seconds that an answer waits to be read
MOST_UNREAD = 64 * 2**20  # bytes of unread answers, of all visitors
MOST_SESSIONS = 2000  # open at once
MOST_NAME = 100  # characters of a session's name


class Mailbox(asyncio.Queue):
    """Unread messages to one session.

    Answers are kept as JSON, which takes a tenth of the memory of gradio's objects.

    Attributes:
        size: bytes of the answers.
        last_read: `time.monotonic` of the last read, or of the mailbox's creation.
    """

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self.size, self.last_read = 0, time.monotonic()

    def _put(self, message: Any) -> None:
        if isinstance(message, HeartbeatMessage) and not self.empty():
            return  # a client that reads nothing needs no heartbeat
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
    """Mailboxes by session. gradio inserts plain queues, and deletes sessions that may be gone already."""

    def __setitem__(self, session: str, _: Any) -> None:
        super().__setitem__(session, Mailbox())

    def __delitem__(self, session: str) -> None:
        self.pop(session, None)


class _WholeAnswer(Coroutine):
    """The answer to some requests, as a coroutine that survives a cancel at any point.

    gradio frees a request's place in the line, and forgets the request, at the end of its answer. A cancel between
    taking the request and starting the answer would end it before it starts, and block the line for good. A cancel
    while the end of the answer awaits something would leave the request registered for good.
    """

    def __init__(self, answer: Coroutine, events: list[queueing.Event], known: dict[str, queueing.Event]):
        self._answer, self._events, self._known, self._started = answer, events, known, False

    def send(self, value: Any) -> Any:
        self._started = True
        return self._continue(self._answer.send, value)

    def throw(self, *error: Any) -> Any:
        if self._started:
            return self._continue(self._answer.throw, *error)
        for event in self._events:
            event.alive = False  # so no work is done for it
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
    """gradio's queue, shared fairly and without unread answers.

    A session that has messages and has not read for `UNREAD` seconds is dropped: its waiting requests are removed, its
    drawing ends with the current step, and its answers are freed. If all unread answers exceed `MOST_UNREAD` bytes, the
    session that has not read for longest is dropped at once.

    Functions that share a `concurrency_id` share a line of `places` requests; every other function has a line of its
    own, so that tokens are counted while the line of those who draw is full.

    A visitor may take at most as many places of a line as remain free, so there is always one for others. Requests are
    answered in turn: the first of every visitor before the second of any.

    Attributes:
        places: of each line; None for any number.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        # gradio itself would count the requests of all lines.
        self.places, self.max_size = self.max_size, None
        self.pending_messages_per_session = _Mailboxes()
        self.ANALYTICS_MAX_EVENTS = 100  # gradio builds a table of them after every request

    def start(self) -> None:
        super().start()
        run_coro_in_background(self._forget_in_time)

    async def push(self, body, request, username):
        """As in gradio. Raises HTTPException for requests that cannot be queued."""
        self._check(body, visitor(request.client))
        # Named here: gradio names a session only after its request has a place.
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
        is_part = isinstance(event_message, ProcessGeneratingMessage) and event.fn.api_visibility == "public"
        if is_part and any(event_message.output["data"]):
            return  # a program gets the whole answer at its end, and would get its images twice
        super().send_message(event, event_message)
        self._make_room(event.session_hash)

    def _check(self, body, name: str) -> None:
        if body.fn_index not in self.blocks.fns:
            raise HTTPException(400, f"There is no function {body.fn_index!r}. /gradio_api/info lists them.")
        if len(body.session_hash or "") > MOST_NAME:
            raise HTTPException(400, f"A session's name may have at most {MOST_NAME} characters.")
        line = self._line(self.blocks.fns[body.fn_index].concurrency_id)
        if self.places is None:
            return
        if len(line) >= self.places:
            raise HTTPException(503, f"Queue is full: {len(line):,} requests wait. Send this again in a while.")
        waiting, free = sum(visitor(event.request.client) == name for event in line), self.places - len(line)
        if free <= waiting:
            raise HTTPException(
                429,
                f"You have {waiting:,} waiting requests, and the {free:,} places left are for others. Send this again "
                "when some of yours are answered.",
            )

    def _line(self, concurrency_id: str) -> list[queueing.Event]:
        """The requests that wait for functions of a `concurrency_id`."""
        line = self.event_queue_per_concurrency_id.get(concurrency_id)
        return [] if line is None else line.queue

    def _take_turns(self, event: queueing.Event) -> None:
        """Moves the last request ahead of requests whose visitors have more waiting before them."""
        line = self._line(event.concurrency_id)
        if event not in line:
            return
        line.remove(event)
        names = [visitor(other.request.client) for other in line]
        turn = names.count(visitor(event.request.client))
        # The first request with more of its visitor's before it.
        later = (place for place, name in enumerate(names) if names[:place].count(name) > turn)
        place = next(later, len(line))
        line.insert(place, event)
        if place + 1 < len(line):
            self.broadcast_estimations(event.concurrency_id, place)

    def _make_room(self, keep: str) -> None:
        """Drops the sessions that have not read for longest while there are too many sessions or bytes."""
        boxes = self.pending_messages_per_session
        while len(boxes) > MOST_SESSIONS or sum(box.size for box in boxes.values()) > MOST_UNREAD:
            droppable = [session for session, box in boxes.items() if session != keep and self._can_go(session, box)]
            if not droppable:
                return
            self.forget(min(droppable, key=lambda session: boxes[session].last_read))

    def _can_go(self, session: str, box: Mailbox) -> bool:
        """Whether a session may be dropped: it has unread messages, or expects none."""
        ids = self.pending_event_ids_session.get(session, ())
        return not box.empty() or not any(event_id in self.event_ids_to_events for event_id in ids)

    def forget(self, session: str) -> None:
        """Frees a session's messages, and ends its requests."""
        self.pending_messages_per_session.pop(session, None)
        for event_id in self.pending_event_ids_session.pop(session, ()):
            event = self.event_ids_to_events.get(event_id)
            if event is None:
                continue
            event.alive = False  # its drawing ends with the current step
            line = self._line(event.concurrency_id)
            if event in line:
                line.remove(event)
                del self.event_ids_to_events[event_id]

    async def _forget_in_time(self) -> None:
        while not self.stopped:
            await asyncio.sleep(min(1.0, UNREAD / 10))
            before = time.monotonic() - UNREAD
            boxes = self.pending_messages_per_session
            for session, box in list(boxes.items()):
                if box.last_read < before and self._can_go(session, box):
                    self.forget(session)
            for session in set(self.pending_event_ids_session) - set(boxes):
                self.forget(session)
