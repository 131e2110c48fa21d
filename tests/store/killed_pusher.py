"""A push that dies at every one of its steps: argv is a folder to work in, with keys.

Each time, whoever looks at the remote finds no name that leads nowhere and no document that is not signed, and the
next push completes it. Prints how many steps were tried.
"""

import os
import sys
from pathlib import Path

from fusekit.errors import NotBuiltError
from fusekit.store import Store
from fusekit.store.exchange import push, survey
from fusekit.store.remote import Remote
from fusekit.store.selection import select
from fusekit.store.signature import Trust
from tests.store.remotes import NAMES, fill

KILLED = 9


class Dying:
    """A file system whose process is gone before its step `last`; a write then leaves half of its bytes."""

    def __init__(self, real, last):
        self.real, self.left = real, last

    def __getattr__(self, name):
        value = getattr(self.real, name)
        if name not in ("pipe_file", "mv", "makedirs", "rm_file"):
            return value

        def step(path, *arguments, **options):
            self.left -= 1
            if self.left < 0:
                if name == "pipe_file":
                    self.real.pipe_file(path, arguments[0][: len(arguments[0]) // 2])
                os._exit(KILLED)
            return value(path, *arguments, **options)

        return step


def pushed(store: Store, url: str, last: int) -> bool:
    """Whether a push lived through its first `last` steps to its end."""
    child = os.fork()
    if child == 0:
        remote = Remote(url)
        remote._fs, remote.parallel = Dying(remote._fs, last), 1
        push(store, select(store), remote)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == 0


def main() -> None:
    folder = Path(sys.argv[1])
    store = fill(Store(folder / "store", signing_key=folder / "ours"))
    trust = Trust([folder / "ours.pub"])
    for last in range(1000):
        url = str(folder / f"remote-{last}")
        if last % 2:  # over what an earlier build of the same names left
            older = fill(Store(folder / "older", signing_key=folder / "ours"), first=5)
            push(older, select(older), Remote(url))
        whole = pushed(store, url, last)
        try:
            found = survey(Remote(url), trust, cubins=True)
            assert found.failed == (), found.failed
            assert not last % 2 or len(found.records) == len(NAMES)
        except NotBuiltError:
            assert not last % 2  # nothing has a name yet
        push(store, select(store), Remote(url))
        found = survey(Remote(url), trust, cubins=True)
        assert found.failed == ()
        assert {each.key for each in found.records} == {each.record.key for each in store.names()}
        if whole and last % 2:
            sys.stdout.write(f"{last}\n")
            return


if __name__ == "__main__":
    main()
