"""Which worker passes the messages between a worker and the coordinator on (ADR 0016). Pure."""

from __future__ import annotations

from holdfast_core.ids import Worker
from holdfast_core.messages.schema import Round


def relay_of(message: Round, worker: Worker) -> Worker:
    """Return the relay of a worker's group. The coordinator is the relay of its own group."""
    group = worker // message.fan_in
    if message.coordinator // message.fan_in == group:
        return message.coordinator
    return Worker(group * message.fan_in)


def next_hop(message: Round, sender: Worker, receiver: Worker) -> Worker:
    """Return the worker to which `sender` sends a message for `receiver`, which may be `receiver` itself."""
    if receiver == message.coordinator:
        relay = relay_of(message, sender)
    elif sender == message.coordinator:
        relay = relay_of(message, receiver)
    else:
        return receiver
    return receiver if relay == sender else relay
