"""Errors of torch's readers and writers as Holdfast errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast_core.errors import HoldfastError
from holdfast_core.node.files import disk_error


@contextmanager
def torch_errors(operation: str, otherwise: type[HoldfastError]) -> Iterator[None]:
    """Convert what torch raises in the context.

    DCP wraps each error, also Ctrl-C, in a CheckpointException, which is not an Exception. torch's writer of
    zip files raises a RuntimeError in the place of the OSError of a full disk.

    Args:
        operation: Names the operation and the path.
        otherwise: The error where no OSError and no HoldfastError is the cause.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:
        causes = _causes(error)
        for cause in causes:
            if isinstance(cause, HoldfastError | KeyboardInterrupt):
                raise cause from None
            if isinstance(cause, OSError):
                named = f" ({cause.filename})" if cause.filename else ""
                raise disk_error(cause, f"{operation}{named}") from error
        raise otherwise(f"{operation}: {type(causes[0]).__name__}: {causes[0]}") from error


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error that DCP has wrapped, or the error itself, and then the errors before it."""
    from torch.distributed.checkpoint.api import CheckpointException

    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        if isinstance(one, CheckpointException) and one.failures:
            one = next(iter(one.failures.values()))[0]
            continue
        found.append(one)
        one = one.__cause__ or one.__context__
    return found
