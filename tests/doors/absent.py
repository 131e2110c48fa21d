"""Stands in for packages that a door's package imports at the top, and that nothing here calls."""

import importlib.machinery
import sys
import types
from unittest.mock import MagicMock


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Any(metaclass=_Names):
    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **options):
        pass

    def __class_getitem__(cls, item):
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):  # a field of such a type is not checked
        return handler.generate_schema(object)


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (_Any,), {}) if name[0].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Absent:
    """Finds modules of the packages `names`, after every other finder."""

    def __init__(self, names):
        self.names = frozenset(names)

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] in self.names else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def stand_in(*names):
    """From now on these packages can be imported where they are not installed."""
    sys.meta_path.append(Absent(names))
