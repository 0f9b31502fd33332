"""Text of one choice into reasoning, content and tool calls, as it arrives.

Every parser works character by character on a buffer of what is undecided, so the result does not
depend on how the text was cut. What was returned is never taken back.
"""

import secrets
from dataclasses import dataclass, field

import orjson

from proxy.call_scanner import CallScanner, ValueScanner
from proxy.tool_formats import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    HERMES_BEGIN,
    HERMES_END,
    PYTHON_TAG,
    ToolFormat,
)

THINK_BEGIN, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """What to look for in the output of one request."""

    tool_format: ToolFormat | None = None
    """None: no tool calls."""
    tool_names: frozenset[str] = frozenset()
    """A JSON object without marker is a call only if it names one of these."""
    max_calls: int = 1 << 30
    """Later ones are dropped."""
    is_named: bool = False
    """tool_choice named the function: such a choice ends with stop, as at OpenAI."""
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that the parser has to see."""
    splits_reasoning: bool = False
    starts_in_reasoning: bool = False
    """The prompt opened <think>."""


@dataclass(slots=True)
class ToolCallDelta:
    """News of one tool call; id and name come with its first."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of text meant."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def call(self, delta: ToolCallDelta) -> None:
        """Add news of a call, joined to those of the same call."""
        if self.calls and self.calls[-1].index == delta.index and not delta.name:
            self.calls[-1].arguments += delta.arguments
        else:
            self.calls.append(delta)


class OutputParser:
    """See the module's docstring."""

    def __init__(self, options: OutputOptions) -> None:
        self.options = options
        self._reasoning = (
            _ReasoningSplitter(options.starts_in_reasoning) if options.splits_reasoning else None
        )
        kinds = {"hermes": _HermesParser, "llama3": _Llama3Parser, "deepseek": _DeepSeekParser}
        self._calls = kinds[options.tool_format](options) if options.tool_format else None
        self.has_calls = False

    def push(self, text: str, *, is_last: bool = False) -> Parsed:
        """Take the next piece of text; the last one decides what is still held back."""
        parsed = Parsed()
        if self._reasoning is not None:
            parsed.reasoning, text = self._reasoning.push(text, is_last=is_last)
        if self._calls is None:
            parsed.content = text
            return parsed
        self._calls.push(text, parsed)
        if is_last:
            self._calls.finish(parsed)
        self.has_calls = self.has_calls or bool(parsed.calls)
        return parsed


class _ReasoningSplitter:
    """<think> ... </think> at the start; what follows is the answer."""

    def __init__(self, is_inside: bool) -> None:
        self._is_inside = is_inside
        self._is_over = False
        self._has_begun = is_inside
        self._held = ""

    def push(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """(reasoning, answer)."""
        self._held += text
        if not self._has_begun:
            stripped = self._held.lstrip()
            if (
                not is_last
                and len(stripped) < len(THINK_BEGIN)
                and THINK_BEGIN.startswith(stripped)
            ):
                return "", ""
            self._has_begun = True
            if stripped.startswith(THINK_BEGIN):
                self._is_inside, self._held = True, stripped[len(THINK_BEGIN) :]
            else:
                self._is_over = True
        reasoning = ""
        if self._is_inside:
            place = self._held.find(THINK_END)
            if place < 0:
                cut = len(self._held) if is_last else _safe_length(self._held, (THINK_END,))
                reasoning, self._held = self._held[:cut], self._held[cut:]
                return reasoning, ""
            reasoning, self._held = self._held[:place], self._held[place + len(THINK_END) :]
            self._is_inside = False
        if not self._is_over:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return reasoning, ""
            self._is_over = True
        answer, self._held = self._held, ""
        return reasoning, answer


class _CallParser:
    """What the formats share: numbering, and text around the calls."""

    def __init__(self, options: OutputOptions) -> None:
        self._max_calls = options.max_calls
        self._num_calls = 0
        self._held = ""

    def push(self, text: str, parsed: Parsed) -> None:
        """Take text; add what it means to `parsed`."""
        self._held += text
        while self._step(parsed):
            pass

    def finish(self, parsed: Parsed) -> None:
        """Nothing follows: what is held back is text."""
        self._emit(self._held, parsed)
        self._held = ""

    def _step(self, parsed: Parsed) -> bool:
        raise NotImplementedError

    def _begin(self, name: str, parsed: Parsed) -> None:
        if self._num_calls < self._max_calls:
            call_id = f"call_{secrets.token_hex(12)}"
            parsed.call(ToolCallDelta(self._num_calls, call_id, name))
        self._num_calls += 1

    def _add(self, arguments: str, parsed: Parsed) -> None:
        if arguments and self._num_calls <= self._max_calls:
            parsed.call(ToolCallDelta(self._num_calls - 1, arguments=arguments))

    def _emit(self, text: str, parsed: Parsed) -> None:
        # Blanks between and after calls are no answer.
        if self._num_calls and not text.strip():
            return
        parsed.content += text

    def _emit_until(self, marker: str, parsed: Parsed) -> bool:
        """Emit text up to a marker and drop the marker; False: it is not there (yet)."""
        place = self._held.find(marker)
        if place >= 0:
            self._emit(self._held[:place].rstrip(), parsed)
            self._held = self._held[place + len(marker) :]
            return True
        cut = _safe_length(self._held, (marker,))
        cut = len(self._held[:cut].rstrip())
        self._emit(self._held[:cut], parsed)
        self._held = self._held[cut:]
        return False


class _JsonCallParser(_CallParser):
    """Calls that are JSON objects with a name and arguments."""

    def __init__(self, options: OutputOptions) -> None:
        super().__init__(options)
        self._scanner: CallScanner | None = None
        self._was_call = False
        self._raw = ""
        """Text of the call so far, markers included, while it may turn out to be none."""

    def _scan(self, parsed: Parsed) -> bool:
        """Feed the scanner; True: the call is over, or was none."""
        assert self._scanner is not None
        had_name = self._scanner.name is not None
        num_used = self._scanner.feed(self._held)
        used, self._held = self._held[:num_used], self._held[num_used:]
        name = self._scanner.name
        if name is not None:
            if not had_name and not self._is_known(name):
                self._emit(self._raw + used, parsed)
                self._raw, self._scanner, self._was_call = "", None, False
                return True
            if not had_name:
                self._begin(name, parsed)
                self._raw = ""
            self._add(self._scanner.take_arguments(), parsed)
        else:
            self._raw += used
        if not self._scanner.is_over:
            return False
        self._was_call = name is not None
        self._emit(self._raw, parsed)
        self._raw, self._scanner = "", None
        return True

    def _is_known(self, name: str) -> bool:
        return True

    def finish(self, parsed: Parsed) -> None:
        """Nothing follows."""
        if self._scanner is not None and self._scanner.name is None:
            self._held = self._raw + self._held
        super().finish(parsed)


class _HermesParser(_JsonCallParser):
    def __init__(self, options: OutputOptions) -> None:
        super().__init__(options)
        self._needs_end = False

    def _step(self, parsed: Parsed) -> bool:
        if self._scanner is not None:
            if self._scan(parsed):
                self._needs_end = self._was_call
                return True
            return False
        if self._needs_end:
            rest = self._held.lstrip()
            if len(rest) < len(HERMES_END) and HERMES_END.startswith(rest):
                return False
            self._held, self._needs_end = rest.removeprefix(HERMES_END), False
        if not self._emit_until(HERMES_BEGIN, parsed):
            return False
        self._scanner, self._raw = CallScanner(("arguments", "parameters")), HERMES_BEGIN
        return True

    def finish(self, parsed: Parsed) -> None:
        """Nothing follows; a closing marker that was cut off is no text."""
        if self._needs_end and HERMES_END.startswith(self._held.lstrip()):
            self._held = ""
        super().finish(parsed)


class _Llama3Parser(_JsonCallParser):
    def __init__(self, options: OutputOptions) -> None:
        super().__init__(options)
        self._names = options.tool_names
        self._is_text = False

    def _is_known(self, name: str) -> bool:
        return name in self._names

    def _step(self, parsed: Parsed) -> bool:
        if self._scanner is not None:
            if not self._scan(parsed):
                return False
            self._is_text = not self._was_call
            return True
        if self._is_text:
            self._emit(self._held, parsed)
            self._held = ""
            return False
        rest = self._held.lstrip("; \n\t" if self._num_calls else " \n\t")
        if len(rest) < len(PYTHON_TAG) and PYTHON_TAG.startswith(rest):
            return False
        if rest.removeprefix(PYTHON_TAG).lstrip().startswith("{"):
            rest = rest.removeprefix(PYTHON_TAG).lstrip()
            self._raw = ""
            self._held, self._scanner = rest, CallScanner(("parameters", "arguments"))
            return True
        if rest.startswith(PYTHON_TAG) and not rest.removeprefix(PYTHON_TAG).strip():
            return False
        self._is_text = True
        return True


class _DeepSeekParser(_CallParser):
    def __init__(self, options: OutputOptions) -> None:
        super().__init__(options)
        self._state = "text"
        self._value: ValueScanner | None = None

    def _step(self, parsed: Parsed) -> bool:
        if self._state == "text":
            if not self._emit_until(CALLS_BEGIN, parsed):
                return False
            self._state = "between"
        elif self._state == "between":
            begin, end = self._held.find(CALL_BEGIN), self._held.find(CALLS_END)
            if begin >= 0 and (end < 0 or begin < end):
                self._held, self._state = self._held[begin + len(CALL_BEGIN) :], "head"
            elif end >= 0:
                self._held, self._state = self._held[end + len(CALLS_END) :], "text"
            else:
                return False
        elif self._state == "head":
            return self._step_head(parsed)
        elif self._state == "arguments":
            assert self._value is not None
            num_used = self._value.feed(self._held)
            self._add(self._held[:num_used], parsed)
            self._held = self._held[num_used:]
            if not self._value.is_over:
                return False
            self._value, self._state = None, "tail"
        else:
            place = self._held.find(CALL_END)
            if place < 0:
                return False
            self._held, self._state = self._held[place + len(CALL_END) :], "between"
        return True

    def _step_head(self, parsed: Parsed) -> bool:
        """`function<sep>NAME\\n```json\\n{`, or `NAME<sep>{`."""
        before, sep, after = self._held.partition(CALL_SEP)
        place = after.find("{")
        if not sep or place < 0:
            return False
        name = after[:place].partition("\n")[0].strip() or before.strip()
        self._begin(name, parsed)
        self._held, self._state, self._value = after[place:], "arguments", ValueScanner()
        return True

    def finish(self, parsed: Parsed) -> None:
        """Nothing follows; an unfinished call is no text."""
        if self._state == "text":
            super().finish(parsed)


def _safe_length(text: str, markers: tuple[str, ...]) -> int:
    """Length of `text` without an end that may begin one of the markers."""
    longest = max(map(len, markers)) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


def parse_arguments(text: str) -> object:
    """Arguments as chat templates expect them: an object if they are one, else their text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
