"""Models from the hub: a model's files, into its local cache."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from pdserve.errors import ModelNotFound

# NOTE: weights as safetensors only; nothing that would have to be unpickled, and no code.
_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")
_TIMEOUT_S = 10.0


def download(model: str) -> Path:
    """The local folder of a hub id.

    Raises: ModelNotFound: not cached and out of reach, or refused by the hub.
    """
    try:
        return Path(snapshot_download(model, allow_patterns=list(_FILES), etag_timeout=_TIMEOUT_S))
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"model {model} is not in the local cache, and the hub cannot be reached; "
            "is it a path with a typing error?"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelNotFound(f"model {model} cannot be fetched from the hub: {error}") from error
