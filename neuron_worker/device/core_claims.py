"""Which cores the servers of this machine have named: two that name the same core are told so, by number.

The runtime says of such a core that it is busy, after minutes of loading and without a name. A claim is a locked file
per core, which the kernel unlocks when its process ends, however it ends. Claims reach as far as the directory of
temporary files does: to every user, not across containers.

Anybody may write there, so nothing in it is trusted: links are not followed, and what a claim says is shown, not used.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from .errors import LoadError

logger = logging.getLogger(__name__)

FOLDER = Path(tempfile.gettempdir()) / "neuronserve-cores"

_FOR_ALL, _FILE_FOR_ALL = 0o1777, 0o666  # whatever this process's umask
_LONGEST_NAME = 200
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

_held: dict[int, IO[str]] = {}  # of this process, until its end: so does the runtime


def claim(cores: Iterable[int], said_by: str) -> None:
    """`LoadError` names the first core that another process has claimed, and the process."""
    for core in cores:
        if core in _held:
            continue
        try:
            file = _open(str(core))
        except OSError as error:  # another user's folder, or nowhere to write: the runtime will say it
            logger.warning(
                "%s: whether another server uses these cores is not checked, claims cannot be written (%s)",
                *(said_by, error),
            )
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _printable(file.read(_LONGEST_NAME))
            file.close()
            raise LoadError(
                f"{said_by}: core {core} is already used by {owner or 'another process'}; give each server cores of "
                "its own"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} ({said_by})")
        file.flush()
        _held[core] = file


def _open(name: str) -> IO[str]:
    """The claim's file, made where it is missing."""
    folder = _open_folder()
    try:
        descriptor = _open_file(folder, name)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _in_the_way(FOLDER / name, "file") from None
        raise
    finally:
        os.close(folder)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise _in_the_way(FOLDER / name, "file")
    return open(descriptor, "r+", encoding="utf-8", errors="replace")


def _open_folder() -> int:
    with suppress(FileExistsError):
        FOLDER.mkdir()
    if FOLDER.is_symlink() or not FOLDER.is_dir():
        raise _in_the_way(FOLDER, "folder")
    descriptor = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != _FOR_ALL:
        os.fchmod(descriptor, _FOR_ALL)
    return descriptor


def _open_file(folder: int, name: str) -> int:
    with suppress(FileNotFoundError):
        # Not with O_CREAT: in such a folder the kernel refuses that for another user's file.
        return os.open(name, _OPEN, dir_fd=folder)
    try:
        descriptor = os.open(name, _OPEN | os.O_CREAT | os.O_EXCL, _FILE_FOR_ALL, dir_fd=folder)
    except FileExistsError:  # another server was quicker
        return os.open(name, _OPEN, dir_fd=folder)
    os.fchmod(descriptor, _FILE_FOR_ALL)
    return descriptor


def _in_the_way(path: Path, expected: str) -> OSError:
    return OSError(f"{path} is a link or no {expected}: remove it")


def _printable(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable()).strip()
