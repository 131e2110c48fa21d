/* Launches silu-add without Python.
 *
 *     fusekit export --lang c build kernels/silu-add --prefix mine
 *     gcc -std=c11 -O2 -Ibuild silu_add.c build/mine.c -ldl -o silu_add
 */
#include <stdio.h>

#include "mine.h"

/* y = silu(scale x) + residual, n bf16 in device memory, on `stream`. */
static mine_status silu_add(mine_kernels_silu_add *kernel, const void *x, const void *residual, void *y, int64_t n,
                            float scale, void *stream, mine_error *error) {
    mine_kernels_silu_add_args args = mine_kernels_silu_add_defaults();
    args.n = n;
    args.x = x, args.residual = residual, args.y = y;
    args.scale = scale;
    return mine_kernels_silu_add_launch(kernel, &args, stream, error);
}

int main(void) {
    mine_driver *driver = NULL;
    mine_kernels_silu_add *kernel = NULL;
    mine_error error;
    if (mine_driver_open(&driver, &error) != MINE_OK ||
        mine_kernels_silu_add_load(driver, 0, &kernel, &error) != MINE_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    /* Your program has memory on the device; an empty launch needs none. */
    if (silu_add(kernel, NULL, NULL, NULL, 0, 1.0f, NULL, &error) != MINE_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    mine_kernels_silu_add_unload(kernel, &error);
    mine_driver_close(driver);
    return 0;
}
