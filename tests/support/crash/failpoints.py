"""Failpoints for a process under test, turned on by comma-separated rules.

A rule is `name=panic|sleep:SECONDS|err[:ERRNO]|wait:PATH|raise:EXCEPTION[@n]`.

- `panic` ends the process immediately, as SIGKILL would.
- `sleep` blocks the thread.
- `err` raises an OSError with EIO or the named errno.
- `wait` blocks the thread until a file exists at the absolute path.
- `raise` raises the built-in exception of that name.

With `@n` the rule applies only to the n-th hit, counted from 1; without it, to every hit.

A failpoint is an audit event of Python, `sys.audit("holdfast.node.after_rename")` for example. Without an
audit hook such a call does nothing, and no module that ships installs one.
"""

from __future__ import annotations

import builtins
import errno
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from holdfast_core.errors import ConfigError

VARIABLE = "HOLDFAST_FAILPOINTS"
_ROOT = Path(__file__).resolve().parents[3]
PANIC_EXIT_CODE = 86
_POLL_SECONDS = 0.01


class Action(StrEnum):
    PANIC = "panic"
    SLEEP = "sleep"
    ERR = "err"
    WAIT = "wait"
    RAISE = "raise"


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    action: Action
    seconds: float = 0.0
    path: str = ""
    exception: type[BaseException] = OSError
    error_number: int = errno.EIO
    at: int | None = None
    """Number of the hit that triggers the rule, from 1; None for every hit."""


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Parse comma-separated rules. Raises ConfigError that names an invalid rule."""
    return tuple(_rule(part) for part in text.split(",") if part)


class Failpoints:
    """Failpoint hook that counts hits and applies the rules. It is thread-safe."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._hits: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        with self._lock:
            self._hits[name] += 1
            hit = self._hits[name]
        for rule in self._rules:
            if rule.name == name and rule.at in (None, hit):
                _act(rule)

    def hits(self, name: str) -> int:
        with self._lock:
            return self._hits[name]


def install_from_env(env: Mapping[str, str]) -> Failpoints | None:
    """Install the rules of HOLDFAST_FAILPOINTS, if any. The entry points of test processes call this."""
    text = env.get(VARIABLE)
    if not text:
        return None
    points = Failpoints(parse_rules(text))
    _HOOK.apply(points)
    return points


def in_every_python(directory: Path, text: str) -> dict[str, str]:
    """Return environment variables that apply the rules to a program that does not call `install_from_env`.

    The rules also apply in every Python process that the program starts. The function writes a
    `sitecustomize.py` into `directory`, which those processes import.
    """
    (directory / "sitecustomize.py").write_text(
        "import os\nfrom tests.support.crash.failpoints import install_from_env\n"
        "install_from_env(os.environ)\n"
    )
    path = (str(directory), str(_ROOT), os.environ.get("PYTHONPATH"))
    return {VARIABLE: text, "PYTHONPATH": os.pathsep.join(filter(None, path))}


@contextmanager
def failpoints(text: str) -> Iterator[Failpoints]:
    """Apply the rules in this process within the `with` block."""
    points = Failpoints(parse_rules(text))
    _HOOK.apply(points)
    try:
        yield points
    finally:
        _HOOK.apply(None)


_PREFIX = "holdfast."


class _Hook:
    """The audit hook of this process. Python never removes it, so it stays without rules."""

    points: Failpoints | None = None
    is_installed = False

    def apply(self, points: Failpoints | None) -> None:
        self.points = points
        if not self.is_installed:
            self.is_installed = True
            sys.addaudithook(self._audit)

    def _audit(self, event: str, _: tuple[object, ...]) -> None:
        if self.points is not None and event.startswith(_PREFIX):
            self.points(event.removeprefix(_PREFIX))


_HOOK = _Hook()


def _rule(part: str) -> Rule:
    name, _, rest = part.partition("=")
    rest, _, at = rest.partition("@")
    action, _, argument = rest.partition(":")
    try:
        known = Action(action)
        if (known is Action.WAIT) != argument.startswith("/"):
            raise ValueError(argument)
        return Rule(
            name.strip(),
            known,
            float(argument) if known is Action.SLEEP else 0.0,
            argument if known is Action.WAIT else "",
            _exception(argument) if known is Action.RAISE else OSError,
            _error_number(argument) if known is Action.ERR else errno.EIO,
            int(at) if at else None,
        )
    except ValueError as error:
        raise ConfigError(
            f"{VARIABLE}: {part!r} is no rule; expected "
            "name=panic|sleep:SECONDS|err[:ERRNO]|wait:/PATH|raise:EXCEPTION[@n]"
        ) from error


def _error_number(name: str) -> int:
    found = getattr(errno, name or "EIO", None)
    if not isinstance(found, int):
        raise ValueError(name)
    return found


def _exception(name: str) -> type[BaseException]:
    found = getattr(builtins, name, None)
    if not isinstance(found, type) or not issubclass(found, BaseException):
        raise ValueError(name)
    return found


def _act(rule: Rule) -> None:
    match rule.action:
        case Action.PANIC:
            os._exit(PANIC_EXIT_CODE)
        case Action.SLEEP:
            time.sleep(rule.seconds)
        case Action.WAIT:
            while not Path(rule.path).exists():
                time.sleep(_POLL_SECONDS)
        case Action.RAISE:
            raise rule.exception(f"failpoint {rule.name}")
        case Action.ERR:
            raise OSError(rule.error_number, f"failpoint {rule.name}")
