"""pdserve.yaml and `--set key=value` to a checked ServiceConfig; every error names the key."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pdserve.config import DERIVED, ServiceConfig
from pdserve.config_checks import check
from pdserve.errors import ConfigError
from pdserve.units import parse_bytes, parse_seconds

Values = dict[str, Any]

_ADAPTER = TypeAdapter(ServiceConfig)


_BOOL = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would take the last one without a word.

    `off` is text, as YAML 1.2 has it: it is a value of settings that are no switches.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one section."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is no text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"`{key.value}` stands twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# PyYAML offers no way to take one back but this.
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile(r"(yes|no|true|false)$", re.IGNORECASE) if tag == _BOOL else pattern)
        for tag, pattern in resolvers
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ServiceConfig:
    """Read a file (None: all defaults), apply `a.b=value` overrides, check everything.

    Raises: ConfigError: with every problem found.
    """
    values = _read(path) if path else {}
    for override in overrides:
        _apply(values, override)
    return parse_config(values)


def parse_config(values: Mapping[str, Any]) -> ServiceConfig:
    """Check plain values, as YAML gives them.

    Raises: ConfigError: with every problem found.
    """
    try:
        json.dumps(values, default=str)
    except (ValueError, RecursionError):
        raise ConfigError(["a value is nested too deeply, or contains itself"]) from None
    problems = list(_unknown_keys(values, ServiceConfig, ""))
    if problems:
        raise ConfigError(problems)
    converted = _convert_units(dict(values))
    complete = _fill_derived(_with_all_sections(converted, ServiceConfig))
    found = dict(_wrong_choices(complete, ServiceConfig, ""))
    try:
        config = _ADAPTER.validate_json(json.dumps(complete, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_problems(error.errors(), found)) from None
    if found:
        raise ConfigError(list(found.values()))
    check(config)
    return config


def _read(path: Path) -> Values:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}"]) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # no UTF-8, no date
        raise ConfigError([f"{path}: {error}"]) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: expected `key: value` lines, got {type(values).__name__}"])
    return values


def _apply(values: Values, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError([f"--set {override}: expected key=value, such as decoder.replicas=2"])
    try:
        value = yaml.load(text, _Loader)  # a SafeLoader
    except (ValueError, yaml.YAMLError, RecursionError):  # what looks like a date and is none
        value = text
    *sections, name = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError([f"--set {override}: {section} is no section"])
        values = inner
    values[name] = value


def _unknown_keys(values: Mapping[str, Any], section: type, path: str) -> Iterator[str]:
    types = get_type_hints(section)
    known = [field.name for field in fields(section) if f"{path}{field.name}" not in DERIVED]
    for key, value in values.items():
        full = f"{path}{key}"
        if DERIVED.get(full):
            yield f"{full}: state it once, as `{DERIVED[full]}`"
        elif key not in known:
            yield f"{full}: unknown key{_suggest(str(key), path, known)}"
        elif is_dataclass(types[key]) and isinstance(value, Mapping):
            yield from _unknown_keys(value, types[key], f"{full}.")


def _suggest(key: str, path: str, known: Sequence[str]) -> str:
    here = {name: f"{path}{name}" for name in known}
    anywhere = {full.rpartition(".")[2]: full for full in all_keys()} | here
    # A slip of the pen in a key of another section is nearer than a mere likeness in this one.
    for names, cutoff in ((anywhere, 0.9), (here, 0.5), (anywhere, 0.75)):
        if near := difflib.get_close_matches(key, names, n=1, cutoff=cutoff):
            return f"; did you mean `{names[near[0]]}`?"
    return f"; known: {', '.join(known)}"


def all_keys(section: type = ServiceConfig, path: str = "") -> list[str]:
    """Every key that a user may set, dotted."""
    keys: list[str] = []
    for name, kind in get_type_hints(section).items():
        full = f"{path}{name}"
        if full in DERIVED:
            continue
        keys += (
            all_keys(kind, f"{full}.") if isinstance(kind, type) and is_dataclass(kind) else [full]
        )
    return keys


def _convert_units(values: Values) -> Values:
    """Turn "1GiB" into bytes and "2s" into seconds, where the key's name ends with the unit."""
    converted: Values = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = _convert_units(value)
        elif isinstance(value, str) and key.endswith(("_bytes", "_s")):
            parse = parse_bytes if key.endswith("_bytes") else parse_seconds
            # A text that is no quantity stays: the type check names the key and what is allowed.
            with suppress(ValueError):
                value = parse(value)
        converted[key] = value
    return converted


def _with_all_sections(values: Values, section: type) -> Values:
    """Make a section without a value, and one that is not there, an empty one."""
    filled = dict(values)
    for name, kind in _sections(section):
        inner = {} if filled.get(name) is None else filled[name]
        filled[name] = _with_all_sections(inner, kind) if isinstance(inner, dict) else inner
    return filled


def _sections(section: type) -> Iterator[tuple[str, type]]:
    for name, kind in get_type_hints(section).items():
        if isinstance(kind, type) and is_dataclass(kind):
            yield name, kind


def _wrong_choices(values: Values, section: type, path: str) -> Iterator[tuple[str, str]]:
    """(key, problem) where a whole number is among what may be chosen.

    NOTE: to pydantic 8.0 is 8, and a number of many digits is none.
    """
    for name, kind in get_type_hints(section).items():
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if name in values and int in map(type, choices):
            value, full = values[name], f"{path}{name}"
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                *others, last = map(repr, choices)
                yield full, _refusal(full, value, f"one of {', '.join(others)} or {last}")
    for name, kind in _sections(section):
        if isinstance(inner := values.get(name), dict):
            yield from _wrong_choices(inner, kind, f"{path}{name}.")


def _fill_derived(values: Values) -> Values:
    """Repeat what the user said once wherever a room needs it."""
    host = values.get("host", "127.0.0.1")
    proxy: Values = {
        "host": host,
        "http_port": values.get("http_port", 8000),
        "grpc_port": values.get("grpc_port", 8001),
        "max_model_len": values.get("max_model_len") or 0,
        "model_path": "",
        "served_model_names": [],
        "controller_address": "",
    }
    transfer: Values = {"transport": values.get("transport", "auto")}
    filled = dict(values)
    for name, derived in (("proxy", proxy), ("transfer", transfer)):
        if isinstance(values[name], dict):
            filled[name] = values[name] | derived
    return filled


def _problems(details: Sequence[ErrorDetails], found: Mapping[str, str]) -> list[str]:
    """One per value: what a room says of a value that was refused where it is stated is left out.

    found: by key, known without pydantic.
    """
    problems = dict(found)
    paths = [".".join(str(part) for part in detail["loc"]) for detail in details]
    for path, detail in zip(paths, details, strict=True):
        stated = DERIVED.get(path, path)
        if path == stated or stated not in paths:
            problems.setdefault(stated, _describe(stated, detail))
    return list(problems.values())


def _describe(path: str, detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    allowed = {
        "greater_than_equal": "at least {ge}",
        "greater_than": "more than {gt}",
        "less_than_equal": "at most {le}",
        "less_than": "less than {lt}",
        "literal_error": "one of {expected}",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text (quote it)",
        "tuple_type": "a list",
        "dataclass_type": "a section of `key: value` lines",
        "string_too_short": "not empty",
        "too_short": "not empty",
        "too_long": "at most {max_length} characters",
        "string_too_long": "at most {max_length} characters",
    }
    expected = allowed.get(kind, detail["msg"]).format_map(context)
    if kind.endswith("_type") and path.endswith("_bytes"):
        expected = "a size such as 512MiB"
    if kind.endswith("_type") and path.endswith("_s"):
        expected = "a duration such as 500ms, 2s or 5m"
    return _refusal(path, detail["input"], expected)


def _refusal(path: str, value: object, expected: str) -> str:
    return f"{path}: {json.dumps(value, default=str)} is not allowed: {expected}"
