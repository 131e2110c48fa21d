"""Python imports this when it starts: `fusekit exec` puts its folder before PYTHONPATH.

It runs in each Python below a program, of whatever version and with whatever packages: it imports the standard library
alone, until the DSL is imported.
"""

import os
import sys


class _Finder:
    busy = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != "cutlass" or self.busy:
            return None
        self.busy = True
        import importlib.util

        if importlib.util.find_spec(name) is None:
            self.busy = False  # it may be installed meanwhile
            return None
        try:
            from fusekit.cute import install

            install()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError):
                # Such as a Python of another environment than the one that `fusekit` is in.
                python = sys.executable
                reason = f"{python} has no {error.name}; install fusekit there: {python} -m pip install fusekit"
            if os.environ.get("FUSEKIT_MISS") == "error":
                # No ImportError: programs take that as a DSL that is not there.
                raise RuntimeError(f"fusekit: the cache is off, and FUSEKIT_MISS is error: {reason}") from error
            if not (isinstance(error, ModuleNotFoundError) and _carries()):
                sys.stderr.write(f"fusekit: the cache is off: {reason}\n")
            return None
        return importlib.util.find_spec(name)


def _carries() -> bool:
    """Whether `exec` serves more than the DSL, so that a Python without fusekit is no mistake."""
    import json

    return bool(json.loads(os.environ.get("FUSEKIT_EXEC", "{}")).get("carries")) and not os.environ.get("FUSEKIT_MISS")


def _start(here: str) -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]  # noqa: PTH100
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    # The module of this name that this one hides, if there is one.
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_start(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
