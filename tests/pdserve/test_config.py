"""pdserve.yaml: what is accepted, what is refused and how the refusal reads."""

from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from engine.worker.config import WorkerConfig
from pdserve.config import (
    ServiceConfig,
    proxy_config,
    resolve,
    settle,
    user_values,
    worker_configs,
)
from pdserve.config_checks import is_loopback
from pdserve.config_file import load_config, parse_config
from pdserve.errors import ConfigError


def load(*overrides: str) -> ServiceConfig:
    return load_config(None, overrides)


def workers(config: ServiceConfig) -> tuple[WorkerConfig, WorkerConfig]:
    return worker_configs(settle(config, is_latent=False), model_path="/m", token="t")


def test_defaults_are_valid_and_serve_the_packaged_model_on_loopback() -> None:
    config = load()
    assert config.model == "smollm2-135m-instruct"
    assert (config.host, config.http_port, config.grpc_port) == ("127.0.0.1", 8000, 8001)
    assert (config.prefiller.replicas, config.decoder.replicas) == (1, 1)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("modl=x", "modl: unknown key; did you mean `model`?"),
        (
            "decoder.replica=2",
            "decoder.replica: unknown key; did you mean `decoder.replicas`?",
        ),
        ("kv_cache_byte=1", "kv_cache_byte: unknown key; did you mean `decoder.kv_cache_bytes`?"),
        ("proxy.host=1", "proxy.host: state it once, as `host`"),
        ("transfer.transport=memory", "transfer.transport: state it once, as `transport`"),
        ("prefiller.replicas=-1", "prefiller.replicas: -1 is not allowed: at least 0"),
        (
            "prefiller.num_threads=9999999",
            "prefiller.num_threads: 9999999 is not allowed: at most 1024",
        ),
        (
            "decoder.max_num_seqs=9999999",
            "decoder.max_num_seqs: 9999999 is not allowed: at most 65536",
        ),
        ("decoder.replicas=two", 'decoder.replicas: "two" is not allowed: a whole number'),
        ("decoder.replicas=true", "decoder.replicas: true is not allowed: a whole number"),
        ("http_port=99999", "http_port: 99999 is not allowed: at most 65535"),
        ("insecure=1", "insecure: 1 is not allowed: true or false"),
        ("decoder=3", "decoder: 3 is not allowed: a section of `key: value` lines"),
        (
            "transport=tcp",
            "transport: \"tcp\" is not allowed: one of 'auto', 'memory', 'mooncake' or 'hccl'",
        ),
        (
            "decoder.kv_cache_bytes=1Gx",
            'decoder.kv_cache_bytes: "1Gx" is not allowed: a size such as 512MiB',
        ),
        ("lease_s=soon", 'lease_s: "soon" is not allowed: a duration such as 500ms, 2s or 5m'),
        ("lease_s=.inf", "lease_s: inf is not allowed: at most 604800 s (7 days)"),
        ("proxy.request_timeout_s=.nan", "proxy.request_timeout_s: NaN is not allowed"),
        (
            "proxy.client_write_timeout_s=10000000",
            "proxy.client_write_timeout_s: 10000000.0 is not allowed: at most 604800 s (7 days)",
        ),
        ("grpc_port=8000", "http_port and grpc_port are both 8000: they must differ"),
        ("host=foo bar", 'host: "foo bar" is not allowed: an address or host name'),
        ("host=http://a", 'host: "http://a" is not allowed: an address or host name'),
        ("host=a..b", 'host: "a..b" is not allowed: an address or host name'),
        ("host=[::1]", "host: "),
        ("ray.address=ray://h:1", 'ray.address: "ray://h:1" is not allowed: local, auto or HOST:'),
        ("ray.address=h:99999", 'ray.address: "h:99999" is not allowed'),
        ("ray.address=nowhere", 'ray.address: "nowhere" is not allowed'),
        ('model="a\\nb"', 'model: "a\\nb" is not allowed as the name that clients use'),
        ("proxy.cors_origins=&a [*a]", "contains itself"),
        ("proxy.cors_origins=" + "[" * 5000, 'proxy.cors_origins: "[[['),
        ('served_model_name="a\\nb"', 'served_model_name: "a\\nb" is not allowed as'),
        ("served_model_name=' a'", 'served_model_name: " a" is not allowed as'),
        (
            "cpu.activation_bits=32",
            "cpu.activation_bits: 32 is not allowed: one of 'auto', 8 or 16",
        ),
        (
            "cpu.activation_bits=8.0",
            "cpu.activation_bits: 8.0 is not allowed: one of 'auto', 8 or 16",
        ),
        (
            f"cpu.activation_bits={'9' * 26}",
            f"cpu.activation_bits: {'9' * 26} is not allowed: one of 'auto', 8 or 16",
        ),
        (
            "cpu.activation_bits=true",
            "cpu.activation_bits: true is not allowed: one of 'auto', 8 or 16",
        ),
        (
            "cpu.activation_bits=null",
            "cpu.activation_bits: null is not allowed: one of 'auto', 8 or 16",
        ),
        ("max_model_len=8.0", "max_model_len: 8.0 is not allowed: a whole number"),
        (f"http_port={'9' * 5000}", 'http_port: "999'),
        ("decoder.replicas", "--set decoder.replicas: expected key=value"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_is_allowed(
    override: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert problem in str(caught.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load("http_port=-1", "decoder.max_num_seqs=0", "cpu.activation_bits=8.0")
    assert len(caught.value.problems) == 3


def test_a_value_that_a_room_is_told_too_is_one_problem() -> None:
    for override in ("max_model_len=-1", "http_port=-1", "transport=tcp", "host=null"):
        with pytest.raises(ConfigError) as caught:
            load(override)
        assert len(caught.value.problems) == 1, caught.value.problems


def sections(kind: type = ServiceConfig, path: str = "") -> list[str]:
    found = []
    for name, inner in get_type_hints(kind).items():
        if is_dataclass(inner):
            found += [f"{path}{name}", *sections(inner, f"{path}{name}.")]
    return found


@pytest.mark.parametrize("section", sections())
def test_a_section_without_a_value_is_all_defaults(section: str) -> None:
    assert load(f"{section}=") == load()


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["quantization=none"], "cpu.activation_bits is 8: changes nothing with quantization none"),
        (["quantization=int8"], "cpu.activation_bits is 8: changes nothing with quantization int8"),
        (["ops=reference"], "cpu.activation_bits is 8: changes nothing with ops reference"),
    ],
)
def test_activation_bits_that_change_nothing_are_refused(
    overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load("cpu.activation_bits=8", *overrides)
    assert load("cpu.activation_bits=16", *overrides)


@pytest.mark.parametrize(
    ("overrides", "is_latent", "bits"),
    [
        ([], False, 8),
        (["quantization=int4", "ops=cpu"], False, 8),
        (["decoder.replicas=3", "prefiller.replicas=0"], False, 8),
        (["prefiller.pp=2", "decoder.dp=2"], False, 8),
        ([], True, 16),
        (["decoder.tp=2"], False, 16),
        (["prefiller.tp=2", "decoder.tp=2"], False, 16),
        (["prefiller.cp=2"], False, 16),
        (["decoder.dp=2", "decoder.ep=2"], False, 16),
        (["quantization=none"], False, 16),
        (["quantization=int8"], False, 16),
        (["ops=reference"], False, 16),
        (
            ["ops=npu", "block_size=128", "ray.npus_per_worker=1", "transfer.checksum=off"],
            False,
            16,
        ),
        (["cpu.activation_bits=8"], True, 8),
        (["cpu.activation_bits=8", "decoder.tp=2"], False, 8),
        (["cpu.activation_bits=16"], False, 16),
    ],
)
def test_activations_have_8_bits_by_default_where_tokens_do_not_depend_on_how_work_is_split(
    overrides: list[str], is_latent: bool, bits: int
) -> None:
    config = settle(resolve(load(*overrides), 2), is_latent=is_latent)
    assert config.cpu.activation_bits == bits
    assert parse_config(user_values(config)) == config, "it could not be given to a service"
    found = worker_configs(config, model_path="/m", token="t")
    assert [worker.cpu.activation_bits for worker in found] == [bits, bits]


def test_activation_bits_go_with_weights_that_may_have_4_bits() -> None:
    for quantization in ("auto", "native", "int4"):
        for ops in ("auto", "cpu"):
            assert load("cpu.activation_bits=8", f"quantization={quantization}", f"ops={ops}")


def test_a_host_that_others_reach_needs_insecure() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        load("host=0.0.0.0")
    for host in ("0.0.0.0", "::", "node-1.cluster.local", "fe80::1%eth0"):
        assert load(f'host="{host}"', "insecure=true").host == host


def test_api_keys_open_other_hosts_and_a_broken_list_of_keys_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice sha256:{'ab' * 32}\n")
    config = load("host=0.0.0.0", f"proxy.api_keys_file={keys}")
    assert config.needs_key
    assert parse_config(user_values(config)) == config
    keys.write_text("alice in plain text\n")
    with pytest.raises(ConfigError, match="keys:1"):
        load(f"proxy.api_keys_file={keys}")
    with pytest.raises(ConfigError, match="No such file"):
        load(f"proxy.api_keys_file={tmp_path}/none")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("h1", False)],
)
def test_loopback_is_told_from_the_rest(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_too_few_blocks_for_the_context_are_refused_with_the_number_needed() -> None:
    with pytest.raises(ConfigError, match="needs at least 4 blocks"):
        load("decoder.num_blocks=2", "max_model_len=100")
    assert load("prefiller.num_blocks=2", "max_model_len=100")


def test_caches_larger_than_the_machine_are_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has"):
        load("decoder.kv_cache_bytes=100TiB")


def test_more_prompts_than_tokens_in_a_step_are_refused() -> None:
    problem = "prefiller.max_num_seqs is 16: at most prefiller.max_num_batched_tokens, which is 8"
    with pytest.raises(ConfigError, match=problem):
        load("prefiller.max_num_batched_tokens=8")
    assert load("prefiller.max_num_batched_tokens=8", "prefiller.max_num_seqs=8")


@pytest.mark.parametrize(
    ("ops", "mode", "allowed"),
    [
        ("auto", "torchair", "auto, eager, native"),
        ("cpu", "aclgraph", "auto, eager, native"),
        ("reference", "native", "auto, eager"),
        ("npu", "native", "auto, eager, torchair, aclgraph"),
    ],
)
def test_a_graph_mode_of_other_kernels_is_refused(ops: str, mode: str, allowed: str) -> None:
    problem = f"decoder.graph_mode is {mode}, with ops {ops} it is one of {allowed}"
    with pytest.raises(ConfigError, match=problem):
        load(f"ops={ops}", f"decoder.graph_mode={mode}")


def test_a_lease_must_survive_one_lost_renewal() -> None:
    with pytest.raises(ConfigError, match=r"at most 0\.5"):
        load("lease_s=1s")


def test_sizes_and_durations_are_read_with_their_units() -> None:
    config = load(
        "decoder.kv_cache_bytes=1.5GiB", "proxy.queue_timeout_s=500ms", "proxy.request_timeout_s=5m"
    )
    assert config.decoder.kv_cache_bytes == 3 << 29
    assert config.proxy.queue_timeout_s == 0.5
    assert config.proxy.request_timeout_s == 300.0


def test_a_file_is_read_and_overridden_and_what_is_printed_can_be_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pdserve.yaml"
    path.write_text("model: /models/x\ndecoder:\n  replicas: 3\nproxy:\nmax_model_len: 512\n")
    config = load_config(path, ["decoder.max_num_seqs=8"])
    assert (config.decoder.replicas, config.decoder.max_num_seqs) == (3, 8)
    assert config.proxy.max_model_len == 512
    resolved = resolve(config, num_cores=8)
    assert parse_config(user_values(resolved)) == resolved
    assert resolved.decoder.num_threads == 2


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("http_port: 1\nmodel: m\nhttp_port: 2\n", "http_port"),
        ("decoder:\n  replicas: 1\n  replicas: 2\n", "replicas"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(
    tmp_path: Path, text: str, key: str
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"x\.yaml: `{key}` stands twice\n.*line 3"):
        load_config(path)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ("decoder.tp=3", "takes a decoder of one rank, tp times dp is 3"),
        ("decoder.dp=2", "takes a decoder of one rank, tp times dp is 2"),
        ("speculation=ngram", "does not go with speculation ngram, which drafts from"),
    ],
)
def test_steps_that_never_run_ahead_are_refused_where_they_are_asked_for(
    other: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"^decoder.async_scheduling is on: {problem}"):
        load("decoder.async_scheduling=on", other)
    for value in ("auto", "off"):
        assert load(f"decoder.async_scheduling={value}", other).decoder.async_scheduling == value
    assert load("decoder.async_scheduling=on").decoder.async_scheduling == "on"


@pytest.mark.parametrize("text", ["- a\n", "a: [", "just text", "? [a]\n: 2\n", "[" * 5000])
def test_a_file_that_is_no_mapping_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_config(path)


def test_a_text_that_looks_like_a_date_but_is_none_is_text_or_named(tmp_path: Path) -> None:
    assert load("served_model_name=2026-99-99").served_model_name == "2026-99-99"
    path = tmp_path / "pdserve.yaml"
    path.write_text("served_model_name: 2026-99-99\n")
    with pytest.raises(ConfigError, match=r"pdserve\.yaml: month must be in"):
        load_config(path)


def test_a_decode_step_has_room_for_every_draft() -> None:
    config = resolve(load("speculation=ngram", "num_draft_tokens=2", "decoder.max_num_seqs=10"), 2)
    for worker in workers(config):
        assert (worker.speculation, worker.num_draft_tokens) == ("ngram", 2)
    _, decoder = workers(config)
    assert decoder.max_num_batched_tokens == 10 * 3 + config.decoder.max_prefill_tokens


def test_what_is_stated_once_reaches_every_process() -> None:
    config = resolve(
        load("transport=mooncake", "block_size=16", "served_model_name=m", "quantization=int8"), 2
    )
    prefiller, decoder = workers(config)
    for worker in (prefiller, decoder):
        assert worker.transfer.transport == "mooncake"
        assert (worker.block_size, worker.model_name, worker.cluster_token) == (16, "m", "t")
        assert worker.quantization == "int8"
        assert (worker.speculation, worker.num_draft_tokens) == ("none", 0)
    assert decoder.max_num_batched_tokens == 128
    proxy = proxy_config(config, model_path="/m", controller_address="a:1", token="t")
    assert (proxy.served_model_names, proxy.cluster_token) == (("m",), "t")


def test_roles_are_spread_over_ranks_each_in_its_own_way() -> None:
    config = load("prefiller.tp=2", "decoder.dp=2", "decoder.tp=2", "decoder.ep=4")
    prefiller, decoder = (w.parallel for w in workers(config))
    assert (prefiller.tp_size, prefiller.dp_size, prefiller.ep_size) == (2, 1, 1)
    assert (decoder.tp_size, decoder.dp_size, decoder.ep_size) == (2, 2, 4)
    assert (config.prefiller.num_ranks, config.decoder.num_ranks) == (2, 4)
    assert resolve(config, 12).decoder.num_threads == 2, "cores are shared by all six ranks"
    message = "decoder.ep is 4: must divide the 6 ranks, which is tp 3 times dp 2"
    with pytest.raises(ConfigError, match=message):
        load("decoder.tp=3", "decoder.dp=2", "decoder.ep=4")
    with pytest.raises(ConfigError, match=r"mtp does not go with decoder\.dp"):
        load("decoder.dp=2", "speculation=mtp")
    assert load("decoder.tp=2", "speculation=mtp").decoder.tp == 2
    with pytest.raises(ConfigError, match="KV caches"):  # every rank has one
        load("decoder.dp=1024", "decoder.kv_cache_bytes=1073741824")


def test_a_prefiller_may_share_the_rows_of_its_prompts_over_ranks() -> None:
    config = load("prefiller.cp=2", "prefiller.tp=2", "prefiller.ep=4", "prefiller.cp_min_tokens=9")
    assert config.prefiller.num_ranks == 4
    prefiller, decoder = (w.parallel for w in workers(config))
    assert (prefiller.cp_size, prefiller.cp_min_tokens, prefiller.world_size) == (2, 9, 4)
    assert (decoder.cp_size, decoder.world_size) == (1, 1)
    for setting, problem in (
        ("prefiller.dp=2", r"prefiller\.cp is 2 and prefiller\.dp is 2"),
        ("speculation=mtp", r"prefiller\.cp is 2 and speculation is mtp"),
        ("prefiller.ep=3", r"the 2 ranks, which is tp 1 times dp 1 times cp 2"),
        ("decoder.cp=2", r"decoder\.cp"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load("prefiller.cp=2", setting)


def test_layers_of_a_prefiller_may_be_in_stages_and_what_does_not_go_with_it_is_named() -> None:
    config = load("prefiller.pp=2", "prefiller.tp=2", "prefiller.pp_layers=[3, 4]")
    assert parse_config(user_values(config)) == config
    assert config.prefiller.num_ranks == 4
    prefiller, decoder = (w.parallel for w in workers(config))
    assert (prefiller.pp_size, prefiller.pp_layers, prefiller.world_size) == (2, (3, 4), 4)
    assert decoder.pp_size == 1
    for setting, problem in (
        ("prefiller.dp=2", r"prefiller\.dp is 2: does not go with pp 2"),
        ("prefiller.cp=2", r"prefiller\.cp is 2: does not go with pp 2"),
        ("prefiller.layer_sharding=[o_proj]", r"layer_sharding is \['o_proj'\]: does not go"),
        ("tiers.host_bytes=1048576", r"prefiller\.pp is 2: does not go with tiers"),
        ("speculation=mtp", r"prefiller\.pp is 2: does not go with speculation mtp"),
        ("prefiller.pp_layers=[3]", r"prefiller\.pp_layers is \[3\]: must be 2 numbers"),
        ("prefiller.ep=2", r"the 1 ranks, which is tp 1"),
        ("decoder.pp=2", r"decoder\.pp: unknown key; did you mean `prefiller\.pp`"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load("prefiller.pp=2", setting)
    with pytest.raises(ConfigError, match=r"pp_layers is \[3\]: pp is 1"):
        load("prefiller.pp_layers=[3]")


def test_settings_of_expert_balance_that_do_not_fit_are_refused() -> None:
    config = load("decoder.tp=4", "decoder.ep=4", "decoder.eplb.mode=dynamic")
    assert parse_config(user_values(config)) == config
    assert workers(config)[1].parallel.eplb.mode == "dynamic"
    for settings, problem in (
        (["decoder.eplb.mode=dynamic"], "decoder: eplb is on, and ep is 1"),
        (["decoder.eplb.num_redundant_experts=2"], "eplb.mode is off"),
        (["decoder.tp=2", "decoder.ep=2", "decoder.eplb.mode=static"], "eplb.file must name"),
        (["decoder.dp=2", "decoder.dual_batch_overlap=true"], "with tp 1 and ep 1 no layer waits"),
        (["decoder.eplb.mode=on"], "decoder.eplb.mode: .* one of"),
        (["decoder.eplb.interval_steps=0"], "at least 1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load(*settings)
