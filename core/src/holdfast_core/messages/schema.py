"""Every message between launcher, ranks, sidecars and operator (docs/protocol.md).

There are three transports: frames on the pod's Unix socket (SDK and launcher <-> sidecar), JSON over HTTPS
with mutual TLS (between sidecars, operator -> sidecar), and the bulk port between sidecars (`core/peer`).
These dataclasses are the contract.
`messages.codec` converts them to and from JSON and refuses values that do not fit. Each module below holds
the messages of one component. All other code imports them from here.
"""

from __future__ import annotations

from holdfast_core.errors import Refusal
from holdfast_core.ids import ShardInfo, ShardRef
from holdfast_core.messages.common import (
    CHECKPOINT_MISSING,
    DeadRank,
    Failure,
    Interval,
    Policy,
    Progress,
    RankStack,
    RankWork,
    Refused,
    RestorePoint,
    StepOutcome,
    Timing,
)
from holdfast_core.messages.gang import (
    CopyReply,
    CopyRequest,
    PersistRequest,
    Plan,
    ReadObject,
    ReadReply,
    StoredAs,
)
from holdfast_core.messages.operator import (
    CoordinatorState,
    FinishCommit,
    GangProgress,
    GangRequest,
    Inventory,
    Member,
    Prune,
    Round,
    Seal,
    Straggler,
    UncommittedShard,
)
from holdfast_core.messages.pod_socket import (
    NO_OBJECT_TIER,
    OVERTAKEN,
    PROTOCOL_VERSION,
    STORE_TAKEN,
    Fill,
    Filled,
    Hello,
    HelloReply,
    LauncherPlan,
    LauncherState,
    Restore,
    RestoreReply,
    Run,
    ShardFile,
    Stage,
    StoreAddress,
    TakeStore,
)
from holdfast_core.messages.report import (
    AcceptedRound,
    Ok,
    RankSaves,
    ReportedShard,
    WorkerReport,
    WorkerReports,
)
