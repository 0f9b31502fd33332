"""The command line: pdserve up | down | status | scale | chat | config | doctor | bench.

NOTE: commands import what they run when they run it. Ray alone takes a second to import, and only
`up` needs it; `status` should not wait for it.
"""

import json
import logging
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from pdserve.errors import ConfigError, PdserveError
from pdserve.state import (
    DEFAULT_ROOT,
    DEFAULT_SERVICE,
    ServiceState,
    StateFolder,
    place_options,
)
from pdserve.units import parse_seconds

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="LLM inference with prefill and decode on separate workers.",
)

_DEFAULT_FILE = Path("pdserve.yaml")
_SCALE_TIMEOUT_S = 120.0
_INTERRUPTED = 130
"""As a shell says of what SIGINT ended."""
_MAX_SECONDS = 7 * 24 * 3600.0

ConfigFile = Annotated[
    Path | None, typer.Option("-c", "--config", help="Default: ./pdserve.yaml if it exists.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE, such as decoder.replicas=2; may be repeated."),
]
Model = Annotated[
    str | None, typer.Option("--model", help="Packaged name, folder, .gguf file or hub id.")
]
Insecure = Annotated[bool, typer.Option(help="Allow other machines without API keys.")]
StateRoot = Annotated[Path, typer.Option("--state-dir", help="Where running services are noted.")]
Service = Annotated[str, typer.Option("--service", help="Which one.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def up(
    config_file: ConfigFile = None,
    model: Model = None,
    overrides: Overrides = None,
    insecure: Insecure = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it is ready.")] = False,
    state_root: StateRoot = DEFAULT_ROOT,
) -> None:
    """Start a service and watch over it until Ctrl-C."""
    from pdserve.config_file import load_config

    settings = _overrides(model, overrides, insecure)
    config = load_config(_file(config_file), settings)
    folder = _state_folder(state_root, config.service)
    if detach:
        from pdserve.detach import start_detached

        arguments = [f"--set={setting}" for setting in settings]
        arguments += ["--state-dir", str(folder.root)]
        if file := _file(config_file):
            arguments += ["--config", str(file.absolute())]
        start_detached(arguments, folder, _console())
        return
    # NOTE: before the ports are looked at: the running service itself is what listens on them.
    folder.check_free()
    from pdserve.ray_environment import ray_environment

    token = secrets.token_hex(32)
    os.environ.update(ray_environment(is_local=config.is_local, token=token))
    from pdserve.launch import make_plan, run_service

    run_service(make_plan(config, token), folder, _console())


@app.command()
def down(service: Service = DEFAULT_SERVICE, state_root: StateRoot = DEFAULT_ROOT) -> None:
    """Stop a service."""
    from pdserve.detach import stop_running

    stop_running(_state_folder(state_root, service), _console())


@app.command()
def status(
    service: Service = DEFAULT_SERVICE,
    as_json: AsJson = False,
    state_root: StateRoot = DEFAULT_ROOT,
) -> None:
    """Show the workers of a service."""
    from pdserve.client import connect
    from pdserve.display import status_table, transfer_lines
    from pdserve.status import status_values

    state = _running(service, state_root)
    with connect(state.controller_address, state.token) as client:
        service_status = client.status()
        found = {
            entry.engine_id: client.worker_stats(entry.address)
            for entry in service_status.membership.workers
            if entry.address
        }
    stats = {name: figures for name, figures in found.items() if figures is not None}
    if as_json:
        print(json.dumps(status_values(state, service_status, stats), indent=2))
        return
    console = _console()
    console.print(status_table(state, service_status, stats))
    for line in transfer_lines(stats):
        console.print(line, highlight=False)


@app.command()
def scale(
    numbers: Annotated[list[str], typer.Argument(help="prefiller=N decoder=N")],
    grace: Annotated[str, typer.Option(help="For the requests of workers that go.")] = "30s",
    wait: Annotated[bool, typer.Option(help="Return once the numbers are reached.")] = True,
    service: Service = DEFAULT_SERVICE,
    state_root: StateRoot = DEFAULT_ROOT,
) -> None:
    """Change the number of workers while serving."""
    from pdserve.client import connect
    from pdserve.readiness import unready
    from pdserve.scaling import parse_numbers

    prefillers, decoders = parse_numbers(numbers)
    grace_s = _seconds("--grace", grace)
    state = _running(service, state_root)
    with connect(state.controller_address, state.token) as client:
        service_status = client.scale(prefillers=prefillers, decoders=decoders, grace_s=grace_s)
        deadline_s = time.monotonic() + grace_s + _SCALE_TIMEOUT_S
        while wait and (missing := unready(service_status)):
            if time.monotonic() >= deadline_s:
                options = place_options(service, state.root)
                raise PdserveError(f"still waiting for {missing}; see `pdserve status{options}`")
            time.sleep(0.2)
            service_status = client.status()
    _console().print(
        f"prefillers {service_status.desired_prefillers}, "
        f"decoders {service_status.desired_decoders}",
        highlight=False,
    )


@app.command()
def config(
    config_file: ConfigFile = None,
    model: Model = None,
    overrides: Overrides = None,
    insecure: Insecure = False,
    resolved: Annotated[
        bool,
        typer.Option(
            "--resolved", help="Fill in name, threads and bits; fetch a model of the hub."
        ),
    ] = False,
) -> None:
    """Check a configuration, against its model too if that is here, and print it with defaults."""
    from pdserve.config import resolve, user_values
    from pdserve.config_file import load_config
    from pdserve.model_fit import fit
    from pdserve.models import find_model, find_model_at_hand

    loaded = load_config(_file(config_file), _overrides(model, overrides, insecure))
    if resolved:
        loaded = resolve(loaded)
        found = find_model(loaded.model)
        loaded = fit(loaded, found)
        print(f"# model files: {found.path}")
    elif at_hand := find_model_at_hand(loaded.model):
        fit(loaded, at_hand)
    else:
        print(f"the model was not checked: {loaded.model} is not on this machine", file=sys.stderr)
    print(yaml.safe_dump(user_values(loaded), sort_keys=False), end="")


@app.command()
def doctor(
    config_file: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Check this machine: versions, ports, and the NPUs' driver, CANN and links."""
    from pdserve.config_file import load_config
    from pdserve.doctor import Machine, Verdict, examine

    loaded = load_config(_file(config_file), overrides or [])
    ports = {"http_port": loaded.http_port, "grpc_port": loaded.grpc_port}
    findings = examine(Machine(environment=os.environ, ports=ports))
    if as_json:
        values = [
            {"subject": f.subject, "verdict": f.verdict.value, "text": f.text} for f in findings
        ]
        print(json.dumps(values, indent=2))
    else:
        for finding in findings:
            print(f"{finding.verdict.value:<6} {finding.subject:<34} {finding.text}")
    if any(finding.verdict is Verdict.WRONG for finding in findings):
        sys.exit(1)


@app.command()
def chat(
    message: Annotated[str | None, typer.Argument(help="Ask once; without it, a dialogue.")] = None,
    url: Annotated[str | None, typer.Option(help="Any OpenAI API; else the service.")] = None,
    model: Annotated[str | None, typer.Option(help="With --url.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    service: Service = DEFAULT_SERVICE,
    state_root: StateRoot = DEFAULT_ROOT,
) -> None:
    """Talk to the model."""
    from pdserve.chat import Chat, run_dialogue

    base_url = url or _running(service, state_root).http_url
    talk = Chat(
        base_url,
        model=model,
        api_key=_api_key(),
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    with talk:
        if message is None:
            run_dialogue(talk)
            return
        for piece in talk.ask(message):
            print(piece, end="", flush=True)
        print()


@app.command()
def bench(
    url: Annotated[str | None, typer.Option(help="Any OpenAI API; else the service.")] = None,
    model: Annotated[str | None, typer.Option(help="With --url.")] = None,
    num_requests: Annotated[int, typer.Option("-n", "--num-requests", min=1)] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients of a closed loop.")] = 8,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Instead: Poisson arrivals per second.")
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Input tokens in common.")] = 0,
    text: Annotated[bool, typer.Option("--text", help="Send text, not token ids.")] = False,
    vocab_size: Annotated[int, typer.Option(min=1000)] = 30_000,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: int = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests that are not counted.")] = 2,
    timeout: Annotated[str, typer.Option(help="For one request.")] = "600s",
    slo_ttft: Annotated[str | None, typer.Option(help="For goodput, such as 2s.")] = None,
    slo_tpot: Annotated[str | None, typer.Option(help="For goodput, such as 200ms.")] = None,
    output: Annotated[Path | None, typer.Option("-o", help="JSON file, - for stdout.")] = None,
    service: Service = DEFAULT_SERVICE,
    state_root: StateRoot = DEFAULT_ROOT,
) -> None:
    """Measure a server under load: TTFT, TPOT, ITL, throughput, goodput.

    Ends with status 1 if a request failed. Ctrl-C shows what there is so far.
    """
    from pdserve.load import LoadConfig
    from pdserve.load_report import report_table, summarize
    from pdserve.measure import measure

    if url is None:
        state = _running(service, state_root)
        url, model = state.http_url, state.model
    if model is None:
        raise ConfigError(["--model: needed with --url"])
    load = LoadConfig(
        url=url,
        model=model,
        num_requests=num_requests,
        concurrency=concurrency if rate is None else None,
        rate=rate,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        shared_prefix_tokens=shared_prefix,
        prompt_kind="text" if text else "tokens",
        vocab_size=vocab_size,
        temperature=temperature,
        seed=seed,
        warmup_requests=warmup,
        timeout_s=_seconds("--timeout", timeout),
        api_key=_api_key(),
    )
    slo_ttft_s = _seconds("--slo-ttft", slo_ttft) if slo_ttft else None
    slo_tpot_s = _seconds("--slo-tpot", slo_tpot) if slo_tpot else None
    result, is_whole = measure(load)
    if not result.requests:
        sys.exit(_INTERRUPTED)
    summary = summarize(load, result, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s)
    if output == Path("-"):
        print(json.dumps(summary, indent=2))
    else:
        if output is not None:
            output.write_text(json.dumps(summary, indent=2) + "\n")
        _console().print(report_table(summary))
        for message, number in summary["errors"].items():
            _console().print(f"{number} x {message}", highlight=False, markup=False)
    if not is_whole:
        sys.exit(_INTERRUPTED)
    if number := summary["num_errors"]:
        raise PdserveError(f"{number} of {summary['num_requests']} requests failed")


def main() -> None:
    """Run the command line; errors of ours are one message each."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app(standalone_mode=True)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except PdserveError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that may not be written
        logging.getLogger(__name__).debug("failed", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _file(config_file: Path | None) -> Path | None:
    if config_file is None and _DEFAULT_FILE.is_file():
        return _DEFAULT_FILE
    return config_file


def _overrides(model: str | None, overrides: list[str] | None, insecure: bool) -> list[str]:
    settings = list(overrides or ())
    if model is not None:
        settings.append(f"model={json.dumps(model)}")
    if insecure:
        settings.append("insecure=true")
    if keys := _api_keys():
        from proxy.auth import hash_key

        # Only hashes go on from here: to files, and to the arguments of a detached service.
        settings.append(f"proxy.api_key_hashes={json.dumps([hash_key(key) for key in keys])}")
    return settings


def _seconds(option: str, text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise ConfigError([f"{option} {text} is not allowed: {error}"]) from None
    if seconds > _MAX_SECONDS:
        raise ConfigError([f"{option} {text} is not allowed: at most {_MAX_SECONDS:.0f} s"])
    return seconds


def _api_keys() -> list[str]:
    """Keys from the environment: all for `up` to accept, the first one for clients to send."""
    return os.environ.get("PDSERVE_API_KEY", "").split()


def _api_key() -> str | None:
    return next(iter(_api_keys()), None)


def _running(service: str, state_root: Path) -> ServiceState:
    return _state_folder(state_root, service).read_running()


def _state_folder(root: Path, service: str) -> StateFolder:
    try:
        return StateFolder(root.expanduser().absolute(), service)
    except RuntimeError:  # a user without an entry, as containers have them, and no HOME
        raise ConfigError([f"{root} is nowhere, for there is no home: use --state-dir"]) from None


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    return console
