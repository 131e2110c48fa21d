"""A program that knows nothing of fusekit. Arguments: what it does."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path


def say(*items):
    sys.stdout.write(f"{' '.join(map(str, items))}\n")
    sys.stdout.flush()


def work(_=None):
    from tests.cute import kernels

    return type(kernels.compile_kernel()).__name__


def methods():
    """Each way to start a process that compiles."""
    say(work())
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            say(method, pool.map(work, [0]))
    say(subprocess.run([sys.executable, "-m", "tests.cute.program", "work"], capture_output=True, text=True))


def together():
    """Sixteen processes that begin to compile at one moment."""
    import tests.cute.kernels  # noqa: F401

    begin = time.monotonic() + 0.2
    children = []
    for _ in range(16):
        child = os.fork()
        if not child:
            time.sleep(max(0, begin - time.monotonic()))
            work()
            os._exit(0)
        children.append(child)
    say([os.waitpid(child, 0)[1] for child in children])


if __name__ == "__main__":
    match sys.argv[1]:
        case "work":
            say(work())
        case "exit":
            say(work())
            sys.stderr.write("an error\n")
            sys.stderr.flush()
            os._exit(7)
        case "methods":
            methods()
        case "together":
            together()
        case "state":  # of Python, before it imports anything
            say(sys.path, sorted(set(sys.modules) - {"sitecustomize"}))
        case "late":
            if os.fork() == 0:
                time.sleep(0.3)
                work()
                Path(sys.argv[2]).write_text("done")
