"""Programmatic dependent launch: a launch begins while the one before it in the stream still runs.

Its record has the attribute `programmatic_stream_serialization`. Blocks then come to an SM as soon as it has room for
them, set up what needs no memory, and wait. The rule for all global memory, inputs, outputs and workspaces alike:

    every thread of a kernel with the attribute waits before it reads or writes any

`wait` returns when the launch before has ended and what it wrote is there. That one had waited, too, before it ended;
so all launches before it have ended, and a kernel may read what any of them wrote, and write what any of them read. A
launch without the attribute begins when all before it have ended, so kernels of both kinds may follow each other.
`launch_dependents` promises nothing about memory: once each block has said it, or has ended, the next launch may begin.
"""

from cutlass import cute


def begin() -> None:
    """Lets the next launch begin, and waits for the one before; all threads."""
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
