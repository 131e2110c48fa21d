/* A C11 program that runs GPT-OSS's fc1 without Python, fusekit or the CUDA toolkit.
 *
 *     fusekit export --lang c build gpt-oss-20b/fc1-fwd --prefix moe
 *     gcc -std=c11 -O2 -Ibuild tests/examples/c/fc1.c build/moe.c -ldl -o fc1
 *     ./fc1 FOLDER E M H I
 *
 * FOLDER holds x.bin [M, H], w.bin [E, 2I, H], bias.bin [E, 2I] (bf16) and offsets.bin [E] (int32); y.bin [M, I] and
 * preactivation.bin [M, 2I] are written there. */
#include "moe.h"

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

int main(int count, char **words) {
    moe_driver *loader = NULL;
    moe_gpt_oss_20b_fc1_fwd *kernel = NULL;
    moe_gpt_oss_20b_fc1_fwd_args args = moe_gpt_oss_20b_fc1_fwd_defaults();
    moe_error error;
    driver api;
    void *context, *stream;
    unsigned long long x, w, bias, offsets, y, preactivation;
    size_t e, m, h, i;
    int status = 1;
    if (count != 6) {
        fprintf(stderr, "usage: fc1 FOLDER E M H I\n");
        return 2;
    }
    e = strtoul(words[2], NULL, 10), m = strtoul(words[3], NULL, 10);
    h = strtoul(words[4], NULL, 10), i = strtoul(words[5], NULL, 10);
    if (failed(moe_driver_open(&loader, &error), &error)) return 1;
    if (!find(&api) || api.retain(&context, 0) != 0 || api.set_current(context) != 0 ||
        api.stream_create(&stream, 1) != 0)
        return 1;
    if (failed(moe_gpt_oss_20b_fc1_fwd_load(loader, 0, &kernel, &error), &error)) return 1;
    x = load(&api, words[1], "x", 2 * m * h, 1);
    w = load(&api, words[1], "w", 2 * e * 2 * i * h, 1);
    bias = load(&api, words[1], "bias", 2 * e * 2 * i, 1);
    offsets = load(&api, words[1], "offsets", 4 * e, 1);
    y = load(&api, words[1], "y", 2 * m * i, 0);
    preactivation = load(&api, words[1], "preactivation", 2 * m * 2 * i, 0);
    args.m = (int64_t)m, args.e = (int64_t)e, args.k = (int64_t)h, args.i = (int64_t)i;
    args.x = (const void *)(uintptr_t)x;
    args.w = (const void *)(uintptr_t)w;
    args.bias = (const void *)(uintptr_t)bias;
    args.offsets = (const void *)(uintptr_t)offsets;
    args.y = (void *)(uintptr_t)y;
    args.preactivation = (void *)(uintptr_t)preactivation;
    if (!failed(moe_gpt_oss_20b_fc1_fwd_launch(kernel, &args, stream, &error), &error) &&
        api.stream_wait(stream) == 0 && save(&api, words[1], "y", y, 2 * m * i) &&
        save(&api, words[1], "preactivation", preactivation, 2 * m * 2 * i))
        status = 0;
    /* A wrong argument is refused on the host, in words. */
    args.k -= 1;
    if (moe_gpt_oss_20b_fc1_fwd_launch(kernel, &args, stream, &error) != MOE_INVALID_ARGUMENT) status = 1;
    printf("refused: %s\n", error.text);
    api.release(x), api.release(w), api.release(bias), api.release(offsets), api.release(y), api.release(preactivation);
    if (failed(moe_gpt_oss_20b_fc1_fwd_unload(kernel, &error), &error)) status = 1;
    moe_driver_close(loader);
    return status;
}
