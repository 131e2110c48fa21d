/* A C11 program that reads GPT-OSS's fc1 out of a bundle when it runs, without Python, fusekit or the CUDA toolkit.
 *
 *     fusekit export kernels.tar gpt-oss-20b/fc1-fwd
 *     fusekit export --lang c --loader build --prefix moe
 *     gcc -std=c11 -O2 -Ibuild examples/c/bundle.c build/moe.c -ldl -o bundle
 *     ./bundle kernels.tar gpt-oss-20b/fc1-fwd@128x192-c2x1-dynamic FOLDER E M H I
 *
 * FOLDER holds x.bin [M, H], w.bin [E, 2I, H], bias.bin [E, 2I] (bf16) and offsets.bin [E] (int32); y.bin [M, I] and
 * preactivation.bin [M, 2I] are written there. */
#include "moe.h"

#include "device.h"

int main(int count, char **words) {
    static const char *const names[] = {"x", "w", "bias", "offsets", "y", "preactivation"};
    enum { TENSORS = 6, INPUTS = 4 };
    int64_t shapes[TENSORS][3], e, m, h, i;
    size_t sizes[TENSORS];
    moe_tensor tensors[TENSORS];
    moe_arguments arguments;
    moe_driver *loader = NULL;
    moe_bundle *bundle = NULL;
    moe_kernel *kernel = NULL;
    moe_error error;
    driver api;
    void *context, *stream;
    int status = 1, index, axis;
    if (count != 8) {
        fprintf(stderr, "usage: bundle KERNELS.tar NAME FOLDER E M H I\n");
        return 2;
    }
    e = strtol(words[4], NULL, 10), m = strtol(words[5], NULL, 10);
    h = strtol(words[6], NULL, 10), i = strtol(words[7], NULL, 10);
    if (failed(moe_bundle_open(words[1], &bundle, &error), &error)) return 1;
    printf("bundle %s holds:\n", moe_bundle_digest(bundle));
    for (index = 0; index < (int)moe_bundle_count(bundle); ++index)
        printf("    %s for %s\n", moe_bundle_name(bundle, (size_t)index), moe_bundle_arch(bundle, (size_t)index));
    if (failed(moe_driver_open(&loader, &error), &error)) return 1;
    if (!find(&api) || api.retain(&context, 0) != 0 || api.set_current(context) != 0 ||
        api.stream_create(&stream, 1) != 0)
        return 1;
    if (failed(moe_kernel_load(loader, bundle, words[2], 0, &kernel, &error), &error)) return 1;
    moe_bundle_close(bundle);
    {
        const int64_t extents[TENSORS][3] = {{m, h, 0}, {e, 2 * i, h}, {e, 2 * i, 0}, {e, 0, 0}, {m, i, 0}, {m, 2 * i, 0}};
        memcpy(shapes, extents, sizeof shapes);
    }
    memset(tensors, 0, sizeof tensors);
    for (index = 0; index < TENSORS; ++index) {
        moe_tensor *tensor = &tensors[index];
        tensor->name = names[index];
        tensor->dtype = index == 3 ? MOE_I32 : MOE_BF16;
        tensor->shape = shapes[index];
        sizes[index] = index == 3 ? 4 : 2;
        for (axis = 0; axis < 3 && shapes[index][axis] != 0; ++axis) sizes[index] *= (size_t)shapes[index][axis];
        tensor->rank = axis;
        tensor->data = (void *)(uintptr_t)load(&api, words[3], names[index], sizes[index], index < INPUTS);
    }
    memset(&arguments, 0, sizeof arguments); /* scalars, margin and priority: as the spec and the stream have them */
    arguments.tensors = tensors;
    arguments.tensor_count = TENSORS;
    if (!failed(moe_kernel_launch(kernel, &arguments, stream, &error), &error) && api.stream_wait(stream) == 0) status = 0;
    for (index = INPUTS; index < TENSORS; ++index)
        if (!save(&api, words[3], names[index], (uintptr_t)tensors[index].data, sizes[index])) status = 1;
    /* A wrong argument is refused on the host, in words. */
    tensors[0].dtype = MOE_FP16;
    if (moe_kernel_launch(kernel, &arguments, stream, &error) != MOE_INVALID_ARGUMENT) status = 1;
    printf("refused: %s\n", error.text);
    for (index = 0; index < TENSORS; ++index) api.release((uintptr_t)tensors[index].data);
    if (failed(moe_kernel_unload(kernel, &error), &error)) status = 1;
    moe_driver_close(loader);
    return status;
}
