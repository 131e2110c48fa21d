/* ---- Layers: passes of several kernels, on memory that the caller has. Every launch of a pass is checked before the first
 * is queued. A pass allocates nothing and may be captured.
 *
 *     fusekit_NAME_load(driver, device, &layer, ...)       once for each device; not while a stream is captured
 *     fusekit_NAME_sizes(layer, tokens, NULL, &sizes, ...) bytes of `kept` and `scratch`
 *     fusekit_NAME_forward(layer, &args, stream, ...)      tensors in device memory; an output that is NULL is not computed
 *     fusekit_NAME_backward(layer, &args, stream, ...)     with the same `kept`
 */

/* Device memory, aligned to 128 bytes. */
typedef struct fusekit_memory {
    void *data;
    size_t bytes;
} fusekit_memory;

/* Bytes: kept, from the forward to the backward pass; of scratch memory for each pass, for any choice of outputs. Passes of
 * one stream may share scratch memory. */
typedef struct fusekit_sizes {
    size_t kept, forward, inference, backward;
} fusekit_sizes;

/* What the passes of layers have besides their tensors. All zero is a good start. */
typedef struct fusekit_settings {
    int32_t has_cluster_margin; /* 1: `cluster_margin` counts, 0: the spec's does */
    int32_t cluster_margin;     /* clusters of SMs that each kernel leaves to others, from 0 */
    int32_t in_place;           /* of a backward pass, 1: it overwrites `kept`, and takes less scratch memory */
} fusekit_settings;

/* A window (IPC buffer, symmetric memory) of a layer over ranks: memory of one size on each rank, into which the others
 * store. The program allocates and maps it: CUDA IPC handles, virtual memory, NVSHMEM, one process with peer access. It is
 * aligned to 128 bytes, zeroed before the first pass of any rank, and its own to this layer and others of its capacity.
 *
 * Its first 512 bytes are the launches' own. Of them the program may use: bytes 16 to 27 of this rank's window, 3 int32_t,
 * 0 while all went well, else 1 + the rank that did not come in time, in which stage, in which launch: nothing after that
 * is of use. Byte 64, a uint64_t: once zeroed, the program writes to it the address of byte 16 of another window of the same
 * rank, so that all of them form a ring. A launch then ends at once where one on another window has given up. */
typedef struct fusekit_window {
    void *const *addresses; /* of all ranks' windows, in the order of ranks, as this rank's device addresses them */
    size_t bytes;           /* of each */
} fusekit_window;

/* What passes of a layer over ranks (expert parallelism) have besides their tensors. All ranks queue the same passes with
 * the same outputs in the same order, each rank in one stream, or in several that wait for one another. So does a rank
 * without tokens: its tensors have any address but NULL. A launch waits on the GPU for those of other ranks. So give each
 * rank a device of its own, not a part of one (a green context), load the layers of all ranks of a process, and allocate all
 * memory, before the first launch, and wait for no stream before the passes of all of these ranks are queued. */
typedef struct fusekit_ranks {
    const fusekit_window *windows; /* in the layer's order; those that a pass does not use may be all zero */
    int32_t rank;                  /* this rank, from 0 */
    int32_t timeout;               /* milliseconds that a launch waits for other ranks; 0: a minute */
    int64_t capacity;              /* the most tokens of any rank; the same on all ranks, as `rows` */
    int64_t rows;                  /* the most rows that the experts of a rank have room for; 0: those of any routing */
    /* 16 zeroed bytes of this rank, 4 int32_t: how many forward passes had more rows for some rank than `rows`; of the last
     * of them the rank and its rows; and the most rows so far. Rows beyond were left out. */
    fusekit_memory checked;
    /* Where launches of the layer overlap: a CUstream next to the caller's, not blocking, of the highest priority, and two
     * CUevents without timing. Else NULL is right. */
    void *side_stream, *events[2];
} fusekit_ranks;

/* A pass checked and packed once by one of the _bind functions. It holds addresses, not memory. */
typedef struct fusekit_pass fusekit_pass;

/* Queues the launches of a bound pass. */
fusekit_status fusekit_pass_run(const fusekit_pass *pass, void *stream, fusekit_error *error);

/* NULL is allowed. */
void fusekit_pass_free(fusekit_pass *pass);
