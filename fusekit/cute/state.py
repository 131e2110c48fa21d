"""What of a process decides what code computes, though no value that the code names shows it."""

from __future__ import annotations

import builtins
import hashlib
import locale
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from fusekit.cute.digest import DIGITS


def process_state() -> str:
    """A digest of the settings of Python and of libraries that are not as they are at the start of a process."""
    state: dict[str, Any] = {
        "builtins": [name for name, each in vars(builtins).items() if type(each) is types.FunctionType],
        "numbers": (locale.setlocale(locale.LC_NUMERIC), sys.get_int_max_str_digits()),
    }
    if (decimal := sys.modules.get("decimal")) is not None:
        context = decimal.getcontext()
        state["decimal"] = [getattr(context, name) for name in _DECIMAL]
        state["decimal"] += [kind.__name__ for kind, on in context.traps.items() if on]
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "get_printoptions"):
        state["errors"] = numpy.geterr()
        state["printed"] = {name: numpy.get_printoptions().get(name) for name in _PRINTED}
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_dtype"):
        state["torch"] = str(torch.get_default_dtype())
    # A library that is not imported yet has its defaults.
    set_ = {name: value for name, value in state.items() if value != _DEFAULTS.get(name)}
    return hashlib.sha256(repr(set_).encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_PRINTED: dict[str, Any] = {
    "edgeitems": 3, "threshold": 1000, "floatmode": "maxprec", "precision": 8, "suppress": False, "linewidth": 75,
    "nanstr": "nan", "infstr": "inf", "sign": "-", "formatter": None, "legacy": False, "override_repr": None,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "builtins": [],
    "decimal": [28, "ROUND_HALF_EVEN", -999999, 999999, 1, 0, "InvalidOperation", "DivisionByZero", "Overflow"],
    "errors": {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
    "printed": _PRINTED,
    "torch": "torch.float32",
}


def _loggers() -> str:
    """Those that a program has set."""
    known = [("", logging.root), *logging.root.manager.loggerDict.items()]
    loggers = sorted(
        (name, each.level, each.disabled, each.propagate)
        for name, each in known
        if isinstance(each, logging.Logger) and (each.level or each.disabled or not each.propagate)
    )
    return repr((logging.root.manager.disable, loggers))


def _filters() -> str:
    return repr([(each[0], each[1], getattr(each[2], "__qualname__", ""), *each[3:]) for each in warnings.filters])


STATES: dict[str, Callable[[], str]] = {"logging": _loggers, "warnings": _filters, "_warnings": _filters}
"""Modules of the standard library -> what decides what their functions do."""
