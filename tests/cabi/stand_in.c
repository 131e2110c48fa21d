/* A stand-in for libcuda.so.1, for programs that link or open it: device memory is the host's, and a launch does nothing.
 * STAND_IN_KERNELS names a file with a line for each kernel: its symbol, then offset and size of each parameter. Where
 * STAND_IN_LOG names a file, each launch adds a line to it: symbol, grid, stream,
 * parameters in hexadecimal; and so does each allocation, its address. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_KERNELS = 256, MOST_PARAMETERS = 64 };

typedef struct {
    char symbol[128];
    int count, offset[MOST_PARAMETERS], size[MOST_PARAMETERS];
} kernel;

typedef struct { /* CUlaunchConfig, as far as it is read */
    unsigned grid[3], block[3], shared;
    void *stream;
} config;

static kernel kernels[MOST_KERNELS];
static int kernel_count;
static FILE *log_file;
static int context, *current;

int cuInit(unsigned flags) {
    const char *path = getenv("STAND_IN_KERNELS"), *log_path = getenv("STAND_IN_LOG");
    FILE *file = path == NULL ? NULL : fopen(path, "r");
    char line[4096], *at;
    (void)flags;
    if (log_path != NULL && log_file == NULL) log_file = fopen(log_path, "a");
    if (file == NULL || kernel_count > 0) return file == NULL ? 3 : 0;
    while (kernel_count < MOST_KERNELS && fgets(line, sizeof line, file) != NULL) {
        kernel *row = &kernels[kernel_count++];
        int used;
        sscanf(line, "%127s%n", row->symbol, &used);
        for (at = line + used; sscanf(at, "%d %d%n", &row->offset[row->count], &row->size[row->count], &used) == 2; at += used)
            ++row->count;
    }
    fclose(file);
    return 0;
}

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int status, const char **name) { (void)status; *name = "CUDA_ERROR_STAND_IN"; return 0; }
int cuGetErrorString(int status, const char **text) { (void)status; *text = "of the stand-in"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 2 ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **out, int device) { (void)device; *out = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxGetCurrent(void **out) { *out = current; return 0; }
int cuCtxSetCurrent(void *now) { current = now; return 0; }
int cuCtxEnablePeerAccess(void *other, unsigned flags) { (void)other, (void)flags; return 0; }
int cuCtxPushCurrent_v2(void *now) { current = now; return 0; }
int cuCtxPopCurrent_v2(void **out) { *out = current; return 0; }
int cuLibraryLoadData(void **library, const void *code, int *a, void **b, unsigned c, int *d, void **e, unsigned f) {
    (void)code, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    *library = &context;
    return 0;
}
int cuLibraryUnload(void *library) { (void)library; return 0; }
int cuLibraryGetKernel(void **out, void *library, const char *symbol) {
    int index;
    (void)library;
    for (index = 0; index < kernel_count; ++index)
        if (strcmp(kernels[index].symbol, symbol) == 0) {
            *out = &kernels[index];
            return 0;
        }
    return 500;
}
int cuKernelGetParamInfo(void *handle, size_t index, size_t *offset, size_t *size) {
    const kernel *row = handle;
    if (index >= (size_t)row->count) return 1;
    *offset = (size_t)row->offset[index];
    *size = (size_t)row->size[index];
    return 0;
}
int cuKernelSetAttribute(int attribute, int value, void *handle, int device) {
    (void)attribute, (void)value, (void)handle, (void)device;
    return 0;
}
int cuKernelGetAttribute(int *out, int attribute, void *handle, int device) {
    (void)attribute, (void)handle, (void)device;
    *out = 0;
    return 0;
}
int cuKernelGetFunction(void **function, void *handle) { *function = handle; return 0; }
int cuTensorMapEncodeTiled(void *map, int dtype, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                           const unsigned *box, const unsigned *steps, int a, int b, int c, int d) {
    (void)dtype, (void)strides, (void)box, (void)steps, (void)a, (void)b, (void)c, (void)d;
    memset(map, 0, 128);
    memcpy(map, &address, sizeof address);
    memcpy((char *)map + 8, dims, rank * sizeof *dims);
    return 0;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, const config *settings) {
    (void)function, (void)settings;
    *clusters = 66;
    return 0;
}
int cuLaunchKernelEx(const config *settings, void *function, void **parameters, void **extra) {
    const kernel *row = function;
    int index, byte;
    (void)extra;
    if (log_file == NULL) return 0;
    fprintf(log_file, "%s %u %u %u %lu ", row->symbol, settings->grid[0], settings->grid[1], settings->grid[2],
            (unsigned long)(uintptr_t)settings->stream);
    for (index = 0; index < row->count; ++index)
        for (byte = 0; byte < row->size[index]; ++byte) fprintf(log_file, "%02x", ((unsigned char *)parameters[index])[byte]);
    fprintf(log_file, "\n");
    fflush(log_file);
    return 0;
}
int cuMemAlloc_v2(unsigned long long *address, size_t size) {
    void *memory = aligned_alloc(1024, (size + 1023) / 1024 * 1024);
    *address = (uintptr_t)memory;
    if (log_file != NULL) fprintf(log_file, "allocate %llu\n", *address);
    return memory == NULL ? 2 : 0;
}
int cuMemFree_v2(unsigned long long address) { free((void *)(uintptr_t)address); return 0; }
int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t count, void *stream) {
    (void)stream;
    memset((void *)(uintptr_t)address, value, count);
    return 0;
}
int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t count) {
    return cuMemsetD8Async(address, value, count, NULL);
}
int cuMemsetD16_v2(unsigned long long address, unsigned short value, size_t count) {
    size_t index;
    for (index = 0; index < count; ++index) ((unsigned short *)(uintptr_t)address)[index] = value;
    return 0;
}
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) { memcpy(to, (void *)(uintptr_t)from, size); return 0; }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) {
    memcpy((void *)(uintptr_t)to, from, size);
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = &context; return 0; }
int cuStreamSynchronize(void *stream) { (void)stream; return 0; }
int cuStreamDestroy_v2(void *stream) { (void)stream; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { *mode = 0; return 0; }
int cuStreamIsCapturing(void *stream, int *capturing) { (void)stream; *capturing = 0; return 0; }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = &context; return 0; }
int cuEventQuery(void *event) { (void)event; return 0; }
int cuEventRecord(void *event, void *stream) { (void)event, (void)stream; return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream, (void)event, (void)flags; return 0; }
int cuEventDestroy_v2(void *event) { (void)event; return 0; }
