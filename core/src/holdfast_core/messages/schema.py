"""Every message between launcher, ranks, sidecars and operator (docs/protocol.md).

There are three transports: frames on the pod's Unix socket (SDK and launcher <-> sidecar), JSON over HTTPS
with mutual TLS (between sidecars, operator -> sidecar), and the bulk port between sidecars (`core/peer`).
These dataclasses are the contract.
`messages.codec` converts them to and from JSON and refuses values that do not fit. Each module below holds
the messages of one component. All other code imports them from here.
"""

from __future__ import annotations

from holdfast_core.messages.common import (
    CHECKPOINT_MISSING,
    Failure,
    Interval,
    LevelReached,
    MemoryUse,
    Policy,
    RankStack,
    RankWork,
    Refusal,
    Refused,
    RestorePoint,
    ShardInfo,
    Timing,
)
from holdfast_core.messages.gang import (
    CopyReply,
    CopyRequest,
    PersistRequest,
    Plan,
    ReadObject,
    ReadReply,
    Reference,
    Suspect,
)
from holdfast_core.messages.operator import (
    CoordinatorState,
    CopyAssignment,
    FinishCommit,
    GangProgress,
    GangRequest,
    Hang,
    Inventory,
    ListedManifest,
    ListedShard,
    Member,
    Prune,
    RestoredFrom,
    Round,
    RoundTimes,
    Seal,
    StepState,
    Straggler,
    UncommittedShard,
)
from holdfast_core.messages.pod_socket import (
    NO_OBJECT_TIER,
    OVERTAKEN,
    PROTOCOL_VERSION,
    STORE_TAKEN,
    End,
    Ended,
    Exited,
    Fill,
    Filled,
    Finish,
    Fulfilled,
    Hello,
    HelloReply,
    HostStore,
    LocalRole,
    Progress,
    Restore,
    RestoreReply,
    Run,
    SavedLayout,
    SaveFailed,
    SaveRequested,
    ShardFile,
    SlotOffer,
    Stacks,
    Stage,
    StoreAddress,
    TakeStacks,
    TakeStore,
)
from holdfast_core.messages.report import (
    AcceptedRound,
    DeadRank,
    Ok,
    RankProgress,
    RankSaves,
    RefusedShard,
    ReportedShard,
    StepMetrics,
    WorkerReport,
    WorkerReports,
)
