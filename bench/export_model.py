"""Write the packaged model as a Hugging Face folder in float32, for servers that read no GGUF.

python bench/export_model.py FOLDER
"""

import argparse
from pathlib import Path

from packaged_model import hf_config, hf_weights
from safetensors_formats import folder_formats, write_folder
from transformers import AutoTokenizer

from pdserve.models import resolve_model


def main() -> None:
    """Write weights, configuration and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    path = resolve_model("smollm2-135m-instruct")
    form = folder_formats(group_size=64)["float32"]
    write_folder(folder, hf_config(path) | {"dtype": "float32"}, form, hf_weights(path))
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
