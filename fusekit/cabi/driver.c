/* The launcher: expressions, checks, parameters, tensor maps, one driver call. The tables of the kernels follow
 * it. C11 and C++17. */
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
    FK_DEVICE_SHARED = 97, /* bytes of a block, at most */
    FK_FUNCTION_OWN_SHARED = 1,
    FK_FUNCTION_SHARED = 8,
    FK_FUNCTION_CARVEOUT = 9,
    FK_FUNCTION_NON_PORTABLE_CLUSTER = 14,
    FK_LAUNCH_COOPERATIVE = 2,
    FK_LAUNCH_CLUSTER = 4,
    FK_LAUNCH_SERIALIZATION = 6,
    FK_LAUNCH_PROGRAMMATIC_EVENT = 7,
    FK_LAUNCH_PRIORITY = 8,
    FK_LAUNCH_PREFERRED_CLUSTER = 11,
    FK_LAUNCH_COMPLETION_EVENT = 12,
    FK_MOST_ATTRIBUTES = 7,
    FK_LEGACY = 1, /* handles that name no stream of their own: the driver takes the current context for them */
    FK_PER_THREAD = 2,
    FK_ELF_ABI = 8,   /* where a cubin has EI_ABIVERSION */
    FK_FORMAT_13 = 8, /* from this one on, only drivers for CUDA 13 read it */
    FK_CUDA_13 = 13000,
    FK_MINIMUM_DRIVER = 12040 /* cuKernelGetParamInfo */
};

typedef struct { /* CUlaunchAttribute */
    int id;
    int padding;
    union {
        int number;
        unsigned dims[3];
        struct {
            int64_t handle;
            int flags, at_block_start;
        } event;
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
    X(kernel_fact, "cuKernelGetAttribute", (int *, int, void *, int))                                                  \
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
    X(event_record, "cuEventRecord", (void *, void *))                                                                 \
    X(stream_wait_event, "cuStreamWaitEvent", (void *, void *, unsigned))                                              \
    X(event_destroy, "cuEventDestroy_v2", (void *))

struct fusekit_driver {
    void *handle; /* of dlopen; NULL where the caller looked the functions up */
    int cuda;     /* 13000 for CUDA 13.0 */
#define FK_MEMBER(name, symbol, arguments) int(*name) arguments;
    FK_API(FK_MEMBER)
#undef FK_MEMBER
};
