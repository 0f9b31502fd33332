"""Checks of a body that need its limits alone: no model, no tokenizer."""

from proxy.config import Limits
from proxy.errors import InvalidRequest, Unsupported
from proxy.openai import ChatCompletionBody, CompletionBody, GenerationBody


def check_limits(body: GenerationBody, limits: Limits) -> None:
    """What every kind of generation is bound by. Raises: InvalidRequest, Unsupported."""
    if body.n is not None and body.n > limits.max_n:
        raise InvalidRequest(f"n should be at most {limits.max_n}, got {body.n}", param="n")
    if (body.prompt_logprobs or 0) > limits.max_logprobs:
        raise InvalidRequest(
            f"prompt_logprobs should be at most {limits.max_logprobs}, got {body.prompt_logprobs}",
            param="prompt_logprobs",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise Unsupported("prompt_logprobs is not supported with stream", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is only allowed with stream: true", param="stream_options"
        )
    stop = stop_list(body)
    if len(stop) > limits.max_stop:
        raise InvalidRequest(
            f"stop has {len(stop)} entries, the limit is {limits.max_stop}", param="stop"
        )
    longest = max(map(len, stop), default=0)
    if longest > limits.max_stop_chars:
        raise InvalidRequest(
            f"stop has an entry of {longest} characters, the limit is {limits.max_stop_chars}",
            param="stop",
        )
    if body.logit_bias is not None and len(body.logit_bias) > limits.max_logit_bias:
        raise InvalidRequest(
            f"logit_bias has {len(body.logit_bias)} entries, the limit is {limits.max_logit_bias}",
            param="logit_bias",
        )
    if len(body.stop_token_ids or ()) > limits.max_logit_bias:
        raise InvalidRequest(
            f"stop_token_ids has {len(body.stop_token_ids or ())} entries, "
            f"the limit is {limits.max_logit_bias}",
            param="stop_token_ids",
        )


def check_best_of(body: CompletionBody, limits: Limits) -> None:
    """Raises: InvalidRequest."""
    n, best_of = body.n or 1, body.best_of
    if best_of is None:
        return
    if best_of < n:
        raise InvalidRequest(f"best_of should be at least n ({n}), got {best_of}", param="best_of")
    if best_of > limits.max_n:
        raise InvalidRequest(
            f"best_of should be at most {limits.max_n}, got {best_of}", param="best_of"
        )
    if best_of > n and body.stream:
        raise InvalidRequest("best_of above n excludes stream", param="best_of")


def chat_logprobs(body: ChatCompletionBody, limits: Limits) -> int | None:
    """How many alternatives a chat shows of each token; None: no log-probabilities.

    Raises: InvalidRequest.
    """
    if body.top_logprobs is not None and not body.logprobs:
        if body.top_logprobs == 0:
            return None
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if not body.logprobs:
        return None
    if body.top_logprobs is not None and body.top_logprobs > limits.max_logprobs:
        raise InvalidRequest(
            f"top_logprobs should be at most {limits.max_logprobs}, got {body.top_logprobs}",
            param="top_logprobs",
        )
    return body.top_logprobs or 0


def stop_list(body: GenerationBody) -> tuple[str, ...]:
    """Stop strings that may match."""
    if body.stop is None:
        return ()
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    # An empty string would match everywhere; clients send it to mean none.
    return tuple(text for text in stop if text)


def refuse_unsupported(body: GenerationBody) -> None:
    """Raises: Unsupported."""
    if body.use_beam_search:
        raise Unsupported("use_beam_search is not supported", param="use_beam_search")
    if body.functions is not None:
        raise Unsupported("functions are not supported, tools are", param="functions")
    if body.audio is not None:
        raise Unsupported("audio is not supported", param="audio")
    if body.modalities is not None and body.modalities != ["text"]:
        raise Unsupported("only the modality 'text' is supported", param="modalities")
