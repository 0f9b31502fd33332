"""How the tokens of one step are laid out on the wire."""

from collections.abc import Iterable

from protos import worker_pb2


def step_message(outputs: Iterable[worker_pb2.TokenOutput]) -> worker_pb2.StepOutput:
    """One message of all outputs of a step; what has only tokens to say goes into columns."""
    step = worker_pb2.StepOutput()
    plain = step.plain
    for output in outputs:
        if not _is_plain(output):
            step.outputs.append(output)
            continue
        num_tokens = len(output.token_ids)
        plain.request_id.extend([output.key.request_id] * num_tokens)
        plain.attempt.extend([output.key.attempt] * num_tokens)
        plain.output_index.extend(range(output.output_index, output.output_index + num_tokens))
        plain.token_id.extend(output.token_ids)
    return step


def _is_plain(output: worker_pb2.TokenOutput) -> bool:
    """Whether there is nothing but tokens after the first one."""
    return not (
        output.output_index == 0
        or output.finish_reason
        or output.logprobs
        or output.prompt_logprobs
        or output.draft_token_ids
        or output.error
    )
