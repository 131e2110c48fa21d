/* ---- What a launch is made of. */

typedef struct { /* a tensor's shape by its caller; strides: NULL for the compact ones */
    const int64_t *shape, *strides;
} fk_given;

typedef struct { /* a call: everything that the typed structures hold, by index */
    const int64_t *dims, *strides; /* strides: rank entries for each tensor; 0 is the compact one */
    const fk_given *given;         /* of each tensor, instead of strides; NULL in a typed call */
    const uint64_t *addresses;
    const int64_t *integers;
    const double *floats; /* each a number of its own type */
    int64_t margin;
    int has_priority, priority;
} fk_call;

typedef struct fk_workspaces fk_workspaces;

typedef struct { /* a record as it is exported or read, and its cubin */
    const int64_t *words;
    size_t count;
    const unsigned char *cubin;
    size_t cubin_size;
} fk_source;

typedef struct {
    const fusekit_driver *driver;
    const fk_source *source;
    const fk_record *record; /* in memory of its own */
    const fk_more *more;     /* after it; NULL for none */
    int device, sm_count, major, active_clusters, most_shared[FK_MOST_NODES];
    void *context, *library, *kernels[FK_MOST_NODES], *functions[FK_MOST_NODES];
    fk_workspaces *workspaces; /* and scratch; NULL: it has neither */
} fk_kernel;

enum { FK_MAP_BYTES = 128, FK_MAP_ALIGNMENT = 64 };

typedef struct { /* an address of the stream's own memory: in which parameter, at which offset among all, and of which kind */
    int64_t parameter, offset, scratch;
} fk_own_address;

typedef struct { /* a node of a call, with memory for its parameters at their offsets */
    fk_config config; /* but for the stream */
    fk_attribute attributes[FK_MOST_ATTRIBUTES];
    int idle; /* left out */
    unsigned char *space;
    void **pointers; /* into it, to each parameter */
    fk_own_address *own;
    int64_t own_count;
} fk_packed;

struct fusekit_launch { /* one block of memory, with what it points to */
    const fk_kernel *kernel;
    int skip;
    int64_t scratch; /* bytes */
    fk_packed *nodes;
};
