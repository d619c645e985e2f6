"""Files that only one process at a time may write."""

from __future__ import annotations

import os
from contextlib import suppress


def open_locked(path: str | os.PathLike[str]) -> int:
    """Opens a file for reading and appending, and creates it if it is missing.

    Args:
        path: The file.

    Returns:
        A file descriptor. The lock is released when it and its copies in forked processes are closed.

    Raises:
        BlockingIOError: The file is locked.
        OSError: The file cannot be opened.
    """
    import fcntl  # only on POSIX

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the path names another file by now


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether the file is locked. False if there is no such file."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def unlock(descriptor: int) -> None:
    """Releases the lock, even if a forked process still has a copy of the descriptor."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)


def append(descriptor: int, data: bytes) -> None:
    """Appends all of ``data``, however many writes it takes, or nothing: a part of a line must not precede
    other lines. Raises ``OSError``, such as on a full disk."""
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise
