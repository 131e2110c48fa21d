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

/* A pass checked and packed once by one of the _bind functions. It holds addresses, not memory. */
typedef struct fusekit_pass fusekit_pass;

/* Queues the launches of a bound pass. */
fusekit_status fusekit_pass_run(const fusekit_pass *pass, void *stream, fusekit_error *error);

/* NULL is allowed. */
void fusekit_pass_free(fusekit_pass *pass);
