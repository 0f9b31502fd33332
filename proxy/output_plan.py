"""What a conversation may bring back: its prompt with tools, the constraint, what to look for."""

from collections.abc import Callable

from proxy.config import ProxyConfig
from proxy.conversation import ToolPlan, template_messages
from proxy.errors import InvalidRequest, Unsupported
from proxy.grammar import (
    MAYBE_THINKING,
    OPEN_THINKING,
    Constraint,
    GrammarChecker,
    build_grammar,
    constraint,
)
from proxy.openai import ConversationBody, GenerationBody
from proxy.output_parser import THINK_BEGIN, OutputOptions
from proxy.tokenizer import Tokenizer
from proxy.tool_formats import MARKERS, ToolFormat, calls_rules, detect_format, strict_rules


class OutputPlanner:
    """Knows how one model takes tools, calls them and thinks."""

    def __init__(self, config: ProxyConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars = GrammarChecker(tokenizer, config.limits.max_grammar_bytes)
        template = tokenizer.template_source
        self._tool_format: ToolFormat = (
            detect_format(template) if config.tool_format == "auto" else config.tool_format
        )
        self._knows_tools = "tools" in template
        self._knows_tool_role = "tool" in template
        self._splits_reasoning = config.reasoning_format == "think" or (
            config.reasoning_format == "auto" and THINK_BEGIN in template
        )
        token_bytes = tokenizer.token_bytes
        special = {token_bytes[i].decode(errors="replace"): i for i in tokenizer.special_ids}
        self._marker_ids = {
            text: special[text] for text in MARKERS[self._tool_format] if text in special
        }

    def render(self, body: ConversationBody, plan: ToolPlan) -> str:
        """Prompt text of a conversation.

        Raises: InvalidRequest, Unsupported: see the error's param.
        """
        if body.chat_template is not None:
            raise Unsupported("chat_template is not supported", param="chat_template")
        tools = [tool.model_dump(exclude_none=True) for tool in plan.tools]
        messages = template_messages(
            body.messages,
            tools,
            knows_tools=self._knows_tools or (not tools and self._knows_tool_role),
        )
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message excludes add_generation_prompt",
                param="continue_final_message",
            )
        text = self._tokenizer.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            template_kwargs=body.chat_template_kwargs,
            tools=tools if self._knows_tools else None,
        )
        if not continues:
            return text
        last = str(messages[-1]["content"])
        place = text.rfind(last.strip())
        if not last.strip() or place < 0:
            raise InvalidRequest(
                "the last message has no content to continue", param="continue_final_message"
            )
        return text[: place + len(last.strip())]

    def options(self, prompt: str, plan: ToolPlan) -> OutputOptions:
        """What to look for in the answer to a prompt."""
        return OutputOptions(
            tool_format=self._tool_format if plan.tools else None,
            tool_names=frozenset(tool.function.name for tool in plan.tools),
            max_calls=1 if plan.is_single else 1 << 30,
            is_named=plan.is_named,
            splits_reasoning=self._splits_reasoning,
            starts_in_reasoning=self._splits_reasoning and prompt.rstrip().endswith(THINK_BEGIN),
            kept_ids=frozenset(self._marker_ids.values()) if plan.tools else frozenset(),
        )

    async def grammar(self, body: GenerationBody, plan: ToolPlan, output: OutputOptions) -> str:
        """The checked grammar of a request; empty for none.

        Raises: InvalidRequest: it cannot be used.
        """
        wanted = constraint(body)
        is_strict = any(tool.function.strict for tool in plan.tools)
        if is_strict and wanted is None and not plan.is_forced:
            strict = self._rules(strict_rules, plan)
            wanted = Constraint("tools", strict)
        elif plan.is_forced or (wanted is not None and plan.tools):
            calls = self._rules(calls_rules, plan)
            if plan.is_forced or wanted is None:
                wanted = Constraint("tools", f"answer: calls\n{calls}")
            elif wanted.is_whole:
                raise Unsupported(f"{wanted.param} excludes tools", param=wanted.param)
            else:
                rules = wanted.rules.replace("answer:", "document:", 1)
                wanted = Constraint(wanted.param, f"answer: document | calls\n{rules}\n{calls}")
        if wanted is None:
            return ""
        if body.ignore_eos:
            raise InvalidRequest(f"ignore_eos excludes {wanted.param}", param="ignore_eos")
        thinking = ""
        if output.splits_reasoning:
            thinking = OPEN_THINKING if output.starts_in_reasoning else MAYBE_THINKING
        try:
            grammar = build_grammar(wanted, thinking=thinking)
        except RecursionError:
            raise InvalidRequest(
                f"{wanted.param} is nested too deeply", param=wanted.param
            ) from None
        await self._grammars.check(grammar, wanted.param)
        return grammar

    def _rules(self, write: Callable[..., str], plan: ToolPlan) -> str:
        return write(
            self._tool_format,
            plan.functions,
            is_single=plan.is_single,
            special_ids=self._marker_ids,
        )
