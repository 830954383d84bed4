"""Parses a long JSON list entry by entry, with the position of each entry in its file."""

import json
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

LARGEST_ENTRY = 64 << 20  # bytes
_CHUNK = 4 << 20  # bytes read at once
_USUAL_ENTRY = 1 << 16  # bytes that few entries exceed
_MARK = "\ufeff".encode().decode("latin-1")  # of UTF-8
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
# Finds the end of an entry in which a number has too many digits, or a string a control character.
_LENIENT = json.JSONDecoder(strict=False, parse_int=len)


class BrokenList(Exception):
    """A file that is not JSON.

    Attributes:
        reason: the fault.
        at: its position in bytes.
        entries: the number of whole entries before it.
    """

    def __init__(self, reason: str, at: int):
        super().__init__(reason)
        self.reason, self.at, self.entries = reason, at, 0


class NotAList(Exception):
    """JSON that is not a list: the name of its type."""


def read_list(file: BinaryIO) -> Iterator[tuple[int, int, object]]:
    """(start, end, value) of each entry of a JSON list; positions are in bytes.

    The value is that of `json.load`, or a ValueError if only this entry is broken: it is not UTF-8, has a control
    character in a string, or a number with too many digits.

    Raises:
        BrokenList: the file is not JSON, so the start of the next entry is unknown.
        NotAList: the file is JSON, but not a list.
    """
    window, count = _Window(file.read), 0
    window.skip(_MARK)
    try:
        if window.next() != "[":
            value = window.entry()[2]
            window.expect("", "Extra data")
            raise NotAList(type(value).__name__)
        window.skip("[")
        if window.next() == "]":
            window.skip("]")
        else:
            separator = ","
            while separator == ",":
                window.next()
                yield window.entry()
                count += 1
                separator = window.expect(",]", "Expecting ',' delimiter")
        window.expect("", "Extra data")
    except BrokenList as error:
        error.entries = count
        raise


class _Window:
    """The part of a file being parsed, as Latin-1: each byte is one character.

    So positions are bytes, and a byte that is not UTF-8 affects only its own entry, because JSON's own characters are
    ASCII.
    """

    def __init__(self, read: Callable[[int], bytes]):
        self._read = read
        self._text, self._at, self._dropped = "", 0, 0
        self._more()

    def _more(self) -> bool:
        """Reads on, at least as much as the window still has; returns whether there was more."""
        piece = self._read(max(_CHUNK, len(self._text) - self._at))
        if piece:
            self._dropped += self._at
            self._text, self._at = self._text[self._at :] + piece.decode("latin-1"), 0
        return bool(piece)

    def skip(self, text: str) -> None:
        """Moves past `text`, if it comes next."""
        while len(self._text) - self._at < len(text) and self._more():
            pass
        if self._text.startswith(text, self._at):
            self._at += len(text)

    def next(self) -> str:
        """Moves to the next character that is not white space and returns it; "" at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def expect(self, characters: str, otherwise: str) -> str:
        """Moves past the next character, which must be one of `characters`, or the file's end if there are none."""
        character = self.next()
        if character not in characters or (characters and not character):
            raise BrokenList(otherwise, self._dropped + self._at)
        self._at += len(character)
        return character

    def entry(self) -> tuple[int, int, object]:
        """Moves past the next entry and returns it; see `read_list`."""
        if len(self._text) - self._at < _USUAL_ENTRY:
            self._more()  # or it would often be parsed twice
        try:
            value, end = self._decoded()
            while len(self._text) - end < len("e+1") and self._more():  # a number may go on
                value, end = self._decoded()
        except RecursionError:
            raise BrokenList("nested too deeply", self._dropped + self._at) from None
        raw, start = self._text[self._at : end], self._dropped + self._at
        self._at = end
        if not raw.isascii() and not isinstance(value, ValueError):
            try:
                value = json.loads(raw.encode("latin-1").decode())
            except UnicodeDecodeError as error:
                value = ValueError(f"not UTF-8 ({error.reason})")
        return start, start + len(raw), value

    def _decoded(self) -> tuple[object, int]:
        """(value or ValueError, its end in the window)"""
        while True:
            try:
                return _DECODER.raw_decode(self._text, self._at)
            except ValueError as error:
                fault = getattr(error, "msg", str(error))  # not the error, which would keep the text alive
            try:
                return ValueError(fault), _LENIENT.raw_decode(self._text, self._at)[1]
            except json.JSONDecodeError as error:  # broken, or cut by the window
                too_large = len(self._text) - self._at > LARGEST_ENTRY
                if too_large or not self._more():
                    reason = f"{error.msg}, or an entry of more than {LARGEST_ENTRY} bytes" if too_large else error.msg
                    raise BrokenList(reason, self._dropped + error.pos) from None
