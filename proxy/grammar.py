"""Structured output: what a request's options demand, as one grammar, checked before any worker.

    response_format, guided_*, structured_outputs --constraint--> rules --build_grammar--> text
    text --GrammarChecker.check--> it compiles against this model's vocabulary and allows a token

A grammar is Lark text as llguidance reads it. `no_forcing` leaves the choice among several
tokenizations of the same text to the model.
"""

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from proxy.errors import InvalidRequest, Unsupported
from proxy.openai import GenerationBody, StructuredOutputs
from proxy.tokenizer import Tokenizer

_HEADER = '%llguidance {"no_forcing": true}\n'
# A blank, or a new line and its indentation: bounded, or weak models would go on with blanks.
_WHITESPACE = r"( |\r?\n[ \t]{0,32})"
_CACHE_SIZE = 256
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer must match: Lark rules that define `answer`, and the option they are from."""

    param: str
    rules: str
    is_whole: bool = False
    """The rules are a grammar of their own, which defines `start`."""


def constraint(body: GenerationBody) -> Constraint | None:
    """The one constraint that a request states.

    Raises: InvalidRequest: more than one, or none that can be read; Unsupported.
    """
    found = [entry for entry in (_response_format(body), *_guided(body)) if entry is not None]
    if len(found) > 1:
        names = ", ".join(entry.param for entry in found)
        raise InvalidRequest(f"only one of {names} may be given", param=found[1].param)
    return found[0] if found else None


def json_rule(schema: dict[str, Any]) -> str:
    """The right-hand side of a rule for JSON documents that validate against `schema`."""
    options = {"whitespace_pattern": _WHITESPACE, "lenient": False}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def build_grammar(answer: Constraint, *, thinking: str = "") -> str:
    """The whole grammar. thinking: a Lark expression for what may, or must, come first."""
    if not answer.is_whole:
        return f"{_HEADER}start: {thinking} answer\n{_THINKING_RULES if thinking else ''}" + (
            answer.rules
        )
    if not thinking:
        return _HEADER + answer.rules
    outer = f"{_HEADER}start: {thinking} @answer\n{_THINKING_RULES}"
    return json.dumps(
        {
            "grammars": [
                {"lark_grammar": outer},
                {"name": "answer", "lark_grammar": _HEADER + answer.rules},
            ]
        }
    )


OPEN_THINKING = "open_thinking"
"""The prompt ends inside of <think>."""
MAYBE_THINKING = "thinking?"
"""The model may begin with <think>."""
_THINKING_RULES = (
    'open_thinking: thoughts /\\n*/\nthoughts[suffix="</think>"]: /(.|\\n)*/\n'
    'thinking: "<think>" open_thinking\n'
)


class GrammarChecker:
    """Compiles grammars to see whether they can be; remembers the last ones."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tokenizer = tokenizer
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiler: LLTokenizer | None = None
        self._known: OrderedDict[str, str] = OrderedDict()
        self._lock = asyncio.Lock()

    async def check(self, grammar: str, param: str) -> None:
        """Accept a grammar.

        Raises: InvalidRequest: it is too large, malformed, or nothing matches it.
        """
        num_bytes = len(grammar.encode(errors="surrogatepass"))
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"{param} makes a grammar of {num_bytes} bytes, the limit is {self._max_bytes}",
                param=param,
            )
        problem = self._known.get(grammar)
        if problem is None:
            # One at a time: a hostile one may take a core for some milliseconds.
            async with self._lock:
                problem = await asyncio.to_thread(self._problem, grammar)
            self._known[grammar] = problem
            if len(self._known) > _CACHE_SIZE:
                self._known.popitem(last=False)
        if problem:
            raise InvalidRequest(
                f"{param} cannot be used: {problem[:_MAX_MESSAGE_CHARS]}", param=param
            )

    def _problem(self, grammar: str) -> str:
        if self._compiler is None:
            self._compiler = _compiler(self._tokenizer)
        matcher = LLMatcher(self._compiler, grammar, log_level=0, limits=self._limits)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error().partition("\n<state>")[0] or "it is malformed"
        return "" if any(mask) else "nothing matches it"


class _Wrapped:
    """What the library wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = list(tokenizer.token_bytes)
        self.special_token_ids = sorted(tokenizer.special_ids | {eos_token_id})
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize what a grammar forces."""
        string = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(string, add_special_tokens=False)


def _compiler(tokenizer: Tokenizer) -> LLTokenizer:
    # NOTE: which special token ends a text is the workers' business; any will do for a check.
    eos_token_id = min(tokenizer.special_ids, default=tokenizer.vocab_size - 1)
    wrapped = TokenizerWrapper(_Wrapped(tokenizer, eos_token_id))
    return LLTokenizer(wrapped, n_vocab=tokenizer.vocab_size, eos_token=[eos_token_id])


def _response_format(body: GenerationBody) -> Constraint | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _json({"type": "object"}, "response_format")
    if wanted.type != "json_schema":
        raise Unsupported(
            f"response_format type {wanted.type[:100]!r} is not supported, only 'text', "
            "'json_object' and 'json_schema' are",
            param="response_format",
        )
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest(
            "response_format.json_schema.schema is required",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    return _json(wanted.json_schema.schema_, "response_format.json_schema.schema")


def _guided(body: GenerationBody) -> list[Constraint]:
    old = StructuredOutputs.model_construct(
        json_=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    found = []
    for prefix, wanted in (("guided_", old), ("structured_outputs.", body.structured_outputs)):
        if wanted is None:
            continue
        if wanted.json_ is not None:
            found.append(_json(wanted.json_, f"{prefix}json"))
        if wanted.regex is not None:
            found.append(_rule(f"{prefix}regex", f"answer: /{regex_to_lark(wanted.regex)}/"))
        if wanted.choice is not None:
            found.append(_choice(wanted.choice, f"{prefix}choice"))
        if wanted.grammar is not None:
            found.append(_whole(wanted.grammar, f"{prefix}grammar"))
        if wanted.json_object:
            found.append(_json({"type": "object"}, f"{prefix}json_object"))
    return found


def _rule(param: str, rules: str) -> Constraint:
    return Constraint(param, rules)


def _json(schema: object, param: str) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be a JSON schema, an object", param=param)
    try:
        return _rule(param, f"answer: {json_rule(schema)}")
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


def _choice(choices: list[str], param: str) -> Constraint:
    texts = [text for text in choices if text]
    if not texts:
        raise InvalidRequest(f"{param} must hold at least one text", param=param)
    spelled = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return _rule(param, f"answer: {spelled}")


def _whole(grammar: str, param: str) -> Constraint:
    try:
        return Constraint(param, any_to_lark(grammar), is_whole=True)
    except (Exception, RecursionError) as error:  # the converter raises bare exceptions
        raise InvalidRequest(
            f"{param} is neither Lark nor GBNF: {str(error)[:_MAX_MESSAGE_CHARS]}", param=param
        ) from None
