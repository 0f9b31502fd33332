"""What workers say about tokens, as the request path has it."""

from protos import worker_pb2
from proxy.request import TokenLogprobs


def logprobs_of(output: worker_pb2.TokenOutput, num_known: int) -> list[TokenLogprobs] | None:
    """Of the tokens after the first `num_known`; None when none were asked for."""
    if not output.logprobs:
        return None
    tops = output.top_logprobs
    return [
        TokenLogprobs(
            entry.token_id,
            entry.logprob,
            tuple((top.token_id, top.logprob) for top in tops[index].logprobs)
            if index < len(tops)
            else (),
        )
        for index, entry in enumerate(output.logprobs)
        if index >= num_known
    ]


def prompt_logprobs_of(output: worker_pb2.TokenOutput) -> list[TokenLogprobs] | None:
    """Of every prompt token but the first; None when not asked for."""
    if not output.prompt_logprobs:
        return None
    return [
        TokenLogprobs(
            entry.logprobs[0].token_id,
            entry.logprobs[0].logprob,
            tuple((top.token_id, top.logprob) for top in entry.logprobs[1:]),
        )
        for entry in output.prompt_logprobs
    ]
