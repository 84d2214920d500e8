"""Count the operations of a call, so that a test can compare costs without a clock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(call: Callable[[], object]) -> int:
    """Return the number of byte codes that the interpreter executes during the call.

    Work inside functions that are written in C counts as one operation. No garbage is collected meanwhile:
    its finalizers, also those of objects that other tests of the process have left, would count.
    """
    found = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal found
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            found += 1
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return found


NOISE = 500
"""Operations that two equal calls may differ by: one of them may fill a cache."""


def growth(cost: Callable[[int], int], number: int) -> float:
    """Return by what factor the cost of further objects grows when their number doubles.

    It is 2 where the cost is linear in their number, 4 where it is quadratic, and 0 where they cost nothing.
    """
    one, two, four = cost(number), cost(2 * number), cost(4 * number)
    return (four - two) / max(1, two - one) if four - two > NOISE else 0.0
