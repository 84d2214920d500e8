"""Which decisions run outside of the event loop's thread."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.support.operator.builders import job, now, pod

from holdfast_operator.loop import controller
from holdfast_operator.model.job import Observed


async def test_a_decision_about_a_large_job_leaves_the_event_loop_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(controller, "decide", lambda *_: threads.append(threading.get_ident()))
    small = Observed(job=job(2), pods=(pod(0), pod(1)))
    large = replace(small, pods=(pod(0),) * controller.LARGE_JOB_OBJECTS)
    await controller.decided(small, now())
    await controller.decided(large, now())
    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()
