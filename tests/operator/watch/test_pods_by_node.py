"""Which jobs have pods on a node. A change of the node requests a pass over these."""

from __future__ import annotations

from dataclasses import replace

from tests.support.operator.builders import UID, pod

from holdfast_operator.model.ownership import job_key
from holdfast_operator.watch.cache import PodIndex
from holdfast_operator.watch.records import WorkerPod

GPT, BERT = job_key("team-a", "gpt"), job_key("team-a", "bert")


def worker(number: int, node: str | None, key: object = GPT) -> WorkerPod:
    view = pod(number, node=node)
    return WorkerPod("team-a", view.uid, key, UID, view)  # type: ignore[arg-type]


def test_a_pod_counts_from_its_binding_to_its_end() -> None:
    cache = PodIndex()
    unbound, bound = worker(0, None), worker(0, "node-a")
    cache.put(unbound)
    assert cache.keys_on_node("node-a") == set()
    cache.drop(unbound)
    cache.put(bound)
    assert cache.keys_on_node("node-a") == {GPT}
    cache.drop(bound)
    assert cache.keys_on_node("node-a") == set()


def test_a_node_with_pods_of_several_jobs_has_each_key_once() -> None:
    cache = PodIndex()
    pods = [worker(0, "node-a"), worker(1, "node-a"), worker(2, "node-b")]
    other = replace(worker(3, "node-a", BERT), view=pod(3, node="node-a"))
    for item in (*pods, other):
        cache.put(item)
    assert cache.keys_on_node("node-a") == {GPT, BERT}
    cache.drop(pods[0])
    assert cache.keys_on_node("node-a") == {GPT, BERT}
    cache.drop(pods[1])
    assert cache.keys_on_node("node-a") == {BERT}
    assert cache.keys_on_node("node-b") == {GPT}
