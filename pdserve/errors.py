"""What can go wrong at the command line; each is printed as one message, without a traceback.

PdserveError
├── ConfigError        pdserve.yaml or --set; carries every problem found
├── ModelNotFound      `model` names nothing that can be loaded
├── BadModel           its files are damaged, or of a kind that is not supported
├── ServiceExists      a service of that name already runs
├── ServiceNotRunning  nothing runs under that name
├── StateDamaged       what is noted of a running service cannot be read
├── StartFailed        a port is taken, a worker or the proxy could not start
├── ServiceLost        Ray or the controller went away under a running service
├── ControllerError    the controller refused, or cannot be reached (client.py)
├── Interrupted        the user stopped the start (readiness.py)
└── ChatError          the service refused, or broke off (chat.py)
"""

from collections.abc import Sequence


class PdserveError(Exception):
    """Base of what the command line reports."""


class ConfigError(PdserveError):
    """The configuration is wrong; `problems` has one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ModelNotFound(PdserveError):
    """The model cannot be found."""


class BadModel(PdserveError):
    """The model's files cannot be served."""


class ServiceExists(PdserveError):
    """The service runs already."""


class ServiceNotRunning(PdserveError):
    """The service does not run."""


class ServiceLost(PdserveError):
    """The service cannot go on."""


class StateDamaged(PdserveError):
    """The note of a running service cannot be read."""


class StartFailed(PdserveError):
    """The service could not start."""
