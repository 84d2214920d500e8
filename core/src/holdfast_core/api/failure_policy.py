"""spec.failurePolicy of a TrainingJob: what a failure leads to, and how often the gang may restart.

A rule names failures by exactly one of exit codes, reasons and pod conditions. The rules are tried in their
order against all failures that are found at once, and the first that matches one of them applies.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from holdfast_core.api.base import ApiModel, ConditionStatus
from holdfast_core.api.rules import DURATION, cel_rules, duration_rule, parse_duration, remedy, rule


class FailureAction(StrEnum):
    """What a failure leads to."""

    RESTART_GANG = "RestartGang"
    RESTART_POD = "RestartPod"
    FAIL_JOB = "FailJob"
    IGNORE = "Ignore"
    AVOID_NODE = "AvoidNode"


class FailureReason(StrEnum):
    """Failures that a rule can name. The operator's Reason explains each of them."""

    NODE_LOST = "NodeLost"
    POD_EVICTED = "PodEvicted"
    POD_LOST = "PodLost"
    POD_FAILED = "PodFailed"
    RANK_FAILED = "RankFailed"
    OOM_KILLED = "OOMKilled"
    TRAINER_RESTARTING = "TrainerRestarting"
    RESTORE_FAILED = "RestoreFailed"
    SIDECAR_UNREACHABLE = "SidecarUnreachable"
    POD_SUCCEEDED_EARLY = "PodSucceededEarly"
    HUNG = "Hung"


class Detection(StrEnum):
    """Whether hangs or stragglers are looked for."""

    ON = "On"
    OFF = "Off"


DEFAULT_STEP_TIMES = 10
DEFAULT_STRAGGLER_FACTOR = 1.5
DEFAULT_STRAGGLER_STEPS = 30


class PodConditionPattern(ApiModel):
    """A condition of a pod."""

    type: Annotated[
        str,
        Field(
            min_length=1,
            max_length=316,
            description="Type of the condition, for example DisruptionTarget.",
        ),
    ]
    status: Annotated[
        ConditionStatus, Field(description="Status that the condition must have.")
    ] = ConditionStatus.TRUE


class FailureRule(ApiModel):
    """A rule that says what the failures which it matches lead to."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "[has(self.onExitCodes), has(self.onReasons), has(self.onPodConditions)]"
                ".filter(given, given).size() == 1",
                message_expression=(
                    "'a rule of failurePolicy.rules has %d of onExitCodes, onReasons and "
                    "onPodConditions, expected exactly one: write one rule for "
                    "each'.format([[has(self.onExitCodes), has(self.onReasons), "
                    "has(self.onPodConditions)].filter(given, given).size()])"
                ),
            )
        )
    )

    on_exit_codes: Annotated[
        tuple[int, ...],
        Field(
            min_length=1,
            max_length=64,
            description="Exit codes of a rank process or its container, 1 to 255. A process that "
            "signal n ended has code 128 + n, for example 139 for SIGSEGV. A disruption (NodeLost, "
            "PodLost, PodEvicted) has no exit code, and ranks that fail with one are its consequence.",
            json_schema_extra=cel_rules(
                rule(
                    "self.all(c, c >= 1 && c <= 255)",
                    message=(
                        "failurePolicy.rules.onExitCodes contains a code outside of 1 to 255: "
                        "0 means success, and a process that signal n ended has code 128 + n"
                    ),
                )
            ),
        ),
    ] = ()
    on_reasons: Annotated[
        tuple[FailureReason, ...],
        Field(
            min_length=1,
            max_length=16,
            description="Reasons of failures, as in status.recoveries and the Events of the job.",
        ),
    ] = ()
    on_pod_conditions: Annotated[
        tuple[PodConditionPattern, ...],
        Field(
            min_length=1,
            max_length=16,
            description="Conditions of the pod of the worker that failed. One that matches "
            "suffices. A pod that no longer exists has no conditions.",
        ),
    ] = ()
    action: Annotated[
        FailureAction,
        Field(
            description="RestartGang: as without a rule, all ranks restart in the pods that are left. "
            "RestartPod: the pods of the workers that failed are also replaced, unless only they hold "
            "the newest committed step. FailJob: the job fails without a restart. Ignore: as "
            "RestartGang, but the restart does not count towards maxRestarts. AvoidNode: as RestartPod, and "
            "new pods of the job avoid the nodes of these workers for avoidNodes.window."
        ),
    ]


class AvoidNodesSpec(ApiModel):
    """When new pods of the job avoid a node on which its workers failed."""

    failures: Annotated[
        int,
        Field(
            ge=1,
            le=20,
            description="Number of failures on a node within the window after which it is avoided.",
            json_schema_extra=remedy("1 avoids a node after its first failure"),
        ),
    ] = 3
    window: Annotated[
        str,
        DURATION,
        Field(
            max_length=32,
            description="How long a failure on a node is remembered, a duration such as 24h.",
            json_schema_extra=cel_rules(duration_rule("failurePolicy.avoidNodes.window", "24h")),
        ),
    ] = "24h"

    @property
    def window_length(self) -> timedelta:
        return parse_duration(self.window)


class HangsSpec(ApiModel):
    """After which time without a step the gang counts as hung and restarts."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "!(has(self.stepTimes) && has(self.seconds))",
                message_expression=(
                    "'failurePolicy.hangs has stepTimes %d and seconds %d, expected at most one: omit "
                    "stepTimes for a fixed time'.format([self.stepTimes, self.seconds])"
                ),
            ),
            rule(
                "self.detection != 'Off' || !(has(self.stepTimes) || has(self.seconds))",
                message=(
                    "failurePolicy.hangs has detection Off and a limit: omit stepTimes and seconds, or "
                    "detection"
                ),
            ),
        )
    )

    detection: Annotated[
        Detection,
        Field(description="Off: a gang that finishes no step is never restarted for it."),
    ] = Detection.ON
    step_times: Annotated[
        int | None,
        Field(
            ge=2,
            le=10_000,
            description="Number of median step times without a step after which the gang is hung, but at "
            "least 60 seconds. Default: 10, if seconds is not set.",
            json_schema_extra=remedy("10 suits most trainings"),
        ),
    ] = None
    seconds: Annotated[
        int | None,
        Field(
            ge=10,
            le=604_800,
            description="Seconds without a step after which the gang is hung, instead of stepTimes. The time "
            "counts from the first step of a round.",
            json_schema_extra=remedy("write more than the longest step takes, for example 600"),
        ),
    ] = None

    @property
    def effective_step_times(self) -> int:
        """The number of step times, or 0 if the limit is a fixed time or the detection is off."""
        if self.detection is Detection.OFF or self.seconds is not None:
            return 0
        return self.step_times or DEFAULT_STEP_TIMES

    @property
    def effective_seconds(self) -> float:
        """The fixed limit in seconds, or 0 if there is none or the detection is off."""
        return 0.0 if self.detection is Detection.OFF else float(self.seconds or 0)


class StragglersSpec(ApiModel):
    """Limits from which the status shows a slow rank as a straggler. No straggler causes a restart."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            rule(
                "self.detection != 'Off' || !(has(self.factor) || has(self.steps))",
                message=(
                    "failurePolicy.stragglers has detection Off and a limit: omit factor and steps, or "
                    "detection"
                ),
            ),
        )
    )

    detection: Annotated[
        Detection,
        Field(description="Off: the ranks measure nothing, and none is shown as a straggler."),
    ] = Detection.ON
    factor: Annotated[
        float | None,
        Field(
            description="1.1 to 100. A rank is slow while the input and the forward passes of a step take it "
            "this many times as long as the median of the ranks with the same number of parameters, and "
            "this delays the gang by at least 5 % of a step. Default: 1.5.",
            json_schema_extra=cel_rules(
                rule(
                    "self >= 1.1 && self <= 100.0",
                    message_expression=(
                        "'failurePolicy.stragglers.factor must be 1.1 to 100, got %.2f: 1.5 shows ranks that "
                        "take half as long again as the others'.format([self])"
                    ),
                )
            ),
        ),
    ] = None
    steps: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_000_000,
            description="Steps for which a rank must be slow without a break. Default: 30.",
            json_schema_extra=remedy("30 suits most trainings"),
        ),
    ] = None

    @property
    def effective_factor(self) -> float:
        """The factor, or 0 if the detection is off."""
        if self.detection is Detection.OFF:
            return 0.0
        return DEFAULT_STRAGGLER_FACTOR if self.factor is None else self.factor

    @property
    def effective_steps(self) -> int:
        """The number of steps, or 0 if the detection is off."""
        return 0 if self.detection is Detection.OFF else self.steps or DEFAULT_STRAGGLER_STEPS


class StartOverSpec(ApiModel):
    """When a gang that has lost every checkpoint starts from restoreFrom or from step 0."""

    at_most: Annotated[
        str,
        DURATION,
        Field(
            max_length=32,
            description="Longest training, a duration such as 30m, that the operator gives up by itself when "
            "every copy of the job's checkpoints is lost. 0s: never.",
            json_schema_extra=cel_rules(
                rule(
                    r"self.matches('^([0-9]+(\\.[0-9]+)?(ms|s|m|h))+$')",
                    message_expression=(
                        '\'failurePolicy.startOver.atMost is "%s", expected a duration with units h, m, s or '
                        "ms: write for example 30m, or 0s to start over never'.format([self])"
                    ),
                )
            ),
        ),
    ] = "30m"

    @property
    def limit(self) -> timedelta:
        return parse_duration(self.at_most)


class FailurePolicySpec(ApiModel):
    """What failures lead to, and how often the gang may restart before the job fails."""

    max_restarts: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description=(
                "Number of restarts within the window, or since the newest committed step was saved, after "
                "which one more restart fails the job."
            ),
            json_schema_extra=remedy("0 fails the job at the first failure"),
        ),
    ] = 10
    window: Annotated[
        str,
        DURATION,
        Field(
            max_length=32,
            description="Length of the window in which restarts count, a duration such as 1h or "
            "90m30s.",
            json_schema_extra=cel_rules(duration_rule("failurePolicy.window", "1h")),
        ),
    ] = "1h"
    rules: Annotated[
        tuple[FailureRule, ...],
        Field(
            max_length=16,
            description="What certain failures lead to. The first rule that matches one of the "
            "failures that are found at once applies; without one, the gang restarts.",
        ),
    ] = ()

    quarantine_after: Annotated[
        int,
        Field(
            ge=1,
            le=20,
            description="Restarts from one checkpoint that fail before any rank has finished a step, "
            "after which it is quarantined and an older one is restored. If there is no older one, "
            "the gang tries again until maxRestarts is exceeded.",
            json_schema_extra=remedy("3 leaves room for two failures with other causes"),
        ),
    ] = 3
    released_steps: Annotated[
        tuple[int, ...],
        Field(
            max_length=64,
            description="Steps whose checkpoints are not quarantined. Adding a step ends the "
            "quarantine of its checkpoint.",
            json_schema_extra=cel_rules(
                rule(
                    "self.all(s, s >= 0)",
                    message=(
                        "failurePolicy.releasedSteps contains a number below 0: write the step of "
                        "an entry of status.quarantined"
                    ),
                )
            ),
        ),
    ] = ()

    avoid_nodes: Annotated[
        AvoidNodesSpec | None,
        Field(
            description="Avoid nodes on which workers failed repeatedly. Default: only those that a "
            "rule with action AvoidNode names, for 24h."
        ),
    ] = None

    hangs: Annotated[
        HangsSpec,
        Field(description="When a gang that finishes no step is restarted."),
    ] = HangsSpec()

    stragglers: Annotated[
        StragglersSpec,
        Field(description="When a slow rank is shown as a straggler."),
    ] = StragglersSpec()

    start_over: Annotated[
        StartOverSpec,
        Field(description="When a gang that has lost every checkpoint starts over."),
    ] = StartOverSpec()

    @property
    def window_length(self) -> timedelta:
        return parse_duration(self.window)
