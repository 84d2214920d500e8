"""Which jobs have pods on a node. A change of the node requests a pass over these."""

from __future__ import annotations

from dataclasses import replace

from tests.support.operator.builders import UID, pod

from holdfast_operator.model.keys import job_key
from holdfast_operator.watch.indexes import PodCache
from holdfast_operator.watch.records import WorkerPod

GPT, BERT = job_key("team-a", "gpt"), job_key("team-a", "bert")


def worker(number: int, node: str | None, key: object = GPT) -> WorkerPod:
    return WorkerPod("team-a", key, UID, pod(number, node=node))  # type: ignore[arg-type]


def test_a_pod_counts_from_its_binding_to_its_end() -> None:
    cache = PodCache()
    unbound, bound = worker(0, None), worker(0, "node-a")
    cache.add(unbound)
    assert cache.keys_on_node("node-a") == set()
    cache.remove(unbound)
    cache.add(bound)
    assert cache.keys_on_node("node-a") == {GPT}
    cache.remove(bound)
    assert cache.keys_on_node("node-a") == set()


def test_a_node_with_pods_of_several_jobs_has_each_key_once() -> None:
    cache = PodCache()
    pods = [worker(0, "node-a"), worker(1, "node-a"), worker(2, "node-b")]
    other = replace(worker(3, "node-a", BERT), view=pod(3, node="node-a"))
    for item in (*pods, other):
        cache.add(item)
    assert cache.keys_on_node("node-a") == {GPT, BERT}
    cache.remove(pods[0])
    assert cache.keys_on_node("node-a") == {GPT, BERT}
    cache.remove(pods[1])
    assert cache.keys_on_node("node-a") == {BERT}
    assert cache.keys_on_node("node-b") == {GPT}
