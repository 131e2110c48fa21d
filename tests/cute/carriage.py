"""Runs of `fusekit exec --with` in this process, of programs that compile as other packages do."""

import os
import re
import sys
from pathlib import Path

from fusekit.config import Config, CuteConfig
from fusekit.cute.carried import Carriage
from fusekit.store import Store
from fusekit.store.entries import CARRIED
from tests.cute import cached

PYTHON = (sys.executable, "program.py")
COUNTS = re.compile(r"fusekit: 0 hits, 0 misses, 0\.0 s saved(.*)\n")


def begin(root, *names, config=None, environ=None, **settings):
    """A run over the store in `root`."""
    return Carriage(CuteConfig(config or Config(store=root), **settings), names, PYTHON, environ or dict(os.environ))


def compile_with(carriage, package, *names):
    """Which of `names` are compiled in that run."""
    folder = Path(carriage.variables[cached.VARIABLES[package]])
    return [name for name in names if getattr(cached, package)(folder, name)]


def ran(root, package, *names, **settings):
    """(what a run compiled, what its report says, its troubles)."""
    carriage = begin(root, package, **settings)
    compiled, text = compile_with(carriage, package, *names), carriage.store()
    carriage.remove()
    return compiled, text, carriage.troubles


def units(root):
    """The units of all sets in the store."""
    keys = [listed.record.key for listed in Store(root).names()]
    return sorted(unit for key in keys for unit in Store(root).find_entry(key).launch[CARRIED]["units"])
