"""LangChain's ChatOpenAI, unmodified, against real workers."""

from collections.abc import Iterator
from typing import Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.integration.conftest import PACKAGED_NAME
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

MODEL = PACKAGED_NAME


class Person(BaseModel):
    """A person."""

    name: Literal["Ada", "Bob"]
    age: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def service(packaged_service: Service) -> Iterator[Service]:
    yield packaged_service
    packaged_service.assert_idle()


@pytest.fixture
def chat(service: Service) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{service.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=40
    )


def test_langchain_invokes_and_streams_the_same(chat: ChatOpenAI) -> None:
    question = [HumanMessage("Name the capital of France.")]
    whole = chat.invoke(question)
    assert "Paris" in whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in chat.stream(question)) == whole.content


async def test_langchain_batches_asynchronously(chat: ChatOpenAI) -> None:
    replies = await chat.abatch(["Say one.", "Say two."])
    assert [type(reply) for reply in replies] == [AIMessage, AIMessage]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat: ChatOpenAI, method: str) -> None:
    structured = chat.with_structured_output(Person, method=method)
    assert isinstance(structured.invoke("Invent a person."), Person)


def test_langchain_tools_go_round(chat: ChatOpenAI) -> None:
    question = HumanMessage("Who?")
    reply = chat.bind_tools([Person], tool_choice="required").invoke([question])
    assert isinstance(reply, AIMessage)
    call = reply.tool_calls[0]
    assert Person.model_validate(call["args"])
    last = chat.invoke([question, reply, ToolMessage("done", tool_call_id=call["id"])])
    assert isinstance(last.content, str)
