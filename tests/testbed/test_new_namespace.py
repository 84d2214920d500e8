"""A scenario begins in a namespace without the objects of an earlier run."""

from __future__ import annotations

import pytest
from testbed.driver.kube import Kube


class PlayedKube(Kube):
    """A cluster that records what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def delete_namespace(self, name: str) -> None:
        self.asked.append(f"delete {name}")

    def wait_namespace_gone(self, name: str, timeout_seconds: float = 0.0) -> None:
        self.asked.append(f"wait {name}")

    def ensure_namespace(self, name: str, *, restricted: bool = True, pool: str = "") -> None:
        self.asked.append(f"create {name} on {pool}")


def test_what_a_killed_run_has_left_goes_first_and_the_namespace_goes_at_the_end() -> None:
    kube = PlayedKube()
    with pytest.raises(KeyError), kube.new_namespace("x", pool="p") as name:
        kube.asked.append(f"use {name}")
        raise KeyError
    assert kube.asked == ["delete x", "wait x", "create x on p", "use x", "delete x"]
