/* Device helpers of both C programs next to this file: memory, a stream, files in and out. They
 * include the header that fusekit wrote first. */
#ifndef EXAMPLE_DEVICE_H
#define EXAMPLE_DEVICE_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The few driver functions that a program needs for itself. One with the CUDA toolkit includes cuda.h instead. */
typedef struct {
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    int (*allocate)(unsigned long long *address, size_t size);
    int (*release)(unsigned long long address);
    int (*upload)(unsigned long long to, const void *from, size_t size);
    int (*download)(void *to, unsigned long long from, size_t size);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_wait)(void *stream);
} driver;

static void *symbol(void *handle, const char *name) {
    void *found = dlsym(handle, name);
    if (found == NULL) fprintf(stderr, "libcuda has no %s\n", name);
    return found;
}

#define FIND(member, name)                                                                                             \
    do {                                                                                                               \
        void *found = symbol(handle, name);                                                                            \
        if (found == NULL) return 0;                                                                                   \
        memcpy(&api->member, &found, sizeof found);                                                                    \
    } while (0)

static int find(driver *api) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    if (handle == NULL) return 0;
    FIND(retain, "cuDevicePrimaryCtxRetain");
    FIND(set_current, "cuCtxSetCurrent");
    FIND(allocate, "cuMemAlloc_v2");
    FIND(release, "cuMemFree_v2");
    FIND(upload, "cuMemcpyHtoD_v2");
    FIND(download, "cuMemcpyDtoH_v2");
    FIND(stream_create, "cuStreamCreate");
    FIND(stream_wait, "cuStreamSynchronize");
    return 1;
}

/* Device memory of `size` bytes, with the file's contents if it is to be read. */
static unsigned long long load(const driver *api, const char *folder, const char *name, size_t size, int read) {
    unsigned long long address = 0;
    char path[4096];
    void *data = malloc(size);
    FILE *file;
    snprintf(path, sizeof path, "%s/%s.bin", folder, name);
    if (data == NULL || api->allocate(&address, size) != 0) {
        free(data);
        return 0;
    }
    memset(data, 0xFF, size);
    if (read) {
        file = fopen(path, "rb");
        if (file == NULL || fread(data, 1, size, file) != size) {
            fprintf(stderr, "%s does not hold %zu bytes\n", path, size);
            address = 0;
        }
        if (file != NULL) fclose(file);
    }
    if (address != 0 && api->upload(address, data, size) != 0) address = 0;
    free(data);
    return address;
}

static int save(const driver *api, const char *folder, const char *name, unsigned long long address, size_t size) {
    char path[4096];
    void *data = malloc(size);
    FILE *file;
    int done = 0;
    snprintf(path, sizeof path, "%s/%s.bin", folder, name);
    file = fopen(path, "wb");
    if (data != NULL && file != NULL && api->download(data, address, size) == 0)
        done = fwrite(data, 1, size, file) == size;
    if (file != NULL) fclose(file);
    free(data);
    return done;
}

static int failed(moe_status status, const moe_error *error) {
    if (status != MOE_OK) fprintf(stderr, "%s: %s\n", moe_status_text(status), error->text);
    return status != MOE_OK;
}

#endif
