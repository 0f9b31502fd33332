"""How models spell tool calls: prompts, grammars for forced calls, and the markers of each format.

    hermes    <tool_call>, {"name": ..., "arguments": {...}}, </tool_call>, on lines of their own
    llama3    {"name": ..., "parameters": {...}}, alone or after <|python_tag|>
    deepseek  CALLS_BEGIN CALL_BEGIN function CALL_SEP NAME, a JSON block, CALL_END CALLS_END;
              from version 3.1 on NAME CALL_SEP {...}

The deepseek markers are special tokens of its vocabulary.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from proxy.grammar import json_rule

ToolFormat = Literal["hermes", "llama3", "deepseek"]

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
# Full-width bars and lower blocks, as DeepSeek's vocabulary has them.
_BAR, _BLANK = "\uff5c", "\u2581"
CALLS_BEGIN = f"<{_BAR}tool{_BLANK}calls{_BLANK}begin{_BAR}>"
CALLS_END = f"<{_BAR}tool{_BLANK}calls{_BLANK}end{_BAR}>"
CALL_BEGIN = f"<{_BAR}tool{_BLANK}call{_BLANK}begin{_BAR}>"
CALL_END = f"<{_BAR}tool{_BLANK}call{_BLANK}end{_BAR}>"
CALL_SEP = f"<{_BAR}tool{_BLANK}sep{_BAR}>"

MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": (HERMES_BEGIN, HERMES_END),
    "llama3": (PYTHON_TAG,),
    "deepseek": (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, CALL_SEP),
}
"""Texts that must reach the parser although they may be special tokens."""

Function = Mapping[str, Any]
"""name, description, parameters."""


def detect_format(template: str) -> ToolFormat:
    """The format that a chat template teaches; hermes when it teaches none."""
    if CALLS_BEGIN in template:
        return "deepseek"
    if HERMES_BEGIN in template:
        return "hermes"
    if PYTHON_TAG in template or '"parameters"' in template:
        return "llama3"
    return "hermes"


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """A system prompt for models whose template knows no tools, in the hermes format."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions to answer the user.\n<tools>\n{lines}\n</tools>\n"
        f"To call one, reply with {HERMES_BEGIN}\n"
        f'{{"name": the function, "arguments": {{its arguments}}}}\n{HERMES_END}'
    )


def calls_rules(
    tool_format: ToolFormat,
    functions: Sequence[Function],
    *,
    is_single: bool,
    special_ids: Mapping[str, int],
) -> str:
    """Lark rules that define `calls`: one call, or one and more.

    special_ids: markers that are special tokens of this model; others are plain text.
    """

    def marker(text: str) -> str:
        return f"<[{special_ids[text]}]>" if text in special_ids else json.dumps(text)

    if tool_format == "deepseek":
        calls = [
            f"call_{i}: {marker(CALL_BEGIN)} {json.dumps('function')} {marker(CALL_SEP)} "
            f"{json.dumps(f['name'] + chr(10) + '```json' + chr(10))} arguments_{i} "
            f"{json.dumps(chr(10) + '```')} {marker(CALL_END)}\n"
            f"arguments_{i}: {json_rule(_parameters(f))}\n"
            for i, f in enumerate(functions)
        ]
        any_call = " | ".join(f"call_{i}" for i in range(len(functions)))
        more = "" if is_single else '("\\n" call)*'
        return (
            f"calls: {marker(CALLS_BEGIN)} calls_rest\n"
            f"calls_rest: call {more} {marker(CALLS_END)}\n"
            f"call: {any_call}\n{''.join(calls)}"
        )
    key = "parameters" if tool_format == "llama3" else "arguments"
    body = f"call_body: {json_rule({'anyOf': [_call_schema(f, key) for f in functions]})}\n"
    if tool_format == "llama3":
        more = "" if is_single else '(";" call_body)*'
        return f"calls: call_body {more}\n{body}"
    begin, end = marker(HERMES_BEGIN), marker(HERMES_END)
    more = "" if is_single else '("\\n" call)*'
    rest = f'call_rest: "\\n" call_body "\\n" {end}\n'
    return f"calls: call {more}\ncall: {begin} call_rest\n{rest}{body}"


def strict_rules(
    tool_format: ToolFormat,
    functions: Sequence[Function],
    *,
    is_single: bool,
    special_ids: Mapping[str, int],
) -> str:
    """Lark rules that define `answer`: any text, and calls whose arguments keep to the schemas.

    Only functions with `strict` have a schema here; others take any object.
    special_ids: as for calls_rules.
    """
    shown = [f if f.get("strict") else {"name": f["name"]} for f in functions]
    calls = calls_rules(tool_format, shown, is_single=is_single, special_ids=special_ids)
    if tool_format == "llama3":
        # The answer is calls or it is text; what begins as a call must be one.
        text = f"/\\s*[^{{\\s](.|\\n)*/ & ~/\\s*{re.escape(PYTHON_TAG)}(.|\\n)*/"
        return f"answer: calls | TEXT?\nTEXT: {text}\n{calls}"
    if tool_format == "deepseek":
        begin, rest, repeat = CALLS_BEGIN, "calls_rest", ""
    else:
        begin, rest, repeat = HERMES_BEGIN, "call_rest", "" if is_single else "+"
    if begin in special_ids:
        # Text never matches a special token.
        lead, text = f"lead: TEXT? <[{special_ids[begin]}]>", "/(.|\\n)+/"
    else:
        lead = f"lead[suffix={json.dumps(begin)}]: /(.|\\n)*/"
        text = f"/(.|\\n)+/ & ~/(.|\\n)*{re.escape(begin)}(.|\\n)*/"
    return f"answer: TEXT? | (lead {rest}){repeat} TEXT?\n{lead}\nTEXT: {text}\n{calls}"


def _call_schema(function: Function, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: _parameters(function)},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _parameters(function: Function) -> dict[str, Any]:
    return dict(function.get("parameters") or {"type": "object"})
