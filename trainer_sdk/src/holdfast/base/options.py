"""The arguments of a Checkpointer, checked before anything is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from holdfast.base.arguments import checked_count, require_one_of
from holdfast_core.contract import MAX_RING_BYTES, MIN_RING_BYTES
from holdfast_core.errors import ConfigError

OnSaveError = Literal["warn", "raise"]
WhenBusy = Literal["skip", "wait"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a script passes to `Checkpointer`, which describes each of them."""

    dir: str | os.PathLike[str] | None
    interval_steps: int | None
    keep_last: int
    slots: int
    slots_dir: str | os.PathLike[str] | None
    strict: bool
    on_save_error: OnSaveError
    when_busy: WhenBusy
    ring_bytes: int

    def checked(self) -> Self:
        """Return the options with counts as plain integers. Raises ConfigError for an invalid one."""
        keep_last = checked_count(self.keep_last, "keep_last", 1)
        slots = checked_count(self.slots, "slots", 0)
        ring_bytes = checked_count(self.ring_bytes, "ring_bytes", MIN_RING_BYTES)
        if ring_bytes > MAX_RING_BYTES:
            raise ConfigError(
                f"Checkpointer(ring_bytes={ring_bytes}): expected at most {MAX_RING_BYTES} bytes"
            )
        interval = self.interval_steps
        if interval is not None:
            interval = checked_count(interval, "interval_steps", 0)
        require_one_of(self.on_save_error, "on_save_error", get_args(OnSaveError))
        require_one_of(self.when_busy, "when_busy", get_args(WhenBusy))
        return replace(
            self,
            keep_last=keep_last,
            slots=slots,
            interval_steps=interval,
            ring_bytes=ring_bytes,
        )

    @property
    def raises(self) -> bool:
        """Whether a failed save raises its error."""
        return self.on_save_error == "raise"

    @property
    def waits(self) -> bool:
        """Whether a save waits for a free slot instead of being left out."""
        return self.when_busy == "wait"
