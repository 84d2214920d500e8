"""The arguments of a Checkpointer, with its `Folder`, checked before anything is opened or allocated.

Without these checks a wrong value would fail far from its cause, or not at all: an unknown `on_save_error`
would count as "warn". A folder is a path or a file URL, and its store is a URL that needs an extra.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
import re
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import unquote, urlsplit

from holdfast_core.contract import DEFAULT_MTBF_SECONDS
from holdfast_core.errors import ConfigError
from holdfast_core.messages.schema import Timing
from holdfast_core.store_url import StoreUrl, parse_store_url

_PACKAGES = {"s3": ("minio", "zstandard"), "cloud": ("minio", "obstore", "zstandard")}
"""What a store needs, by the extra that installs it."""


def checked_count(
    value: Any, what: str, least: int, remedy: str = "", *, of: str = "Checkpointer"
) -> int:
    """Return `value` as an integer of at least `least`.

    Raises ConfigError that names the argument `what` of `of`, and ends with the remedy if there is one.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(
            f"{of}({what}={value!r}): expected an integer of at least {least}"
            + (f": {remedy}" if remedy else "")
        )
    return number


def require_one_of(
    value: Any, what: str, choices: tuple[str, ...], *, of: str = "Checkpointer"
) -> None:
    """Raise ConfigError that names the argument `what` of `of`, unless `value` is one of `choices`."""
    if value not in choices:
        expected = " or ".join(repr(one) for one in choices)
        raise ConfigError(f"{of}({what}={value!r}): expected {expected}")


def require_seconds(value: Any, what: str) -> None:
    """Raise ConfigError that names the argument `what`, unless `value` is a positive finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"Checkpointer({what}={value!r}): expected a number of seconds above 0")


OnDamage = Literal["older", "raise"]

_LEAST_SLOTS = (
    "slots=1 keeps one copy of the state, and slots_dir=... names a directory with more room "
    "than /dev/shm"
)
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):/")
"""It requires only one slash, because pathlib.Path collapses two slashes into one."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of checkpoints, for `Checkpointer(Folder("ckpt", keep_last=5))`.

    path: the path of the folder, or file:///path. It is created if it does not exist.
    keep_last: number of committed checkpoints to keep, at least 1.
    slots: number of slots per rank, at least 1. A slot holds a copy of the rank's state until that copy is
      written to the folder.
    slots_dir: directory on this machine for the slots, instead of /dev/shm. It needs room for `slots`
      copies of the state.
    store: URL of an object store, "s3://bucket/prefix", "az://account/container/prefix" or
      "gs://bucket/prefix", to which each committed checkpoint is uploaded. A run whose folder lacks the
      newest checkpoint restores from it. Endpoint and keys come from the environment, as for the tools of
      that cloud. It needs the extra `holdfast-sdk[s3]`, or `holdfast-sdk[cloud]` for Azure and Google.
    store_keep_last: number of checkpoints to keep in `store`, at least 1.
    on_damage: what a restore does when the newest checkpoint is damaged or missing and no copy of it can be
      read. With "older" it restores the newest one that can be read, and logs which newer steps exist and
      which files are bad. With "raise" it raises CorruptionError. Use the same value on every rank.

    Raises ConfigError for an invalid argument.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    keep_last: int = 3
    slots: int = 2
    slots_dir: str | os.PathLike[str] | None = None
    store: str | None = None
    store_keep_last: int = 3
    on_damage: OnDamage = "older"

    def __post_init__(self) -> None:
        folder_path(self.path)
        checked = {
            "keep_last": checked_count(self.keep_last, "keep_last", 1, of="Folder"),
            "slots": checked_count(self.slots, "slots", 1, _LEAST_SLOTS, of="Folder"),
            "store_keep_last": checked_count(
                self.store_keep_last, "store_keep_last", 1, of="Folder"
            ),
        }
        for name, count in checked.items():
            object.__setattr__(self, name, count)
        require_one_of(self.on_damage, "on_damage", get_args(OnDamage), of="Folder")


def folder_path(dir: str | os.PathLike[str]) -> Path:
    """Return the absolute path. Raises ConfigError for anything but a path or a file URL."""
    text: object = os.fspath(dir)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"Folder({dir!r}): expected the path of a folder")
    match = _SCHEME.match(text)
    if match is None:
        return _absolute(text)
    scheme = match.group(1).lower()
    url = urlsplit(text.strip())
    if scheme == "file" and url.netloc in ("", "localhost") and url.path:
        return _absolute(unquote(url.path))
    raise ConfigError(
        f"Folder({text!r}): {scheme}:// is not supported here. A folder is on a mounted file "
        "system: a path, or file:///path. To keep checkpoints in an S3-compatible store as well, use "
        'Folder("ckpt", store="s3://bucket/prefix"). In a TrainingJob leave the folder out: its '
        "spec.checkpoint.object names the store"
    )


def _absolute(path: str) -> Path:
    """Return the absolute path. Raises ConfigError if messages between processes could not contain it."""
    found = Path(path).absolute()
    try:
        str(found).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"Folder({path!r}): expected a path that UTF-8 can encode, found the bytes "
            f"{os.fsencode(found)!r}: rename the folder"
        ) from error
    return found


OnSaveError = Literal["warn", "raise"]
WhenBusy = Literal["skip", "wait"]
IntervalRule = Literal["auto"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a script passes to `Checkpointer`, which describes each of them."""

    folder: Folder | None
    interval_steps: int | None
    strict: bool
    on_save_error: OnSaveError
    when_busy: WhenBusy
    interval_seconds: float | None = None
    interval: IntervalRule | None = None
    mtbf_seconds: float | None = None

    def checked(self) -> Self:
        """Return the options with counts as plain integers. Raises ConfigError for an invalid one."""
        interval = self.interval_steps
        if interval is not None:
            interval = checked_count(interval, "interval_steps", 0)
        self._expect_one_interval()
        require_one_of(self.on_save_error, "on_save_error", get_args(OnSaveError))
        require_one_of(self.when_busy, "when_busy", get_args(WhenBusy))
        return replace(self, interval_steps=interval)

    @property
    def timing(self) -> Timing | None:
        """The interval as a time, or None if it is a number of steps."""
        if self.interval_seconds is None and self.interval is None:
            return None
        mtbf_seconds = DEFAULT_MTBF_SECONDS if self.mtbf_seconds is None else self.mtbf_seconds
        return Timing(self.interval_seconds, mtbf_seconds)

    def _expect_one_interval(self) -> None:
        """Raise ConfigError unless at most one form of the interval is given, and it is valid."""
        given = [
            f"{name}={value!r}"
            for name, value in (
                ("interval_steps", self.interval_steps),
                ("interval_seconds", self.interval_seconds),
                ("interval", self.interval),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise ConfigError(
                f"Checkpointer({', '.join(given)}): expected at most one of interval_steps, "
                "interval_seconds and interval"
            )
        if self.interval is not None:
            require_one_of(self.interval, "interval", get_args(IntervalRule))
        for name, value in (
            ("interval_seconds", self.interval_seconds),
            ("mtbf_seconds", self.mtbf_seconds),
        ):
            if value is not None:
                require_seconds(value, name)
        if self.mtbf_seconds is not None and self.interval is None:
            raise ConfigError(
                f"Checkpointer(mtbf_seconds={self.mtbf_seconds!r}): it has an effect only with "
                'interval="auto"'
            )

    @property
    def raises(self) -> bool:
        """Whether a failed save raises its error."""
        return self.on_save_error == "raise"

    @property
    def waits(self) -> bool:
        """Whether a save waits for a free slot instead of being left out."""
        return self.when_busy == "wait"


def required_store(url: str) -> StoreUrl:
    """Return the parsed URL.

    Raises:
        ConfigError: It is not a URL of a store, or a package is not installed.
    """
    parsed = parse_store_url(url)
    extra = "cloud" if parsed.account or parsed.is_google else "s3"
    missing = [name for name in _PACKAGES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the store {url!r} needs the packages {' and '.join(missing)}, which are not "
            f'installed: pip install "holdfast-sdk[{extra}]"'
        )
    return parsed
