"""For tests of training code: a sidecar without a cluster, and the launcher as a process to kill."""

from __future__ import annotations

from holdfast.testing.dict_store import DictStore
from holdfast.testing.fake_sidecar import FakeSidecar
from holdfast.testing.launched import Launched, committed_step, until

__all__ = ["DictStore", "FakeSidecar", "Launched", "committed_step", "until"]
