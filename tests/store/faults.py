"""Runs commands of which one system call fails, with faults.c preloaded.

    python -m tests.store.faults FOLDER EACH PART PARTS

EACH: failures of each command, spread over its calls; 0: of every call of it, of which this is part PART of PARTS. For
each failure one line of JSON on stdout: command, call, number of the call, errno, and what was wrong afterwards. FOLDER
has what `prepare` put there.
"""

import contextlib
import ctypes
import errno
import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

CODES = ("EIO", "ENOSPC", "EACCES", "ESTALE", "EROFS", "EMFILE", "EDQUOT", "EINTR")
SECONDS = 60
# Command -> what lies there before it, its arguments, and the folder in which its result is.
COMMANDS = {
    "import": ([], ["--store", "{}/work/s", "import", "{}/bundle.tar"], "s"),
    "copy": ([], ["--store", "{}/work/s", "copy"], "s"),
    "pull": (["remote"], ["--store", "{}/work/s", "pull", "{}/work/remote"], "s"),
    "push": (["s"], ["--store", "{}/work/s", "push", "{}/work/p"], "p"),
    "gc": (["orphans"], ["--store", "{}/work/orphans", "gc", "--max-size", "15K"], "orphans"),
    "rm": (["s"], ["--store", "{}/work/s", "rm", "quickstart/linear"], "s"),
    "key sign": (["s", "keys"], ["--store", "{}/work/s", "key", "sign", "--sign", "keys/k"], "s"),
    "key new": ([], ["key", "new", "n/k"], "n"),
    "export": (["s"], ["--store", "{}/work/s", "export", "o/k.tar"], "o"),
    "verify": (["s"], ["--store", "{}/work/s", "verify", "--full"], "s"),
    "ls": (["s"], ["--store", "{}/work/s", "ls", "--json"], "s"),
}
REMOVES = ("gc", "rm")
PRIVATE = ("used", "locks", "leases")  # they only save work


class Harness:
    def __init__(self, folder: Path) -> None:
        from fusekit_cli.main import main

        # All of it now: what is imported late would be imported from under a failing call.
        for name in ("complete", "copy", "export", "gc", "import_", "key", "ls", "pull", "push", "rm", "verify"):
            importlib.import_module(f"fusekit_cli.{name}")
        for name in ("fsspec.implementations.local", "tenacity", "filelock", "fusekit.runtime.wellformed"):
            importlib.import_module(name)
        self.main, self.folder, self.work = main, folder, folder / "work"
        self.library = ctypes.CDLL(None)
        self.library.faults_count.restype = ctypes.c_long
        self.library.faults_failed.restype = ctypes.c_char_p
        self.library.faults_below(str(self.work).encode())
        os.environ["FUSEKIT_STORES"] = ""

    def begin(self, command: str) -> list[str]:
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / "o").mkdir(parents=True)
        there, arguments, _ = COMMANDS[command]
        for name in there:
            shutil.copytree(self.folder / name, self.work / name)
        os.environ["FUSEKIT_STORES"] = str(self.folder / "s") if command == "copy" else ""
        return [name.format(self.folder) for name in arguments]

    def run(self, arguments: list[str], nth: int | None = None, code: int = 0) -> dict[str, object]:
        """What `arguments` do in a process of their own. nth: the call that fails; 0: count them."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            signal.alarm(SECONDS)
            os.chdir(self.work)
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                if nth is not None:
                    self.library.faults_arm(ctypes.c_long(nth), code)
                try:
                    exit_code: object = self.main(arguments)
                except BaseException as error:
                    exit_code = f"{type(error).__name__}: {error}"
                self.library.faults_disarm()
            failed = self.library.faults_failed().decode()
            answer = {
                "code": exit_code,
                "text": text.getvalue(),
                "calls": self.library.faults_count(),
                "failed": failed,
            }
            with os.fdopen(write, "w") as out:
                json.dump(answer, out)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answers:
            answer = json.loads(answers.read() or '{"code": "died", "text": ""}')
        os.waitpid(child, 0)
        return dict(answer)

    def tree(self, command: str) -> dict[str, str]:
        root = self.work / COMMANDS[command][2]
        return {
            str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in root.rglob("*")
            if path.is_file() and path.suffix != ".tmp" and path.relative_to(root).parts[0] not in PRIVATE
        }

    def failures(self, command: str, turn: int, count: int, part: int, parts: int):
        arguments = self.begin(command)
        good = self.run(arguments, 0)
        expected, calls = self.tree(command), int(str(good["calls"]))
        assert good["code"] == 0, good
        numbers = (
            range(1 + part, calls + 1, parts)
            if not count
            else [1 + (2 * k + 1) * calls // (2 * count) for k in range(count)]
        )
        for place, number in enumerate(numbers):
            code = CODES[(place + turn + part) % len(CODES)]
            self.begin(command)
            answer = self.run(arguments, number, getattr(errno, code))
            wrong = list(self.wrong(command, arguments, answer, expected))
            yield [command, answer.get("failed"), number, code, wrong]

    def wrong(self, command, arguments, answer, expected):
        text, tree = str(answer["text"]), self.tree(command)
        if answer["code"] not in (0, 1, 2, 3) or "Traceback" in text:
            yield f"ended with {answer['code']}: {text[-300:]}"
        if answer["code"] == 0 and tree != expected and command != "key new":
            yield f"success, and not what it makes: {sorted(tree.items() ^ expected.items())[:4]}"
        named = any(name in text for name in (str(self.work), "n/k", "o/k.tar", "keys/k"))
        if answer["code"] not in (0, 3) and not named:
            yield f"its message names no path: {text[-300:]}"
        stores = [name for name in ("s", "p", "orphans") if next((self.work / name).glob("*"), None)]
        yield from self.bad(stores)
        if answer["code"] == 0 and command == "key new":
            return
        again = self.run(arguments)
        if again["code"] not in ((0, 3) if command == "rm" else (0,)):
            yield f"the next try ended with {again['code']}: {str(again['text'])[-300:]}"
        elif command in REMOVES:
            if left := self.tree(command).keys() - expected.keys() if command == "gc" else ():
                yield f"the next try left {sorted(left)[:4]}"
        elif command != "key new" and self.tree(command) != expected:
            yield f"the next try made something else: {sorted(self.tree(command).items() ^ expected.items())[:4]}"
        yield from self.bad(stores)

    def bad(self, stores):
        for store in stores:
            answer = self.run(["--store", store, "verify", "--full"])
            if answer["code"] not in (0, 3) or "bad:" in str(answer["text"]):
                yield f"verify of {store}: {answer['text']}"


def main() -> None:
    harness = Harness(Path(sys.argv[1]))
    for turn, command in enumerate(COMMANDS):
        for line in harness.failures(command, turn, *map(int, sys.argv[2:])):
            sys.stdout.write(f"{json.dumps(line)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
