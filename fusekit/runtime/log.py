"""The logger "fusekit", which fusekit never configures."""

from __future__ import annotations

import sys
from typing import Any

_DEBUG = 10  # logging.DEBUG


def debug_log() -> Any:
    """The logger if it takes debug messages, else None. Does not import logging: a program that listens has, and the
    import would be felt in the first load.
    """
    logging = sys.modules.get("logging")
    log = logging and logging.getLogger("fusekit")
    return log if log and log.isEnabledFor(_DEBUG) else None
