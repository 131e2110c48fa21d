"""The content-addressed store of compiled kernels.

Three maps, each on plain files:

- **name -> key** (`names/`): `gpt-oss-120b/fc1-fwd@128x160-c2x1` on `sm_90a` stands for a key. The only files that
  change.
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
repair. A builder may replace it.

**Layers.** One writable root is searched first, then read-only roots in their order. Nothing is copied up. A damaged
or unreadable file in one layer does not hide a good one below.

**Locks** save work; nothing depends on them. Without them, or on a network file system where they stop at the host,
the same kernel may be compiled twice, and the store is as right as before.

**Assumed of the file system:** that a rename or a hard link within one directory is one step, that a synced file
stays, and that a file's bytes can be read once its name can be seen. Not assumed: that a new name is seen at once
elsewhere, that flock reaches other hosts, that clocks agree. Time stamps are never compared.

**What digests are for:** bit rot, cut transfers, mixed-up files. They are no defence against someone who can write to
the store: such a person can write digests too. Give a store read-only to those who only launch.
"""

from fusekit.store.entries import Entry
from fusekit.store.gc import CollectReport, Evicted
from fusekit.store.keys import SCHEMA, canonical_json, key_fields, key_of
from fusekit.store.listing import Listing, NameListing, Overview, Row
from fusekit.store.names import NameRecord, matches
from fusekit.store.store import Store
from fusekit.store.verify import Problem, VerifyReport

__all__ = [
    "SCHEMA",
    "CollectReport",
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
