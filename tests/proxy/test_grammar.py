"""From options to grammars: what matches and what does not, in every tool format."""

import functools
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from proxy.conversation import ToolPlan, plan_tools, template_messages
from proxy.errors import InvalidRequest
from proxy.grammar import (
    MAYBE_THINKING,
    OPEN_THINKING,
    Constraint,
    GrammarChecker,
    _compiler,
    build_grammar,
    constraint,
)
from proxy.openai import ChatCompletionBody, CompletionBody, parse_body
from proxy.output_parser import OutputOptions, OutputParser
from proxy.tokenizer import Tokenizer
from proxy.tool_formats import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    ToolFormat,
    calls_rules,
    detect_format,
    strict_rules,
)

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [{"name": "get_weather", "parameters": PARAMETERS}, {"name": "now"}]
OSLO = '{"city": "Oslo"}'


compiler = functools.lru_cache(maxsize=1)(_compiler)


@functools.lru_cache(maxsize=4)
def compiled(tokenizer: Tokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(compiler(tokenizer), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def matches(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text is in the language."""
    matcher = compiled(tokenizer, grammar).deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def answer(**options: Any) -> Constraint:
    found = constraint(parse_body(CompletionBody, {"prompt": "a", **options}))
    assert found is not None
    return found


SPELLED: dict[ToolFormat, tuple[str, str]] = {
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3": (
        f'{{"name": "get_weather", "parameters": {OSLO}}}',
        ';{"name": "now", "parameters": {}}',
    ),
    "deepseek": (
        f"{CALLS_BEGIN}{CALL_BEGIN}function{CALL_SEP}get_weather\n```json\n{OSLO}\n```{CALL_END}",
        f"\n{CALL_BEGIN}function{CALL_SEP}now\n```json\n{{}}\n```{CALL_END}",
    ),
}


@pytest.mark.parametrize("tool_format", SPELLED)
def test_forced_calls_match_what_the_parser_reads(
    tokenizer: Tokenizer, tool_format: ToolFormat
) -> None:
    one, more = SPELLED[tool_format]
    end = CALLS_END if tool_format == "deepseek" else ""
    for is_single in (True, False):
        rules = calls_rules(tool_format, FUNCTIONS, is_single=is_single, special_ids={})
        grammar = build_grammar(Constraint("tools", f"answer: calls\n{rules}"))
        assert matches(tokenizer, grammar, one + end)
        assert matches(tokenizer, grammar, one + more + end) != is_single
        assert not matches(tokenizer, grammar, one.replace("city", "town") + end)
        assert not matches(tokenizer, grammar, one.replace("get_weather", "other") + end)
    names = frozenset({"get_weather", "now"})
    parser = OutputParser(OutputOptions(tool_format=tool_format, tool_names=names))
    parsed = parser.push(one + more + end, is_last=True)
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    assert calls == [("get_weather", {"city": "Oslo"}), ("now", {})]
    assert parsed.content == ""


def test_special_markers_are_matched_as_tokens(tokenizer: Tokenizer) -> None:
    special = {"<tool_call>": max(tokenizer.special_ids)}
    rules = calls_rules("hermes", FUNCTIONS, is_single=True, special_ids=special)
    grammar = build_grammar(Constraint("tools", f"answer: calls\n{rules}"))
    text = tokenizer.token_bytes[max(tokenizer.special_ids)].decode()
    assert matches(tokenizer, grammar, SPELLED["hermes"][0].replace("<tool_call>", text))


@pytest.mark.parametrize("tool_format", SPELLED)
def test_strict_tools_hold_calls_to_their_schema_and_leave_text_free(
    tokenizer: Tokenizer, tool_format: ToolFormat
) -> None:
    one, more = SPELLED[tool_format]
    end = CALLS_END if tool_format == "deepseek" else ""
    tools = [{**FUNCTIONS[0], "strict": True}, {"name": "now", "parameters": PARAMETERS}]
    for is_single in (True, False):
        rules = strict_rules(tool_format, tools, is_single=is_single, special_ids={})
        grammar = build_grammar(Constraint("tools", rules))
        # `now` is not strict: its parameters may be anything.
        for text in ("", "Hello {there}", "a <b> c\n", one + end):
            assert matches(tokenizer, grammar, text), text
        if tool_format != "llama3":
            assert matches(tokenizer, grammar, "I look.\n" + one + end)
        assert matches(tokenizer, grammar, one + more + end) != is_single
        for start in ("", "\n", "Well: ") if tool_format != "llama3" else ("", "\n"):
            assert not matches(tokenizer, grammar, start + one.replace("city", "town") + end)
            assert not matches(tokenizer, grammar, start + one.replace("get_weather", "x") + end)


def test_strict_tools_with_special_markers(tokenizer: Tokenizer) -> None:
    special = {"<tool_call>": max(tokenizer.special_ids)}
    marker = tokenizer.token_bytes[max(tokenizer.special_ids)].decode()
    tools = [{**FUNCTIONS[0], "strict": True}]
    rules = strict_rules("hermes", tools, is_single=False, special_ids=special)
    grammar = build_grammar(Constraint("tools", rules))
    call = SPELLED["hermes"][0].replace("<tool_call>", marker)
    for text in ("Hello", call, f"So: {call}", f"{call}{call} Done."):
        assert matches(tokenizer, grammar, text)
    assert not matches(tokenizer, grammar, f"So: {call.replace('city', 'town')}")


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({"guided_json": {"type": "integer"}}, "15", '"15"'),
        ({"guided_regex": "a/b+"}, "a/bb", "a/"),
        ({"guided_grammar": 'start: "x" y\ny: /[0-9]+/'}, "x15", "x"),
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    ],
)
def test_thoughts_may_come_before_a_structured_answer(
    tokenizer: Tokenizer, options: dict[str, Any], good: str, bad: str
) -> None:
    plain = build_grammar(answer(**options))
    maybe = build_grammar(answer(**options), thinking=MAYBE_THINKING)
    opened = build_grammar(answer(**options), thinking=OPEN_THINKING)
    assert [matches(tokenizer, plain, text) for text in (good, bad)] == [True, False]
    for text, expected in ((good, True), (bad, False)):
        assert matches(tokenizer, maybe, text) is expected
        assert matches(tokenizer, maybe, f"<think>\nhm <b>\n</think>\n\n{text}") is expected
        assert matches(tokenizer, opened, f"hm\n</think>\n\n{text}") is expected
    assert not matches(tokenizer, opened, good)


async def test_refusals_are_remembered(tokenizer: Tokenizer) -> None:
    checker = GrammarChecker(tokenizer, 65536)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="guided_regex cannot be used"):
            await checker.check(build_grammar(answer(guided_regex="(")), "guided_regex")
    for i in range(300):
        await checker.check(build_grammar(answer(guided_regex=f"a{i}")), "guided_regex")
    assert len(checker._known) == 256


def test_blanks_in_json_are_bounded(tokenizer: Tokenizer) -> None:
    grammar = build_grammar(answer(guided_json={"type": "object"}))
    assert matches(tokenizer, grammar, '{\n    "a": {\n        "b": 1\n    }\n}')
    assert not matches(tokenizer, grammar, '{\n\n\n"a": 1}')
    assert not matches(tokenizer, grammar, '{"a":    1}')


def body(**options: Any) -> ChatCompletionBody:
    return parse_body(
        ChatCompletionBody, {"messages": [{"role": "user", "content": "hi"}], **options}
    )


TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def test_tool_choice_decides_what_is_looked_for() -> None:
    assert plan_tools(body(tools=TOOLS, tool_choice="none"), 9) == ToolPlan()
    assert plan_tools(body(), 9) == ToolPlan()
    auto = plan_tools(body(tools=TOOLS), 9)
    assert (len(auto.tools), auto.is_forced, auto.is_single) == (2, False, False)
    required = plan_tools(body(tools=TOOLS, tool_choice="required", parallel_tool_calls=False), 9)
    assert (required.is_forced, required.is_single, required.is_named) == (True, True, False)
    choice = {"type": "function", "function": {"name": "now"}}
    named = plan_tools(body(tools=TOOLS, tool_choice=choice), 9)
    assert [tool.function.name for tool in named.tools] == ["now"]
    assert named.is_forced
    assert named.is_named


def test_templates_without_tools_get_them_as_text() -> None:
    call = {"id": "1", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = body(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
        ]
    ).messages
    known = template_messages(messages, TOOLS, knows_tools=True)
    assert known[2]["tool_calls"][0]["function"] == {"name": "now", "arguments": {"a": 1}}
    assert known[3] == {"role": "tool", "content": "noon", "tool_call_id": "1"}
    system, _, assistant, tool = template_messages(messages, TOOLS, knows_tools=False)
    assert system["content"].startswith("Be brief.\n\nYou may call")
    assert "get_weather" in system["content"]
    assert assistant["content"].startswith("<tool_call>")
    assert tool == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}


def test_the_format_is_read_from_the_template() -> None:
    assert detect_format("... <tool_call> ...") == "hermes"
    assert detect_format("<|python_tag|>") == "llama3"
    assert detect_format(f"x {CALLS_BEGIN}") == "deepseek"
    assert detect_format("{{ messages }}") == "hermes"
