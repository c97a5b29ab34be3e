"""Every error that this package raises on purpose.

OPDError
├── ConfigError          a setting that cannot work: names the setting, its value and the next step
├── WireError            bytes that break the protocol; `code` says which rule
└── TeacherError         the teacher did not give a usable answer
    ├── TeacherUnavailable   nobody answered in time, after all retries
    ├── TeacherMismatch      another model, tokenizer or protocol than the one pinned at the handshake
    ├── BadReply             a reply that failed a check; its values were dropped
    ├── RequestRefused       the teacher says that the request itself is wrong; a retry cannot help
    └── RowsFailed           some rows have no value; `row_errors` says which and why

A row that cannot be scored travels as a `RowError` value, so that the rest of its batch is answered.
"""

from __future__ import annotations

from typing import NamedTuple


class RowError(NamedTuple):
    """Why one row of a batch has no value. `row` is its index in the batch of whoever reads it."""

    row: int
    code: str
    message: str


class OPDError(Exception):
    """Base of all errors of this package."""


class ConfigError(OPDError, ValueError):
    """A setting that cannot work."""


class WireError(OPDError, ValueError):
    """Bytes that break the protocol."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class TeacherError(OPDError):
    """The teacher did not give a usable answer."""


class TeacherUnavailable(TeacherError):
    """Nobody answered in time, after all retries."""


class TeacherMismatch(TeacherError):
    """Another model, tokenizer or protocol than the one pinned at the handshake."""


class BadReply(TeacherError):
    """A reply that failed a check; none of its values were used."""


class RequestRefused(TeacherError):
    """The teacher says that the request itself is wrong."""

    def __init__(self, code: str, message: str):
        super().__init__(f"{message} [{code}]")
        self.code = code


class RowsFailed(TeacherError):
    """Some rows have no value."""

    def __init__(self, row_errors: list[RowError], num_rows: int):
        first = row_errors[0]
        super().__init__(
            f"the teacher could not score {len(row_errors)} of {num_rows} rows; "
            f"the first is row {first.row}: {first.message} [{first.code}]"
        )
        self.row_errors = row_errors
