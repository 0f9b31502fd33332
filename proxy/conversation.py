"""From messages and tools to what a chat template takes, and what may come back."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import InvalidRequest, Unsupported
from proxy.openai import ChatCompletionBody, Message, NamedTool, Tool
from proxy.output_parser import parse_arguments
from proxy.tool_formats import describe_tools


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolPlan:
    """What tools and tool_choice of a request come to."""

    tools: tuple[Tool, ...] = ()
    """Those that may be called; none: no call is looked for."""
    is_forced: bool = False
    is_single: bool = False
    is_named: bool = False

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Name, description and parameters of each."""
        return [tool.function.model_dump(exclude_none=True) for tool in self.tools]


def plan_tools(body: ChatCompletionBody, max_tools: int) -> ToolPlan:
    """Read tools, tool_choice and parallel_tool_calls.

    Raises: InvalidRequest: they do not fit together.
    """
    tools, choice = tuple(body.tools or ()), body.tool_choice
    if len(tools) > max_tools:
        raise InvalidRequest(
            f"tools has {len(tools)} entries, the limit is {max_tools}", param="tools"
        )
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools holds two functions of one name", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    is_single = body.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        if wanted not in names:
            raise InvalidRequest(
                f"tool_choice names {wanted[:100]!r}, which is not among the tools",
                param="tool_choice",
            )
        named = tuple(tool for tool in tools if tool.function.name == wanted)
        return ToolPlan(tools=named, is_forced=True, is_single=True, is_named=True)
    return ToolPlan(tools=tools, is_forced=choice == "required", is_single=is_single)


def template_messages(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, knows_tools: bool
) -> list[dict[str, Any]]:
    """Messages as chat templates expect them; tools are described in text if need be.

    Raises: InvalidRequest: content is missing or of another kind; Unsupported.
    """
    rendered = [_message(i, message) for i, message in enumerate(messages)]
    if knows_tools:
        return rendered
    if tools:
        text = describe_tools(tools)
        if rendered[0]["role"] == "system":
            rendered[0]["content"] = f"{rendered[0]['content']}\n\n{text}"
        else:
            rendered.insert(0, {"role": "system", "content": text})
    return [_without_tools(message) for message in rendered]


def _message(index: int, message: Message) -> dict[str, Any]:
    param = f"messages[{index}]"
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"{param}.content is required", param=f"{param}.content")
        content = ""
    if not isinstance(content, str):
        for part_index, part in enumerate(content):
            if part.type not in ("text", "refusal") or part.text is None:
                raise Unsupported(
                    f"content parts of type {part.type[:100]!r} are not supported",
                    param=f"{param}.content[{part_index}]",
                )
        content = "\n".join(part.text or "" for part in content)
    rendered: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    rendered |= {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": parse_arguments(call.function.arguments or "{}")
                    if not isinstance(call.function.arguments, dict)
                    else call.function.arguments,
                },
            }
            for call in message.tool_calls
        ]
    return rendered


def _without_tools(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and their results as text, for templates that know neither."""
    calls = message.get("tool_calls") or ()
    spelled = [_describe_call(call["function"]) for call in calls]
    content = "\n".join([*([message["content"]] if message["content"] else []), *spelled])
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": content}


def _describe_call(function: dict[str, Any]) -> str:
    """A call in the hermes format."""
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
