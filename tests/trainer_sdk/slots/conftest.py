"""Fixtures of the tests of slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.trainer.device_training import Training
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast


@pytest.fixture
def training(sidecar: WatchedSidecar) -> Iterator[Training]:
    with holdfast.Checkpointer() as ckpt:
        running = Training(sidecar, ckpt)
        yield running
        running.device.is_lagging = False
        running.device.catch_up()
