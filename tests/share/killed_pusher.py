"""A push that dies at every one of its steps: argv is a folder to work in, with keys, and "here" for a remote that is a
folder of this machine, or "elsewhere" for one that is written through fsspec alone.

Each time, whoever looks at the remote finds no name that leads nowhere and no document that is not signed, and the
next push completes it. Prints how many steps were tried.
"""

import os
import sys
from pathlib import Path

from fusekit.errors import NotBuiltError
from fusekit.share.push_pull import push, survey
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import Store
from fusekit.store.publishing import Disk
from fusekit.store.signature import Trust
from tests.share.remotes import NAMES, elsewhere, fill

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


class DyingDisk(Disk):
    """The same of a folder of this machine."""

    def __init__(self, last):
        self.left = last

    def step(self):
        self.left -= 1
        if self.left < 0:
            os._exit(KILLED)

    def write(self, path, data, at=None):
        if not self.left:
            super().write(path, data[: len(data) // 2], at)
        self.step()
        super().write(path, data, at)

    def make_directory(self, path, at=None):
        self.step()
        return super().make_directory(path, at)

    def link(self, source, target, at=None):
        self.step()
        super().link(source, target, at)

    def replace(self, source, target, at=None):
        self.step()
        super().replace(source, target, at)

    def remove(self, path, at=None):
        self.step()
        super().remove(path, at)


def pushed(store: Store, url: str, last: int, where: str) -> bool:
    """Whether a push lived through its first `last` steps to its end."""
    child = os.fork()
    if child == 0:
        remote = Remote(url)
        remote.parallel = 1
        if where == "here":
            remote._publisher.disk = DyingDisk(last)
        else:
            elsewhere(remote)._fs = Dying(remote._fs, last)
        push(store, select(store), remote)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == 0


def main() -> None:
    folder, where = Path(sys.argv[1]), sys.argv[2]
    store = fill(Store(folder / "store", signing_key=folder / "ours"))
    trust = Trust([folder / "ours.pub"])
    for last in range(1000):
        url = str(folder / f"remote-{last}")
        if last % 2:  # over what an earlier build of the same names left
            older = fill(Store(folder / "older", signing_key=folder / "ours"), first=5)
            push(older, select(older), Remote(url))
        whole = pushed(store, url, last, where)
        try:
            content = survey(Remote(url), trust, cubins=True)
            assert content.failed == (), content.failed
            assert not last % 2 or len(content.records) == len(NAMES)
        except NotBuiltError:
            assert not last % 2  # nothing has a name yet
        push(store, select(store), Remote(url) if where == "here" else elsewhere(Remote(url)))
        content = survey(Remote(url), trust, cubins=True)
        assert content.failed == ()
        assert {record.key for record in content.records} == {listed.record.key for listed in store.names()}
        if where == "here":  # the folder is a store, whose collection clears away what killed pushes left
            Store(Path(url)).collect()
            assert not list(Path(url).rglob("*.tmp"))
            assert not Store(Path(url), trust=trust).verify(full=True).bad
        if whole and last % 2:
            sys.stdout.write(f"{last}\n")
            return


if __name__ == "__main__":
    main()
