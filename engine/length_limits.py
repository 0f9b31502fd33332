"""How long a request may become in one engine, and what its newest token ends."""

from dataclasses import dataclass

from engine.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimits:
    """The same for all requests of a scheduler."""

    max_model_len: int
    """Tokens that one request may have, prompt and output."""
    num_kv_tokens: int
    """Tokens whose KV the whole pool holds."""
    num_draft_tokens: int
    """Drafts that a request may have in a step."""
    prefill_only: bool
    """Requests leave with their first token."""
    eos_token_ids: frozenset[int]

    def validate(self, request: Request) -> None:
        """Check that the request can run to its end here.

        Raises: ValueError: it exceeds max_model_len or the whole pool, or has nothing to generate.
        """
        num_tokens, bound = request.num_tokens, self.max_model_len
        if not 0 < request.num_prompt_tokens <= num_tokens:
            raise ValueError(
                f"request has {num_tokens} tokens, {request.num_prompt_tokens} of them prompt"
            )
        if num_tokens >= bound:
            raise ValueError(f"request has {num_tokens} tokens, max_model_len is {bound}")
        if request.num_output_tokens >= request.sampling.max_tokens:
            raise ValueError(
                f"request has {request.num_output_tokens} output tokens, "
                f"max_tokens is {request.sampling.max_tokens}"
            )
        # The last token that is sampled never gets KV.
        longest = min(request.num_prompt_tokens + request.sampling.max_tokens, bound) - 1
        needed = num_tokens if self.prefill_only else longest
        if needed > self.num_kv_tokens:
            raise ValueError(
                f"request needs KV of {needed} tokens, the pool has {self.num_kv_tokens}"
            )

    def num_drafts_allowed(self, request: Request) -> int:
        """How many drafts the request can use: all may be right, and one more token is sampled."""
        left = min(
            request.sampling.max_tokens - request.num_output_tokens,
            self.max_model_len - request.num_tokens,
        )
        return max(0, min(self.num_draft_tokens, left - 1))

    def ends_with_running(self, request: Request) -> bool:
        """Whether the tokens of steps under way are the last ones it may have."""
        samples = request.num_running_samples
        return samples > 0 and (
            request.num_output_tokens + samples >= request.sampling.max_tokens
            or request.num_tokens + samples >= self.max_model_len
        )

    def finish_reason(self, request: Request) -> FinishReason | None:
        """What its newest token ends it by; None: it goes on."""
        token_id = request.token_ids[-1]
        sampling = request.sampling
        stops = token_id in sampling.stop_token_ids or (
            token_id in self.eos_token_ids and not sampling.ignore_eos
        )
        # The sampler lets a grammar that is complete end below min_tokens.
        if stops and (request.num_output_tokens > sampling.min_tokens or sampling.grammar):
            return FinishReason.STOP
        if request.num_output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        if request.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None
