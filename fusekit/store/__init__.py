"""The content-addressed store of compiled kernels.

Three maps, each on plain files:

- **name -> key** (`names/`): `gpt-oss-120b/fc1-fwd@128x192-c2x1-dynamic` on `sm_90a` points to a key. The only
  files that change. A name record also has a summary of its entry, for listings: a copy, by which nothing is loaded.
  It gives the last build; records of earlier ones are in `candidates/`, and a load takes the first that its driver
  reads. A publisher that replaces a name writes both records there first.
- **key -> entry** (`entries/`): the key is the SHA-256 of everything that decides the result (spec, architecture,
  toolchain, options, sources, schema). The entry is the result: the cubin's digest, launch record, resources, proof. An
  action cache.
- **digest -> bytes** (`blobs/`): the cubin, stored under its own SHA-256. A content-addressed store.

**Publishing.** A file is written under a temporary name in its own directory, synced, given its name in one step, and
the directory is synced. A cubin is published before its entry, an entry before a name. So a visible file is
complete, a process that is killed at any moment leaves at most temporaries and unused blobs, and after a power loss
an entry is either there, with its cubin, or not there. Of several publishers of one key the entry of the first is kept
(on a file system without hard links, of the last); as both were built for the same key, either is correct. Cubins and
entries are never changed, only replaced if they are damaged.

**Reading.** A reader reads the bytes once, checks them, and uses those bytes: there is no gap between check and use. A
document has a digest over its own bytes; an entry must lie under the key that its fields hash to; a cubin must have the
size and the digest in its entry. Links, FIFOs, directories and files of the wrong size are refused before they are
read. A failed check is an `IntegrityError`, never a miss: a reader does not guess and does not repair. A builder may
replace the file. (A build with nothing to do compares sizes and stamps only, and reads what may have changed; a load
reads and checks everything.)

**Roots.** One writable root is searched first, then read-only roots in their order. Nothing is copied up unless
requested (`Store.adopt`, `fusekit copy`). A damaged or unreadable file in one root does not hide a good one below:
the first good record of a name gives its key, the first root with a good entry of this key and a cubin to it gives
the kernel.

**Once.** `Store.ensure` looks a key up, and if it is missing looks again under its lock before it builds it: if
locks work, one process builds it, and the others use the result. A build continues with its next kernel meanwhile
(`Store.ensure_unless_held`). Locks save work; nothing depends on them. Without them, or if they do not reach other
hosts, a kernel may be compiled twice, and the store is as correct.

**Collection** (`fusekit.store.gc`) evicts the least recently used, by size and by age, while others read and write. A
use is an empty file with a time stamp (`used/`), so it needs no access times; if it cannot be written, the kernel is
used anyway, and counts as used when it was published. A build holds a lease (`leases/`): what it published or looked up
stays until it ends.

**Network file systems.** The store relies on what NFS and similar systems guarantee:

- a rename or a hard link within one directory is one step, seen whole or not at all;
- a file that was synced and closed stays, and an open *after* that sees those bytes;
- a listing of a newly opened directory shows, sooner or later, what others put there.

It does not rely on these:

- that flock reaches other hosts, or works at all;
- that a new or a removed name is seen at once elsewhere (attribute and negative look-up caches live for seconds);
- that something just written can be read back, here or elsewhere: no step is checked by reading its result;
- that a failed `link` changed nothing (a repeated request may fail although the first one worked): a publisher that
  lost reads the file that is there, which may be its own;
- that the hosts' clocks agree. Stamps are the file system's, are compared with each other only, and decide what is
  evicted and what is read twice, never what is correct.

Stale views have these effects: a miss instead of a hit, so work is done twice; a stale handle (ESTALE), after which a
reader opens the file again; an entry whose cubin is not visible yet, for which a reader waits a little more than a
second, and looks the directory up again. Collect on one host at a time, best on the file server: on another host a mark
may be seen late, and a kernel that a reader has just looked up can be evicted. The reader has its bytes, or gets a
miss.

**Where fusekit writes and removes**: only in a folder that has a store's marker or is empty
(`fusekit.store.marker`), only under names that it gives (`fusekit.store.layout`), and never through a link below the
root (`fusekit.store.folders`).

**Digests** detect bit rot, truncated transfers and mixed-up files. They do not protect against someone who can write to
the store, and so can write digests, too. Give a store read-only to those who only launch.

**Signatures** do. A store with trusted keys accepts an entry or a name, from any root, only if one of those keys signed
its exact bytes, and parses nothing before that check. An entry holds its cubin's digest, so its signature covers the
cubin. A signature is published before its document. It does not show that a document is the latest: who can write can
put back an older signed one. docs/remotes.md describes how kernels are distributed (bundles, remotes), and the use of
both checks.

docs/store.md names the test that attacks each of these promises, and how fast the store is.
"""

from fusekit.store.entries import Entry
from fusekit.store.keys import canonical_json, key_fields, key_of
from fusekit.store.listing import Listing, NameListing, Overview, Row
from fusekit.store.names import NameRecord, matches
from fusekit.store.reports import CollectReport, DiscardReport, Evicted
from fusekit.store.store import Store
from fusekit.store.verify import Problem, VerifyReport

__all__ = [
    "CollectReport",
    "DiscardReport",
    "Entry",
    "Evicted",
    "Listing",
    "NameListing",
    "NameRecord",
    "Overview",
    "Problem",
    "Row",
    "Store",
    "VerifyReport",
    "canonical_json",
    "key_fields",
    "key_of",
    "matches",
]
