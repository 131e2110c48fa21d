"""Files that the user names: a bundle, a key. Links are followed here, unlike in a store."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fusekit.errors import UsageError
from fusekit.store.files import close, file_error


@contextlib.contextmanager
def given_file(path: Path, what: str, remedy: str = "check the path") -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """The plain file `path`, open for reading, and its status. what: what it should be, such as `bundle`.

    Raises UsageError if there is none or it is a folder, a FIFO or a device, StoreError if it cannot be opened or read.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no {what} {path}; {remedy}") from None
    except OSError as error:
        raise file_error(path, f"open the {what}", error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is no plain file; a {what} is; {remedy}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file, status
    except OSError as error:
        if error.filename is not None:
            raise
        raise file_error(path, f"read the {what}", error) from error
    finally:
        close(descriptor)
