"""From `model:` to files."""

from pathlib import Path

import pytest

from pdserve.errors import ModelNotFound
from pdserve.models import default_served_name, resolve_model


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    path = resolve_model("smollm2-135m-instruct")
    assert path.suffix == ".gguf"
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "x.gguf"):
        (tmp_path / name).touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    assert default_served_name(str(tmp_path / "x.gguf")) == "x"
    assert default_served_name(str(tmp_path)) == tmp_path.name


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_with_what_it_lacks(tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "model.safetensors", "tokenizer.json"} - {missing}:
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=missing.removeprefix("model")):
        resolve_model(str(tmp_path))


def test_a_name_that_is_nothing_is_refused_with_what_it_could_be(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m-instruct"):
        resolve_model("smolm2")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
