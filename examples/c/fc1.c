/* A C11 program that runs GPT-OSS's fc1 without Python, fusekit or the CUDA toolkit.
 *
 *     fusekit export --lang c build gpt-oss-20b/fc1-fwd --prefix moe
 *     gcc -std=c11 -O2 -Ibuild examples/c/fc1.c build/moe.c -ldl -o fc1
 *     ./fc1 FOLDER E M H I
 *
 * FOLDER holds x.bin [M, H], w.bin [E, 2I, H], bias.bin [E, 2I] (bf16) and offsets.bin [E] (int32); y.bin [M, I] and
 * preactivation.bin [M, 2I] are written there. */
#include "moe.h"

#include "device.h"

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
