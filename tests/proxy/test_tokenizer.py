"""Tokenizers of GGUF files and folders, and chat templates."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from proxy.chat_template import ChatTemplate
from proxy.errors import InvalidRequest, Unsupported
from proxy.tokenizer import Tokenizer, load_tokenizer

TEXTS = (
    "Hello world",
    "12345 + 678 = ?",
    "naïve café 😀👩‍👩‍👧 日本語テキスト",
    "  leading\n\n\ttabs  and trailing  ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "don't I'LL we've x = foo(bar)[1:2]\r\n  y",
    "a" * 500,
)


def test_the_packaged_tokenizer_matches_transformers(tokenizer: Tokenizer, gguf_path: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <b>&"},
    ]
    for subset in (messages, messages[1:]):
        expected = reference.apply_chat_template(subset, tokenize=False, add_generation_prompt=True)
        assert tokenizer.render(subset) == expected


def test_digits_are_split_one_by_one(tokenizer: Tokenizer) -> None:
    # The GGUF names this splitter ("smollm"); a plain GPT-2 split keeps " ½" and "١٢" together.
    for text in (" ½", "١٢", "2024"):
        ids = tokenizer.encode(text)
        alone = [i for char in text for i in tokenizer.encode(char)]
        assert ids == alone


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        data = b"".join(tokenizer.token_bytes[i] for i in tokenizer.encode(text))
        assert data.decode() == text


def test_loading_is_fast(gguf_path: Path) -> None:
    began = time.process_time()
    load_tokenizer(gguf_path)
    assert time.process_time() - began < 1.5


def test_a_folder_gives_the_same_as_the_file_it_came_from(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    settings = {"eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    folder = load_tokenizer(tmp_path)
    assert folder.token_bytes == tokenizer.token_bytes
    assert folder.special_ids == tokenizer.special_ids
    assert folder.context_length == 77
    assert folder.render([{"role": "user", "content": "a"}]) == "a<|im_end|>"
    assert [folder.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_a_jinja_file_wins_over_the_settings(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_tokenizer(tmp_path).render([]) == "new"


def test_a_model_without_template_refuses_chats(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(Unsupported):
        load_tokenizer(tmp_path).render([])


def test_sentencepiece_bytes_and_spaces_are_understood(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "▁", "h", "i", "▁h", "▁hi", *(f"<0x{b:02X}>" for b in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "h"), ("▁h", "i")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip()]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    folder = load_tokenizer(tmp_path)
    ids = folder.encode("hi é")
    assert b"".join(folder.token_bytes[i] for i in ids).decode() == " hi é"
    assert folder.strips_leading_space


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "chat template"),
    ],
)
def test_a_template_that_refuses_is_an_invalid_request(template: str, message: str) -> None:
    chat = ChatTemplate(template, {})
    with pytest.raises(InvalidRequest, match=message) as refused:
        chat.render(
            [{"role": "user", "content": "x"}], add_generation_prompt=True, template_kwargs={}
        )
    assert refused.value.param == "messages"


def test_templates_have_what_model_authors_use() -> None:
    chat = ChatTemplate(
        "{{ bos_token }}{{ messages | tojson }}{{ strftime_now('%Y')[:2] }}{{ flag }}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}no{% endfor %}",
        {"bos_token": "<s>"},
    )
    text = chat.render(
        [{"content": "<é>"}], add_generation_prompt=False, template_kwargs={"flag": "on"}
    )
    assert text == '<s>[{"content": "<é>"}]20on'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"model": '),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("tokenizer_config.json", '{"chat_template": [{}]}'),
        ("chat_template.jinja", "{{"),
        ("config.json", '"text"'),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: str
) -> None:
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
        load_tokenizer(tmp_path)


def write_gguf(path: Path, **changes: Any) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": ["<unk>", "a", "ab", "b"],
        "scores": [0.0, 1.0, 2.0, 3.0],
        "unknown_token_id": 0,
    }
    for name, value in (values | changes).items():
        writer.add_key_value(f"tokenizer.ggml.{name}", value, kind_of(value), kind_of(value, 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def kind_of(value: Any, *indices: int) -> gguf.GGUFValueType | None:
    if indices:
        return gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
    return gguf.GGUFValueType.get_type(value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "bert"},
        {"scores": [0.0]},
        {"unknown_token_id": 99},
        {"model": "gpt2", "pre": "unheard-of", "merges": ["a b"]},
        {"model": "gpt2", "merges": ["a c"]},
    ],
)
def test_gguf_metadata_that_makes_no_tokenizer_is_refused_with_the_files_name(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, **changes)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load_tokenizer(path)


async def test_a_long_text_is_encoded_while_others_run(tokenizer: Tokenizer) -> None:
    text = "The keeper, who was old, said: 42 gulls. " * 10_000
    num_turns = 0
    encoding = asyncio.create_task(asyncio.to_thread(tokenizer.encode, text))
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 5
    assert await encoding == tokenizer._backend.encode(text).ids
