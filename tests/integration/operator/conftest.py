"""A real API server with our CRDs. The operator runs as a process, and the tests act as the kubelet."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.operator.api_proxy import ApiProxy
from tests.support.operator.operator_account import OperatorAccount, Right, running_account
from tests.support.operator.operator_bed import OperatorBed, opened_bed
from tests.support.operator.write_rules import broken_rules


@pytest.fixture(scope="session")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorAccount]:
    """Start the API server, or fail with the command to run if the test bed's binaries are missing.

    The admission plugin is on in OpenShift: an object may block the deletion of its owner only if its creator
    may update the owner's finalizers.
    """
    folder = tmp_path_factory.mktemp("operator-account")
    plugin = "--enable-admission-plugins=OwnerReferencesPermissionEnforcement"
    with running_account(folder, plugin) as account:
        yield account


@pytest.fixture
def empty_bed(account: OperatorAccount, tmp_path: Path) -> Iterator[OperatorBed]:
    """Return a namespace without a job and without a running operator, and a node without a lease.

    A test fails if the operator has made a call for which the chart gives it no right.
    """
    with opened_bed(account, f"t{secrets.token_hex(6)}", tmp_path) as bed:
        begin = account.mark()
        yield bed
    # The server refuses a call whose right it has not read yet: the operator starts while it reads them.
    given = set[Right]().union(*map(account.rights, (bed.namespace, *bed.also_watched)))
    assert sorted(account.calls(begin).refused - given) == []


@pytest.fixture
def bed(empty_bed: OperatorBed) -> OperatorBed:
    """Return a job that trains in round 0, with a running operator."""
    empty_bed.start_operator()
    empty_bed.train()
    return empty_bed


@pytest.fixture
def proxy(empty_bed: OperatorBed, tmp_path: Path) -> Iterator[ApiProxy]:
    """Let the operator of the bed reach the API server through a proxy with faults.

    A test fails if the operator's writes break a rule.
    """
    with ApiProxy(empty_bed.plane) as proxy:
        empty_bed.kubeconfig = tmp_path / "kubeconfig-of-the-proxy"
        proxy.write_kubeconfig(empty_bed.account.kubeconfig, empty_bed.kubeconfig)
        yield proxy
        if empty_bed.process is not None:
            empty_bed.kill_operator()
        assert broken_rules(proxy.writes) == []


@pytest.fixture
def gang(empty_bed: OperatorBed, proxy: ApiProxy) -> OperatorBed:
    """Return a job that trains in round 0 and has stored step 40, with an operator behind the proxy."""
    empty_bed.start_with_gang()
    return empty_bed
