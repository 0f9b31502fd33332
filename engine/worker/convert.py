"""Wire messages to engine types and back; nothing past this file sees a proto request."""

import time
from collections.abc import Sequence

from engine.logprobs import TokenLogprobs
from engine.request import FinishReason, Request, RequestKey, RequestState, SamplingParams
from kvtransfer.layout import KVLayout
from protos import worker_pb2
from protos.block_hash import block_salt

_FINISH_REASONS = {
    None: worker_pb2.FINISH_NONE,
    FinishReason.STOP: worker_pb2.FINISH_STOP,
    FinishReason.LENGTH: worker_pb2.FINISH_LENGTH,
}


def key_from_proto(key: worker_pb2.RequestKey) -> RequestKey:
    """(request_id, attempt) of a wire key."""
    return (key.request_id, key.attempt)


def key_to_proto(key: RequestKey) -> worker_pb2.RequestKey:
    """Inverse of `key_from_proto`."""
    return worker_pb2.RequestKey(request_id=key[0], attempt=key[1])


def sampling_from_proto(sampling: worker_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters as the engine keeps them."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        num_prompt_logprobs=(
            sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None
        ),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        grammar=sampling.grammar,
    )


def token_ids_from_proto(ids: Sequence[int], vocab_size: int, *, least: int = 1) -> list[int]:
    """Token ids that the model can take.

    Raises: ValueError: fewer than `least`, or one outside the vocabulary.
    """
    token_ids = list(ids)
    if len(token_ids) < least:
        raise ValueError("token_ids is empty")
    if (largest := max(token_ids, default=0)) >= vocab_size:
        raise ValueError(f"token id {largest} is outside the vocabulary of {vocab_size}")
    return token_ids


def request_from_proto(
    key: worker_pb2.RequestKey,
    work: worker_pb2.Work,
    *,
    kv_identity: str,
    vocab_size: int,
    adapter: str = "",
) -> Request:
    """A new request for this worker; its clock starts now.

    `kv_identity`: model and quantisation, whatever makes the same tokens' KV differ; the key of
    the `adapter` does too.

    Raises: ValueError: no tokens, or a token id outside the vocabulary.
    """
    token_ids = token_ids_from_proto(work.token_ids, vocab_size)
    now_s = time.monotonic()
    return Request(
        request_id=key.request_id,
        attempt=key.attempt,
        token_ids=token_ids,
        num_prompt_tokens=work.num_prompt_tokens,
        sampling=sampling_from_proto(work.sampling),
        deadline_s=now_s + work.deadline_ms / 1000 if work.deadline_ms else float("inf"),
        priority=work.priority,
        cache_salt=block_salt(kv_identity, adapter, work.cache_salt),
        adapter=adapter,
        arrival_s=now_s,
    )


def logprobs_to_proto(
    entries: list[TokenLogprobs],
) -> tuple[list[worker_pb2.TokenLogprob], list[worker_pb2.LogprobList]]:
    """(the tokens' own, their alternatives), one of each per entry."""
    own = [worker_pb2.TokenLogprob(token_id=e.token_id, logprob=e.logprob) for e in entries]
    top = [
        worker_pb2.LogprobList(
            logprobs=[worker_pb2.TokenLogprob(token_id=t, logprob=lp) for t, lp in e.top]
        )
        for e in entries
    ]
    return own, top


def output_to_proto(
    request: Request, token_ids: list[int], logprobs: list[TokenLogprobs]
) -> worker_pb2.TokenOutput:
    """The newest tokens of a request; `token_ids` are the last ones of its outputs.

    The drafts go along where another worker goes on with the request.
    """
    own, top = logprobs_to_proto(logprobs)
    leaves = request.state is RequestState.SENDING
    output = worker_pb2.TokenOutput(
        key=key_to_proto(request.key),
        output_index=request.num_output_tokens - len(token_ids),
        token_ids=token_ids,
        logprobs=own,
        top_logprobs=top,
        draft_token_ids=request.draft_token_ids if leaves else (),
        finish_reason=_FINISH_REASONS[request.finish_reason],
        num_cached_tokens=request.num_cached_tokens,
    )
    return output


def layout_to_proto(layout: KVLayout) -> worker_pb2.KVLayout:
    """The layout as peers compare it."""
    return layout.to_proto()
