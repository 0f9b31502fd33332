"""The message of a step: what has only tokens to say goes into columns, nothing else does."""

from protos import worker_pb2
from protos.step_message import step_message


def output(request_id: str, index: int, *token_ids: int) -> worker_pb2.TokenOutput:
    key = worker_pb2.RequestKey(request_id=request_id, attempt=3)
    return worker_pb2.TokenOutput(key=key, output_index=index, token_ids=token_ids)


def test_tokens_alone_go_into_columns_one_entry_each() -> None:
    step = step_message([output("a", 5, 70), output("b", 1, 71, 72), output("c", 9)])
    assert not step.outputs
    assert list(step.plain.request_id) == ["a", "b", "b"]
    assert list(step.plain.attempt) == [3, 3, 3]
    assert list(step.plain.output_index) == [5, 1, 2]
    assert list(step.plain.token_id) == [70, 71, 72]


def test_an_output_with_anything_else_stays_whole() -> None:
    entry = worker_pb2.TokenLogprob(token_id=1, logprob=-0.5)
    more = (
        worker_pb2.TokenOutput(finish_reason=worker_pb2.FINISH_STOP),
        worker_pb2.TokenOutput(logprobs=[entry]),
        worker_pb2.TokenOutput(prompt_logprobs=[worker_pb2.LogprobList(logprobs=[entry])]),
        worker_pb2.TokenOutput(draft_token_ids=[1]),
        worker_pb2.TokenOutput(error="grammar: fault"),
    )
    outputs = [output("a", 0, 70)]
    for one in more:
        whole = output("a", 4, 70)
        whole.MergeFrom(one)
        outputs.append(whole)
    step = step_message(outputs)
    assert list(step.outputs) == outputs
    assert not step.plain.token_id
