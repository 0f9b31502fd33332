"""Masks of grammars: whatever is drawn from random logits matches, wherever the request runs."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from engine.errors import WeightsError
from engine.grammar import Grammars
from engine.request import Request, SamplingParams
from engine.sampling import Sampler
from engine.weights.vocabulary import Vocabulary, load_vocabulary
from kernels.reference import ReferenceOps
from tests.oracle import packaged_model_path

EOS = 256
# Every byte, the end, a special token, and words that straddle the grammar's own borders.
WORDS = [b'{"', b'":', b'", "', b"true", b"12", b'"}', b"}}", b"], ", b"abc", "é".encode()]
VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b"<end>", b"<s>", *WORDS], {EOS, 257})
VOCAB_SIZE = 280
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LOOSE = {**SCHEMA, "x-guidance": {"whitespace_pattern": r"[ \n]{1,2}"}}
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: %json ' + json.dumps(LOOSE)


def make_grammars() -> Grammars:
    return Grammars(lambda: VOCABULARY, VOCAB_SIZE, frozenset({EOS}))


def make_request(grammar: str = GRAMMAR, seed: int = 0, **sampling: object) -> Request:
    params = {"temperature": 1.0, "seed": seed, "max_tokens": 200, **sampling}
    return Request("r", seed, [5, 6], 2, SamplingParams(grammar=grammar, **params))


def step(grammars: Grammars, requests: list[Request]) -> None:
    sampler = Sampler(VOCAB_SIZE, frozenset({EOS}), ReferenceOps())
    grammars.prepare(requests)
    generator = torch.Generator().manual_seed(requests[0].num_tokens)
    logits = torch.randn(len(requests), VOCAB_SIZE, generator=generator) * 3
    output = sampler.sample(logits, requests, grammars.masks(requests))
    for request, token_id in zip(requests, output.token_ids, strict=True):
        request.token_ids.append(token_id)


def text(request: Request) -> str:
    ids = request.token_ids[request.num_prompt_tokens :]
    assert ids[-1] == EOS, ids
    return b"".join(VOCABULARY.token_bytes[i] for i in ids[:-1]).decode()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), move_after=st.integers(0, 30), min_tokens=st.integers(0, 60))
def test_random_outputs_validate_even_when_the_request_moves(
    seed: int, move_after: int, min_tokens: int
) -> None:
    request = make_request(seed=seed, min_tokens=min_tokens)
    grammars = make_grammars()
    while request.token_ids[-1] != EOS and request.num_output_tokens < 200:
        if request.num_output_tokens == move_after:
            grammars.close()
            grammars = make_grammars()  # another worker: nothing but the tokens goes along
        step(grammars, [request])
        assert not grammars.error(request.key)
    grammars.close()
    Draft202012Validator(SCHEMA).validate(json.loads(text(request)))


def test_a_grammar_that_forces_tokens_is_matched_too() -> None:
    grammars = make_grammars()
    request = make_request(LLMatcher.grammar_from_lark('start: "abcabctrue" /x{3}/'))
    while request.token_ids[-1] != EOS:
        step(grammars, [request])
    assert text(request) == "abcabctruexxx"
    grammars.close()


def test_rows_without_a_grammar_are_left_alone() -> None:
    grammars = make_grammars()
    free, bound = make_request("", 1), make_request(seed=2)
    sampler = Sampler(VOCAB_SIZE, frozenset({EOS}), ReferenceOps())
    logits = torch.randn(2, VOCAB_SIZE)
    grammars.prepare([free, bound])
    masks = grammars.masks([free, bound])
    assert masks is not None
    assert masks.rows == [1]
    together = sampler.sample(logits, [free, bound], masks)
    assert (
        together.token_ids[0]
        == Sampler(VOCAB_SIZE, frozenset({EOS}), ReferenceOps())
        .sample(logits[:1], [free])
        .token_ids[0]
    )
    assert VOCABULARY.token_bytes[together.token_ids[1]].startswith((b"{", b" ", b"\n"))
    assert grammars.masks([free]) is None
    grammars.close()


@pytest.mark.parametrize("grammar", [LLMatcher.grammar_from_regex("(["), "nonsense", "{}"])
def test_a_grammar_that_cannot_be_used_is_an_error_of_its_request_alone(grammar: str) -> None:
    grammars = make_grammars()
    bad, good = make_request(grammar, 1), make_request(seed=2)
    step(grammars, [bad, good])
    assert grammars.error(bad.key)
    assert not grammars.error(good.key)
    assert bad.token_ids[-1] == EOS
    grammars.forget(bad.key)
    assert not grammars.error(bad.key)
    grammars.close()


def test_without_a_vocabulary_grammars_fail_and_say_why() -> None:
    def load() -> Vocabulary:
        raise WeightsError("no tokenizer.json")

    grammars = Grammars(load, VOCAB_SIZE, frozenset({EOS}))
    request = make_request()
    step(grammars, [request])
    assert grammars.error(request.key) == "no tokenizer.json"
    grammars.close()


def test_the_packaged_vocabulary_spells_text() -> None:
    vocabulary = load_vocabulary(packaged_model_path())
    assert len(vocabulary.token_bytes) == 49152
    assert vocabulary.token_bytes[2] == b"<|im_end|>"
    assert 2 in vocabulary.special_ids
    assert {b" the", "é".encode(), b"\n\n"} <= set(vocabulary.token_bytes)


def test_a_folder_without_tokenizer_has_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path)
