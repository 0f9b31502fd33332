"""Reasoning and tool calls in text, however it is cut."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.call_scanner import CallScanner
from proxy.output_parser import OutputOptions, OutputParser
from proxy.tool_formats import CALL_BEGIN, CALL_END, CALL_SEP, CALLS_BEGIN, CALLS_END, ToolFormat

CITY = '{"city": "Oslo \\"N\\" }", "n": [1, {"a": 2}]}'
Calls = list[tuple[str, str]]


def parse(text: str, cuts: list[int], **options: Any) -> tuple[str, str, Calls]:
    """(reasoning, content, calls) of a text that arrives in pieces."""
    parser = OutputParser(
        OutputOptions(tool_names=frozenset({"get_weather", "now"}), max_calls=9, **options)
    )
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    reasoning, content = "", ""
    calls: dict[int, list[str]] = {}
    for i, piece in enumerate(pieces or [""]):
        parsed = parser.push(piece, is_last=i >= len(pieces) - 1)
        reasoning += parsed.reasoning
        content += parsed.content
        for call in parsed.calls:
            if call.name:
                assert call.index not in calls
                assert call.id.startswith("call_")
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    assert list(calls) == list(range(len(calls)))
    return reasoning, content, [(name, arguments) for name, arguments in calls.values()]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{CALL_SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


BOTH: Calls = [("get_weather", CITY), ("now", "{}")]
CASES: dict[str, tuple[ToolFormat, str, str, Calls]] = {
    "hermes, two": ("hermes", hermes("get_weather", CITY) + "\n" + hermes("now", "{}"), "", BOTH),
    "hermes after text": (
        "hermes",
        f"I will look.\n\n{hermes('now', '{}')}\n",
        "I will look.",
        [("now", "{}")],
    ),
    "hermes, name last": (
        "hermes",
        f'<tool_call>{{"arguments": {CITY}, "name": "get_weather"}}</tool_call>',
        "",
        [("get_weather", CITY)],
    ),
    "hermes, quoted arguments": (
        "hermes",
        f'<tool_call>{{"name": "now", "arguments": {json.dumps(CITY)}}}</tool_call>',
        "",
        [("now", CITY)],
    ),
    "hermes, cut off": (
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {"a": "b',
        "",
        [("now", '{"a": "b')],
    ),
    "hermes, cut off after the call": ("hermes", hermes("now", "{}")[:-5], "", [("now", "{}")]),
    "no call": ("hermes", "a < b <tool and </tool_call> ", "a < b <tool and </tool_call> ", []),
    "hermes, no JSON": ("hermes", "<tool_call>hello", "<tool_call>hello", []),
    "hermes, broken": (
        "hermes",
        '<tool_call>{"name": 5} x',
        '<tool_call>{"name": 5} x',
        [],
    ),
    "llama3": (
        "llama3",
        f'{{"name": "get_weather", "parameters": {CITY}}}',
        "",
        [("get_weather", CITY)],
    ),
    "llama3, tagged and two": (
        "llama3",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {CITY}}}; '
        '{"name": "now", "parameters": {}}',
        "",
        BOTH,
    ),
    "llama3, text": ("llama3", 'The answer is {"name": 1}.', 'The answer is {"name": 1}.', []),
    "llama3, JSON that is no call": (
        "llama3",
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob", "age": 3}',
        [],
    ),
    "llama3, an object without name": ("llama3", '{"age": {"b": 3}} x', '{"age": {"b": 3}} x', []),
    "deepseek": (
        "deepseek",
        f"Well. {CALLS_BEGIN}{deepseek('get_weather', CITY)}\n{deepseek('now', '{}')}{CALLS_END}",
        "Well.",
        BOTH,
    ),
    "deepseek 3.1": (
        "deepseek",
        f"{CALLS_BEGIN}{CALL_BEGIN}now{CALL_SEP}{CITY}{CALL_END}{CALLS_END}",
        "",
        [("now", CITY)],
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(cuts=st.lists(st.integers(0, 500), max_size=40))
def test_calls_are_found_however_the_text_is_cut(name: str, cuts: list[int]) -> None:
    tool_format, text, content, calls = CASES[name]
    assert parse(text, cuts, tool_format=tool_format) == ("", content, calls)


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_character_by_character(name: str) -> None:
    tool_format, text, content, calls = CASES[name]
    expected = ("", content, calls)
    assert parse(text, list(range(len(text))), tool_format=tool_format) == expected


@given(text=st.text(alphabet='<tool_c>/{}":, name\n', max_size=80), cut=st.integers(0, 80))
def test_any_text_means_the_same_however_it_is_cut(text: str, cut: int) -> None:
    for tool_format in ("hermes", "llama3", "deepseek"):
        whole = parse(text, [], tool_format=tool_format, splits_reasoning=True)
        assert parse(text, [cut], tool_format=tool_format, splits_reasoning=True) == whole


THOUGHTS = {
    "<think>\nhm < </thin\n</think>\n\nYes.": ("\nhm < </thin\n", "Yes."),
    "\n<think></think>Yes": ("", "Yes"),
    "Yes <think>no</think>": ("", "Yes <think>no</think>"),
    "<think>never ends": ("never ends", ""),
    "<thi": ("", "<thi"),
    "": ("", ""),
}


@given(cuts=st.lists(st.integers(0, 60), max_size=20))
def test_reasoning_is_split_off(cuts: list[int]) -> None:
    for text, (reasoning, content) in THOUGHTS.items():
        assert parse(text, cuts, splits_reasoning=True) == (reasoning, content, [])
    opened = parse("so</think>\nYes", cuts, splits_reasoning=True, starts_in_reasoning=True)
    assert opened == ("so", "Yes", [])


def test_calls_beyond_the_limit_are_dropped() -> None:
    parser = OutputParser(OutputOptions(tool_format="hermes", max_calls=1))
    parsed = parser.push(hermes("a", '{"x": 1}') + hermes("b", '{"y": 2}'), is_last=True)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("a", '{"x": 1}')]
    assert parsed.content == ""


@pytest.mark.parametrize("text", ['"\\ud800"', '"a\\udfff\\ud800"'])
def test_half_characters_in_a_call_never_reach_a_reply(text: str) -> None:
    for call in (
        f'{{"name": {text}, "arguments": {{}}}}',
        f'{{"name": "now", "arguments": {text}}}',
    ):
        reasoning, content, calls = parse(
            f"<tool_call>\n{call}\n</tool_call>", [], tool_format="hermes"
        )
        "".join([reasoning, content, *itertools.chain(*calls)]).encode()


def test_a_scanner_says_how_much_it_took() -> None:
    scanner = CallScanner(("arguments",))
    assert scanner.feed('{"name": "a", "arguments": 5, "x": true} rest') == 40
    assert scanner.is_over
    assert (scanner.name, scanner.take_arguments()) == ("a", "5")
