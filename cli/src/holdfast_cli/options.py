"""What all verbs share: the session, the type of a TARGET, and the options that several of them take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from holdfast_cli.errors import CommandError, NotFound, UsageError
from holdfast_cli.output import Format
from holdfast_cli.targets import ClusterTarget, Kind, Program, Target, local_path, parse_target

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

F = TypeVar("F", bound=Callable[..., Any])
COMMON_OPTIONS = ("-n", "--namespace", "--context", "-o", "--output")
JOBS = (Kind.JOB,)
STORES = (Kind.STORE,)
EITHER = (Kind.JOB, Kind.CHECKPOINT)


@dataclass(slots=True)
class Session:
    """One command: how it was started, and what the options for all verbs say."""

    program: Program
    namespace: str | None = None
    context: str | None = None
    everywhere: bool = False
    """Whether lists contain the objects of all namespaces."""
    format: Format = Format.TABLE
    variables: dict[str, str] = field(default_factory=dict)
    """Variables of the environment that a store of the cluster has set."""

    def cluster(self, target: ClusterTarget | None = None) -> ClusterClient:
        """Connect to the cluster, which has the target. Raises UsageError or CommandError."""
        # The client takes half a second of CPU to import, which verbs on folders and stores do not need.
        from holdfast_cli.cluster import ClusterClient

        if self.everywhere and self.namespace is not None:
            raise UsageError("--all-namespaces lists everything: omit it, or omit --namespace")
        try:
            return ClusterClient.connect(self.context, self.namespace, everywhere=self.everywhere)
        except CommandError as error:
            if target is None or target.kind is not None or self.program != "holdfast":
                raise
            # The word is more likely the name of a folder with a mistake in it.
            raise NotFound(
                f"there is no folder {target.name} here, and no cluster that may have a job of this name: "
                f"{error}"
            ) from error

    def target(self, text: str) -> Target:
        """Return what a text names. Raises UsageError or NotFound."""
        return parse_target(text, self.program, os.path.exists)


class TargetType(click.ParamType[Target]):
    """A TARGET of the command line."""

    name = "target"

    def __init__(self, *kinds: Kind) -> None:
        self.kinds = kinds
        """Kinds of objects whose names a shell completes."""

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Target:
        assert ctx is not None, "targets are parsed in a command"
        return ctx.ensure_object(Session).target(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from holdfast_cli.completion import targets

        return targets(ctx.ensure_object(Session), self.kinds, incomplete)


def target_argument(*kinds: Kind, required: bool = True) -> Callable[[F], F]:
    """Add the argument TARGET. A shell completes the names of objects of these kinds."""
    metavar = "TARGET" if required else "[TARGET]"
    return click.argument("target", metavar=metavar, type=TargetType(*kinds), required=required)


def _keep(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Keep an option in the session. Behind the verb, an option that is not given keeps what is before it."""
    if value:
        assert param.name is not None
        setattr(ctx.ensure_object(Session), param.name, value)


def place_options(command: F) -> F:
    """Add --namespace and --context, which kubectl takes before and behind a verb."""
    for names, text in (
        (["--context"], "Context of the kubeconfig (default: the active one)."),
        (["-n", "--namespace"], "Namespace of the objects (default: that of the context)."),
    ):
        command = click.option(*names, callback=_keep, expose_value=False, help=text)(command)
    return command


def output_option(command: F) -> F:
    """Add --output."""

    def keep(ctx: click.Context, param: click.Parameter, value: str) -> None:
        ctx.ensure_object(Session).format = Format(value)

    return click.option(
        "-o",
        "--output",
        type=click.Choice([one.value for one in Format]),
        default=Format.TABLE.value,
        show_default=True,
        callback=keep,
        expose_value=False,
        help="Format of the result.",
    )(command)


def common_options(command: F) -> F:
    """Add the options that every verb takes."""
    return output_option(place_options(command))


def everywhere_option(command: F) -> F:
    """Add --all-namespaces to a verb that lists."""
    return click.option(
        "-A",
        "--all-namespaces",
        "everywhere",
        is_flag=True,
        callback=_keep,
        expose_value=False,
        help="List those of all namespaces.",
    )(command)


def expanded(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Replace the ~ of a path, as in a TARGET. No shell does it behind `--to=` or within quotes."""
    return type(value)(local_path(str(value))) if str(value).startswith("~") else value


def yes_option(command: F) -> F:
    """Add --yes to a verb that asks."""
    return click.option(
        "-y", "--yes", is_flag=True, help="Do not ask (needed without a terminal)."
    )(command)
