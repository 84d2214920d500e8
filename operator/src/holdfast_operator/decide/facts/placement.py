"""Choose which worker keeps copies of which worker's shards. Pure: the result depends on the domains alone.

The workers are sorted by topology domain. The first copy goes to the worker that follows by the size of the
largest domain: it is in another domain, and each worker keeps one such copy. Further copies use more domains
while there are any. If one domain has more than half of the gang, no such shift exists. Then its members use
the workers of other domains in turn, and workers of their own domain if there are too few others: such a copy
still survives the loss of the source's pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from holdfast_core.ids import Worker
from holdfast_core.messages.schema import CopyAssignment
from holdfast_operator.decide.facts.world import World


def domain_of(world: World, node_name: str | None) -> str | None:
    """Return the topology domain of a node. A node without the label is a domain of its own."""
    if node_name is None:
        return None
    node = world.observed.nodes.get(node_name)
    label = None if node is None else node.labels.get(world.observed.job.spec.peer.topology_key)
    return label if label is not None else node_name


def place_copies(domains: tuple[str, ...], copies: int) -> tuple[CopyAssignment, ...]:
    """Return the workers that keep copies, sorted by source and target.

    Args:
        domains: The topology domain of each worker.
        copies: Number of copies of each shard. It is limited to the number of other workers.
    """
    count = len(domains)
    copies = min(copies, count - 1)
    if copies <= 0:
        return ()
    order = sorted(range(count), key=lambda w: (domains[w], w))
    largest = max(Counter(domains).values())
    found: list[CopyAssignment] = []
    for position, source in enumerate(order):
        for target in _targets(order, domains, position, largest, copies):
            found.append(CopyAssignment(Worker(source), Worker(target)))
    return tuple(sorted(found, key=lambda a: (a.source, a.target)))


def _targets(
    order: list[int], domains: tuple[str, ...], position: int, largest: int, copies: int
) -> list[int]:
    source = order[position]
    chosen: list[int] = []
    used = {domains[source]}
    for candidate in _candidates(order, domains, position, largest):
        if domains[candidate] not in used:  # each copy in a new domain, while there is one
            chosen.append(candidate)
            used.add(domains[candidate])
        if len(chosen) == copies:
            return chosen
    for candidate in _candidates(order, domains, position, largest):
        if candidate not in chosen:
            chosen.append(candidate)
        if len(chosen) == copies:
            return chosen
    return chosen


def _candidates(
    order: list[int], domains: tuple[str, ...], position: int, largest: int
) -> Iterator[int]:
    """Yield every other worker once, the best target first."""
    count = len(order)
    if 2 * largest <= count:
        shifts = chain(
            range(largest, count - largest + 1),
            range(1, largest),
            range(count - largest + 1, count),
        )
        yield from (order[(position + shift) % count] for shift in shifts)
        return
    own = domains[order[position]]
    elsewhere = [w for w in order if domains[w] != own]
    turn = position % len(elsewhere) if elsewhere else 0
    yield from elsewhere[turn:]
    yield from elsewhere[:turn]
    near = (order[(position + shift) % count] for shift in range(1, count))
    yield from (w for w in near if domains[w] == own)
