"""Pods of `demo.local` whose sidecars, launchers and fork servers are forked from the zygotes.

Executed, each pod of a gang imports torch and the sidecar again, which takes five CPU seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from demo import local_pods
from tests.support import zygote
from tests.support.zygote.launcher import connection_of_launcher
from tests.support.zygote.popen import subprocess_with


@contextmanager
def forked_pods() -> Iterator[None]:
    """Let the pods that start in this context fork their containers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_pods, "subprocess", subprocess_with(_start_container))
        yield


def _start_container(command: Sequence[str], **options: Any) -> zygote.Popen[bytes]:
    if "holdfast_sidecar" in command:
        return zygote.Popen(command, **options)
    with connection_of_launcher(options["env"]) as connection:
        return zygote.Popen(command, launcher=connection, **options)
