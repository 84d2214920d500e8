"""A process that writes one object to a store of Azure or Google, and is killed at a step of it.

usage: cloud_writer.py STORE_CONFIG_JSON STORE_DIR KEY SIZE_BYTES

It prints "part" before each part, and "copy" before the object is copied from its temporary key. The parent
process answers each with a line, or kills this one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import obstore
from tests.support.hang import HANG_SECONDS

from holdfast.testing.object_store_contract import payload
from holdfast_core.contract import StoreConfig
from holdfast_core.store.access import access_in_pod
from holdfast_core.store.upload import Document


def killed_at(config: StoreConfig, keys: Path, key: str, size: int, where: str, count: int) -> None:
    """Kill a writing process before its `count`th part or its copy. `keys` has the files of the Secret."""
    command = [sys.executable, __file__, config.to_json(), str(keys), key, str(size)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        seen = 0
        for line in child.stdout:
            seen += line.strip() == where
            if seen == count:
                break
            child.stdin.write("\n")
            child.stdin.flush()
        child.send_signal(signal.SIGKILL)
        assert child.wait(HANG_SECONDS) == -signal.SIGKILL


def say(what: str) -> None:
    print(what, flush=True)
    sys.stdin.readline()


def main(config: str, keys: str, key: str, size: str) -> None:
    copy = obstore.copy

    def copied(*args: object, **options: object) -> None:
        say("copy")
        copy(*args, **options)  # type: ignore[arg-type]

    obstore.copy = copied
    access = access_in_pod(StoreConfig.from_json(config), keys)
    store = access.open(throttle=lambda length: say("part"))
    store.write(key, Document(payload(int(size))))
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
