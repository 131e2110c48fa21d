/* A C11 program that trains a mixture-of-experts layer: ten steps, SGD on the host, no Python, framework or CUDA toolkit.
 *
 *     fusekit build layer
 *     fusekit export --lang c build layer/moe --prefix moe
 *     gcc -std=c11 -O2 -Ibuild examples/c/train.c build/moe.c -ldl -o train
 *     ./train FOLDER TOKENS
 *
 * FOLDER holds x.bin and target.bin [TOKENS, 512], router.bin [8, 512], w1.bin [8, 512, 512] and w2.bin [8, 512, 256], all
 * bf16; the weights after the last step are written over theirs. */
#include "moe.h"

#include "device.h"

#include <stdint.h>

enum { H = 512, I = 256, E = 8, STEPS = 10 };

static float wide(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static uint16_t narrow(float value) { /* to the nearest, ties to even */
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

/* first = first - rate * second, element by element, on the host. */
static int subtract(const driver *api, unsigned long long first, unsigned long long second, size_t count, float rate,
                    unsigned long long to) {
    uint16_t *one = malloc(2 * count), *two = malloc(2 * count);
    size_t index;
    int done = one != NULL && two != NULL && api->download(one, first, 2 * count) == 0 &&
               api->download(two, second, 2 * count) == 0;
    for (index = 0; done && index < count; ++index) one[index] = narrow(wide(one[index]) - rate * wide(two[index]));
    if (done) done = api->upload(to, one, 2 * count) == 0;
    free(one), free(two);
    return done;
}

int main(int count, char **words) {
    static const char *const names[] = {"router", "w1", "w2"};
    static const size_t sizes[] = {E * H, E * 2 * I * H, E * H * I};
    unsigned long long weights[3], gradients[3], x, target, y, dy, dx, kept, scratch;
    moe_layer_moe_forward_args forward = {0};
    moe_layer_moe_backward_args backward = {0};
    moe_driver *loader = NULL;
    moe_layer_moe *layer = NULL;
    moe_sizes bytes;
    moe_error error;
    driver api;
    void *context, *stream;
    size_t rows, most;
    int step, index, good = 1;
    if (count != 3) {
        fprintf(stderr, "usage: train FOLDER TOKENS\n");
        return 2;
    }
    rows = strtoul(words[2], NULL, 10);
    if (failed(moe_driver_open(&loader, &error), &error)) return 1;
    if (!find(&api) || api.retain(&context, 0) != 0 || api.set_current(context) != 0 || api.stream_create(&stream, 1) != 0)
        return 1;
    if (failed(moe_layer_moe_load(loader, 0, &layer, &error), &error)) return 1;
    if (failed(moe_layer_moe_sizes(layer, (int64_t)rows, NULL, &bytes, &error), &error)) return 1;
    most = bytes.forward > bytes.backward ? bytes.forward : bytes.backward;
    x = load(&api, words[1], "x", 2 * rows * H, 1), target = load(&api, words[1], "target", 2 * rows * H, 1);
    y = load(&api, words[1], "y", 2 * rows * H, 0), dy = load(&api, words[1], "dy", 2 * rows * H, 0);
    dx = load(&api, words[1], "dx", 2 * rows * H, 0);
    kept = load(&api, words[1], "kept", bytes.kept, 0), scratch = load(&api, words[1], "scratch", most, 0);
    for (index = 0; index < 3; ++index) {
        weights[index] = load(&api, words[1], names[index], 2 * sizes[index], 1);
        gradients[index] = load(&api, words[1], "gradient", 2 * sizes[index], 0);
    }
    forward.tokens = backward.tokens = (int64_t)rows;
    forward.x = backward.x = (void *)(uintptr_t)x;
    forward.router = backward.router = (void *)(uintptr_t)weights[0];
    forward.w1 = backward.w1 = (void *)(uintptr_t)weights[1];
    forward.w2 = backward.w2 = (void *)(uintptr_t)weights[2];
    forward.y = (void *)(uintptr_t)y, backward.dy = (void *)(uintptr_t)dy, backward.dx = (void *)(uintptr_t)dx;
    backward.drouter = (void *)(uintptr_t)gradients[0];
    backward.dw1 = (void *)(uintptr_t)gradients[1], backward.dw2 = (void *)(uintptr_t)gradients[2];
    forward.kept.data = (void *)(uintptr_t)kept, forward.kept.bytes = bytes.kept, backward.kept = forward.kept;
    forward.scratch.data = (void *)(uintptr_t)scratch, forward.scratch.bytes = most, backward.scratch = forward.scratch;
    for (step = 0; step < STEPS && good; ++step) {
        good = !failed(moe_layer_moe_forward(layer, &forward, stream, &error), &error) && api.stream_wait(stream) == 0 &&
               subtract(&api, y, target, rows * H, 1.0f, dy) && /* the gradient of half the sum of squares */
               !failed(moe_layer_moe_backward(layer, &backward, stream, &error), &error) && api.stream_wait(stream) == 0;
        for (index = 0; index < 3 && good; ++index)
            good = subtract(&api, weights[index], gradients[index], sizes[index], 0.001f, weights[index]);
    }
    for (index = 0; index < 3 && good; ++index) good = save(&api, words[1], names[index], weights[index], 2 * sizes[index]);
    good = good && save(&api, words[1], "y", y, 2 * rows * H) && save(&api, words[1], "dx", dx, 2 * rows * H);
    if (failed(moe_layer_moe_unload(layer, &error), &error)) good = 0;
    moe_driver_close(loader);
    return good ? 0 : 1;
}
