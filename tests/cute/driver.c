/* What a host object calls of the DSL's runtime library: it notes the launches. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint64_t last[12];
static int count;

const uint64_t *last_launch(void) { return last; }
int launches(void) { return count; }

int _cudaLibraryLoadData(void **library, const void *data, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    *library = (void *)0x111;
    return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    *kernel = (void *)0x222;
    return 0;
}
int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 132 : 232448;
    return 0;
}
int _cudaFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { return *value = 0; }

typedef struct {
    unsigned grid[3], block[3];
    size_t shared;
    void *stream, *attributes;
    unsigned number;
} config;

/* Of the kernel `scaled`: two addresses, a float, an integer of 64 bits. */
int _cudaLaunchKernelEx(const config *launch, void *kernel, void **arguments) {
    for (int i = 0; i < 3; i++) {
        last[i] = launch->grid[i];
        last[3 + i] = launch->block[i];
    }
    last[6] = launch->shared;
    last[7] = (uint64_t)launch->stream;
    memcpy(&last[8], arguments[0], 8);
    memcpy(&last[9], arguments[1], 8);
    memcpy(&last[10], arguments[2], 4);
    memcpy(&last[11], arguments[3], 8);
    count++;
    return 0;
}
