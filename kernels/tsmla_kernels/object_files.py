"""The files of the cache of compiled objects: their names, their bytes, and which of them may be trusted.

An entry's file holds a magic number, the length of its description, the description (JSON), the object, and a checksum
of all that. The object is native code that runs in this process, so a file is read only if nobody but this user and
root can have written it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SUFFIX = ".obj"
LOCK_SUFFIX = ".lock"
TEMPORARY_PREFIX = ".writing-"
TEMPORARY_SUFFIX = SUFFIX + ".tmp"
_MAGIC = b"TSMLAOB1"
_DIGEST_SIZE = 32

# Only files of these names are the cache's: TSMLA_CACHE_DIR may be a directory that holds others too.
_ENTRY_NAME = re.compile(r"[A-Za-z0-9_]+-sm_[0-9]+[a-z]?-[0-9a-f]{32}-dsl[A-Za-z0-9._+-]+" + re.escape(SUFFIX))
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + r"[a-z0-9_]+" + re.escape(TEMPORARY_SUFFIX))

_TEXTS = ("kernel", "config", "arch", "host", "package", "sources", "dsl")
_LATEST = 2.0**36
"""Greatest time in seconds that is taken for one: the year 4147."""


class DamagedEntry(Exception):
    """A file in the cache is truncated, changed, of another program, or may hold another user's code."""


class UntrustedDirectory(ValueError):
    """Others may write into the cache's directory, so that its files may be anybody's code."""


def is_entry(name: str) -> bool:
    """Whether an entry of the cache may have this file name."""
    return _ENTRY_NAME.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Whether a process that is killed may leave a file of this name: a lock, or a half-written entry."""
    if name.endswith(LOCK_SUFFIX):
        return is_entry(name.removesuffix(LOCK_SUFFIX))
    return _TEMPORARY_NAME.fullmatch(name) is not None


def in_directory(directory: Path) -> list[Path]:
    """The files of a directory by name; none if there is no such directory. OSError if it is another file, or can't be
    read."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as e:
        raise OSError(
            f"the cache of compiled kernels {directory} can't be read ({e.strerror or e}); TSMLA_CACHE_DIR names"
            " another directory"
        ) from None


def temporary_files() -> str:
    """The directory of temporary files; /tmp if none can be written, so that its next user says which."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return "/tmp"


def pack(description: dict[str, Any], module: bytes) -> bytes:
    """The bytes of an entry's file."""
    header = json.dumps(description).encode()
    content = b"".join((_MAGIC, struct.pack("<Q", len(header)), header, module))
    return content + hashlib.sha256(content).digest()


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """The description and the object of an entry's file.

    Raises:
      DamagedEntry: it is not sound, or not to be trusted. OSError: it can't be read.
    """
    content = _trusted_bytes(path)
    start = len(_MAGIC) + 8
    if len(content) < start + _DIGEST_SIZE or not content.startswith(_MAGIC):
        raise DamagedEntry(f"{path.name} is not a compiled kernel, or only its beginning ({len(content)} bytes)")
    body, digest = content[:-_DIGEST_SIZE], content[-_DIGEST_SIZE:]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedEntry(f"{path.name} does not match its checksum: it is damaged or incomplete")
    (length,) = struct.unpack_from("<Q", body, len(_MAGIC))
    if length > len(body) - start:
        raise DamagedEntry(f"{path.name} gives its description {length} bytes, more than there are")
    try:
        description = json.loads(body[start : start + length])
    except (ValueError, RecursionError):
        raise DamagedEntry(f"{path.name} has a description that is not JSON") from None
    if wrong := _wrong_fields(description):
        raise DamagedEntry(f"{path.name} has a description without a legal {', '.join(wrong)}")
    return description, body[start + length :]


def check_directory(directory: Path, otherwise: str = ", or name another directory with TSMLA_CACHE_DIR") -> None:
    """UntrustedDirectory if others may write into a directory that exists. otherwise: what else helps, in the error."""
    try:
        status = os.stat(directory)
    except OSError:
        return  # it will be made; if it can't be read, its next reader gets the error
    if reason := why_untrusted(status):
        raise UntrustedDirectory(
            f"the cache of compiled kernels {directory} {reason}, and its files are run as code: make it yours alone"
            f" (chown, chmod go-w {directory}){otherwise}"
        )


def why_untrusted(status: os.stat_result) -> str | None:
    """Why a file or directory may hold what another user wrote; None if only this user and root can have."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):03o})"
    return None


def _trusted_bytes(path: Path) -> bytes:
    # Without O_NONBLOCK, opening a named pipe would wait for somebody to write to it.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DamagedEntry(f"{path.name} is not a regular file")
        if reason := why_untrusted(status):
            raise DamagedEntry(f"{path.name} {reason}, and it would be run as code (chown, chmod go-w make it yours)")
        return file.read()


def _wrong_fields(description: Any) -> Iterable[str]:
    """The fields of a description that are missing or of another type."""
    if not isinstance(description, dict):
        return ["object"]

    def is_time(name: str) -> bool:
        value: Any = description.get(name)
        return type(value) in (int, float) and 0 <= value < _LATEST  # not true of NaN either

    def is_text(name: str) -> bool:
        value = description.get(name)
        return isinstance(value, str) and value.isprintable()

    def is_object(name: str) -> bool:
        try:
            return isinstance(json.loads(description[name]), dict)
        except (ValueError, RecursionError):
            return False

    wrong = [name for name in _TEXTS if not is_text(name)]
    if "config" not in wrong and not is_object("config"):
        wrong.append("config")
    wrong += [name for name in ("seconds", "created") if not is_time(name)]
    if not isinstance(description.get("log"), str):
        wrong.append("log")
    if not isinstance(description.get("environment"), dict):
        wrong.append("environment")
    if "made_of" in description and not is_text("made_of"):
        wrong.append("made_of")
    return wrong
