"""Run one proxy: `python -m proxy --config proxy.json [--ports-file ports.json]`."""

import argparse
import asyncio
import logging
import resource
import sys
from pathlib import Path

import uvloop

from proxy.auth import load_keys
from proxy.config import ProxyConfig
from proxy.server import serve
from proxy.tokenizer import load_tokenizer


def main() -> None:
    """Parse the command line and serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m proxy")
    parser.add_argument("--config", type=Path, required=True, help="ProxyConfig as JSON")
    parser.add_argument("--ports-file", type=Path, help="write the bound ports here as JSON")
    parser.add_argument("--log-level", default="warning")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s proxy %(levelname)s %(name)s: %(message)s",
    )
    config = ProxyConfig.from_json(arguments.config.read_text())
    try:
        load_keys(config)
    except (ValueError, OSError) as error:
        sys.exit(f"the API keys cannot be loaded: {error}")
    try:
        tokenizer = load_tokenizer(Path(config.model_path))
    except (ValueError, OSError) as error:
        sys.exit(f"the tokenizer cannot be loaded: {error}")
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, tokenizer, arguments.ports_file))


def _raise_file_limit() -> None:
    """A connection is an open file, and the usual soft limit of 1,024 is for shells."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
