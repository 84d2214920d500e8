"""Support for tests of training code: a sidecar that needs no cluster."""

from __future__ import annotations

from holdfast.testing.fake_sidecar import FakeSidecar

__all__ = ["FakeSidecar"]
