"""Child of the kill tests: writes one object to Azurite, and says what it is about to send.

usage: azure_writer.py STORE_CONFIG_JSON KEY SIZE_BYTES

It prints "part" before each block, and "copy" before the object is copied from its temporary key. The parent
process answers each with a line, or kills this one.
"""

from __future__ import annotations

import sys

import obstore
from tests.support.servers.azurite_server import ACCOUNT_KEY

from holdfast.testing.object_store_contract import payload
from holdfast_core.contract import StoreConfig
from holdfast_core.store.azure.credentials import AzureKeys, FixedKeys
from holdfast_core.store.azure.store import AzureObjectStore
from holdfast_core.store.upload import Document


def say(what: str) -> None:
    print(what, flush=True)
    sys.stdin.readline()


def main(config: str, key: str, size: str) -> None:
    copy = obstore.copy

    def copied(*args: object, **options: object) -> None:
        say("copy")
        copy(*args, **options)  # type: ignore[arg-type]

    obstore.copy = copied
    store = AzureObjectStore(
        StoreConfig.from_json(config),
        FixedKeys(AzureKeys(account_key=ACCOUNT_KEY)),
        throttle=lambda length: say("part"),
    )
    store.write(key, Document(payload(int(size))))
    print("done")


main(*sys.argv[1:])
