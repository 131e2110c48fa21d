"""The content-addressed store of compiled kernels.

Three maps, each on plain files:

- **name -> key** (`names/`): `gpt-oss-120b/fc1-fwd@128x192-c2x1-dynamic` on `sm_90a` stands for a key. The only
  files that change. A name record also has a summary of its entry, for listings: a copy, and never what a kernel is
  loaded by.
- **key -> entry** (`entries/`): the key is the SHA-256 of everything that decides the result (spec, architecture,
  toolchain, options, sources, schema). The entry is what came of it: the cubin's digest, launch record, resources,
  proof. An action cache.
- **digest -> bytes** (`blobs/`): the cubin, filed under its own SHA-256. A content-addressed store.

**Publishing.** A file is written under a temporary name in its own directory, synced, given its name in one step, and
the directory is synced. A cubin is published before its entry, an entry before a name. So whatever can be seen is
complete, a process that is killed at any moment leaves at most temporaries and unused blobs, and after a power loss
an entry is there whole with its cubin or is not there. Of several publishers of one key the first one's entry stands;
where a file system has no hard links the last one's does, and as both were made from the same key, either is right.
Cubins and entries are never changed, only replaced when they are found damaged.

**Reading.** A reader takes the bytes once, checks them, and uses those bytes: there is no moment between check and
use. A document has a digest over its own bytes; an entry must lie under the key that its fields hash to; a cubin must
have the size and the digest that its entry says. Links, FIFOs, directories and files of the wrong size are refused
before they are read. What fails a check is an `IntegrityError`, never a miss: a reader does not guess and does not
repair. A builder may replace it. (A build with nothing to do compares sizes and stamps only, and reads what looks
touched; what it did not read, its user will.)

**Roots.** One writable root is searched first, then read-only roots in their order. Nothing is copied up unless
asked for (`Store.adopt`, `fusekit copy`). A damaged or unreadable file in one root does not hide a good one below:
the first good record of a name gives its key, the first root with a good entry of this key and a cubin to it gives
the kernel.

**Once.** `Store.ensure` looks a key up, and if it is missing looks again under its lock before it makes it: where
locks work, one process makes it, and the others take what it made. A build goes on with its next kernel meanwhile
(`Store.ensure_unless_held`). Locks save work; nothing depends on them. Without them, or where they stop at the host, a
kernel may be compiled twice, and the store is as right as before.

**Collection** (`fusekit.store.gc`) evicts the least recently used, by size and by age, while others read and write. A
use is an empty file with a time stamp (`used/`), so it needs no access times; where it cannot be written, the
kernel is used all the same, and counts as used when it was published. A build holds a lease (`leases/`): what it
published or looked up stays until it ends.

**Network file systems.** Assumed is what NFS and its like promise:

- a rename or a hard link within one directory is one step, seen whole or not at all;
- a file that was synced and closed stays, and who opens it *after* that sees those bytes;
- a look at a directory that was opened anew sees, sooner or later, what others put there.

Not assumed:

- that flock reaches other hosts, or works at all;
- that a new or a removed name is seen at once elsewhere (attribute and negative look-up caches live for seconds);
- that something just written can be read back, here or elsewhere: no step is judged by looking at its result;
- that a failed `link` changed nothing (a repeated request may fail although the first one worked): a publisher that
  lost looks at what is there, and that may be its own;
- that the hosts' clocks agree. Stamps are the file system's, are compared with each other alone, and decide what is
  evicted and what is looked at twice, never what is right.

What follows from stale views: a miss where there is a hit, so work is done twice; a handle that went stale (ESTALE)
under a reader, who opens the file again; an entry whose cubin is not visible yet, for which a reader waits and has
the directory looked up anew, for little more than a second. Collect on one host at a time, best on the file server:
elsewhere a mark may be seen late, and a kernel that a reader has just looked up can be evicted. The reader has its
bytes, or gets a miss.

**Where fusekit writes and removes**: only in a folder that has a store's marker or is empty
(`fusekit.store.marker`), only at names that it gives (`fusekit.store.layout`), and never through a link below the root
(`fusekit.store.folders`).

**What digests are for:** bit rot, cut transfers, mixed-up files. They are no defence against someone who can write to
the store: such a person can write digests too. Give a store read-only to those who only launch.

**Signatures** are that defence. A store that is told whom to trust takes an entry or a name, from any root, only if
one of those keys signed its exact bytes, and parses nothing before that is known. An entry holds its cubin's digest,
so its signature covers the cubin. A signature is published before its document. It does not say that a document is
the latest: who can write can put back an older one that was signed too. docs/remotes.md says how
kernels travel (bundles, remotes), and what each of both kinds of check is good for.

docs/store.md says which test attacks each of these promises, and how fast the store is.
"""

from fusekit.store.entries import Entry
from fusekit.store.keys import SCHEMA, canonical_json, key_fields, key_of
from fusekit.store.listing import Listing, NameListing, Overview, Row
from fusekit.store.names import NameRecord, matches
from fusekit.store.reports import CollectReport, DiscardReport, Evicted
from fusekit.store.store import Store
from fusekit.store.verify import Problem, VerifyReport

__all__ = [
    "SCHEMA",
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
