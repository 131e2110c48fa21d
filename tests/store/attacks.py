"""What the tests of links share: a store with every kind of file, a victim, and all that one does with a store."""

import shutil
from pathlib import Path

from fusekit.errors import FusekitError
from fusekit.share.bundle import export_bundle
from fusekit.share.bundle_import import import_bundle
from fusekit.share.push_pull import pull, push
from fusekit.share.remote import Remote
from fusekit.share.selection import select
from fusekit.store import Store, process
from tests.store.collecting import DAY, age
from tests.store.samples import build_entry, build_record

RANDOM = "0123456789ab"
KEY_ID = "0123456789abcdef"


def whole_store(root, count=1):
    """A store with a file of every kind in each of its folders, all of it old."""
    store = Store(root)
    for seed in range(count):
        entry, cubin = build_entry(seed)
        with store.lock(entry.key):
            store.publish(entry, cubin, {KEY_ID: b"s" * 64})
        store.publish_name(build_record(entry, f"f/k{seed}@v"))
        store.load(entry.key)
    store.publish(*build_entry(99))
    orphan = store.roots[0].entry_path(build_entry(99)[0].key)
    orphan.unlink()
    orphan.with_name(f".{orphan.name}.{RANDOM}-7-{RANDOM}.tmp").write_bytes(b"left")
    store.publish_tuning("sm_90a", b"{}")
    store.publish_signatures(b"gone", {KEY_ID: b"s" * 64})
    (root / "leases").mkdir(exist_ok=True)
    (root / "leases" / f"{RANDOM}-7-{RANDOM}").write_text("1")
    for path in root.rglob("*"):
        if path.is_file():
            age(path, 3 * DAY)
    return store


def folders_of(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir())


def victim_of(folder: Path, victim: Path) -> None:
    """A folder like `folder`, with more in it that one would not want to lose."""
    shutil.copytree(folder, victim)
    for name in ("precious.txt", f".{'0' * 64}.{RANDOM}-7-{RANDOM}.tmp", "0" * 64, "terraform.tfstate"):
        (victim / name).write_text("precious")
    (victim / "00").mkdir(exist_ok=True)
    (victim / "00" / ("0" * 64)).write_text("precious")
    for path in victim.rglob("*"):
        age(path, 9 * DAY)


def state(folder: Path):
    """Names, bytes, modes and stamps of everything below `folder`."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes())
        if path.is_file()
        else (path.stat().st_mode, path.stat().st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
    }


def build(store, _):
    with store.lease():
        for seed in (0, 1, 99):
            entry, cubin = build_entry(seed)
            store.settled(build_record(entry, f"f/k{seed}@v"))
            store.ensure(entry.key, lambda entry=entry, cubin=cubin: (entry, cubin))
            store.publish_name(build_record(entry, f"f/k{seed}@v"), entry)
        for lease in store._leases:
            lease._renewed -= 1000
            lease.renew()


def bundle(aside):
    """A bundle of a store of its own that lies in `aside`."""
    if not (aside / "bundle.tar").exists():
        export_bundle(whole_store(aside / "other", 2), select(Store(aside / "other")), aside / "bundle.tar")
        push(Store(aside / "other"), select(Store(aside / "other")), Remote(str(aside / "remote")))
    return aside / "bundle.tar"


def copy(store, aside):
    bundle(aside)
    layered = Store(store.root, [aside / "other"])
    for listed in Store(aside / "other").names():
        layered.adopt(listed.record)


def load(store, _):
    for seed in (0, 1):
        store.load(build_entry(seed)[0].key)
        store.find_name(f"f/k{seed}@v", "sm_90a")
    store.variants("f/k0", "sm_90a")


def lock(store, _):
    for seed in (0, 1):
        with store.lock(build_entry(seed)[0].key, patience=0):
            pass


COMMANDS = {
    "gc": lambda store, _: store.collect(max_bytes=0),
    "gc without a policy": lambda store, _: store.collect(),
    "gc --dry-run": lambda store, _: store.collect(max_bytes=0, dry_run=True),
    "rm": lambda store, _: store.discard([("f/k0@v", "sm_90a"), ("f/none@v", "sm_90a")]),
    "build": build,
    "publish": lambda store, _: store.publish(*build_entry(0, seconds=2.0)),
    "import": lambda store, aside: import_bundle(store, bundle(aside)),
    "pull": lambda store, aside: (bundle(aside), pull(store, Remote(str(aside / "remote")))),
    "verify": lambda store, _: store.verify(full=True),
    "ls": lambda store, _: store.overview(),
    "copy": copy,
    "load": load,
    "lock": lock,
    "sign": lambda store, _: store.publish_signatures(build_entry(0)[0].to_bytes(), {KEY_ID: b"t" * 64}),
    "tune": lambda store, _: store.publish_tuning("sm_90a", b"[]"),
}
WRITERS = ("gc", "rm", "build", "publish", "import", "pull", "copy", "lock", "sign", "tune")


def attempt(command, store, aside):
    """Whatever `command` does, it raises nothing but what a user is told; what it returned, or the error."""
    try:
        return COMMANDS[command](store, aside)
    except FusekitError as error:
        return error


def gone_owner(host=None):
    return f"{host or process.host()}-{4194305}-{RANDOM}"  # no system gives that number
