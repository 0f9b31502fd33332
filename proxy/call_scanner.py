"""Incremental reading of one JSON value, and of an object {"name": ..., "arguments": ...}."""

import enum
from collections.abc import Sequence

import orjson

_BLANKS = " \t\n\r"


class ValueScanner:
    """Finds where one JSON value ends; it does not check what lies between."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False
        self._is_scalar = False
        self.is_over = False

    def feed(self, text: str) -> int:
        """Take text; return how much of it belongs to the value."""
        for place, char in enumerate(text):
            if self.is_over or (self._is_scalar and char in ",}]" + _BLANKS):
                self.is_over = True
                return place
            self._take(char)
        return len(text)

    def _take(self, char: str) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                self.is_over = self._depth == 0
        elif char == '"':
            self._in_string = self._has_begun = True
        elif char in "{[":
            self._depth += 1
            self._has_begun = True
        elif char in "}]":
            self._depth -= 1
            self.is_over = self._depth <= 0
        elif not self._has_begun and char not in _BLANKS:
            self._has_begun = self._is_scalar = True


class _State(enum.Enum):
    START = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()
    OVER = enum.auto()


class CallScanner:
    """Reads a call; the name is known as soon as it was read, arguments come piece by piece."""

    def __init__(self, argument_keys: Sequence[str]) -> None:
        self._argument_keys = argument_keys
        self._state = _State.START
        self._key = ""
        self._text = ""
        self._value = ValueScanner()
        self._arguments = ""
        self._is_quoted = False
        self.name: str | None = None

    @property
    def is_over(self) -> bool:
        """The object ended, or this is none: the name tells."""
        return self._state is _State.OVER

    def feed(self, text: str) -> int:
        """Take text; return how much of it belongs to the call."""
        place = 0
        while place < len(text) and not self.is_over:
            if self._state is _State.VALUE:
                num_used = self._value.feed(text[place:])
                self._take_value(text[place : place + num_used])
                place += num_used
            elif self._state is _State.IN_KEY:
                num_used = self._value.feed(text[place:])
                self._text += text[place : place + num_used]
                place += num_used
                if self._value.is_over:
                    self._key, self._state = _string(self._text) or "", _State.COLON
            else:
                if text[place] == '"' and self._state is _State.KEY:
                    self._state, self._text, self._value = _State.IN_KEY, "", ValueScanner()
                elif self._take_mark(text[place]):
                    place += 1
                else:
                    self._state = _State.OVER
        return place

    def take_arguments(self) -> str:
        """Arguments read since the last call of this."""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _take_mark(self, char: str) -> bool:
        """A character between keys and values; False: it may not stand here."""
        if char in _BLANKS:
            return True
        match self._state, char:
            case _State.START, "{":
                self._state = _State.KEY
            case _State.COLON, ":":
                self._state, self._text, self._value = _State.VALUE, "", ValueScanner()
            case _State.COMMA, ",":
                self._state = _State.KEY
            case ((_State.COMMA | _State.KEY), "}"):
                self._state = _State.OVER
            case _:
                return False
        return True

    def _take_value(self, text: str) -> None:
        if self._key in self._argument_keys:
            if not self._text.strip():
                text = text.lstrip()
                self._is_quoted = text.startswith('"')
            if not self._is_quoted:
                self._arguments += text
        self._text += text
        if not self._value.is_over:
            return
        self._state = _State.COMMA
        if self._key == "name":
            self.name = _string(self._text)
            if self.name is None:
                self._state = _State.OVER
        elif self._key in self._argument_keys and self._is_quoted:
            # Some models quote the arguments once more.
            self._arguments += _string(self._text) or ""


def _string(text: str) -> str | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, str) else None
