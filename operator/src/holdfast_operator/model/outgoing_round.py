"""ROUND as all members of a gang receive it, encoded and digested once. Pure.

For 4,096 workers ROUND has 0.4 MB. The operator sends it to each of them, so that an encoding and a digest
for each member would take six minutes of its CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from holdfast_core.ids import Digest
from holdfast_core.messages.codec import dumps
from holdfast_core.messages.operator import Round


@dataclass(frozen=True)
class OutgoingRound:
    """One version of ROUND. The members' sends share the object."""

    message: Round
    digest: Digest
    """`message.content_digest()`."""

    @classmethod
    def of(cls, message: Round) -> OutgoingRound:
        return cls(message, message.content_digest())

    @cached_property
    def body(self) -> bytes:
        """The encoded message."""
        return dumps(self.message)
