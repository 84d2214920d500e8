"""Apply failurePolicy.rules to the failures that a pass found. Pure.

1. If one of the failures is a disruption, only the disruptions are compared with the rules: ranks that fail
   with one are its consequence.
2. The rules are tried in their order. The first that matches one of these failures applies, whichever rank
   failed first. So the order of the rules decides if several ranks end with different codes.
3. Without a rule that matches, the gang restarts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast_core.api import FailureAction, FailureRule
from holdfast_core.ids import Worker
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.evidence import failed_from_restore_point
from holdfast_operator.decide.facts.failure import Failure
from holdfast_operator.decide.facts.world import World


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the failures of a pass lead to."""

    failures: tuple[Failure, ...]
    """All failures, causes before consequences, with the pods that the rule replaces."""
    action: FailureAction = FailureAction.RESTART_GANG
    matched: Failure | None = None
    """The first failure that the rule matches. None: no rule matches."""
    avoided: frozenset[Worker] = frozenset()
    """Workers whose nodes the rule avoids."""
    note: str = ""
    """Which rule applies, for conditions and Events. "" without a rule."""


def rule_on(world: World, failures: tuple[Failure, ...]) -> Ruling:
    """Return what these failures lead to, of which there is at least one."""
    compared = [f for f in failures if f.disruption] or list(failures)
    for index, rule in enumerate(world.observed.job.spec.failure_policy.rules):
        found = [f for f in compared if _matches(rule, f, world)]
        if not found:
            continue
        note = f"failurePolicy.rules[{index}] applies ({rule.action})"
        if rule.action is FailureAction.RESTART_POD:
            return _with_new_pods(world, failures, found, note)
        if rule.action is FailureAction.AVOID_NODE:
            ruling = _with_new_pods(world, failures, found, note)
            workers = frozenset(f.worker for f in found if f.worker is not None)
            return replace(ruling, action=rule.action, avoided=workers)
        return Ruling(failures, rule.action, found[0], note=note)
    return Ruling(failures)


def never_applies(rules: tuple[FailureRule, ...]) -> tuple[int, ...]:
    """Return the indexes of the rules that cannot apply, because rules before them match all their values."""
    before: set[object] = set()
    found = []
    for index, rule in enumerate(rules):
        values = _values(rule)
        if values <= before:
            found.append(index)
        before |= values
    return tuple(found)


def _values(rule: FailureRule) -> set[object]:
    """Return what the rule matches. Values of different kinds are never equal."""
    conditions = {(c.type, c.status) for c in rule.on_pod_conditions}
    return {*rule.on_exit_codes, *rule.on_reasons, *conditions}


def _matches(rule: FailureRule, failure: Failure, world: World) -> bool:
    if rule.on_exit_codes:
        return _exit_code(failure) in rule.on_exit_codes
    if rule.on_reasons:
        return failure.reason.value in rule.on_reasons
    member = None if failure.worker is None else world.member(failure.worker)
    pod = None if member is None else member.pod
    return pod is not None and any(
        (c.type, c.status) in pod.conditions for c in rule.on_pod_conditions
    )


def _exit_code(failure: Failure) -> int | None:
    """Return the exit code as shells and kubelets report it: 128 + n for a process that signal n ended."""
    code = failure.exit_code
    return code if code is None or code >= 0 else 128 - code


def _with_new_pods(
    world: World, failures: tuple[Failure, ...], matched: Iterable[Failure], note: str
) -> Ruling:
    """Return the ruling that also replaces the pods of these failures.

    The pods stay if the newest committed step is not known to be readable without them, or if the gang fails
    from this step and an older one is not. They stay while no pod can be created (World.may_replace_pods).
    """
    found = list(matched)
    gone = {f.worker for f in failures if f.replace_pod and f.worker is not None}
    workers = {f.worker for f in found if f.worker is not None} - gone
    if workers and not world.may_create_pods:
        note += "; the pods stay, because no pod is created while spec.suspend is true"
    elif workers and not world.may_replace_pods:
        note += "; the pods stay, because the API server refuses the pods of the present template"
    elif workers and not readable.answering_can_be_replaced(world, workers | gone):
        note += (
            "; the pods stay, because the newest committed step is not known to be readable "
            "without them"
        )
    elif workers and not readable.older_is_kept(
        world, workers | gone, failed_from_restore_point(world, failures)
    ):
        note += (
            "; the pods stay, because they have the checkpoint that follows if the gang fails from "
            "this one again"
        )
    else:
        failures = tuple(
            replace(f, replace_pod=f.replace_pod or f.worker in workers) for f in failures
        )
    return Ruling(failures, FailureAction.RESTART_POD, found[0], note=note)
