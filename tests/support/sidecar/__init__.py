"""For tests and the local demo: a scripted launcher and ranks on the real socket with real slot
files, a scripted operator over HTTPS, and a sidecar as a child process.

Nothing here is used by the sidecar itself.
"""

from tests.support.sidecar.local import FakeLauncher, LocalClient
from tests.support.sidecar.operator import FakeOperator
from tests.support.sidecar.processes import SidecarProcess, flip_a_bit
from tests.support.sidecar.ranks import FakeRank, rank_document
from tests.support.sidecar.waiting import DEADLINE_SECONDS, until

__all__ = [
    "DEADLINE_SECONDS",
    "FakeLauncher",
    "FakeOperator",
    "FakeRank",
    "LocalClient",
    "SidecarProcess",
    "flip_a_bit",
    "rank_document",
    "until",
]
