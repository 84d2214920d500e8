"""Support for tests of training code, and for tests of stores that others write.

`FakeSidecar` is a sidecar that needs no cluster. `ObjectStoreContract`, `ReadableStoreContract`
and `RangedStoreContract` are the tests that every object store passes. Only they need pytest, so their module
is imported when one of them is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from holdfast.testing.fake_sidecar import FakeSidecar

if TYPE_CHECKING:
    from holdfast.testing.object_store_contract import (
        ObjectStoreContract,
        RangedStoreContract,
        ReadableStoreContract,
    )

__all__ = ["FakeSidecar", "ObjectStoreContract", "RangedStoreContract", "ReadableStoreContract"]

_CONTRACTS = "holdfast.testing.object_store_contract"


if not TYPE_CHECKING:  # so that a type checker still finds misspelled names

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if _CONTRACTS not in sys.modules:
            # Otherwise a comparison that fails in the suite shows no values.
            importlib.import_module("pytest").register_assert_rewrite(_CONTRACTS)
        found = getattr(importlib.import_module(_CONTRACTS), name)
        globals()[name] = found
        return found
