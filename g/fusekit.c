/* Written by fusekit; changes are lost when it is written again. */

#include "fusekit.h"

#include <math.h>
/* The launcher: expressions, checks, parameters, tensor maps, one driver call. What a kernel is stands in the tables
 * behind it. C11 and C++17. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The driver API, as far as it is used: opaque handles, exported names, two structures. */

enum {
    FK_INVALID_VALUE = 1,
    FK_INVALID_CONTEXT = 201,
    FK_INVALID_HANDLE = 400,
    FK_DEVICE_SM_COUNT = 16,
    FK_DEVICE_MAJOR = 75,
    FK_DEVICE_MINOR = 76,
    FK_FUNCTION_SHARED = 8,
    FK_FUNCTION_CARVEOUT = 9,
    FK_FUNCTION_NON_PORTABLE_CLUSTER = 14,
    FK_LAUNCH_COOPERATIVE = 2,
    FK_LAUNCH_CLUSTER = 4,
    FK_LAUNCH_SERIALIZATION = 6,
    FK_LAUNCH_PRIORITY = 8,
    FK_LEGACY = 1, /* handles that name no stream of their own: the driver takes the current context for them */
    FK_PER_THREAD = 2,
    FK_ELF_ABI = 8, /* where a cubin has EI_ABIVERSION; from 8 on, only drivers for CUDA 13 read it */
    FK_CUDA_13 = 13000,
    FK_MINIMUM_DRIVER = 12040 /* cuKernelGetParamInfo */
};

typedef struct { /* CUlaunchAttribute */
    int id;
    int padding;
    union {
        int number;
        unsigned dims[3];
        char bytes[64];
    } value;
} fk_attribute;

typedef struct { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream;
    fk_attribute *attributes;
    unsigned count;
} fk_config;

/* name in the table, exported name, arguments */
#define FK_API(X)                                                                                                      \
    X(init, "cuInit", (unsigned))                                                                                      \
    X(version, "cuDriverGetVersion", (int *))                                                                          \
    X(error_name, "cuGetErrorName", (int, const char **))                                                              \
    X(error_string, "cuGetErrorString", (int, const char **))                                                          \
    X(device_get, "cuDeviceGet", (int *, int))                                                                         \
    X(device_attribute, "cuDeviceGetAttribute", (int *, int, int))                                                     \
    X(retain, "cuDevicePrimaryCtxRetain", (void **, int))                                                              \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int))                                                                  \
    X(current, "cuCtxGetCurrent", (void **))                                                                           \
    X(push, "cuCtxPushCurrent_v2", (void *))                                                                           \
    X(pop, "cuCtxPopCurrent_v2", (void **))                                                                            \
    X(library_load, "cuLibraryLoadData",                                                                               \
      (void **, const void *, int *, void **, unsigned, int *, void **, unsigned))                                     \
    X(library_unload, "cuLibraryUnload", (void *))                                                                     \
    X(library_kernel, "cuLibraryGetKernel", (void **, void *, const char *))                                           \
    X(kernel_parameter, "cuKernelGetParamInfo", (void *, size_t, size_t *, size_t *))                                  \
    X(kernel_attribute, "cuKernelSetAttribute", (int, int, void *, int))                                               \
    X(kernel_function, "cuKernelGetFunction", (void **, void *))                                                       \
    X(encode, "cuTensorMapEncodeTiled",                                                                                \
      (void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const unsigned *, const unsigned *, int,     \
       int, int, int))                                                                                                 \
    X(active_clusters, "cuOccupancyMaxActiveClusters", (int *, void *, const fk_config *))                             \
    X(launch, "cuLaunchKernelEx", (const fk_config *, void *, void **, void **))                                       \
    X(allocate, "cuMemAlloc_v2", (unsigned long long *, size_t))                                                       \
    X(free_memory, "cuMemFree_v2", (unsigned long long))                                                               \
    X(fill, "cuMemsetD8Async", (unsigned long long, unsigned char, size_t, void *))                                    \
    X(stream_create, "cuStreamCreate", (void **, unsigned))                                                            \
    X(stream_wait, "cuStreamSynchronize", (void *))                                                                    \
    X(stream_destroy, "cuStreamDestroy_v2", (void *))                                                                  \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))                                                      \
    X(stream_capturing, "cuStreamIsCapturing", (void *, int *))                                                        \
    X(event_create, "cuEventCreate", (void **, unsigned))                                                              \
    X(event_query, "cuEventQuery", (void *))                                                                           \
    X(event_destroy, "cuEventDestroy_v2", (void *))

struct fusekit_driver {
    void *handle; /* of dlopen; NULL where the caller looked the functions up */
    int cuda;     /* 13000 for CUDA 13.0 */
#define FK_MEMBER(name, symbol, arguments) int(*name) arguments;
    FK_API(FK_MEMBER)
#undef FK_MEMBER
};

/* ---- Launch records, in words of 64 bits. */

enum {
    FK_MOST_RANK = 5, FK_MOST_VARIABLES = 512, FK_MOST_NODES = 16, FK_MOST_PARAMETERS = 256, FK_MOST_SPACE = 32764, FK_MOST_TENSORS = 32,
    FK_MOST_SCALARS = 64, FK_MOST_STACK = 40, FK_MOST_DOCUMENT = 16777216, FK_MOST_CUBIN = 1073741824
};

enum {
    FK_VERSION = 1, FK_DTYPES = 20, FK_I32 = 3, FK_FIRST_DIM = 3
};

typedef enum {
    FK_PUSH, FK_VARIABLE, FK_JUMP, FK_UNLESS, FK_BIT_LENGTH, FK_EXP2,
    FK_ADD, FK_SUB, FK_MUL, FK_FLOORDIV, FK_CEILDIV, FK_MOD,
    FK_MIN, FK_MAX, FK_EQ, FK_NE, FK_LT, FK_LE,
    FK_FADD, FK_FSUB, FK_FMUL, FK_FDIV
} fk_operator;

typedef enum {
    FK_TENSOR_MAP, FK_POINTER, FK_WORKSPACE, FK_SCRATCH, FK_INT, FK_UINT,
    FK_FLOAT
} fk_kind;

typedef enum {
    FK_SM_COUNT, FK_CLUSTER_MARGIN, FK_ACTIVE_CLUSTERS
} fk_own_variable;

typedef enum {
    FK_BELOW_NONE, FK_BELOW_FIRST_STRIDE, FK_BELOW_FIRST_VALUE, FK_BELOW_VARIABLE_COUNT, FK_BELOW_FLOAT_COUNT, FK_BELOW_TENSOR_COUNT,
    FK_BELOW_OUTER, FK_BELOW_VALUE
} fk_limit;

typedef struct {
    int64_t operation, value;
} fk_step;

typedef struct {
    const fk_step *steps;
    int64_t count;
} fk_expression;

typedef enum { FK_WHOLE, FK_TEXT, FK_ROWS, FK_EXPRESSION } fk_field_kind;

typedef struct fk_type fk_type;

typedef struct {
    const char *name;
    fk_field_kind kind;
    int64_t low, high;
    int count;
    fk_limit limit;
    const fk_type *of;
} fk_field;

struct fk_type {
    const fk_field *fields;
    int count;
    size_t words;
};

typedef struct {
    const char *name;
    int64_t divisor;
    int64_t minimum;
    int64_t maximum;
} fk_dim;

static const fk_field fk_fields_dim[] = {
    {"name", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL},
    {"divisor", FK_WHOLE, INT64_C(1), INT64_C(9223372036854775807), 1, FK_BELOW_NONE, NULL},
    {"minimum", FK_WHOLE, INT64_C(0), INT64_C(9223372036854775807), 1, FK_BELOW_NONE, NULL},
    {"maximum", FK_WHOLE, INT64_C(0), INT64_C(9223372036854775807), 1, FK_BELOW_NONE, NULL}
};
static const fk_type fk_type_dim = {fk_fields_dim, 4, sizeof(fk_dim) / 8};

typedef struct {
    const char *name;
    int64_t written;
    int64_t itemsize;
    int64_t rank;
    int64_t alignment;
    int64_t stride_divisor;
    int64_t free_strides;
    int64_t first_stride;
    fk_expression shape[5];
    fk_expression strides[5];
} fk_tensor;

static const fk_field fk_fields_tensor[] = {
    {"name", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL},
    {"written", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"itemsize", FK_WHOLE, INT64_C(1), INT64_C(8), 1, FK_BELOW_NONE, NULL},
    {"rank", FK_WHOLE, INT64_C(0), INT64_C(5), 1, FK_BELOW_NONE, NULL},
    {"alignment", FK_WHOLE, INT64_C(1), INT64_C(1073741824), 1, FK_BELOW_NONE, NULL},
    {"stride_divisor", FK_WHOLE, INT64_C(1), INT64_C(9223372036854775807), 1, FK_BELOW_NONE, NULL},
    {"free_strides", FK_WHOLE, INT64_C(0), INT64_C(31), 1, FK_BELOW_NONE, NULL},
    {"first_stride", FK_WHOLE, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, NULL},
    {"shape", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 5, FK_BELOW_FIRST_STRIDE, NULL},
    {"strides", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 5, FK_BELOW_FIRST_STRIDE, NULL}
};
static const fk_type fk_type_tensor = {fk_fields_tensor, 10, sizeof(fk_tensor) / 8};

typedef struct {
    const char *name;
    int64_t dtype;
    int64_t tensor;
    int64_t has_default;
    int64_t default_bits;
} fk_argument;

static const fk_field fk_fields_argument[] = {
    {"name", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL},
    {"dtype", FK_WHOLE, INT64_C(0), INT64_C(19), 1, FK_BELOW_NONE, NULL},
    {"tensor", FK_WHOLE, INT64_C(-1), INT64_C(9223372036854775807), 1, FK_BELOW_TENSOR_COUNT, NULL},
    {"has_default", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"default_bits", FK_WHOLE, INT64_MIN, INT64_C(9223372036854775807), 1, FK_BELOW_NONE, NULL}
};
static const fk_type fk_type_argument = {fk_fields_argument, 5, sizeof(fk_argument) / 8};

typedef struct {
    fk_expression expression;
    const char *message;
} fk_constraint;

static const fk_field fk_fields_constraint[] = {
    {"expression", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 1, FK_BELOW_OUTER, NULL},
    {"message", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL}
};
static const fk_type fk_type_constraint = {fk_fields_constraint, 2, sizeof(fk_constraint) / 8};

typedef struct {
    fk_expression expression;
} fk_own_value;

static const fk_field fk_fields_own_value[] = {
    {"expression", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 1, FK_BELOW_VALUE, NULL}
};
static const fk_type fk_type_own_value = {fk_fields_own_value, 1, sizeof(fk_own_value) / 8};

typedef struct {
    int64_t dim;
} fk_skip;

static const fk_field fk_fields_skip[] = {
    {"dim", FK_WHOLE, INT64_C(3), INT64_C(9223372036854775807), 1, FK_BELOW_FIRST_STRIDE, NULL}
};
static const fk_type fk_type_skip = {fk_fields_skip, 1, sizeof(fk_skip) / 8};

typedef struct {
    int64_t dtype;
    int64_t rank;
    fk_expression address;
    fk_expression dims[5];
    fk_expression strides[5];
    int64_t box[5];
    int64_t element_strides[5];
    int64_t interleave;
    int64_t swizzle;
    int64_t promotion;
    int64_t fill;
    int64_t raw;
} fk_map;

static const fk_field fk_fields_map[] = {
    {"dtype", FK_WHOLE, INT64_C(0), INT64_C(15), 1, FK_BELOW_NONE, NULL},
    {"rank", FK_WHOLE, INT64_C(1), INT64_C(5), 1, FK_BELOW_NONE, NULL},
    {"address", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 1, FK_BELOW_VARIABLE_COUNT, NULL},
    {"dims", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 5, FK_BELOW_VARIABLE_COUNT, NULL},
    {"strides", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 5, FK_BELOW_VARIABLE_COUNT, NULL},
    {"box", FK_WHOLE, INT64_C(0), INT64_C(256), 5, FK_BELOW_NONE, NULL},
    {"element_strides", FK_WHOLE, INT64_C(0), INT64_C(8), 5, FK_BELOW_NONE, NULL},
    {"interleave", FK_WHOLE, INT64_C(0), INT64_C(2), 1, FK_BELOW_NONE, NULL},
    {"swizzle", FK_WHOLE, INT64_C(0), INT64_C(3), 1, FK_BELOW_NONE, NULL},
    {"promotion", FK_WHOLE, INT64_C(0), INT64_C(3), 1, FK_BELOW_NONE, NULL},
    {"fill", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"raw", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL}
};
static const fk_type fk_type_map = {fk_fields_map, 12, sizeof(fk_map) / 8};

typedef struct {
    const char *name;
    int64_t offset;
    int64_t size;
} fk_parameter;

static const fk_field fk_fields_parameter[] = {
    {"name", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL},
    {"offset", FK_WHOLE, INT64_C(0), INT64_C(32764), 1, FK_BELOW_NONE, NULL},
    {"size", FK_WHOLE, INT64_C(1), INT64_C(32764), 1, FK_BELOW_NONE, NULL}
};
static const fk_type fk_type_parameter = {fk_fields_parameter, 3, sizeof(fk_parameter) / 8};

typedef struct {
    const char *name;
    int64_t kind;
    int64_t offset;
    int64_t size;
    int64_t argument;
    fk_expression value;
    fk_expression number;
    const fk_map *map;
    int64_t map_count;
} fk_part;

static const fk_field fk_fields_part[] = {
    {"name", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL},
    {"kind", FK_WHOLE, INT64_C(0), INT64_C(6), 1, FK_BELOW_NONE, NULL},
    {"offset", FK_WHOLE, INT64_C(0), INT64_C(32764), 1, FK_BELOW_NONE, NULL},
    {"size", FK_WHOLE, INT64_C(1), INT64_C(128), 1, FK_BELOW_NONE, NULL},
    {"argument", FK_WHOLE, INT64_C(-1), INT64_C(9223372036854775807), 1, FK_BELOW_TENSOR_COUNT, NULL},
    {"value", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 1, FK_BELOW_VARIABLE_COUNT, NULL},
    {"number", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 1, FK_BELOW_FLOAT_COUNT, NULL},
    {"map", FK_ROWS, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, &fk_type_map}
};
static const fk_type fk_type_part = {fk_fields_part, 8, sizeof(fk_part) / 8};

typedef struct {
    const char *symbol;
    const fk_parameter *parameters;
    int64_t parameter_count;
    const fk_part *parts;
    int64_t part_count;
    fk_expression grid[3];
    int64_t block[3];
    int64_t cluster[3];
    int64_t shared;
    int64_t cooperative;
    int64_t serialization;
    int64_t non_portable_cluster;
    int64_t carveout;
} fk_node;

static const fk_field fk_fields_node[] = {
    {"symbol", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL},
    {"parameters", FK_ROWS, INT64_C(0), INT64_C(256), 1, FK_BELOW_NONE, &fk_type_parameter},
    {"parts", FK_ROWS, INT64_C(0), INT64_C(32764), 1, FK_BELOW_NONE, &fk_type_part},
    {"grid", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 3, FK_BELOW_VARIABLE_COUNT, NULL},
    {"block", FK_WHOLE, INT64_C(1), INT64_C(1024), 3, FK_BELOW_NONE, NULL},
    {"cluster", FK_WHOLE, INT64_C(1), INT64_C(16), 3, FK_BELOW_NONE, NULL},
    {"shared", FK_WHOLE, INT64_C(0), INT64_C(2147483647), 1, FK_BELOW_NONE, NULL},
    {"cooperative", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"serialization", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"non_portable_cluster", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"carveout", FK_WHOLE, INT64_C(-2147483648), INT64_C(2147483647), 1, FK_BELOW_NONE, NULL}
};
static const fk_type fk_type_node = {fk_fields_node, 11, sizeof(fk_node) / 8};

typedef struct {
    const char *name;
    const char *arch;
    int64_t major;
    int64_t minor;
    int64_t exact;
    int64_t margin;
    int64_t asks_clusters;
    int64_t float_count;
    int64_t first_stride;
    int64_t first_address;
    int64_t first_integer;
    int64_t first_value;
    int64_t variable_count;
    fk_expression workspace;
    int64_t workspace_zeroed;
    fk_expression scratch;
    const fk_dim *dims;
    int64_t dim_count;
    const fk_tensor *tensors;
    int64_t tensor_count;
    const fk_argument *arguments;
    int64_t argument_count;
    const fk_constraint *constraints;
    int64_t constraint_count;
    const fk_constraint *late_constraints;
    int64_t late_constraint_count;
    const fk_own_value *values;
    int64_t value_count;
    const fk_skip *skips;
    int64_t skip_count;
    const fk_node *nodes;
    int64_t node_count;
} fk_record;

static const fk_field fk_fields_record[] = {
    {"name", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL},
    {"arch", FK_TEXT, INT64_C(0), INT64_C(65536), 1, FK_BELOW_NONE, NULL},
    {"major", FK_WHOLE, INT64_C(0), INT64_C(99), 1, FK_BELOW_NONE, NULL},
    {"minor", FK_WHOLE, INT64_C(0), INT64_C(9), 1, FK_BELOW_NONE, NULL},
    {"exact", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"margin", FK_WHOLE, INT64_C(0), INT64_C(2147483647), 1, FK_BELOW_NONE, NULL},
    {"asks_clusters", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"float_count", FK_WHOLE, INT64_C(0), INT64_C(64), 1, FK_BELOW_NONE, NULL},
    {"first_stride", FK_WHOLE, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, NULL},
    {"first_address", FK_WHOLE, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, NULL},
    {"first_integer", FK_WHOLE, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, NULL},
    {"first_value", FK_WHOLE, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, NULL},
    {"variable_count", FK_WHOLE, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, NULL},
    {"workspace", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 1, FK_BELOW_FIRST_STRIDE, NULL},
    {"workspace_zeroed", FK_WHOLE, INT64_C(0), INT64_C(1), 1, FK_BELOW_NONE, NULL},
    {"scratch", FK_EXPRESSION, INT64_C(0), INT64_C(65536), 1, FK_BELOW_FIRST_VALUE, NULL},
    {"dims", FK_ROWS, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, &fk_type_dim},
    {"tensors", FK_ROWS, INT64_C(0), INT64_C(32), 1, FK_BELOW_NONE, &fk_type_tensor},
    {"arguments", FK_ROWS, INT64_C(0), INT64_C(96), 1, FK_BELOW_NONE, &fk_type_argument},
    {"constraints", FK_ROWS, INT64_C(0), INT64_C(1024), 1, FK_BELOW_FIRST_VALUE, &fk_type_constraint},
    {"late_constraints", FK_ROWS, INT64_C(0), INT64_C(1024), 1, FK_BELOW_VARIABLE_COUNT, &fk_type_constraint},
    {"values", FK_ROWS, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, &fk_type_own_value},
    {"skips", FK_ROWS, INT64_C(0), INT64_C(512), 1, FK_BELOW_NONE, &fk_type_skip},
    {"nodes", FK_ROWS, INT64_C(1), INT64_C(16), 1, FK_BELOW_NONE, &fk_type_node}
};
static const fk_type fk_type_record = {fk_fields_record, 24, sizeof(fk_record) / 8};

/* ---- What a launch is made of. */

typedef struct { /* a tensor's shape by its caller; strides: NULL for the compact ones */
    const int64_t *shape, *strides;
} fk_given;

typedef struct { /* a call: everything that the typed structures hold, by index */
    const int64_t *dims, *strides; /* strides: rank entries for each tensor; 0 is the compact one */
    const fk_given *given;         /* of each tensor, instead of strides; NULL in a typed call */
    const uint64_t *addresses;
    const int64_t *integers;
    const float *floats;
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
    int device, sm_count, major, active_clusters;
    void *context, *library, *kernels[FK_MOST_NODES], *functions[FK_MOST_NODES];
    fk_workspaces *workspaces; /* and scratch; NULL: it has neither */
} fk_kernel;

enum { FK_MAP_BYTES = 128, FK_MAP_ALIGNMENT = 64 };

typedef struct { /* a node of a call, with memory for its parameters at their offsets */
    unsigned grid[3], attribute_count;
    fk_attribute attributes[4];
    unsigned char *space;
} fk_packed;

struct fusekit_launch { /* one block of memory, with what it points to */
    const fk_kernel *kernel;
    int skip;
    int64_t scratch; /* bytes */
    fk_packed *nodes;
};

/* ---- Errors. */

const char *fusekit_status_text(fusekit_status status) {
    switch (status) {
    case FUSEKIT_OK: return "done";
    case FUSEKIT_INVALID_ARGUMENT: return "an argument breaks a rule of the kernel";
    case FUSEKIT_NO_DRIVER: return "no CUDA driver that is new enough";
    case FUSEKIT_WRONG_ARCH: return "the kernel was built for another architecture";
    case FUSEKIT_MISMATCH: return "the cubin and its launch record are of two builds";
    case FUSEKIT_OUT_OF_MEMORY: return "out of host memory";
    case FUSEKIT_CUDA_ERROR: return "the CUDA driver refused";
    case FUSEKIT_FILE_ERROR: return "the file cannot be read";
    case FUSEKIT_BAD_BUNDLE: return "the bundle is damaged, or of another version";
    case FUSEKIT_NOT_FOUND: return "the bundle has no such kernel";
    }
    return "unknown status";
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static fusekit_status fk_fail(fusekit_error *error, fusekit_status status, const char *format, ...) {
    if (error != NULL) {
        va_list arguments;
        error->status = status;
        error->cuda = 0;
        va_start(arguments, format);
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
    }
    return status;
}

static fusekit_status fk_ok(fusekit_error *error) {
    if (error != NULL) {
        error->status = FUSEKIT_OK;
        error->cuda = 0;
        error->text[0] = 0;
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_cuda(const fusekit_driver *driver, fusekit_error *error, int result, const char *name,
                              const char *what) {
    const char *label = NULL, *text = NULL;
    if (driver->error_name(result, &label) != 0 || label == NULL) label = "an unknown CUresult";
    if (driver->error_string(result, &text) != 0 || text == NULL) text = "";
    fk_fail(error, FUSEKIT_CUDA_ERROR, "%s: %s failed: %s (%d) %s", name, what, label, result, text);
    if (error != NULL) error->cuda = result;
    return FUSEKIT_CUDA_ERROR;
}

/* ---- Expressions: signed 64-bit; an overflow is an error, except in an address, which wraps modulo 2^64. */

static int fk_overflows(int64_t operation, int64_t a, int64_t b) {
    switch (operation) {
    case FK_ADD: return b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b;
    case FK_SUB: return b < 0 ? a > INT64_MAX + b : a < INT64_MIN + b;
    case FK_MUL:
        if (a == 0 || b == 0) return 0;
        if (a > 0) return b > 0 ? a > INT64_MAX / b : b < INT64_MIN / a;
        return b > 0 ? a < INT64_MIN / b : b < INT64_MAX / a;
    default: return 0;
    }
}

static int64_t fk_floordiv(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static int64_t fk_apply(int64_t operation, int64_t a, int64_t b) {
    switch (operation) {
    case FK_ADD: return (int64_t)((uint64_t)a + (uint64_t)b);
    case FK_SUB: return (int64_t)((uint64_t)a - (uint64_t)b);
    case FK_MUL: return (int64_t)((uint64_t)a * (uint64_t)b);
    case FK_FLOORDIV: return fk_floordiv(a, b);
    case FK_CEILDIV: return fk_floordiv(a, b) + (a % b != 0);
    case FK_MOD: return a % b < 0 ? a % b + b : a % b;
    case FK_MIN: return a < b ? a : b;
    case FK_MAX: return a > b ? a : b;
    case FK_EQ: return a == b;
    case FK_NE: return a != b;
    case FK_LT: return a < b;
    case FK_LE: return a <= b;
    case FK_EXP2: return (int64_t)1 << b;
    case FK_BIT_LENGTH:
        for (a = 0; b != 0; b >>= 1) ++a;
        return a;
    default: return 0;
    }
}

/* Whether the operator takes `b` for its only or second operand. */
static int fk_takes(int64_t operation, int64_t b) {
    switch (operation) {
    case FK_FLOORDIV:
    case FK_CEILDIV:
    case FK_MOD: return b > 0;
    case FK_BIT_LENGTH: return b >= 0;
    case FK_EXP2: return b >= 0 && b <= 62;
    default: return 1;
    }
}

/* Returns 0 where the expression has no value: it overflows, or an operator does not take an operand. `wraps`: sums and
 * products wrap modulo 2^64, as long as nothing but sums and products is made of them. */
static int fk_evaluate(const fk_expression *expression, const int64_t *variables, int wraps, int64_t *result) {
    int64_t stack[FK_MOST_STACK];
    char wrapped[FK_MOST_STACK];
    int depth = 0, index;
    if (expression->count == 1) { /* a constant or a variable, as most are */
        *result = expression->steps->operation == FK_PUSH ? expression->steps->value : variables[expression->steps->value];
        return 1;
    }
    for (index = 0; index < expression->count; ++index) {
        const fk_step *step = &expression->steps[index];
        int64_t a = 0, b;
        int lost;
        if (step->operation <= FK_VARIABLE) {
            if (depth == FK_MOST_STACK) return 0;
            wrapped[depth] = 0;
            stack[depth++] = step->operation == FK_PUSH ? step->value : variables[step->value];
            continue;
        }
        if (step->operation == FK_JUMP) {
            index += (int)step->value;
            continue;
        }
        if (depth < (step->operation < FK_ADD ? 1 : 2)) return 0;
        b = stack[--depth];
        lost = wrapped[depth];
        if (step->operation >= FK_ADD) {
            a = stack[--depth];
            lost |= wrapped[depth] | fk_overflows(step->operation, a, b);
        }
        if (lost && (!wraps || step->operation < FK_ADD || step->operation > FK_MUL)) return 0;
        if (step->operation == FK_UNLESS) {
            if (b == 0) index += (int)step->value;
            continue;
        }
        if (!fk_takes(step->operation, b)) return 0;
        wrapped[depth] = (char)lost;
        stack[depth++] = fk_apply(step->operation, a, b);
    }
    if (depth != 1) return 0;
    *result = stack[0];
    return 1;
}

/* Of numbers and f32 scalars. The exact result of a step, rounded to binary64 and then to binary32, is the one rounded
 * once: 53 bits are more than 2 * 24 + 2. */
static float fk_evaluate_float(const fk_expression *expression, const float *floats) {
    float stack[FK_MOST_STACK] = {0};
    int depth = 0, index;
    for (index = 0; index < expression->count; ++index) {
        const fk_step *step = &expression->steps[index];
        double a, b;
        if (step->operation <= FK_VARIABLE) {
            uint32_t bits = (uint32_t)step->value;
            if (depth == FK_MOST_STACK) return 0;
            if (step->operation == FK_VARIABLE)
                stack[depth++] = floats[step->value];
            else
                memcpy(&stack[depth++], &bits, sizeof bits);
            continue;
        }
        if (depth < 2) return 0;
        b = (double)stack[--depth];
        a = (double)stack[depth - 1];
        switch (step->operation) {
        case FK_FADD: a += b; break;
        case FK_FSUB: a -= b; break;
        case FK_FMUL: a *= b; break;
        default: a /= b; break;
        }
        stack[depth - 1] = (float)a;
    }
    return stack[0];
}

static fusekit_status fk_no_value(const fk_record *record, const char *what, fusekit_error *error) {
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s cannot be computed in 64 bits for these extents",
                   record->name, what);
}

static fusekit_status fk_value(const fk_record *record, const fk_expression *expression, const int64_t *variables,
                               const char *what, int64_t *result, fusekit_error *error) {
    return fk_evaluate(expression, variables, 0, result) ? FUSEKIT_OK : fk_no_value(record, what, error);
}

/* ---- Reading a launch record, which may come from anybody. What is read here is not checked again: `fk_read_rows` holds
 * every field against its rule, `fk_check_record` those that belong together. */

typedef char fk_needs_64_bits[sizeof(void *) == sizeof(int64_t) ? 1 : -1];

typedef struct fk_place { /* of what is read: a row of a table, in a row of another one */
    const struct fk_place *outer;
    const char *name;
    int64_t row;
} fk_place;

typedef struct {
    int64_t *next; /* words that were not taken yet */
    size_t left;
    int64_t limits[FK_BELOW_VALUE + 1];
    const char *title;
    fusekit_error *error;
} fk_reader;

static size_t fk_show_place(const fk_place *place, char *text, size_t size) {
    size_t length = place->outer == NULL ? 0 : fk_show_place(place->outer, text, size);
    if (place->name != NULL && length < size)
        length += (size_t)snprintf(text + length, size - length, "%s[%lld].", place->name, (long long)place->row);
    return length;
}

/* Returns 0, the failure of every function here. `rule`: what is wrong, and what it must be. */
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static int fk_refuse(const fk_reader *reader, const fk_place *place, const char *field, const char *rule, ...) {
    char where[96] = "", what[120];
    va_list arguments;
    va_start(arguments, rule);
    vsnprintf(what, sizeof what, rule, arguments);
    va_end(arguments);
    fk_show_place(place, where, sizeof where);
    fk_fail(reader->error, FUSEKIT_BAD_BUNDLE, "%.60s: %s%s %s; write loader and bundle with one version of fusekit",
            reader->title, where, field, what);
    return 0;
}

/* The next `count` items of `size` words; NULL where there are not so many. */
static int64_t *fk_take(fk_reader *reader, int64_t count, size_t size) {
    int64_t *taken = reader->next;
    if (count < 0 || (uint64_t)count > reader->left / size) return NULL;
    reader->next += (size_t)count * size;
    reader->left -= (size_t)count * size;
    return taken;
}

static int fk_check_whole(const fk_reader *reader, const fk_place *place, const fk_field *field, const int64_t *slot) {
    int64_t high = field->limit == FK_BELOW_NONE ? field->high : reader->limits[field->limit] - 1;
    int index;
    for (index = 0; index < field->count; ++index)
        if (slot[index] < field->low || slot[index] > high)
            return fk_refuse(reader, place, field->name, "is %lld; it must be %lld to %lld", (long long)slot[index],
                             (long long)field->low, (long long)high);
    return 1;
}

static int fk_read_text(fk_reader *reader, const fk_place *place, const fk_field *field, int64_t *slot) {
    int64_t length = slot[0];
    const char *text;
    if (length < 0 || length > field->high)
        return fk_refuse(reader, place, field->name, "has %lld bytes; there may be %lld", (long long)length,
                         (long long)field->high);
    text = (const char *)fk_take(reader, length / 8 + 1, 1);
    if (text == NULL) return fk_refuse(reader, place, field->name, "is cut");
    if (memchr(text, 0, (size_t)(length / 8 + 1) * 8) != text + length)
        return fk_refuse(reader, place, field->name, "holds a 0 byte, or does not end with one");
    memcpy(slot, &text, sizeof text);
    return 1;
}

static int fk_read_steps(fk_reader *reader, const fk_place *place, const fk_field *field, int64_t *slot) {
    const fk_step *steps;
    int64_t index, count = slot[1], limit = reader->limits[field->limit];
    if (count < 0 || count > field->high || (steps = (const fk_step *)fk_take(reader, count, 2)) == NULL)
        return fk_refuse(reader, place, field->name, "has %lld steps, and is cut, or has more than %lld",
                         (long long)count, (long long)field->high);
    for (index = 0; index < count; ++index) {
        int64_t operation = steps[index].operation, value = steps[index].value;
        if (operation < 0 || operation > FK_FDIV || (count == 1 && operation > FK_VARIABLE))
            return fk_refuse(reader, place, field->name, "has a step that is not known, or no expression alone");
        if (operation == FK_VARIABLE && (value < 0 || value >= limit))
            return fk_refuse(reader, place, field->name, "reads variable %lld; it must be 0 to %lld", (long long)value,
                             (long long)limit - 1);
        if ((operation == FK_JUMP || operation == FK_UNLESS) && (value < 0 || value >= count - index))
            return fk_refuse(reader, place, field->name, "leaves out %lld steps, of which there are fewer",
                             (long long)value);
    }
    memcpy(slot, &steps, sizeof steps);
    return 1;
}

static int fk_read_rows(fk_reader *reader, const fk_place *outer, const fk_field *field, int64_t *slot);

/* What follows a row: its texts, expressions and tables, in the order of its fields. */
static int fk_read_row(fk_reader *reader, const fk_place *place, const fk_type *type, int64_t *slot) {
    int index, part;
    for (index = 0; index < type->count; ++index) {
        const fk_field *field = &type->fields[index];
        switch (field->kind) {
        case FK_WHOLE: slot += field->count; break;
        case FK_TEXT:
            if (!fk_read_text(reader, place, field, slot++)) return 0;
            break;
        case FK_ROWS:
            if (!fk_read_rows(reader, place, field, slot)) return 0;
            slot += 2;
            break;
        case FK_EXPRESSION:
            for (part = 0; part < field->count; ++part, slot += 2)
                if (!fk_read_steps(reader, place, field, slot)) return 0;
            break;
        }
    }
    return 1;
}

/* Numbers first: what follows the rows may be bounded by them. */
static int fk_check_row(const fk_reader *reader, const fk_place *place, const fk_type *type, const int64_t *slot) {
    int index;
    for (index = 0; index < type->count; ++index) {
        const fk_field *field = &type->fields[index];
        if (field->kind == FK_WHOLE && !fk_check_whole(reader, place, field, slot)) return 0;
        slot += field->kind == FK_WHOLE ? field->count : field->kind == FK_TEXT ? 1 : 2 * field->count;
    }
    return 1;
}

static int fk_read_rows(fk_reader *reader, const fk_place *outer, const fk_field *field, int64_t *slot) {
    const fk_type *type = field->of;
    int64_t count = slot[1], *rows;
    fk_place place = {NULL, NULL, 0};
    if (count < field->low || count > field->high)
        return fk_refuse(reader, outer, field->name, "has %lld rows; there may be %lld to %lld", (long long)count,
                         (long long)field->low, (long long)field->high);
    rows = fk_take(reader, count, type->words);
    if (rows == NULL) return fk_refuse(reader, outer, field->name, "is cut");
    place.outer = outer;
    place.name = field->name;
    for (place.row = 0; place.row < count; ++place.row)
        if (!fk_check_row(reader, &place, type, rows + (size_t)place.row * type->words)) return 0;
    for (place.row = 0; place.row < count; ++place.row) {
        if (type == &fk_type_constraint) reader->limits[FK_BELOW_OUTER] = reader->limits[field->limit];
        if (type == &fk_type_own_value) reader->limits[FK_BELOW_VALUE] = reader->limits[FK_BELOW_FIRST_VALUE] + place.row;
        if (!fk_read_row(reader, &place, type, rows + (size_t)place.row * type->words)) return 0;
    }
    memcpy(slot, &rows, sizeof rows);
    return 1;
}

/* All words as one row of `type` and what follows it; it lies at their beginning. */
static int fk_read_whole(fk_reader *reader, const fk_type *type) {
    static const fk_place top = {NULL, NULL, 0};
    int64_t *row = fk_take(reader, 1, type->words);
    if (row == NULL) return fk_refuse(reader, &top, "it", "is cut");
    if (!fk_check_row(reader, &top, type, row)) return 0;
    if (type == &fk_type_record) {
        const fk_record *record = (const fk_record *)row;
        reader->limits[FK_BELOW_FIRST_STRIDE] = record->first_stride;
        reader->limits[FK_BELOW_FIRST_VALUE] = record->first_value;
        reader->limits[FK_BELOW_VARIABLE_COUNT] = record->variable_count;
        reader->limits[FK_BELOW_FLOAT_COUNT] = record->float_count;
        reader->limits[FK_BELOW_TENSOR_COUNT] = record->tensor_count;
    }
    if (!fk_read_row(reader, &top, type, row)) return 0;
    return reader->left == 0 ||
           fk_refuse(reader, &top, "it", "has %llu words too many", (unsigned long long)reader->left);
}

/* ---- What belongs together. */

/* Bytes of a part; of an integer as many as it says. */
static int64_t fk_part_size(const fk_part *part) {
    static const unsigned char integers[9] = {0, 1, 2, 0, 4, 0, 0, 0, 8};
    switch (part->kind) {
    case FK_TENSOR_MAP: return FK_MAP_BYTES;
    case FK_FLOAT: return 4;
    case FK_INT:
    case FK_UINT: return part->size <= 8 ? integers[part->size] : 0;
    default: return 8;
    }
}

static int fk_check_node(const fk_reader *reader, const fk_place *place, const fk_node *node) {
    int64_t index, end = 0;
    fk_place at = {place, "parameters", 0};
    for (index = 0; index < node->parameter_count; ++index) {
        const fk_parameter *parameter = &node->parameters[at.row = index];
        if (parameter->offset < end || parameter->size > FK_MOST_SPACE - parameter->offset)
            return fk_refuse(reader, &at, "offset", "is %lld; it must be %lld to %lld", (long long)parameter->offset,
                             (long long)end, (long long)(FK_MOST_SPACE - parameter->size));
        end = parameter->offset + parameter->size;
    }
    at.name = "parts";
    for (index = 0; index < node->part_count; ++index) {
        const fk_part *part = &node->parts[at.row = index];
        if (part->size != fk_part_size(part) || part->size > end - part->offset)
            return fk_refuse(reader, &at, "size", "is %lld, which is not its kind's, or reaches beyond the parameters",
                             (long long)part->size);
        if (part->map_count != (part->kind == FK_TENSOR_MAP))
            return fk_refuse(reader, &at, "map", "is there or not against its kind");
        if (part->kind == FK_POINTER && part->argument < 0) return fk_refuse(reader, &at, "argument", "is no tensor");
    }
    return 1;
}

/* Whether the variables are as many as there are dims, strides, addresses, integers and values, in this order. */
static int fk_check_record(const fk_reader *reader, const fk_record *record) {
    fk_place at = {NULL, "tensors", 0};
    int64_t next = FK_FIRST_DIM + record->dim_count, index, integers = 0, floats = 0;
    int fits = record->first_stride == next;
    for (; fits && at.row < record->tensor_count; ++at.row) {
        const fk_tensor *tensor = &record->tensors[at.row];
        if (tensor->first_stride != next)
            return fk_refuse(reader, &at, "first_stride", "is %lld; it must be %lld", (long long)tensor->first_stride,
                             (long long)next);
        next += tensor->rank;
    }
    for (index = 0; index < record->argument_count; ++index) {
        const fk_argument *argument = &record->arguments[index];
        integers += argument->tensor < 0 && argument->dtype == FK_I32;
        floats += argument->tensor < 0 && argument->dtype != FK_I32;
    }
    fits = fits && record->first_address == next && record->first_integer == next + record->tensor_count &&
           record->first_value == record->first_integer + integers && integers <= FK_MOST_SCALARS &&
           record->float_count == floats && record->variable_count == record->first_value + record->value_count;
    at.name = NULL;
    if (!fits) return fk_refuse(reader, &at, "variable_count", "is not that of its dims, tensors, scalars and values");
    at.name = "nodes";
    for (at.row = 0; at.row < record->node_count; ++at.row)
        if (!fk_check_node(reader, &at, &record->nodes[at.row])) return 0;
    return 1;
}

/* The record out of a copy of the words, which is to be freed. */
static fusekit_status fk_read_record(const fk_source *source, const char *title, const fk_record **record,
                                     fusekit_error *error) {
    size_t bytes = source->count * sizeof(int64_t);
    int64_t *words = (int64_t *)malloc(bytes > 0 ? bytes : 1);
    fk_reader reader = {words, source->count, {0}, title, error};
    *record = NULL;
    if (words == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for its launch record", title);
    memcpy(words, source->words, bytes);
    if (fk_read_whole(&reader, &fk_type_record) && fk_check_record(&reader, (const fk_record *)words)) {
        *record = (const fk_record *)words;
        return FUSEKIT_OK;
    }
    free(words);
    return FUSEKIT_BAD_BUNDLE;
}

/* ---- The arguments. */

typedef struct {
    int64_t shape[FK_MOST_RANK], strides[FK_MOST_RANK]; /* elements */
    int64_t span;                                       /* bytes from the first element to the end of the last */
    int64_t pitch, width;                               /* bytes; of a matrix with contiguous rows, else 0 */
} fk_extent;

static fusekit_status fk_check_dims(const fk_record *record, const fk_call *call, int64_t *variables,
                                    fusekit_error *error) {
    int64_t index;
    for (index = 0; index < record->dim_count; ++index) {
        const fk_dim *dim = &record->dims[index];
        int64_t value = call->dims[index];
        if (value < dim->minimum || value > dim->maximum || value % dim->divisor != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: %s is %lld; it must be a multiple of %lld from %lld to %lld", record->name, dim->name,
                           (long long)value, (long long)dim->divisor, (long long)dim->minimum,
                           (long long)dim->maximum);
        variables[FK_FIRST_DIM + index] = value;
    }
    return FUSEKIT_OK;
}

/* An output whose elements share memory would be written in a race. */
static int fk_distinct(const fk_tensor *tensor, const fk_extent *extent) {
    int64_t reach = 1;
    unsigned done = 0;
    int round, index;
    for (round = 0; round < tensor->rank; ++round) {
        int least = -1;
        for (index = 0; index < tensor->rank; ++index)
            if (!(done >> index & 1) && (least < 0 || extent->strides[index] < extent->strides[least])) least = index;
        done |= 1u << least;
        if (extent->shape[least] <= 1) continue;
        if (extent->strides[least] < reach) return 0;
        reach += extent->strides[least] * (extent->shape[least] - 1);
    }
    return 1;
}

/* The extents, the strides that they have without padding, and whether one is 0. given: the caller's shape. */
static fusekit_status fk_check_shape(const fk_record *record, const fk_tensor *tensor, const fk_given *given,
                                     const int64_t *variables, fk_extent *extent, int *empty, fusekit_error *error) {
    int64_t step = 1;
    int index;
    *empty = 0;
    for (index = (int)tensor->rank - 1; index >= 0; --index) {
        int64_t *own = &extent->shape[index];
        fusekit_status status = fk_value(record, &tensor->shape[index], variables, tensor->name, own, error);
        if (status != FUSEKIT_OK) return status;
        if (given != NULL && (given->shape[index] != *own || *own < 0))
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has %lld at dim %d; it must have %lld there",
                           record->name, tensor->name, (long long)given->shape[index], index, (long long)*own);
        *empty |= *own == 0;
        extent->strides[index] = step;
        if (*own <= 1) continue;
        if (fk_overflows(FK_MUL, step, *own))
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has more than 2^63 elements", record->name,
                           tensor->name);
        step *= *own;
    }
    return FUSEKIT_OK;
}

/* `stride` is the compact one, and becomes the tensor's. asked: the caller's. */
static fusekit_status fk_check_stride(const fk_record *record, const fk_tensor *tensor, int index, int64_t extent,
                                      const int64_t *asked, const int64_t *variables, int64_t *stride,
                                      fusekit_error *error) {
    int64_t actual = asked == NULL ? *stride : *asked;
    if (tensor->free_strides >> index & 1) {
        if (extent != 1) *stride = actual;
        /* 2^55 elements are beyond every device, and keep the arithmetic with them in range. */
        if (*stride > 0 && *stride < (int64_t)1 << 55 && (extent == 1 || *stride % tensor->stride_divisor == 0))
            return FUSEKIT_OK;
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: %s has stride %lld at dim %d (elements); it must be a positive multiple of %lld",
                       record->name, tensor->name, (long long)*stride, index, (long long)tensor->stride_divisor);
    }
    if (!fk_evaluate(&tensor->strides[index], variables, 0, stride)) return fk_no_value(record, tensor->name, error);
    if (asked == NULL || extent == 1 || actual == *stride) return FUSEKIT_OK;
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has stride %lld at dim %d (elements); it must be %lld",
                   record->name, tensor->name, (long long)actual, index, (long long)*stride);
}

/* strides: those of a typed call. */
static fusekit_status fk_check_tensor(const fk_record *record, const fk_tensor *tensor, const fk_given *given,
                                      const int64_t *strides, int64_t *variables, fk_extent *extent,
                                      fusekit_error *error) {
    int64_t last = 0;
    int index, empty;
    fusekit_status status = fk_check_shape(record, tensor, given, variables, extent, &empty, error);
    for (index = 0; index < tensor->rank && status == FUSEKIT_OK; ++index) {
        int64_t extents = extent->shape[index], *stride = &extent->strides[index], compact = *stride;
        const int64_t *asked = given == NULL           ? strides[index] == 0 ? NULL : &strides[index]
                               : given->strides == NULL ? &compact
                                                        : &given->strides[index];
        if (!empty) status = fk_check_stride(record, tensor, index, extents, asked, variables, stride, error);
        variables[tensor->first_stride + index] = *stride;
        if (extents <= 1 || status != FUSEKIT_OK) continue;
        if (*stride < 0 || fk_overflows(FK_MUL, *stride, extents - 1) ||
            *stride * (extents - 1) > ((int64_t)1 << 57) - last)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s reaches over more than 2^57 elements", record->name,
                           tensor->name);
        last += *stride * (extents - 1);
    }
    if (status != FUSEKIT_OK) return status;
    extent->span = empty ? 0 : (last + 1) * tensor->itemsize;
    extent->pitch = extent->width = 0;
    if (tensor->rank == 2 && extent->strides[1] == 1 && extent->shape[0] != 1) {
        extent->pitch = extent->strides[0] * tensor->itemsize;
        extent->width = extent->shape[1] * tensor->itemsize;
    }
    if (tensor->written && !empty && !fk_distinct(tensor, extent))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: elements of %s overlap; an output's must lie apart",
                       record->name, tensor->name);
    return FUSEKIT_OK;
}

static int fk_overlap(const fk_extent *one, uint64_t first, const fk_extent *other, uint64_t second) {
    int64_t distance = (int64_t)(second - first), column;
    if (one->span == 0 || other->span == 0 || distance <= -other->span || distance >= one->span) return 0;
    if (one->pitch == 0 || one->pitch != other->pitch) return 1;
    column = fk_apply(FK_MOD, distance, one->pitch); /* of one buffer, side by side */
    return column < one->width || column + other->width > one->pitch;
}

static fusekit_status fk_check_places(const fk_record *record, const fk_call *call, const fk_extent *extents,
                                      fusekit_error *error) {
    int one, other;
    for (one = 0; one < record->tensor_count; ++one) {
        const fk_tensor *tensor = &record->tensors[one];
        if (extents[one].span == 0) continue;
        if (call->addresses[one] == 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is NULL; it must be device memory", record->name,
                           tensor->name);
        if (call->addresses[one] % (uint64_t)tensor->alignment != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s begins at %#llx; it must be a multiple of %lld bytes",
                           record->name, tensor->name, (unsigned long long)call->addresses[one],
                           (long long)tensor->alignment);
        for (other = 0; other < one; ++other)
            if ((tensor->written || record->tensors[other].written) &&
                fk_overlap(&extents[other], call->addresses[other], &extents[one], call->addresses[one]))
                return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                               "%s: %s overlaps %s in memory; an output must not share memory with another argument",
                               record->name, tensor->name, record->tensors[other].name);
    }
    return FUSEKIT_OK;
}

/* ---- Device memory that a kernel needs beside its arguments, for each stream: launches that may overlap in time must not
 * share it. A launch leaves its workspace (a scheduler's counters) as the next one needs it. Workspaces are made in stocks,
 * the first at load: a launch in a stream not seen before takes one from it, and only where it is used up asks the driver.
 * Scratch (partial sums) is of any content, and grows with the largest launch there was in the stream. */
#include <pthread.h>

enum { FK_WORKSPACE_ALIGNMENT = 256, FK_STOCK_BYTES = 1 << 16, FK_MOST_STOCK = 64 };

typedef struct {
    uintptr_t stream;
    pthread_t thread; /* of a per-thread default stream, of which every thread has one behind the same handle */
} fk_owner;

typedef struct fk_stock { /* memory for some workspaces; the stocks form a list, the newest first */
    struct fk_stock *next;
    unsigned long long base;
    int used;
    fk_owner owners[FK_MOST_STOCK];
} fk_stock;

typedef struct fk_piece { /* scratch of a stream; pieces form a list, the newest first, and stay: graphs may use them */
    struct fk_piece *next;
    unsigned long long address;
    int64_t size;
    fk_owner owner;
} fk_piece;

struct fk_workspaces {
    const fusekit_driver *driver;
    const char *name; /* of the kernel */
    void *context;
    size_t size; /* bytes of each, aligned */
    int zeroed, count; /* of each stock */
    pthread_mutex_t lock; /* of whoever adds to the lists; nobody waits for it to find his own */
    fk_stock *stocks;
    fk_piece *pieces;
};

static fk_owner fk_owner_of(void *handle) {
    fk_owner owner;
    owner.stream = handle == NULL ? (uintptr_t)FK_LEGACY : (uintptr_t)handle;
    owner.thread = pthread_self();
    return owner;
}

static int fk_owns(const fk_owner *one, const fk_owner *other) {
    return one->stream == other->stream && (one->stream != FK_PER_THREAD || pthread_equal(one->thread, other->thread));
}

/* On a stream of its own, and finished on return: whichever stream launches next finds zeros. */
static int fk_zero(const fusekit_driver *driver, unsigned long long address, size_t size) {
    void *stream;
    int result = driver->stream_create(&stream, 1), other;
    if (result != 0) return result;
    result = driver->fill(address, 0, size, stream);
    if (result == 0) result = driver->stream_wait(stream);
    other = driver->stream_destroy(stream);
    return result != 0 ? result : other;
}

enum { FK_THREAD_LOCAL = 1, FK_RELAXED = 2 };

/* Inside, what this thread asks of the driver is no danger to streams that other threads capture; relaxed: nor to those that
 * this one does. */
static int fk_apart(const fusekit_driver *driver, int kind, int *mode) {
    *mode = kind;
    return driver->capture_mode(mode);
}

static fusekit_status fk_allocate(const fk_workspaces *own, size_t size, int zeroed, unsigned long long *address,
                                  fusekit_error *error) {
    const fusekit_driver *driver = own->driver;
    void *before;
    int mode, result = driver->push(own->context);
    if (result == 0) {
        result = fk_apart(driver, FK_RELAXED, &mode); /* the first launch in a stream may be one that is captured */
        if (result == 0) {
            result = driver->allocate(address, size);
            if (result == 0 && zeroed && (result = fk_zero(driver, *address, size)) != 0) driver->free_memory(*address);
            driver->capture_mode(&mode);
        }
        driver->pop(&before);
    }
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, own->name, "allocating a workspace");
}

static fusekit_status fk_add_stock(fk_workspaces *own, fusekit_error *error) {
    fk_stock *stock = (fk_stock *)calloc(1, sizeof *stock);
    fusekit_status status;
    if (stock == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for workspaces", own->name);
    status = fk_allocate(own, own->size * (size_t)own->count, own->zeroed, &stock->base, error);
    if (status != FUSEKIT_OK) {
        free(stock);
        return status;
    }
    stock->next = own->stocks;
    __atomic_store_n(&own->stocks, stock, __ATOMIC_RELEASE);
    return FUSEKIT_OK;
}

/* The workspace of a stream, or 0. A stock only ever grows, and says so last. */
static unsigned long long fk_find_workspace(const fk_workspaces *own, const fk_owner *owner) {
    const fk_stock *stock = __atomic_load_n(&own->stocks, __ATOMIC_ACQUIRE);
    for (; stock != NULL; stock = stock->next) {
        int used = __atomic_load_n(&stock->used, __ATOMIC_ACQUIRE), index;
        for (index = 0; index < used; ++index)
            if (fk_owns(&stock->owners[index], owner)) return stock->base + (size_t)index * own->size;
    }
    return 0;
}

/* The workspace for launches in a stream. */
static fusekit_status fk_workspace(fk_workspaces *own, void *stream, unsigned long long *address, fusekit_error *error) {
    fk_owner owner = fk_owner_of(stream);
    fusekit_status status = FUSEKIT_OK;
    *address = fk_find_workspace(own, &owner);
    if (*address != 0) return FUSEKIT_OK;
    pthread_mutex_lock(&own->lock);
    *address = fk_find_workspace(own, &owner);
    if (*address == 0 && own->stocks->used == own->count) status = fk_add_stock(own, error);
    if (*address == 0 && status == FUSEKIT_OK) {
        fk_stock *stock = own->stocks;
        stock->owners[stock->used] = owner;
        *address = stock->base + (size_t)stock->used * own->size;
        __atomic_store_n(&stock->used, stock->used + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&own->lock);
    return status;
}

/* The newest piece of a stream, which is its largest; NULL where it has none. */
static const fk_piece *fk_find_piece(const fk_workspaces *own, const fk_owner *owner) {
    const fk_piece *piece = __atomic_load_n(&own->pieces, __ATOMIC_ACQUIRE);
    while (piece != NULL && !fk_owns(&piece->owner, owner)) piece = piece->next;
    return piece;
}

/* Half as much again as before: a slowly growing batch takes few allocations, three times its size at most. */
static fusekit_status fk_add_piece(fk_workspaces *own, const fk_owner *owner, const fk_piece *before, int64_t size,
                                   fusekit_error *error) {
    const int64_t granule = 1 << 21; /* what the driver allocates at least */
    fk_piece *piece = (fk_piece *)calloc(1, sizeof *piece);
    fusekit_status status;
    if (piece == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for scratch", own->name);
    if (before != NULL && before->size / 2 * 3 > size) size = before->size / 2 * 3;
    piece->owner = *owner;
    piece->size = (size + granule - 1) / granule * granule;
    status = fk_allocate(own, (size_t)piece->size, 0, &piece->address, error);
    if (status != FUSEKIT_OK) {
        free(piece);
        return status;
    }
    piece->next = own->pieces;
    __atomic_store_n(&own->pieces, piece, __ATOMIC_RELEASE);
    return FUSEKIT_OK;
}

/* `size` bytes at least for a launch in a stream. */
static fusekit_status fk_scratch(fk_workspaces *own, void *stream, int64_t size, unsigned long long *address,
                                 fusekit_error *error) {
    fk_owner owner = fk_owner_of(stream);
    const fk_piece *piece = fk_find_piece(own, &owner);
    fusekit_status status = FUSEKIT_OK;
    if (size > 0 && (piece == NULL || piece->size < size)) {
        pthread_mutex_lock(&own->lock);
        piece = fk_find_piece(own, &owner);
        if (piece == NULL || piece->size < size) status = fk_add_piece(own, &owner, piece, size, error);
        piece = fk_find_piece(own, &owner);
        pthread_mutex_unlock(&own->lock);
    }
    *address = piece == NULL ? 0 : piece->address;
    return status;
}

/* Gives the memory back; no launch that uses it may be pending. */
static int fk_free_workspaces(fk_workspaces *own) {
    const fusekit_driver *driver = own->driver;
    void *before;
    int result = 0, other, mode;
    if ((own->stocks != NULL || own->pieces != NULL) && (result = driver->push(own->context)) == 0) {
        result = fk_apart(driver, FK_THREAD_LOCAL, &mode);
        while (own->stocks != NULL) {
            fk_stock *stock = own->stocks;
            own->stocks = stock->next;
            if ((other = driver->free_memory(stock->base)) != 0) result = other;
            free(stock);
        }
        while (own->pieces != NULL) {
            fk_piece *piece = own->pieces;
            own->pieces = piece->next;
            if ((other = driver->free_memory(piece->address)) != 0) result = other;
            free(piece);
        }
        driver->capture_mode(&mode);
        driver->pop(&before);
    }
    pthread_mutex_destroy(&own->lock);
    free(own);
    return result;
}

/* bytes: of each workspace; 0 where the kernel has none. */
static fusekit_status fk_make_workspaces(const fusekit_driver *driver, const char *name, void *context, int64_t bytes,
                                         int zeroed, fk_workspaces **made, fusekit_error *error) {
    fk_workspaces *own = (fk_workspaces *)calloc(1, sizeof *own);
    fusekit_status status;
    *made = NULL;
    if (own == NULL || bytes > INT64_MAX / FK_MOST_STOCK - FK_WORKSPACE_ALIGNMENT ||
        pthread_mutex_init(&own->lock, NULL) != 0) {
        free(own);
        return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a workspace of %lld bytes", name,
                       (long long)bytes);
    }
    own->driver = driver;
    own->name = name;
    own->context = context;
    own->zeroed = zeroed;
    own->size = ((size_t)bytes + FK_WORKSPACE_ALIGNMENT - 1) / FK_WORKSPACE_ALIGNMENT * FK_WORKSPACE_ALIGNMENT;
    own->count = own->size > FK_STOCK_BYTES / FK_MOST_STOCK ? (int)(FK_STOCK_BYTES / own->size) : FK_MOST_STOCK;
    if (own->count == 0) own->count = 1;
    status = bytes > 0 ? fk_add_stock(own, error) : FUSEKIT_OK;
    if (status == FUSEKIT_OK)
        *made = own;
    else
        fk_free_workspaces(own);
    return status;
}

/* ---- Tensor maps. */

/* Extents and strides of a tensor map, with which the driver's encoder may be asked. */
static fusekit_status fk_check_map(const fk_record *record, const fk_part *part, const int64_t *extents,
                                   const int64_t *strides, fusekit_error *error) {
    int index;
    for (index = 0; index < part->map->rank; ++index)
        if (extents[index] < 1 || extents[index] > (int64_t)1 << 32)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has extent %lld; a tensor map takes 1 to 2^32",
                           record->name, part->name, (long long)extents[index]);
    for (index = 0; index + 1 < part->map->rank; ++index)
        if (strides[index] < 0 || strides[index] >= (int64_t)1 << 40 || strides[index] % 16 != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: %s has stride %lld bytes; a tensor map takes multiples of 16 below 2^40", record->name,
                           part->name, (long long)strides[index]);
    return FUSEKIT_OK;
}

static fusekit_status fk_ask_encoder(const fk_kernel *kernel, const fk_map *map, uint64_t at, const int64_t *extents,
                                     const int64_t *strides, unsigned char *place, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    unsigned char room[FK_MAP_BYTES + FK_MAP_ALIGNMENT]; /* it wants alignment, which a parameter need not have */
    unsigned char *made = room + (FK_MAP_ALIGNMENT - (uintptr_t)room % FK_MAP_ALIGNMENT) % FK_MAP_ALIGNMENT;
    uint64_t dims[FK_MOST_RANK] = {0}, steps[FK_MOST_RANK] = {0};
    unsigned box[FK_MOST_RANK] = {0}, element_strides[FK_MOST_RANK] = {0};
    void *before;
    int index, result = FK_INVALID_CONTEXT, attempt;
    for (index = 0; index < map->rank; ++index) {
        dims[index] = (uint64_t)extents[index];
        box[index] = (unsigned)map->box[index];
        element_strides[index] = (unsigned)map->element_strides[index];
    }
    for (index = 0; index + 1 < map->rank; ++index) steps[index] = (uint64_t)strides[index];
    for (attempt = 0; attempt < 2 && result != 0; ++attempt) {
        /* It takes a context, and one of a device that has tensor maps: this thread's may do, the kernel's does. */
        if (attempt == 1 && driver->push(kernel->context) != 0) break;
        result = driver->encode(made, (int)map->dtype, (unsigned)map->rank, (void *)(uintptr_t)at, dims, steps, box,
                                element_strides, (int)map->interleave, (int)map->swizzle, (int)map->promotion,
                                (int)map->fill);
        if (attempt == 1) driver->pop(&before);
    }
    if (result == 0) {
        memcpy(place, made, FK_MAP_BYTES);
        return FUSEKIT_OK;
    }
    fk_cuda(driver, error, result, kernel->record->name, "cuTensorMapEncodeTiled");
    if (result != FK_INVALID_VALUE) return FUSEKIT_CUDA_ERROR;
    if (error != NULL) error->status = FUSEKIT_INVALID_ARGUMENT; /* extents, strides or address are none of a map's */
    return FUSEKIT_INVALID_ARGUMENT;
}

/* The descriptor as the compiler's host code writes it, whatever the driver would say: fusekit/abi/tensormap.py. */
static void fk_write_map(const fk_map *map, uint64_t at, const int64_t *extents, const int64_t *strides,
                         unsigned char *place) {
    /* By CUtensorMapDataType: bits 7-10 of word 2, and bit 16 for TF32. */
    static const int codes[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7 | 1 << 9, 8 | 1 << 9, 11, 12, 13};
    uint32_t words[FK_MAP_BYTES / 4] = {0};
    int index;
    words[0] = (uint32_t)at;
    words[1] = (uint32_t)(at >> 32) & 0x1FFFFFF;
    words[2] = (uint32_t)((map->rank - 1) << 4 | codes[map->dtype] << 7 | map->interleave << 11 | map->swizzle << 13 |
                          map->fill << 15 | map->promotion << 17);
    for (index = 0; index + 1 < map->rank; ++index) {
        words[3 + index] = (uint32_t)((uint64_t)strides[index] >> 4);
        words[7] |= (uint32_t)((uint64_t)strides[index] >> 36 & 0xF) << 4 * index;
    }
    for (index = 0; index < map->rank; ++index) {
        words[8 + index] = (uint32_t)extents[index] - 1;
        words[13] |= ((uint32_t)map->element_strides[index] - 1) << 3 * index;
        if (index > 0) words[14] |= ((uint32_t)map->box[index] - 1) << 8 * (index - 1);
    }
    words[13] |= ((uint32_t)map->box[0] - 1) << 24;
    memcpy(place, words, sizeof words);
}

static fusekit_status fk_encode(const fk_kernel *kernel, const fk_part *part, const int64_t *variables,
                                unsigned char *place, fusekit_error *error) {
    const fk_map *map = part->map;
    int64_t extents[FK_MOST_RANK] = {0}, strides[FK_MOST_RANK] = {0}, at;
    int index, known = fk_evaluate(&map->address, variables, 1, &at);
    fusekit_status status;
    for (index = 0; index < map->rank && known; ++index)
        known = fk_evaluate(&map->dims[index], variables, (int)map->raw, &extents[index]);
    for (index = 0; index + 1 < map->rank && known; ++index)
        known = fk_evaluate(&map->strides[index], variables, (int)map->raw, &strides[index]);
    if (!known) return fk_no_value(kernel->record, part->name, error);
    if (map->raw) {
        fk_write_map(map, (uint64_t)at, extents, strides, place);
        return FUSEKIT_OK;
    }
    status = fk_check_map(kernel->record, part, extents, strides, error);
    return status == FUSEKIT_OK ? fk_ask_encoder(kernel, map, (uint64_t)at, extents, strides, place, error) : status;
}

/* ---- Parameters. */

/* Bytes to the end of the last parameter. */
static size_t fk_space(const fk_node *node) {
    const fk_parameter *last = node->parameters + node->parameter_count;
    return node->parameter_count > 0 ? (size_t)(last[-1].offset + last[-1].size) : 0;
}

static fusekit_status fk_integer(const fk_record *record, const fk_part *part, const int64_t *variables,
                                 unsigned char *place, fusekit_error *error) {
    const int bits = (int)part->size * 8;
    int64_t value, most = part->kind == FK_INT || bits == 64 ? INT64_MAX >> (64 - bits) : ((int64_t)1 << bits) - 1;
    fusekit_status status = fk_value(record, &part->value, variables, part->name, &value, error);
    if (status != FUSEKIT_OK) return status;
    if (value > most || value < (part->kind == FK_INT ? -most - 1 : 0))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is %lld; it does not fit into %d bits%s", record->name,
                       part->name, (long long)value, bits, part->kind == FK_INT ? "" : " without sign");
    memcpy(place, &value, (size_t)part->size); /* little-endian, as every host of CUDA's is */
    return FUSEKIT_OK;
}

/* The value of every part of a node's parameters. Of the stream's own memory it is what is added to the address, which is
 * known only when it is launched. */
static fusekit_status fk_parts(const fk_kernel *kernel, const fk_node *node, const fk_call *call,
                               const int64_t *variables, unsigned char *space, fusekit_error *error) {
    int index;
    for (index = 0; index < node->part_count; ++index) {
        const fk_part *part = &node->parts[index];
        unsigned char *place = space + part->offset;
        fusekit_status status = FUSEKIT_OK;
        int64_t shift = 0;
        uint64_t address;
        float number;
        switch ((fk_kind)part->kind) {
        case FK_TENSOR_MAP: status = fk_encode(kernel, part, variables, place, error); break;
        case FK_POINTER:
        case FK_WORKSPACE:
        case FK_SCRATCH:
            if (part->value.count > 0 && !fk_evaluate(&part->value, variables, 1, &shift))
                return fk_no_value(kernel->record, part->name, error);
            address = (part->kind == FK_POINTER ? call->addresses[part->argument] : 0) + (uint64_t)shift;
            memcpy(place, &address, sizeof address);
            break;
        case FK_INT:
        case FK_UINT: status = fk_integer(kernel->record, part, variables, place, error); break;
        case FK_FLOAT:
            number = fk_evaluate_float(&part->number, call->floats);
            memcpy(place, &number, sizeof number);
            break;
        }
        if (status != FUSEKIT_OK) return status;
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_grid(const fk_record *record, const fk_node *node, const int64_t *variables, unsigned grid[3],
                              fusekit_error *error) {
    int axis;
    for (axis = 0; axis < 3; ++axis) {
        int64_t blocks, limit = axis == 0 ? INT32_MAX : 65535;
        fusekit_status status = fk_value(record, &node->grid[axis], variables, "the grid", &blocks, error);
        if (status != FUSEKIT_OK) return status;
        if (blocks < 1 || blocks > limit || blocks % node->cluster[axis] != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: grid %c is %lld blocks; it must be 1 to %lld, a multiple of %lld (the cluster)",
                           record->name, "xyz"[axis], (long long)blocks, (long long)limit,
                           (long long)node->cluster[axis]);
        grid[axis] = (unsigned)blocks;
    }
    return FUSEKIT_OK;
}

static fk_attribute *fk_add_attribute(fk_attribute *attributes, unsigned *count, int id) {
    fk_attribute *attribute = &attributes[(*count)++];
    memset(attribute, 0, sizeof *attribute);
    attribute->id = id;
    return attribute;
}

/* The launch attributes of a node, three at most; how many. */
static unsigned fk_attributes(const fk_kernel *kernel, const fk_node *node, fk_attribute *attributes) {
    unsigned count = 0;
    int axis;
    if (kernel->major >= 9) {
        fk_attribute *cluster = fk_add_attribute(attributes, &count, FK_LAUNCH_CLUSTER);
        for (axis = 0; axis < 3; ++axis) cluster->value.dims[axis] = (unsigned)node->cluster[axis];
    }
    if (node->cooperative) fk_add_attribute(attributes, &count, FK_LAUNCH_COOPERATIVE)->value.number = 1;
    if (node->serialization) fk_add_attribute(attributes, &count, FK_LAUNCH_SERIALIZATION)->value.number = 1;
    return count;
}

static void fk_configure(const fk_node *node, const unsigned *grid, const fk_attribute *attributes, unsigned count,
                         void *stream, fk_config *config) {
    int axis;
    memset(config, 0, sizeof *config);
    memcpy(config->grid, grid, sizeof config->grid);
    for (axis = 0; axis < 3; ++axis) config->block[axis] = (unsigned)node->block[axis];
    config->shared = (unsigned)node->shared;
    config->stream = stream;
    config->attributes = (fk_attribute *)attributes; /* the driver only reads them */
    config->count = count;
}

static fusekit_status fk_constraints(const fk_record *record, const fk_constraint *constraints, int64_t count,
                                     const int64_t *variables, fusekit_error *error) {
    char dims[160] = "";
    size_t length = 0;
    int index, dim;
    for (index = 0; index < count; ++index) {
        const fk_constraint *constraint = &constraints[index];
        int64_t value = 0;
        fusekit_status status;
        status = fk_value(record, &constraint->expression, variables, "a constraint", &value, error);
        if (status != FUSEKIT_OK) return status;
        if (value == 0) continue;
        for (dim = 0; dim < record->dim_count && length < sizeof dims; ++dim)
            length += (size_t)snprintf(dims + length, sizeof dims - length, "%s%s = %lld", dim ? ", " : "",
                                       record->dims[dim].name, (long long)variables[FK_FIRST_DIM + dim]);
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s; got %s", record->name, constraint->message, dims);
    }
    return FUSEKIT_OK;
}

/* Checks of a call; dims, strides and addresses go into `variables`, whether there is nothing to do into `skip`. */
static fusekit_status fk_check(const fk_kernel *kernel, const fk_call *call, int64_t *variables, int *skip,
                               fusekit_error *error) {
    const fk_record *record = kernel->record;
    fk_extent extents[FK_MOST_TENSORS];
    const int64_t *strides = call->strides;
    int index;
    fusekit_status status = fk_check_dims(record, call, variables, error);
    for (index = 0; index < record->tensor_count && status == FUSEKIT_OK; ++index) {
        const fk_tensor *tensor = &record->tensors[index];
        status = fk_check_tensor(record, tensor, call->given == NULL ? NULL : &call->given[index], strides, variables,
                                 &extents[index], error);
        variables[record->first_address + index] = (int64_t)call->addresses[index];
        if (strides != NULL) strides += tensor->rank;
    }
    if (status == FUSEKIT_OK)
        status = fk_constraints(record, record->constraints, record->constraint_count, variables, error);
    if (status == FUSEKIT_OK && (call->margin < 0 || call->margin > INT32_MAX))
        status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: cluster_margin is %lld; it must be at least 0",
                         record->name, (long long)call->margin);
    if (status != FUSEKIT_OK) return status;
    for (index = 0; index < record->skip_count; ++index) *skip |= variables[record->skips[index].dim] == 0;
    return *skip ? FUSEKIT_OK : fk_check_places(record, call, extents, error);
}

/* Checks a call and packs it into `launch`. */
static fusekit_status fk_pack(const fk_kernel *kernel, const fk_call *call, fusekit_launch *launch,
                              fusekit_error *error) {
    const fk_record *record = kernel->record;
    int64_t variables[FK_MOST_VARIABLES];
    int64_t index;
    fusekit_status status;
    variables[FK_SM_COUNT] = kernel->sm_count;
    variables[FK_CLUSTER_MARGIN] = call->margin;
    variables[FK_ACTIVE_CLUSTERS] = kernel->active_clusters;
    for (index = record->first_integer; index < record->first_value; ++index)
        variables[index] = call->integers[index - record->first_integer];
    status = fk_check(kernel, call, variables, &launch->skip, error);
    if (status != FUSEKIT_OK) return status;
    if (launch->skip) return fk_ok(error);
    for (index = 0; index < record->value_count && status == FUSEKIT_OK; ++index)
        status = fk_value(record, &record->values[index].expression, variables, "its launch",
                          &variables[record->first_value + index], error);
    if (status == FUSEKIT_OK)
        status = fk_constraints(record, record->late_constraints, record->late_constraint_count, variables, error);
    if (status == FUSEKIT_OK && record->scratch.count > 0)
        status = fk_value(record, &record->scratch, variables, "its scratch", &launch->scratch, error);
    if (status == FUSEKIT_OK && launch->scratch > (int64_t)1 << 57)
        status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: it needs %lld bytes of scratch; no device has so many",
                         record->name, (long long)launch->scratch);
    for (index = 0; index < record->node_count && status == FUSEKIT_OK; ++index) {
        fk_packed *packed = &launch->nodes[index];
        status = fk_grid(record, &record->nodes[index], variables, packed->grid, error);
        if (status == FUSEKIT_OK)
            status = fk_parts(kernel, &record->nodes[index], call, variables, packed->space, error);
        packed->attribute_count = fk_attributes(kernel, &record->nodes[index], packed->attributes);
        if (call->has_priority)
            fk_add_attribute(packed->attributes, &packed->attribute_count, FK_LAUNCH_PRIORITY)->value.number = call->priority;
    }
    return status == FUSEKIT_OK ? fk_ok(error) : status;
}

/* Memory for a launch and all that it points to. */
static fusekit_launch *fk_new_launch(const fk_kernel *kernel) {
    const fk_record *record = kernel->record;
    size_t size = sizeof(fusekit_launch) + (size_t)record->node_count * sizeof(fk_packed);
    fusekit_launch *launch;
    unsigned char *at;
    int index;
    for (index = 0; index < record->node_count; ++index) size += fk_space(&record->nodes[index]);
    launch = (fusekit_launch *)calloc(1, size);
    if (launch == NULL) return NULL;
    launch->kernel = kernel;
    launch->nodes = (fk_packed *)(launch + 1);
    at = (unsigned char *)(launch->nodes + record->node_count);
    for (index = 0; index < record->node_count; ++index) {
        launch->nodes[index].space = at;
        at += fk_space(&record->nodes[index]);
    }
    return launch;
}

/* A node's parameters with the stream's own memory in them, in `space`: a launch may run in two streams at once, so it
 * stays as it is. */
static void fk_own_parameters(const fk_node *node, const fk_packed *packed, const unsigned long long memory[2],
                              unsigned char *space) {
    uint64_t address;
    int index;
    memcpy(space, packed->space, fk_space(node));
    for (index = 0; index < node->part_count; ++index) {
        const fk_part *part = &node->parts[index];
        if (part->kind != FK_WORKSPACE && part->kind != FK_SCRATCH) continue;
        memcpy(&address, space + part->offset, sizeof address);
        address += memory[part->kind == FK_SCRATCH];
        memcpy(space + part->offset, &address, sizeof address);
    }
}

/* Queues the nodes from `next` on, which is then the first that is not queued; `inside`: with the kernel's context current.
 * Memory: of the stream's own, 0 where there is none. */
static int fk_queue(const fusekit_launch *launch, void *stream, const unsigned long long memory[2], int inside,
                    int *next) {
    const fk_kernel *kernel = launch->kernel;
    unsigned char space[FK_MOST_SPACE];
    void *before, *pointers[FK_MOST_PARAMETERS];
    int result = inside ? kernel->driver->push(kernel->context) : 0, pushed = inside && result == 0;
    while (result == 0 && *next < kernel->record->node_count) {
        const fk_node *node = &kernel->record->nodes[*next];
        const fk_packed *packed = &launch->nodes[*next];
        unsigned char *values = kernel->workspaces == NULL ? packed->space : space;
        fk_config config;
        int index;
        if (kernel->workspaces != NULL) fk_own_parameters(node, packed, memory, space);
        for (index = 0; index < node->parameter_count; ++index)
            pointers[index] = values + node->parameters[index].offset;
        fk_configure(node, packed->grid, packed->attributes, packed->attribute_count, stream, &config);
        result = kernel->driver->launch(&config, kernel->functions[*next], pointers, NULL);
        if (result == 0) ++*next;
    }
    if (pushed) kernel->driver->pop(&before);
    return result;
}

fusekit_status fusekit_launch_run(const fusekit_launch *launch, void *stream, fusekit_error *error) {
    const fk_kernel *kernel = launch->kernel;
    const fusekit_driver *driver = kernel->driver;
    void *current = kernel->context;
    unsigned long long memory[2] = {0, 0};
    int result = 0, own = (uintptr_t)stream > FK_PER_THREAD, next = 0;
    if (launch->skip) return fk_ok(error);
    if (kernel->workspaces != NULL) {
        fusekit_status status = FUSEKIT_OK;
        if (kernel->workspaces->stocks != NULL) status = fk_workspace(kernel->workspaces, stream, &memory[0], error);
        if (status == FUSEKIT_OK && kernel->record->scratch.count > 0)
            status = fk_scratch(kernel->workspaces, stream, launch->scratch, &memory[1], error);
        if (status != FUSEKIT_OK) return status;
    }
    /* A stream knows its context; for the default streams (0, 1, 2) the driver takes the current one. */
    if (!own) result = driver->current(&current);
    if (result == 0) result = fk_queue(launch, stream, memory, current != kernel->context, &next);
    /* Another device's context may be current, and be why the driver refused. */
    if (own && (result == FK_INVALID_CONTEXT || result == FK_INVALID_HANDLE) && driver->current(&current) == 0 &&
        current != kernel->context)
        result = fk_queue(launch, stream, memory, 1, &next);
    return result == 0 ? fk_ok(error) : fk_cuda(driver, error, result, kernel->record->name, "cuLaunchKernelEx");
}

void fusekit_launch_free(fusekit_launch *launch) { free(launch); }

static fusekit_status fk_bind(const fk_kernel *kernel, const fk_call *call, fusekit_launch **made,
                              fusekit_error *error) {
    fusekit_launch *launch = fk_new_launch(kernel);
    fusekit_status status;
    *made = NULL;
    if (launch == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a launch", kernel->record->name);
    status = fk_pack(kernel, call, launch, error);
    if (status == FUSEKIT_OK)
        *made = launch;
    else
        free(launch);
    return status;
}

static fusekit_status fk_launch(const fk_kernel *kernel, const fk_call *call, void *stream, fusekit_error *error) {
    fusekit_launch *launch;
    fusekit_status status = fk_bind(kernel, call, &launch, error);
    if (status != FUSEKIT_OK) return status;
    status = fusekit_launch_run(launch, stream, error);
    free(launch);
    return status;
}

/* ---- Loading. */

fusekit_status fusekit_driver_open_with(fusekit_lookup lookup, void *user, fusekit_driver **made,
                                        fusekit_error *error) {
    fusekit_driver *driver = (fusekit_driver *)calloc(1, sizeof *driver);
    int version = 0, result;
    *made = NULL;
    if (driver == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "no memory for the driver's functions");
#define FK_FIND(name, symbol, arguments)                                                                               \
    {                                                                                                                  \
        void *found = lookup(symbol, user);                                                                            \
        if (found == NULL) {                                                                                           \
            free(driver);                                                                                              \
            return fk_fail(error, FUSEKIT_NO_DRIVER, "the CUDA driver has no %s; one for CUDA 12.4 or newer is needed", \
                           symbol);                                                                                    \
        }                                                                                                              \
        memcpy(&driver->name, &found, sizeof found);                                                                   \
    }
    FK_API(FK_FIND)
#undef FK_FIND
    result = driver->version(&version);
    if (result == 0 && version < FK_MINIMUM_DRIVER) {
        free(driver);
        return fk_fail(error, FUSEKIT_NO_DRIVER, "the CUDA driver supports CUDA %d.%d; 12.4 or newer is needed",
                       version / 1000, version % 1000 / 10);
    }
    driver->cuda = version;
    if (result == 0) result = driver->init(0);
    if (result != 0) {
        fk_cuda(driver, error, result, "the driver", "cuInit");
        free(driver);
        return FUSEKIT_CUDA_ERROR;
    }
    *made = driver;
    return fk_ok(error);
}

static void *fk_symbol(const char *symbol, void *handle) { return dlsym(handle, symbol); }

fusekit_status fusekit_driver_open(fusekit_driver **made, fusekit_error *error) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    fusekit_status status;
    *made = NULL;
    if (handle == NULL) {
        const char *why = dlerror();
        return fk_fail(error, FUSEKIT_NO_DRIVER, "no NVIDIA driver: %s", why == NULL ? "libcuda.so.1" : why);
    }
    status = fusekit_driver_open_with(fk_symbol, handle, made, error);
    if (status == FUSEKIT_OK)
        (*made)->handle = handle;
    else
        dlclose(handle);
    return status;
}

void fusekit_driver_close(fusekit_driver *driver) {
    if (driver == NULL) return;
    if (driver->handle != NULL) dlclose(driver->handle);
    free(driver);
}

static int fk_attribute_of(const fusekit_driver *driver, int attribute, int device, int *result) {
    int value = 0;
    if (*result == 0) *result = driver->device_attribute(&value, attribute, device);
    return value;
}

/* Why nothing may be loaded now, or 0: this thread captures a stream, or a blocking stream of the device is captured.
 * Whether an event is done is what the driver refuses to say while this thread captures, unless as relaxed. */
static int fk_capturing(const fusekit_driver *driver) {
    void *event;
    int capturing, result = driver->stream_capturing((void *)(uintptr_t)FK_LEGACY, &capturing);
    if (result == 0) result = driver->event_create(&event, 0);
    if (result == 0) {
        result = driver->event_query(event);
        driver->event_destroy(event);
    }
    return result;
}

static fusekit_status fk_open_cubin(fk_kernel *kernel, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const fk_source *source = kernel->source;
    const fk_record *record = kernel->record;
    int index, result;
    if (source->cubin_size > FK_ELF_ABI && source->cubin[FK_ELF_ABI] >= 8 && driver->cuda < FK_CUDA_13)
        return fk_fail(error, FUSEKIT_NO_DRIVER,
                       "%s: the CUDA driver supports CUDA %d.%d; the cubin is of CUDA 13's format; update the driver",
                       record->name, driver->cuda / 1000, driver->cuda % 1000 / 10);
    result = driver->library_load(&kernel->library, source->cubin, NULL, NULL, 0, NULL, NULL, 0);
    for (index = 0; index < record->node_count && result == 0; ++index)
        result = driver->library_kernel(&kernel->kernels[index], kernel->library, record->nodes[index].symbol);
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, record->name, "loading the cubin");
}

/* The driver's own account of a node's parameters against the record's. */
static fusekit_status fk_check_cubin(const fk_kernel *kernel, int64_t at, fusekit_error *error) {
    const fk_record *record = kernel->record;
    const fk_node *node = &record->nodes[at];
    int index;
    for (index = 0; index <= node->parameter_count; ++index) {
        size_t offset = 0, size = 0;
        int result = kernel->driver->kernel_parameter(kernel->kernels[at], (size_t)index, &offset, &size);
        if (index == node->parameter_count) {
            if (result == FK_INVALID_VALUE) return FUSEKIT_OK;
            return fk_fail(error, FUSEKIT_MISMATCH, "%s: the cubin has more than the record's %d parameters",
                           record->name, index);
        }
        if (result == FK_INVALID_VALUE)
            return fk_fail(error, FUSEKIT_MISMATCH, "%s: the cubin has %d parameters, the record %d", record->name, index,
                           (int)node->parameter_count);
        if (result != 0) return fk_cuda(kernel->driver, error, result, record->name, "cuKernelGetParamInfo");
        if (offset != (size_t)node->parameters[index].offset || size != (size_t)node->parameters[index].size)
            return fk_fail(error, FUSEKIT_MISMATCH, "%s: parameter %s is %d+%d in the record and %u+%u in the cubin",
                           record->name, node->parameters[index].name, (int)node->parameters[index].offset,
                           (int)node->parameters[index].size, (unsigned)offset, (unsigned)size);
    }
    return FUSEKIT_OK;
}

/* The function of a node, its attributes set. */
static fusekit_status fk_take_function(fk_kernel *kernel, int64_t at, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const fk_node *node = &kernel->record->nodes[at];
    void *own = kernel->kernels[at];
    int device = kernel->device, result = driver->kernel_attribute(FK_FUNCTION_SHARED, (int)node->shared, own, device);
    if (result == 0 && node->non_portable_cluster)
        result = driver->kernel_attribute(FK_FUNCTION_NON_PORTABLE_CLUSTER, 1, own, device);
    if (result == 0 && node->carveout >= 0)
        result = driver->kernel_attribute(FK_FUNCTION_CARVEOUT, (int)node->carveout, own, device);
    if (result != 0) return fk_cuda(driver, error, result, kernel->record->name, "cuKernelSetAttribute");
    result = driver->kernel_function(&kernel->functions[at], own);
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, kernel->record->name, "cuKernelGetFunction");
}

/* How many clusters of the last node the device runs at a time. */
static fusekit_status fk_ask_clusters(fk_kernel *kernel, fusekit_error *error) {
    const fk_record *record = kernel->record;
    const fk_node *last = &record->nodes[record->node_count - 1];
    fk_attribute attributes[4];
    fk_config config;
    unsigned cluster[3];
    int axis, result;
    for (axis = 0; axis < 3; ++axis) cluster[axis] = (unsigned)last->cluster[axis];
    fk_configure(last, cluster, attributes, fk_attributes(kernel, last, attributes), NULL, &config);
    result = kernel->driver->active_clusters(&kernel->active_clusters, kernel->functions[record->node_count - 1], &config);
    return result == 0 ? FUSEKIT_OK
                       : fk_cuda(kernel->driver, error, result, record->name, "cuOccupancyMaxActiveClusters");
}

static fusekit_status fk_take_memory(fk_kernel *kernel, fusekit_error *error) {
    const fk_record *record = kernel->record;
    int64_t workspace, variables[FK_MOST_VARIABLES] = {0};
    variables[FK_SM_COUNT] = kernel->sm_count;
    if (!fk_evaluate(&record->workspace, variables, 0, &workspace) || workspace < 0) workspace = 0;
    if (workspace == 0 && record->scratch.count == 0) return FUSEKIT_OK;
    return fk_make_workspaces(kernel->driver, record->name, kernel->context, workspace, (int)record->workspace_zeroed,
                              &kernel->workspaces, error);
}

static fusekit_status fk_open_kernel(fk_kernel *kernel, fusekit_error *error) {
    const fk_record *record = kernel->record;
    fusekit_status status = fk_open_cubin(kernel, error);
    int index;
    for (index = 0; index < record->node_count && status == FUSEKIT_OK; ++index) {
        status = fk_check_cubin(kernel, index, error);
        if (status == FUSEKIT_OK) status = fk_take_function(kernel, index, error);
    }
    if (status == FUSEKIT_OK && record->asks_clusters) status = fk_ask_clusters(kernel, error);
    return status == FUSEKIT_OK ? fk_take_memory(kernel, error) : status;
}

static fusekit_status fk_unload(fk_kernel *kernel, fusekit_error *error) {
    const fusekit_driver *driver;
    fusekit_status status;
    int result = 0, other, mode;
    if (kernel == NULL) return fk_ok(error);
    driver = kernel->driver;
    if (kernel->workspaces != NULL) result = fk_free_workspaces(kernel->workspaces);
    if (kernel->library != NULL) {
        other = fk_apart(driver, FK_THREAD_LOCAL, &mode);
        if (other != 0 || (other = driver->library_unload(kernel->library)) != 0) result = other;
        driver->capture_mode(&mode);
    }
    if (kernel->context != NULL && (other = driver->release(kernel->device)) != 0) result = other;
    status = result == 0 ? fk_ok(error) : fk_cuda(driver, error, result, kernel->record->name, "unloading");
    free((void *)(uintptr_t)kernel->record);
    free(kernel);
    return status;
}

/* The device of a kernel, whose context this thread then has: parameters are told only inside one. */
static fusekit_status fk_open_device(fk_kernel *kernel, int ordinal, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const fk_record *record = kernel->record;
    int minor, result = driver->device_get(&kernel->device, ordinal);
    if (result != 0) return fk_cuda(driver, error, result, record->name, "cuDeviceGet");
    kernel->major = fk_attribute_of(driver, FK_DEVICE_MAJOR, kernel->device, &result);
    minor = fk_attribute_of(driver, FK_DEVICE_MINOR, kernel->device, &result);
    kernel->sm_count = fk_attribute_of(driver, FK_DEVICE_SM_COUNT, kernel->device, &result);
    if (result == 0 &&
        (kernel->major != record->major || minor < record->minor || (record->exact && minor != record->minor)))
        return fk_fail(error, FUSEKIT_WRONG_ARCH, "%s is for %s; device %d is of capability %d.%d", record->name,
                       record->arch, ordinal, kernel->major, minor);
    if (result == 0) result = driver->retain(&kernel->context, kernel->device);
    if (result == 0) result = driver->push(kernel->context);
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, record->name, "opening the device");
}

/* The cubin in the context that is current. */
static fusekit_status fk_open_apart(fk_kernel *kernel, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const char *name = kernel->record->name;
    fusekit_status status;
    int mode, result = fk_apart(driver, FK_THREAD_LOCAL, &mode);
    if (result != 0) return fk_cuda(driver, error, result, name, "cuThreadExchangeStreamCaptureMode");
    result = fk_capturing(driver);
    status = result == 0 ? fk_open_kernel(kernel, error)
                         : fk_cuda(driver, error, result, name, "loading before the end of a stream's capture");
    driver->capture_mode(&mode);
    return status;
}

/* title: what the kernel is called until its record is read. */
static fusekit_status fk_load(const fusekit_driver *driver, const fk_source *source, const char *title, int ordinal,
                              fk_kernel **made, fusekit_error *error) {
    fk_kernel *kernel = (fk_kernel *)calloc(1, sizeof *kernel);
    fusekit_status status;
    void *before;
    *made = NULL;
    if (kernel == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", title);
    kernel->driver = driver;
    kernel->source = source;
    status = fk_read_record(source, title, &kernel->record, error);
    if (status == FUSEKIT_OK) status = fk_open_device(kernel, ordinal, error);
    if (status == FUSEKIT_OK) {
        status = fk_open_apart(kernel, error);
        driver->pop(&before);
    }
    if (status != FUSEKIT_OK) {
        fk_unload(kernel, NULL);
        return status;
    }
    *made = kernel;
    return fk_ok(error);
}

/* ---- Cubins, as little-endian words. */

/* 64 bytes, SHA-256 cc9d6fac1f314ccbd3003c6a0e788a426958609b1312422d8fed40a08ee0bb51 */
static const uint64_t fk_cubin_0[] = {
0x464c457fu,0x0u,0x0u,0x0u,0x0u,0x0u,
0x0u,0x0u
};

/* ---- f/k@v */

/* 1528 bytes, SHA-256 5532c32991ffee4004e93b2011d975c020bcf54a28bdea008b405014e5fb37fc */
static const uint64_t fk_words_0[] = {
0x5u,0x6u,0x9u,0x0u,0x1u,0x0u,
0x0u,0x0u,0x5u,0x9u,0xbu,0xbu,
0xbu,0x0u,0x1u,0x0u,0x0u,0x0u,
0x0u,0x2u,0x0u,0x2u,0x0u,0x2u,
0x0u,0x0u,0x0u,0x0u,0x0u,0x0u,
0x0u,0x0u,0x0u,0x1u,0x76406b2f66u,0x6130395f6d73u,
0x0u,0x0u,0x1u,0x1u,0x0u,0x7fffffffu,
0x1u,0x1u,0x0u,0x7fffffffu,0x4du,0x4bu,
0x1u,0x0u,0x2u,0x2u,0x10u,0x1u,
0x1u,0x5u,0x0u,0x1u,0x0u,0x1u,
0x0u,0x0u,0x0u,0x0u,0x0u,0x0u,
0x0u,0x0u,0x0u,0x1u,0x0u,0x0u,
0x0u,0x0u,0x0u,0x0u,0x4u,0x0u,
0x2u,0x2u,0x10u,0x1u,0x1u,0x7u,
0x0u,0x1u,0x0u,0x1u,0x0u,0x0u,
0x0u,0x0u,0x0u,0x0u,0x0u,0x0u,
0x0u,0x1u,0x0u,0x0u,0x0u,0x0u,
0x0u,0x0u,0x78u,0x1u,0x3u,0x1u,
0x4u,0x0u,0x1u,0x78696e75u,0x1u,0x3u,
0x1u,0x4u,0x0u,0x1u,0x1u,0x9u,
0x0u,0x0u,0x0u,0x4u,0x9u,0x1u,
0x0u,0x0u,0x78u,0x78696e75u,0x6u,0x0u,
0x2u,0x0u,0x2u,0x0u,0x1u,0x0u,
0x1u,0x0u,0x1u,0x80u,0x1u,0x1u,
0x1u,0x1u,0x1u,0x0u,0x0u,0x0u,
0x0u,0xffffffffffffffffu,0x6c656e72656bu,0x2u,0x0u,0x8u,
0x2u,0x8u,0x8u,0x3070u,0x3170u,0x2u,
0x1u,0x0u,0x8u,0x0u,0x0u,0x0u,
0x0u,0x0u,0x0u,0x0u,0x2u,0x1u,
0x8u,0x8u,0x1u,0x0u,0x0u,0x0u,
0x0u,0x0u,0x0u,0x3070u,0x3170u,0x0u,
0x1u,0x0u,0x1u,0x0u,0x1u
};

static const char fk_name_0[] = "f/k@v";
static const fk_source fk_source_0 = {(const int64_t *)fk_words_0, 191,
    (const unsigned char *)fk_cubin_0, 64};

typedef struct {
    int64_t dims[2], strides[4], integers[1];
    uint64_t addresses[2];
    float floats[1];
} fk_values_0;

static fusekit_status fk_read_0(const fk_kernel *kernel, const fusekit_f_k_args *args, fk_values_0 *values, fk_call *call,
    fusekit_error *error) {
    if (kernel == NULL || kernel->source != &fk_source_0)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: the handle is of no such kernel; load it first", fk_name_0);
    memset(values, 0, sizeof *values);
    values->dims[0] = args->m;
    values->dims[1] = args->k;
    values->addresses[0] = (uint64_t)(uintptr_t)args->x;
    values->strides[0] = args->x_stride0;
    values->addresses[1] = (uint64_t)(uintptr_t)args->unix_;
    values->strides[2] = args->unix__stride0;
    call->dims = values->dims;
    call->strides = values->strides;
    call->given = NULL;
    call->addresses = values->addresses;
    call->integers = values->integers;
    call->floats = values->floats;
    call->margin = args->cluster_margin;
    call->has_priority = args->has_priority;
    call->priority = args->priority;
    return FUSEKIT_OK;
}

fusekit_f_k_args fusekit_f_k_defaults(void) {
    fusekit_f_k_args args;
    memset(&args, 0, sizeof args);
    return args;
}

fusekit_status fusekit_f_k_load(const fusekit_driver *driver, int device, fusekit_f_k **kernel, fusekit_error *error) {
    fk_kernel *made;
    fusekit_status status = fk_load(driver, &fk_source_0, fk_name_0, device, &made, error);
    *kernel = (fusekit_f_k *)made;
    return status;
}

fusekit_status fusekit_f_k_launch(const fusekit_f_k *kernel, const fusekit_f_k_args *args, void *stream, fusekit_error *error) {
    fk_values_0 values;
    fk_call call;
    fusekit_status status = fk_read_0((const fk_kernel *)kernel, args, &values, &call, error);
    return status == FUSEKIT_OK ? fk_launch((const fk_kernel *)kernel, &call, stream, error) : status;
}

fusekit_status fusekit_f_k_bind(const fusekit_f_k *kernel, const fusekit_f_k_args *args, fusekit_launch **launch, fusekit_error *error) {
    fk_values_0 values;
    fk_call call;
    fusekit_status status = fk_read_0((const fk_kernel *)kernel, args, &values, &call, error);
    *launch = NULL;
    return status == FUSEKIT_OK ? fk_bind((const fk_kernel *)kernel, &call, launch, error) : status;
}

fusekit_status fusekit_f_k_unload(fusekit_f_k *kernel, fusekit_error *error) { return fk_unload((fk_kernel *)kernel, error); }
