"""Fork servers of `holdfast run` that are forked from the zygote, where the launcher executes them.

A fork server imports torch and what DDP and FSDP import, which takes three CPU seconds for each launcher.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.support.zygote.helper import zygotes
from tests.support.zygote.popen import Popen, subprocess_with

from holdfast.base.settings import single_thread_defaults


@contextmanager
def connection_of_launcher(
    variables: Mapping[str, str], *, executed: bool = False
) -> Iterator[int | None]:
    """Yield the connection with which a launcher with these variables forks its fork server.

    None: the launcher executes it.
    """
    zygote = None if executed else zygotes.find(single_thread_defaults(variables), with_torch=True)
    if zygote is None:
        yield None
        return
    with zygote.connect() as connection:
        yield connection.fileno()


def fork_fork_servers(connection: int) -> None:
    """Let the launcher that this child becomes fork its fork server from the zygote of the connection."""
    from holdfast.launcher import processes

    os.set_inheritable(connection, False)
    zygotes.give(socket.socket(fileno=connection))
    vars(processes)["subprocess"] = subprocess_with(Popen)
