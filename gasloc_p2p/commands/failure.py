"""From an exception to one message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator

from gasloc_p2p.core.errors import DiskError, GaslocError
from gasloc_p2p.extensions import place_of

UNEXPECTED_EXIT_CODE = 1
BROKEN_PIPE_EXIT_CODE = 141
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What no program can help: a full disk, or one that may not be written to."""


def explain(error: BaseException) -> int:
    """Write what went wrong to standard error, and return the exit code for it."""
    for cause in _leaves(error):
        if isinstance(cause, BrokenPipeError):
            # Whoever read our output has seen enough; nor shall the flush at exit complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE_EXIT_CODE
        if isinstance(cause, GaslocError):
            print(f"gasloc: {cause.what}", file=sys.stderr)
            if cause.why:
                print(f"  why: {cause.why}", file=sys.stderr)
            if cause.fix:
                print(f"  fix: {cause.fix}", file=sys.stderr)
            print(f"  [{cause.code}, see docs/errors.md]", file=sys.stderr)
            return cause.exit_code
    cause = next(_leaves(error))
    if isinstance(cause, OSError) and cause.errno in _OF_THE_DISK:
        return explain(
            DiskError(
                f"{cause.filename or 'a file'} cannot be used",
                why=cause.strerror or str(cause),
                fix="make room there, or make it writable, and do the same again",
            )
        )
    place = place_of(cause)
    if place is None:
        print(f"gasloc: unexpected {type(cause).__name__}: {cause}", file=sys.stderr)
        print("  fix: this is a defect; run again with --debug and report it", file=sys.stderr)
    else:
        print(f"gasloc: the extension {place} failed", file=sys.stderr)
        print(f"  why: {type(cause).__name__}: {cause}", file=sys.stderr)
        print("  fix: mend that file; --debug shows how it was called", file=sys.stderr)
    return UNEXPECTED_EXIT_CODE


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside nested groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
