"""Slots of shared memory as their reader sees them: by pread and pwrite, never mapped.

The rank may truncate a file at any moment; that must be an error here and not a SIGBUS.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.format.slot import (
    HEADER_BYTES,
    STATE_OFFSET,
    SlotHeader,
    SlotState,
    pack_state,
)


class SlotFile:
    """An open slot; a PayloadSource. Close it: it holds a descriptor of the trainer's memory."""

    def __init__(self, directory: Path, name: str) -> None:
        """Raises FormatError for a name that is no file name, UnavailableError when it is not there."""
        if Path(name).name != name or not name.endswith(".slot"):
            raise FormatError(f"slot name {name!r}: expected rank<6 digits>.<index>.slot")
        try:
            self._descriptor = os.open(directory / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise UnavailableError(f"opening slot {directory / name}: {error}") from error
        self.name = name

    def header(self) -> SlotHeader:
        header = SlotHeader.unpack(os.pread(self._descriptor, HEADER_BYTES, 0))
        held = os.fstat(self._descriptor).st_size - HEADER_BYTES
        if header.capacity_bytes > held:
            raise FormatError(
                f"slot {self.name}: header says {header.capacity_bytes} bytes, the file holds {held}"
            )
        return header

    def write_header(self, header: SlotHeader) -> None:
        """The state word last and alone."""
        packed = header.pack()
        rest = STATE_OFFSET + len(pack_state(header.state))
        os.pwrite(self._descriptor, packed[rest:], rest)
        self.set_state(header.state)

    def set_state(self, state: SlotState) -> None:
        os.pwrite(self._descriptor, pack_state(state), STATE_OFFSET)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], HEADER_BYTES + offset + done)
            if count == 0:
                raise FormatError(f"slot {self.name}: ends at payload byte {offset + done}")
            done += count

    def write_payload(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], HEADER_BYTES + offset + done)

    def close(self) -> None:
        os.close(self._descriptor)
