"""What can go wrong, by who can mend it. The command line turns each into one line and an exit code."""

from __future__ import annotations


class RlsysError(Exception):
    """Base of every error we raise on purpose."""

    exit_code = 1


class UserError(RlsysError):
    """The user can mend it: a wrong value, a missing file, a port in use. Exit code 2."""

    exit_code = 2


class RunError(RlsysError):
    """The run cannot go on: an engine died twice, a push failed attestation. Exit code 1, nothing lost."""
