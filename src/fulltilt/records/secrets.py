"""Passwords, tokens and keys in command lines, configs and lines of code, masked before they are written anywhere.

What counts as a secret: the value of an argument, option or assignment whose name says so (password, token, api-key,
…), the password of a URL, and a long random-looking word wherever it stands. `FULLTILT_SECRETS` adds regular
expressions, separated by white space: whatever matches one, as a name or as a value, is masked too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

MASK = "***"
PATTERNS_VARIABLE = "FULLTILT_SECRETS"

_SECRET_WORDS = re.compile(
    r"password|passwd|passphrase|pwd|pass|token|secrets?|credentials?|auth|authorization|bearer|apikey|apitoken"
    r"|accesskey|cookie|signature|sig"
)
# `--key` alone is a secret; `--image-key` is one only if its value looks like it.
_KEY_OWNERS = re.compile(r"api|access|secret|private|auth|ssh|encryption|account|service|master|license|wandb")
_NOT_SECRET_BEFORE_TOKEN = re.compile(r"pad|eos|bos|unk|mask|sep|cls|stop|image|special")
# Names whose values look random but are public.
_PUBLIC = frozenset(["revision", "commit", "sha", "hash", "digest", "checksum", "uuid", "seed"])
_URL = re.compile(r"(?P<before>\b[A-Za-z][A-Za-z0-9+.-]*://[^\s/@:]*:)(?P<password>[^\s/@]+)@")
_ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z_][\w.-]*)(?P<between>[\"']?\s*[=:]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&)\]}\"']+)"
)
_QUOTED = re.compile(r"\"[^\"]{16,}\"|'[^']{16,}'")
_WORD = re.compile(r"[A-Za-z0-9+_\-.=]{20,}")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)


def mask_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line without its secrets: `--token abc` and `--token=abc` become `--token ***`, `--token=***`."""
    masked: list[str] = []
    name = ""  # of the option whose value comes next
    for argument in arguments:
        option = argument.startswith("-") and not _is_number(argument)
        before, equals, value = argument.partition("=")
        if not option and (name or not equals):
            masked.append(_masked(name, argument))
        else:
            masked.append(f"{before}={_masked(before, value)}" if equals else argument)
        name = argument if option and not equals else ""
    return tuple(masked)


def mask_config(value: Any, name: str = "") -> Any:
    """A config of nested mappings and lists without its secrets."""
    if isinstance(value, Mapping):
        return {key: mask_config(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mask_config(item, name) for item in value)
    if isinstance(value, str):
        return _masked(name, value)
    return MASK if value is not None and name and _is_secret(name, str(value)) else value


def mask_text(text: str) -> str:
    """A line of code or of a message without the secrets in it."""
    return _masked_text(text, os.environ.get(PATTERNS_VARIABLE, ""))


@lru_cache(4096)  # the recorder names the same lines over and over, in the user's own process
def _masked_text(text: str, _patterns: str) -> str:
    def assigned(match: re.Match[str]) -> str:
        value = match["value"]
        quote = value[0] if value[0] in "\"'" else ""
        if not quote and not any(character.isdigit() for character in value):
            return match[0]  # a name or a call in code, not a literal
        inner = value.strip(quote) if quote else value
        if not _is_secret(match["name"], inner):
            return match[0]
        return f"{match['name']}{match['between']}{quote}{MASK}{quote}"

    text = _URL.sub(rf"\g<before>{MASK}@", text)
    text = _ASSIGNED.sub(assigned, text)
    text = _QUOTED.sub(lambda match: match[0][0] + _mask_value(match[0][1:-1]) + match[0][0], text)
    return _KNOWN.sub(MASK, text)


def _is_secret(name: str, value: str) -> bool:
    """Whether the name says that this value is a secret."""
    if not value or value == MASK:
        return bool(value)
    if any(pattern.search(name.lstrip("-")) or pattern.search(value) for pattern in _users_patterns()):
        return True
    if _is_number(value) or value.lower() in ("true", "false", "none", "null"):
        return False
    words = _words(name)
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return not _NOT_SECRET_BEFORE_TOKEN.fullmatch(before)
    if last in ("key", "keys"):
        return not before or bool(_KEY_OWNERS.fullmatch(before)) or _looks_random(value)
    return bool(_SECRET_WORDS.fullmatch(last)) or "password" in words or "secret" in words


def _masked(name: str, value: str) -> str:
    """The value of an argument or setting, masked if its name or its look says that it is a secret."""
    return MASK if _is_secret(name, value) else _mask_value(value, name)


def _mask_value(value: str, name: str = "") -> str:
    """A value with the password of a URL and random-looking words masked."""
    value = _KNOWN.sub(MASK, _URL.sub(rf"\g<before>{MASK}@", value))
    if any(word in _PUBLIC for word in _words(name)):
        return value
    if any(pattern.search(value) for pattern in _users_patterns()):
        return MASK
    return _WORD.sub(lambda match: MASK if _looks_random(match[0]) else match[0], value)


def _looks_random(word: str) -> bool:
    """Whether a word is long and mixed enough to be a key: file names, dates and paths are not."""
    if len(word) < 20 or ("/" in word.strip("/") and "." in word):
        return False
    longest = max(re.split(r"[_\-./=+]", word), key=len)
    if len(longest) < 16:
        return False
    if not any(map(str.isdigit, longest)) or not any(map(str.isalpha, longest)):
        return False
    if re.fullmatch(r"[0-9a-f]+|[0-9A-F]+", longest):
        return len(longest) >= 32
    changes = sum(_kind(a) != _kind(b) for a, b in pairwise(longest))
    return changes >= len(longest) / 5


def _kind(character: str) -> int:
    return 0 if character.isdigit() else 1 if character.isupper() else 2


def _words(name: str) -> list[str]:
    """`--wandbApiKey`, `WANDB_API_KEY` and `wandb.api-key` are all wandb, api, key."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _users_patterns() -> list[re.Pattern[str]]:
    patterns = []
    for text in os.environ.get(PATTERNS_VARIABLE, "").split():
        try:
            patterns.append(re.compile(text, re.IGNORECASE))
        except re.error:
            patterns.append(re.compile(re.escape(text), re.IGNORECASE))
    return patterns
