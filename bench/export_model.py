"""Write the packaged model as a Hugging Face folder in float32, for servers that read no GGUF.

python bench/export_model.py FOLDER
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.oracle import hf_smollm2, packaged_model_path


def main() -> None:
    """Write weights, configuration and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    hf_smollm2().save_pretrained(folder)
    gguf = packaged_model_path()
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
