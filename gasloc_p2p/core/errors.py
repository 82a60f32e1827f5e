"""Errors a person is meant to read: what happened, why, and how to mend it."""

from __future__ import annotations

from typing import ClassVar


class GaslocError(Exception):
    """A fault that ends a command with one clear message.

    Attributes:
        code: stable identifier of the kind of fault, documented in docs/errors.md.
        exit_code: process exit status for this kind.
    """

    code: ClassVar[str] = "GL-ERROR"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(f"why: {self.why}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "\n".join(parts)


class ConfigError(GaslocError):
    """A configuration value is unknown, malformed or contradicts another one."""

    code = "GL-CONFIG"
    exit_code = 2


class InviteError(GaslocError):
    """An invite string cannot be read."""

    code = "GL-INVITE"
    exit_code = 3


class BootstrapUnreachableError(GaslocError):
    """No bootstrap address answered."""

    code = "GL-BOOTSTRAP"
    exit_code = 4


class PortInUseError(GaslocError):
    """A listen port is held by another process."""

    code = "GL-PORT"
    exit_code = 5


class IdentityError(GaslocError):
    """The identity file is missing, unreadable, exposed, or in use by another process."""

    code = "GL-IDENTITY"
    exit_code = 6


class ManifestError(GaslocError):
    """The run's manifest is absent, or is not the one that the invite names."""

    code = "GL-MANIFEST"
    exit_code = 7


class UnstableError(GaslocError):
    """The outer rule diverges with this momentum, learning rate, alpha and topology."""

    code = "GL-UNSTABLE"
    exit_code = 8


class DaemonError(GaslocError):
    """The libp2p daemon did not start, does not answer, or has died."""

    code = "GL-DAEMON"
    exit_code = 9


class StartError(GaslocError):
    """The swarm did not come together before the deadline."""

    code = "GL-START"
    exit_code = 10


class DataError(GaslocError):
    """The training text is missing, unreadable or too small."""

    code = "GL-DATA"
    exit_code = 11


class StateError(GaslocError):
    """No peer handed over parameters that passed their checks, or the run stands still."""

    code = "GL-STATE"
    exit_code = 12


class CheckpointError(GaslocError):
    """A checkpoint is there, but this node may not read it or cannot use it."""

    code = "GL-CHECKPOINT"
    exit_code = 13


class DeviceError(GaslocError):
    """The device that is to train is missing, or has too little memory."""

    code = "GL-DEVICE"
    exit_code = 14


class DiskError(GaslocError):
    """The disk has no room for what a node has to keep, or may not be written to."""

    code = "GL-DISK"
    exit_code = 15
