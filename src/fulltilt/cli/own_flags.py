"""Flags of Fulltilt's that stand behind the script: the script gets them, and the user is told."""

from __future__ import annotations

from collections.abc import Collection, Sequence

# What argparse, click and others end with when they do not know a flag.
USAGE_ERROR = 2


def given_to_script(flags: Collection[str], arguments: Sequence[str]) -> list[str]:
    """Those of ``flags`` that stand behind the first of the job's arguments."""
    behind = {argument.partition("=")[0] for argument in arguments[1:]}
    return [flag for flag in flags if flag in behind]


def hint(verb: str, flag: str) -> str:
    """Where a flag of ours belongs."""
    return f"{flag} goes to the script; a flag of fulltilt {verb} stands before it"
