"""Every message between launcher, ranks, sidecars and operator (docs/protocol.md).

There are three transports: frames on the pod's Unix socket (SDK and launcher <-> sidecar), JSON over HTTPS
with mutual TLS (between sidecars, operator -> sidecar), and the bulk port between sidecars (`core/peer`).
These dataclasses are the contract.
`messages.codec` converts them to and from JSON and refuses values that do not fit. Each module below holds
the messages of one journey. All other code imports them from here.
"""

from __future__ import annotations

from holdfast_core.messages.common import (
    Failure,
    Interval,
    MemoryUse,
    Policy,
    RankStack,
    Refusal,
    Refused,
    RestorePoint,
    ShardInfo,
    Timing,
)
from holdfast_core.messages.gang import (
    Buffered,
    BufferedReply,
    BufferNotice,
    CopyReply,
    CopyRequest,
    DigestedShard,
    KeepLayout,
    LevelNotice,
    ManifestDocument,
    ManifestPut,
    PayloadSpan,
    PersistRequest,
    Prepared,
    PreparedReply,
    RankBuffered,
    ReadReply,
    ReadShard,
    Reference,
    Rendezvous,
    Replicated,
    Suspect,
    Uploaded,
)
from holdfast_core.messages.operator import (
    Certificate,
    CoordinatorState,
    CopyAssignment,
    GangProgress,
    GangRequest,
    Hang,
    Inventory,
    ListedManifest,
    ListedShard,
    ManifestList,
    Member,
    Prune,
    PruneReply,
    Round,
    RoundTimes,
    Seal,
    StepState,
)
from holdfast_core.messages.pod_socket import (
    OVERTAKEN,
    PROTOCOL_VERSION,
    DropSegments,
    End,
    Ended,
    Exited,
    Fill,
    Filled,
    Finish,
    FinishReply,
    Hello,
    HelloReply,
    HostStore,
    LevelReached,
    LocalRole,
    Progress,
    Restore,
    RestoreReply,
    Run,
    SavedLayout,
    SaveFailed,
    SaveRequested,
    Segment,
    ShardFile,
    SlotOffer,
    Stacks,
    Stage,
    Staged,
    StageSegment,
    StopRequested,
    StoreAddress,
    TakeStacks,
    TakeStore,
)
from holdfast_core.messages.report import (
    DeadRank,
    Ok,
    RankProgress,
    RankSaves,
    WorkerReport,
)
