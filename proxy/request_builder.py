"""Validated bodies to GenerationRequests: the checks that need the model, its limits, or both.

Nothing here talks to a worker: what is refused here was never seen by one.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.adapters import Adapters
from proxy.config import ProxyConfig
from proxy.conversation import ToolPlan, plan_tools
from proxy.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unsupported
from proxy.openai import (
    ChatCompletionBody,
    CompletionBody,
    ConversationBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from proxy.output_parser import OutputOptions
from proxy.output_plan import OutputPlanner
from proxy.request import GenerationRequest, SamplingOptions
from proxy.request_limits import (
    chat_logprobs,
    check_best_of,
    check_limits,
    refuse_unsupported,
    stop_list,
)
from proxy.tokenizer import INLINE_CHARS, Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16
# Texts above it wait for each other, so that they never take all threads and cores.
_LARGE_CHARS = 256 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extras:
    """What only some requests have."""

    echo: bool = False
    num_returned: int | None = None
    grammar: str = ""
    output: OutputOptions | None = None
    prompt_logprobs: int | None = None


class RequestBuilder:
    """Checks and tokenizes requests for one model."""

    def __init__(
        self,
        config: ProxyConfig,
        tokenizer: Tokenizer,
        max_model_len: Callable[[], int],
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._names = config.served_model_names
        self._limits = config.limits
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._outputs = OutputPlanner(config, tokenizer)
        self._large = asyncio.Semaphore(1)

    def check_model(self, name: str | None) -> str:
        """Return the model name to report; None means the default.

        Raises: ModelNotFound.
        """
        if name is None or name == "":
            return self._names[0]
        known = (*self._names, *self._adapters.names)
        if name not in known:
            raise ModelNotFound.of(name, known)
        return name

    async def chat(self, body: ChatCompletionBody) -> GenerationRequest:
        """Build the request of a chat completion.

        Raises: InvalidRequest, ModelNotFound: see the error's param.
        """
        model = self.check_model(body.model)
        refuse_unsupported(body)
        num_logprobs = chat_logprobs(body, self._limits)
        max_tokens, param = body.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, param = body.max_tokens, "max_tokens"
        if max_tokens == 0:
            raise InvalidRequest(f"{param} should be at least 1, got 0", param=param)
        self._check(body)
        plan = plan_tools(body, self._limits.max_tools)
        text = self._outputs.render(body, plan)
        prompt = await self._encode(text, bool(body.add_special_tokens), param="messages")
        output = self._outputs.options(text, plan)
        return self._build(
            body,
            model=model,
            prompts=(prompt,),
            prompt_param="messages",
            max_tokens=max_tokens,
            max_tokens_param=param,
            default_max_tokens=None,
            num_logprobs=num_logprobs,
            extras=_Extras(
                grammar=await self._outputs.grammar(body, plan, output),
                output=output if output.splits_reasoning or output.tool_format else None,
                prompt_logprobs=body.prompt_logprobs,
            ),
        )

    async def completion(self, body: CompletionBody) -> GenerationRequest:
        """Build the request of a text completion.

        Raises: InvalidRequest, ModelNotFound: see the error's param.
        """
        model = self.check_model(body.model)
        refuse_unsupported(body)
        if body.suffix:
            raise Unsupported("suffix is not supported", param="suffix")
        check_best_of(body, self._limits)
        echo = bool(body.echo)
        if body.max_tokens == 0 and not echo:
            raise InvalidRequest(
                "max_tokens should be at least 1 (or 0 with echo), got 0", param="max_tokens"
            )
        if body.logprobs is not None and body.logprobs > self._limits.max_logprobs:
            raise InvalidRequest(
                f"logprobs should be at most {self._limits.max_logprobs}, got {body.logprobs}",
                param="logprobs",
            )
        self._check(body)
        prompts = await self._prompts(body)
        return self._build(
            body,
            model=model,
            prompts=prompts,
            prompt_param="prompt",
            max_tokens=body.max_tokens,
            max_tokens_param="max_tokens",
            default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
            num_logprobs=body.logprobs,
            extras=_Extras(
                echo=echo,
                num_returned=body.n or 1,
                grammar=await self._outputs.grammar(body, ToolPlan(), OutputOptions()),
                prompt_logprobs=body.prompt_logprobs,
            ),
        )

    async def tokenize(self, body: TokenizeTextBody | TokenizeChatBody) -> tuple[int, ...]:
        """Token ids as a completion, or a chat completion, would get them."""
        self.check_model(body.model)
        if isinstance(body, TokenizeChatBody):
            return await self.render(body, add_special_tokens=bool(body.add_special_tokens))
        add_special_tokens = body.add_special_tokens is not False
        return await self._encode(body.prompt, add_special_tokens, param=None)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids.

        Raises: InvalidRequest: an id is outside of the vocabulary.
        """
        self._check_token_ids(token_ids, "tokens")
        return self._tokenizer.decode(token_ids)

    async def render(
        self, body: ConversationBody, *, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """Apply the chat template and tokenize."""
        text = self._outputs.render(body, ToolPlan(tools=tuple(body.tools or ())))
        return await self._encode(text, add_special_tokens, param="messages")

    def _check(self, body: GenerationBody) -> None:
        check_limits(body, self._limits)
        self._check_token_ids(body.stop_token_ids or (), "stop_token_ids")

    async def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        *,
        param: str | None,
        is_inline: bool = True,
    ) -> tuple[int, ...]:
        limit = self._max_model_len()
        num_bytes = len(text.encode())
        if param is not None and num_bytes > limit * self._tokenizer.max_token_bytes:
            raise ContextLengthExceeded(
                f"{param} has {num_bytes} bytes, which cannot fit the context of {limit} tokens",
                param=param,
            )
        if is_inline and len(text) <= INLINE_CHARS:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        async with self._large if len(text) > _LARGE_CHARS else contextlib.nullcontext():
            ids = await asyncio.to_thread(
                self._tokenizer.encode, text, add_special_tokens=add_special_tokens
            )
        return tuple(ids)

    async def _prompts(self, body: CompletionBody) -> tuple[tuple[int, ...], ...]:
        """Prompts of a completion: a text, texts, token ids, or lists of token ids."""
        raw = body.prompt
        if raw is None:
            raise InvalidRequest(
                "prompt is required", param="prompt", code="missing_required_parameter"
            )
        items: list[Any]
        if isinstance(raw, str) or (isinstance(raw, list) and raw and _is_int(raw[0])):
            items = [raw]
        elif isinstance(raw, list):
            items = raw
        else:
            items = []
        if not items:
            raise InvalidRequest(
                "prompt must be a string, token ids, or a non-empty list of either",
                param="prompt",
            )
        if len(items) > self._limits.max_prompts:
            raise InvalidRequest(
                f"prompt has {len(items)} entries, the limit is {self._limits.max_prompts}",
                param="prompt",
            )
        num_chars = sum(len(item) for item in items if isinstance(item, str))
        is_inline = num_chars <= INLINE_CHARS
        return tuple([await self._prompt(item, body, is_inline=is_inline) for item in items])

    async def _prompt(
        self, item: object, body: CompletionBody, *, is_inline: bool
    ) -> tuple[int, ...]:
        if isinstance(item, str):
            return await self._encode(
                item,
                body.add_special_tokens is not False,
                param="prompt",
                is_inline=is_inline,
            )
        if isinstance(item, list):
            # First: a look at each of a million ids would keep others waiting.
            self._check_fits(len(item), "prompt")
        if not isinstance(item, list) or not set(map(type, item)) <= {int}:
            raise InvalidRequest(
                "prompt must be a string, token ids, or a list of either", param="prompt"
            )
        self._check_token_ids(item, "prompt")
        return tuple(item)

    def _check_fits(self, num_tokens: int, param: str) -> None:
        limit = self._max_model_len()
        if num_tokens >= limit:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens, the context is {limit} tokens "
                "for prompt and output together",
                param=param,
            )

    def _check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._tokenizer.vocab_size
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{param} holds token id {token_id}, the vocabulary has 0 to {vocab_size - 1}",
                    param=param,
                )

    def _build(
        self,
        body: GenerationBody,
        *,
        model: str,
        prompts: tuple[tuple[int, ...], ...],
        prompt_param: str,
        max_tokens: int | None,
        max_tokens_param: str,
        default_max_tokens: int | None,
        num_logprobs: int | None,
        extras: _Extras,
    ) -> GenerationRequest:
        n = (body.best_of if isinstance(body, CompletionBody) else None) or body.n or 1
        num_returned = extras.num_returned or n
        if len(prompts) * n > self._limits.max_sequences:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n {n} make {len(prompts) * n} sequences, "
                f"the limit is {self._limits.max_sequences}",
                param="n",
            )
        room = self._room(prompts, prompt_param)
        if max_tokens is None:
            fitted = room if default_max_tokens is None else min(room, default_max_tokens)
        elif max_tokens > room:
            longest = max(map(len, prompts))
            raise ContextLengthExceeded(
                f"{max_tokens_param} should be at most {room} (the context has "
                f"{self._max_model_len()} tokens, the prompt {longest}), got {max_tokens}",
                param=max_tokens_param,
            )
        else:
            fitted = max_tokens
        min_tokens = body.min_tokens or 0
        if min_tokens > fitted:
            raise InvalidRequest(
                f"min_tokens should be at most max_tokens ({fitted}), got {min_tokens}",
                param="min_tokens",
            )
        sampling = self._sampling(body, num_logprobs, min_tokens, extras, ranks=n > num_returned)
        return GenerationRequest(
            request_id=secrets.token_hex(16),
            model=model,
            prompts=prompts,
            sampling=sampling,
            max_tokens=fitted,
            n=n,
            num_returned=num_returned,
            stop=stop_list(body),
            include_stop=bool(body.include_stop_str_in_output),
            echo=extras.echo,
            drop_output=max_tokens == 0,
            skip_special_tokens=body.skip_special_tokens is not False,
            output=extras.output,
            shows_logprobs=num_logprobs is not None,
            shows_prompt_logprobs=extras.prompt_logprobs is not None,
            shows_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            adapter=model if model in self._adapters.names else "",
        )

    def _room(self, prompts: Sequence[Sequence[int]], param: str) -> int:
        """Output tokens that the longest prompt leaves in the context."""
        limit = self._max_model_len()
        for prompt in prompts:
            if not prompt:
                raise InvalidRequest(f"{param} must have at least one token", param=param)
            self._check_fits(len(prompt), param)
        return limit - max(map(len, prompts))

    def _sampling(
        self,
        body: GenerationBody,
        num_logprobs: int | None,
        min_tokens: int,
        extras: _Extras,
        *,
        ranks: bool,
    ) -> SamplingOptions:
        prompt_logprobs = [k for k in (extras.prompt_logprobs,) if k is not None]
        if extras.echo and num_logprobs is not None:
            prompt_logprobs.append(num_logprobs)
        return SamplingOptions(
            temperature=_or(body.temperature, 1.0),
            top_k=max(0, body.top_k or 0),
            top_p=_or(body.top_p, 1.0),
            min_p=_or(body.min_p, 0.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(body.logit_bias or {}),
            seed=body.seed,
            num_logprobs=0 if num_logprobs is None and ranks else num_logprobs,
            num_prompt_logprobs=max(prompt_logprobs, default=None),
            min_tokens=min_tokens,
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            grammar=extras.grammar,
        )

    def _logit_bias(self, raw: Mapping[str, float]) -> dict[int, float]:
        biases = {}
        for text, bias in raw.items():
            if not (text.isascii() and text.isdigit()) or len(text) > 10:
                raise InvalidRequest(
                    f"logit_bias keys must be token ids, got {text[:100]!r}", param="logit_bias"
                )
            biases[int(text)] = bias
        self._check_token_ids(list(biases), "logit_bias")
        return biases


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
