"""For tests of training code: a sidecar without a cluster."""

from __future__ import annotations

from holdfast.testing.fake_sidecar import FakeSidecar

__all__ = ["FakeSidecar"]
