"""For tests and the local demo: a scripted launcher and ranks on the real socket with real slot
files, a scripted operator over HTTPS, and a sidecar as a child process.

Nothing here is used by the sidecar itself.
"""

from holdfast_sidecar.testing.local import FakeLauncher, LocalClient
from holdfast_sidecar.testing.operator import FakeOperator
from holdfast_sidecar.testing.processes import SidecarProcess, flip_a_bit
from holdfast_sidecar.testing.ranks import FakeRank, rank_document
from holdfast_sidecar.testing.waiting import DEADLINE_SECONDS, until

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
