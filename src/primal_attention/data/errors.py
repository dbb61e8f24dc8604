"""The error of this room: something is wrong with the data, and the message says in one line what and where."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used as it stands; the person who owns it can mend it."""
