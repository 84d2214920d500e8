"""Faults of nodes hit only the pool of nodes whose tests run one after the other, and all can be ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from testbed import cluster, faults
from testbed.config import FAULTS, NODES, POOLS, SHARED
from testbed.shell import BedError

SHARED_NODE = POOLS[SHARED][0]


@pytest.mark.parametrize(
    "cause",
    [
        faults.kill_node,
        faults.stop_node,
        faults.pause_node,
        faults.partition_node,
        lambda node: ExitStack().enter_context(faults.cordoned(POOLS[FAULTS][0], node)),
        lambda node: ExitStack().enter_context(faults.store_down(nodes=[POOLS[FAULTS][0], node])),
        lambda node: ExitStack().enter_context(faults.sidecars_silent([POOLS[FAULTS][0], node])),
    ],
)
def test_a_node_with_pods_of_other_scenarios_is_refused(
    cause: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_docker", lambda *words: pytest.fail(f"docker {words}"))
    monkeypatch.setattr(cluster, "in_node", lambda *_: pytest.fail("a command in a node"))
    monkeypatch.setattr(cluster, "kubectl", lambda *words, **_: pytest.fail(f"kubectl {words}"))
    with pytest.raises(BedError, match=f"node {SHARED_NODE} is in the pool `{SHARED}`"):
        cause(SHARED_NODE)


def test_the_cordon_of_a_run_that_was_killed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(cluster, "containers", lambda _: dict.fromkeys(NODES, "running"))
    monkeypatch.setattr(cluster, "in_node", lambda *_: "")
    monkeypatch.setattr(cluster, "wait_ready", lambda *_: None)
    monkeypatch.setattr(cluster, "kubectl", lambda _, *words, **__: commands.append(words))
    faults.heal_nodes()
    assert [words[1:] for words in commands] == [("uncordon", *NODES)]
