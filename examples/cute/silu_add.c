/* Launches silu-add without Python, and checks the result.
 *
 *     fusekit export --lang c build kernels/silu-add --prefix mine
 *     gcc -std=c11 -O2 -Ibuild silu_add.c build/mine.c -ldl -lm -o silu_add
 *     ./silu_add
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "mine.h"

enum { N = 1 << 20 };

/* y = silu(scale x) + residual, n bf16 in device memory, on `stream`. */
static mine_status silu_add(mine_kernels_silu_add *kernel, const void *x, const void *residual, void *y, int64_t n,
                            float scale, void *stream, mine_error *error) {
    mine_kernels_silu_add_args args = mine_kernels_silu_add_defaults();
    args.n = n;
    args.x = x, args.residual = residual, args.y = y;
    args.scale = scale;
    return mine_kernels_silu_add_launch(kernel, &args, stream, error);
}

/* What the program itself needs of the driver. One with the CUDA toolkit includes cuda.h instead. */
static int (*retain)(void **context, int device), (*set_current)(void *context), (*synchronize)(void);
static int (*allocate_managed)(unsigned long long *address, size_t size, unsigned flags);

static int find(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* N bf16 that host and device read and write. */
static uint16_t *vector(void) {
    unsigned long long address = 0;
    return allocate_managed(&address, N * sizeof(uint16_t), 1) == 0 ? (uint16_t *)(uintptr_t)address : NULL;
}

static uint16_t bf16(float value) { /* exact for the values below */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float value_of(uint16_t bf16) {
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int main(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
    mine_driver *driver = NULL;
    mine_kernels_silu_add *kernel = NULL;
    mine_error error = {0};
    uint16_t *x, *residual, *y;
    if (mine_driver_open(&driver, &error) != MINE_OK ||
        mine_kernels_silu_add_load(driver, 0, &kernel, &error) != MINE_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    if (!find(library, "cuDevicePrimaryCtxRetain", &retain) || !find(library, "cuCtxSetCurrent", &set_current) ||
        !find(library, "cuMemAllocManaged", &allocate_managed) || !find(library, "cuCtxSynchronize", &synchronize) ||
        retain(&context, 0) != 0 || set_current(context) != 0 || (x = vector()) == NULL ||
        (residual = vector()) == NULL || (y = vector()) == NULL) {
        fprintf(stderr, "the driver gives no memory\n");
        return 1;
    }
    for (int i = 0; i < N; i++) x[i] = bf16((float)(i % 256 - 128) / 16), residual[i] = bf16((float)(i % 7 - 3));
    if (silu_add(kernel, x, residual, y, N, 0.5f, NULL, &error) != MINE_OK || synchronize() != 0) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    for (int i = 0; i < N; i++) {
        float scaled = 0.5f * value_of(x[i]), expected = scaled / (1 + expf(-scaled)) + value_of(residual[i]);
        if (!(fabsf(value_of(y[i]) - expected) <= 0x1p-8f * (1 + fabsf(expected)))) {
            fprintf(stderr, "y[%d] is %g, not %g\n", i, value_of(y[i]), expected);
            return 1;
        }
    }
    printf("%d right\n", N);
    mine_kernels_silu_add_unload(kernel, &error);
    mine_driver_close(driver);
    return 0;
}
