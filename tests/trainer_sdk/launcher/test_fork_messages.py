"""Messages between the launcher and its fork server."""

from __future__ import annotations

import pytest

from holdfast.launcher.forkserver import (
    EVENTS,
    MAX_PACKET_BYTES,
    REQUESTS,
    Failed,
    ForkRank,
    encode,
    failed,
)
from holdfast_core.errors import FormatError


def test_a_long_script_on_the_command_line_and_a_long_variable_are_sent_whole() -> None:
    message = ForkRank(
        "rank 0", "script", ("-c", "x" * 50_000, *("y",) * 5000), {"CONFIG": "z" * 50_000}
    )
    assert REQUESTS.decode(encode(message)) == message


def test_a_command_line_that_no_packet_can_hold_is_refused_by_the_launcher() -> None:
    with pytest.raises(FormatError, match="the command line or the environment of the rank"):
        encode(ForkRank("rank 0", "script", ("-c", "x" * MAX_PACKET_BYTES), {}))


def test_a_long_error_of_the_server_is_cut() -> None:
    received = EVENTS.decode(encode(failed("rank 0", "e" * 10_000)))
    assert isinstance(received, Failed)
    assert received.message.startswith("eeee")
    assert len(received.message) <= 4096
