/* ---- Kernels of a bundle, the file that `fusekit export FILE NAME...` writes, read at run time. Bundle and loader are to
 * be of one version of fusekit.
 *
 *     fusekit_bundle_open("kernels.tar", &bundle, &error)          reads the directory
 *     fusekit_kernel_load(driver, bundle, "moe/fc1", device, ...)   reads one kernel; the bundle may be closed afterwards
 *     fusekit_kernel_launch(kernel, &arguments, stream, ...)        tensors by name, as the launch record has them
 *
 * Nothing is used before its SHA-256 is what the directory says, and nothing is believed: a file that is cut, changed or
 * forged is refused with FUSEKIT_BAD_BUNDLE. Signatures in it are not checked: `fusekit import` does that, or compare
 * fusekit_bundle_digest with one that your program holds.
 */

typedef struct fusekit_bundle fusekit_bundle;

/* Opens a file and keeps it open. It may be used from many threads. */
fusekit_status fusekit_bundle_open(const char *path, fusekit_bundle **bundle, fusekit_error *error);

/* The same over memory, which must stay as it is until the bundle is closed. */
fusekit_status fusekit_bundle_open_bytes(const void *data, size_t size, fusekit_bundle **bundle, fusekit_error *error);

/* Reads and checks every kernel of it: for an installation or a test; loading checks what it loads. */
fusekit_status fusekit_bundle_verify(const fusekit_bundle *bundle, fusekit_error *error);

/* SHA-256 of the directory in hexadecimal, which `fusekit export --json` gives as `digest`. The directory holds the digest
 * of everything that can be loaded, so a program that compares this with a constant of its own runs these or none. */
const char *fusekit_bundle_digest(const fusekit_bundle *bundle);

/* The kernels in it, sorted: full name and architecture; of a layer NAME.layer@record. NULL from `count` on. */
size_t fusekit_bundle_count(const fusekit_bundle *bundle);
const char *fusekit_bundle_name(const fusekit_bundle *bundle, size_t index);
const char *fusekit_bundle_arch(const fusekit_bundle *bundle, size_t index);

/* Kernels loaded from it stay. NULL is allowed. */
void fusekit_bundle_close(fusekit_bundle *bundle);

typedef struct fusekit_kernel fusekit_kernel;

/* Loads a kernel on a device (an ordinal), whose primary context it retains; not while a stream is captured.
 * name: "file/kernel@variant", or "file/kernel" where the bundle has one variant of it for the device. */
fusekit_status fusekit_kernel_load(const fusekit_driver *driver, const fusekit_bundle *bundle, const char *name,
                                   int device, fusekit_kernel **kernel, fusekit_error *error);

/* The values are CUtensorMapDataType's, and further ones. */
typedef enum fusekit_dtype {
    FUSEKIT_U8 = 0,
    FUSEKIT_U16 = 1,
    FUSEKIT_U32 = 2,
    FUSEKIT_I32 = 3,
    FUSEKIT_U64 = 4,
    FUSEKIT_I64 = 5,
    FUSEKIT_FP16 = 6,
    FUSEKIT_F32 = 7,
    FUSEKIT_F64 = 8,
    FUSEKIT_BF16 = 9,
    FUSEKIT_E4M3 = 16,  /* 8-bit floats, and scales: 1 byte */
    FUSEKIT_E5M2 = 17,
    FUSEKIT_E8M0 = 18,
    FUSEKIT_E2M1X2 = 19 /* two 4-bit floats in a byte, which is what extents and strides count */
} fusekit_dtype;

/* What a kernel takes. Of a tensor: rank, whether it is written, alignment of its first element in bytes. Of a scalar
 * (rank -1; F32, I32, I64, F64, BF16 or FP16): the spec's default, if it has one. */
typedef struct fusekit_argument {
    const char *name;
    fusekit_dtype dtype;
    int rank, written, alignment;
    int has_default;
    double default_value;
} fusekit_argument;

/* The full name; an argument by its index, NULL past the last. */
const char *fusekit_kernel_name(const fusekit_kernel *kernel);
const fusekit_argument *fusekit_kernel_argument(const fusekit_kernel *kernel, int index);

/* A tensor in device memory. strides: elements; NULL means row-major without padding. */
typedef struct fusekit_tensor {
    const char *name;
    void *data;
    const int64_t *shape, *strides;
    int rank;
    fusekit_dtype dtype;
} fusekit_tensor;

typedef struct fusekit_scalar {
    const char *name;
    double value;
} fusekit_scalar;

/* All zero but the tensors is a good start: scalars, margin and priority are then the spec's and the stream's. */
typedef struct fusekit_arguments {
    const fusekit_tensor *tensors; /* every tensor of the kernel, in any order */
    const fusekit_scalar *scalars; /* those that differ from their defaults */
    int tensor_count, scalar_count;
    int32_t has_cluster_margin; /* 1: `cluster_margin` counts, 0: the spec's does */
    int32_t cluster_margin;     /* clusters reserved for other kernels (SM carve-out), from 0 */
    int32_t has_priority;       /* 1: `priority` counts for this launch, 0: the stream's does */
    int32_t priority;           /* lower is sooner */
} fusekit_arguments;

/* Checks, packs and launches. */
fusekit_status fusekit_kernel_launch(const fusekit_kernel *kernel, const fusekit_arguments *arguments, void *stream,
                                     fusekit_error *error);

/* Checks and packs once, for fusekit_launch_run; free with fusekit_launch_free before unloading the kernel. */
fusekit_status fusekit_kernel_bind(const fusekit_kernel *kernel, const fusekit_arguments *arguments,
                                   fusekit_launch **launch, fusekit_error *error);

/* NULL is allowed. */
fusekit_status fusekit_kernel_unload(fusekit_kernel *kernel, fusekit_error *error);

/* ---- Layers of a bundle, by name ("layer/moe"); `fusekit show` gives the tensors of each pass. */

typedef struct fusekit_layer fusekit_layer;

typedef enum fusekit_pass_kind {
    FUSEKIT_FORWARD = 0,
    FUSEKIT_INFERENCE = 1,
    FUSEKIT_BACKWARD = 2,
    FUSEKIT_QUANTISE = 3
} fusekit_pass_kind;

/* Tensors of a pass in any order; an output that is left out is not computed. */
typedef struct fusekit_layer_arguments {
    const fusekit_tensor *tensors;
    int tensor_count;
    fusekit_memory kept, scratch;
    fusekit_settings settings;
    const fusekit_ranks *ranks; /* of a layer over ranks, else NULL */
} fusekit_layer_arguments;

/* Loads a layer's kernels, as fusekit_kernel_load does. */
fusekit_status fusekit_layer_load(const fusekit_driver *driver, const fusekit_bundle *bundle, const char *name, int device,
                                  fusekit_layer **layer, fusekit_error *error);

/* For passes of at most so many tokens, with any outputs. */
fusekit_status fusekit_layer_sizes(const fusekit_layer *layer, int64_t tokens, fusekit_sizes *sizes, fusekit_error *error);

/* Of a layer over ranks: how many they are, 0 of any other; the windows by their numbers, NULL past the last; the bytes of
 * each for the capacity of `ranks`, whose windows may be NULL; and its sizes. */
int fusekit_layer_ranks(const fusekit_layer *layer);
const char *fusekit_layer_window(const fusekit_layer *layer, int index);
fusekit_status fusekit_layer_windows(const fusekit_layer *layer, const fusekit_ranks *ranks, size_t *bytes,
                                     fusekit_error *error);
fusekit_status fusekit_layer_rank_sizes(const fusekit_layer *layer, const fusekit_ranks *ranks, int64_t tokens,
                                        fusekit_sizes *sizes, fusekit_error *error);

/* Checks, packs and launches a pass. */
fusekit_status fusekit_layer_launch(const fusekit_layer *layer, fusekit_pass_kind pass,
                                    const fusekit_layer_arguments *arguments, void *stream, fusekit_error *error);

/* Checks and packs once, for fusekit_pass_run; free with fusekit_pass_free before unloading the layer. */
fusekit_status fusekit_layer_bind(const fusekit_layer *layer, fusekit_pass_kind pass,
                                  const fusekit_layer_arguments *arguments, fusekit_pass **bound, fusekit_error *error);

/* NULL is allowed. */
fusekit_status fusekit_layer_unload(fusekit_layer *layer, fusekit_error *error);
