"""Which code counts by its version: that of the DSL, of the libraries that it needs, and of Python."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from types import ModuleType

DSL = "cutlass"

_LIBRARIES = (DSL, "cuda", "numpy", "nvidia_cutlass_dsl", "torch", "triton", "tvm_ffi", "typing_extensions")
"""Packages that count by their version, as the standard library does; not where they are installed to be edited."""
# Names of what gives something else each time, or reads the machine without a trace of it.
UNSTEADY = frozenset({
    "random", "randint", "randrange", "rand", "randn", "choice", "shuffle", "urandom", "getrandbits", "token_hex",
    "uuid1", "uuid4", "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
    "process_time", "now", "utcnow", "today", "getpid", "gethostname", "getuser", "uname", "getcwd", "cwd", "exists",
    "isfile", "is_file", "isdir", "is_dir", "stat", "lstat", "listdir", "scandir", "walk", "iterdir", "glob", "rglob",
    "access", "readlink", "getsize", "getmtime", "getctime", "expanduser", "environb", "_data", "posix",
    "_getframe", "currentframe", "stack", "getloadavg", "cpu_count", "sched_getaffinity", "device_count",
    "current_device", "get_device_properties", "get_device_capability", "get_device_name", "mem_get_info",
    "is_available", "input", "stdin", "print", "get_referrers", "get_objects", "urlopen", "settrace",
    "setprofile", "current_stream", "get_ident", "getrandom", "current_thread", "main_thread",
    "active_count", "get_native_id", "getppid", "getuid", "geteuid", "getlogin", "umask",
    "__subclasses__", "getcontext", "getlocale", "getrecursionlimit", "getrefcount", "getsizeof", "get_default_dtype",
    "get_default_device", "get_num_threads", "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled",
    "get_float32_matmul_precision", "abspath", "realpath", "relpath", "islink", "lexists", "ismount", "samefile",
    "sameopenfile", "localtime", "gmtime", "ctime", "asctime", "strftime", "mktime", "clock_gettime",
    "clock_gettime_ns", "thread_time", "thread_time_ns", "process_time_ns", "isatty", "get_terminal_size", "fstat",
    "statvfs", "getgid", "getegid", "getgroups", "getpgid", "getpgrp", "getsid", "getpriority", "sysconf", "getxattr",
    "listxattr", "pread", "getrusage", "getrlimit", "getsignal", "gettrace", "getprofile", "getswitchinterval",
    "get_int_max_str_digits", "isenabled", "get_threshold", "getallocatedblocks", "cache_info", "getsource",
    "getsourcelines", "getsourcefile", "findsource", "getcomments", "getline", "co_firstlineno", "co_lines",
    "co_positions", "co_linetable", "__hash__", "exc_info", "are_deterministic_algorithms_enabled", "initial_seed",
    "get_rng_state", "start_new_thread", "get_overloads",
})  # fmt: skip

_DRIVER = re.compile(r"(cu|cuda|nvml|nvrtc)(?=[A-Z])\w*(Get|Query|Version|Occupancy|Info|Supported)\w*")


def is_unsteady(name: str) -> bool:
    """Whether functions of libraries with this name give something else each time, or read the machine."""
    return name in UNSTEADY or _DRIVER.fullmatch(name) is not None


@functools.cache
def _roots() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(folders and files of libraries, folders of the standard library)."""
    paths = sysconfig.get_paths()
    standard = tuple({f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib")})
    folders = {paths["purelib"], paths["platlib"], *(path for path in sys.path if path.endswith("-packages"))}
    libraries = [f"{folder}{os.sep}{name}" for folder in folders for name in _LIBRARIES]
    dsl = sys.modules.get(DSL)
    if dsl is not None and dsl.__file__:
        libraries.append(os.path.dirname(dsl.__file__))  # noqa: PTH120
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    return tuple(f"{path}{end}" for path in [*libraries, here] for end in (os.sep, ".py")), standard


@functools.cache
def is_library(path: str) -> bool:
    """Whether the code of a file counts by its version."""
    libraries, standard = _roots()
    if path.startswith(("<frozen ", "<fusekit>", *libraries)):
        return True
    return path.startswith(standard) and "-packages" not in path


@functools.cache
def is_dsl(path: str) -> bool:
    root = os.path.dirname(getattr(sys.modules.get(DSL), "__file__", None) or "//")  # noqa: PTH120
    return path.startswith(root + os.sep)


def home(module: ModuleType | None) -> str | None:
    return getattr(module, "__file__", None) or getattr(getattr(module, "__spec__", None), "origin", None)


def is_library_module(name: str) -> bool:
    top = name.partition(".")[0]
    if top == "builtins" or top in sys.builtin_module_names:
        return True
    if top in _LIBRARIES and "." in name:
        return is_library_module(top)
    path = home(sys.modules.get(name))
    if path in (None, "built-in", "frozen"):
        return top in sys.stdlib_module_names or top in _LIBRARIES
    return is_library(str(path)) or (not str(path).endswith(".py") and top in sys.stdlib_module_names)
