"""The arguments of a Checkpointer, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from holdfast.base.arguments import checked_count, require_one_of, require_seconds
from holdfast.base.folder import Folder
from holdfast_core.contract import DEFAULT_MTBF_SECONDS
from holdfast_core.errors import ConfigError
from holdfast_core.messages.schema import Timing

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
