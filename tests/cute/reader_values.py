"""Values that `reader` reads of a module."""

import types

COMPUTED = 1
BEHIND_CACHE = 1
_LAZY = {"lazy": 1}
nested = types.SimpleNamespace(NUMBER=1)


class Kind:
    number = 1
    mark = __name__


def computed():
    return COMPUTED


def __getattr__(name):
    try:
        return _LAZY[name]
    except KeyError:
        raise AttributeError(name) from None
