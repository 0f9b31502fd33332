"""The arguments of `pdserve scale`."""

from collections.abc import Sequence

from pdserve.controller_config import ROLES
from pdserve.errors import ConfigError


def parse_numbers(arguments: Sequence[str]) -> tuple[int | None, int | None]:
    """(prefillers, decoders) of arguments such as `decoder=3`; None where not named.

    Raises: ConfigError: with every wrong argument.
    """
    numbers: dict[str, int] = {}
    problems = []
    for argument in arguments:
        role, _, text = argument.partition("=")
        minimum = 1 if role == "decoder" else 0
        if role not in ROLES:
            problems.append(f"{argument} is not allowed: prefiller=N or decoder=N")
        elif not text.isdecimal() or int(text) < minimum:
            problems.append(f"{argument} is not allowed: a whole number, at least {minimum}")
        elif role in numbers:
            problems.append(f"{argument} is not allowed: {role} is {numbers[role]} already")
        else:
            numbers[role] = int(text)
    if problems:
        raise ConfigError(problems)
    return numbers.get("prefiller"), numbers.get("decoder")
