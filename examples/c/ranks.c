/* A C11 program with both ranks of a layer over two GPUs: a forward and a backward pass, no Python, NCCL or CUDA toolkit.
 *
 *     fusekit build examples/ranks.toml
 *     fusekit export --lang c build ranks/moe --prefix moe
 *     gcc -std=c11 -O2 -Ibuild examples/c/ranks.c build/moe.c -ldl -o ranks
 *     ./ranks FOLDER TOKENS_OF_RANK_0 TOKENS_OF_RANK_1 [DEVICE_OF_RANK_0 DEVICE_OF_RANK_1]
 *
 * FOLDER/0 and FOLDER/1 hold each rank's x.bin and dy.bin [T, 256], w1.bin [8, 256, 256] and w2.bin [8, 256, 128] of its
 * experts, all bf16, indices.bin [T, 4] i32 and weights.bin [T, 4] f32; y, dx, dw1, dw2 and dweights are written next to
 * them. The devices are 0 and 1 unless it says others. Two ranks may share one, with at most 1280 tokens each. */
#include "moe.h"

#include "device.h"

#include <stdint.h>

enum { RANKS = MOE_RANKS_MOE_RANKS, WINDOWS = MOE_RANKS_MOE_WINDOWS, H = 256, I = 128, LOCAL = 8, K = 4, STATUS = 16, NEXT = 64 };

typedef struct {
    int (*device_get)(int *device, int ordinal);
    int (*enable_peer)(void *context, unsigned flags);
    int (*fill)(unsigned long long to, unsigned char value, size_t size);
} more_of_the_driver;

typedef struct {
    void *context, *stream;
    moe_ranks_moe *layer;
    unsigned long long own[WINDOWS];
    moe_window windows[WINDOWS];
    moe_ranks ranks;
    moe_ranks_moe_forward_args forward;
    moe_ranks_moe_backward_args backward;
    char folder[4096];
} rank_state;

static int find_more(more_of_the_driver *api) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    if (handle == NULL) return 0;
    FIND(device_get, "cuDeviceGet");
    FIND(enable_peer, "cuCtxEnablePeerAccess");
    FIND(fill, "cuMemsetD8_v2");
    return 1;
}

/* Windows of this rank, zeroed, each with the place of another one's status: a launch that gives up ends those on all. */
static int make_windows(const driver *api, const more_of_the_driver *more, rank_state *state, const size_t *bytes) {
    int index;
    for (index = 0; index < WINDOWS; ++index)
        if (api->allocate(&state->own[index], bytes[index]) != 0 || more->fill(state->own[index], 0, bytes[index]) != 0) return 0;
    for (index = 0; index < WINDOWS; ++index) {
        unsigned long long next = state->own[(index + 1) % WINDOWS] + STATUS;
        if (api->upload(state->own[index] + NEXT, &next, sizeof next) != 0) return 0;
    }
    return 1;
}

static void *at(unsigned long long address) { return (void *)(uintptr_t)address; }

/* What the rank's passes are given; the tensors are loaded with its context current. */
static int fill_in(const driver *api, const more_of_the_driver *more, rank_state *state, int64_t tokens, moe_error *error) {
    const size_t rows = tokens > 0 ? (size_t)tokens : 1; /* one without tokens gives tensors as well */
    moe_ranks_moe_forward_args *forward = &state->forward;
    moe_ranks_moe_backward_args *backward = &state->backward;
    const char *folder = state->folder;
    unsigned long long checked;
    moe_sizes bytes;
    if (failed(moe_ranks_moe_sizes(state->layer, &state->ranks, tokens, NULL, &bytes, error), error)) return 0;
    forward->tokens = backward->tokens = tokens;
    forward->x = backward->x = at(load(api, folder, "x", 2 * rows * H, tokens > 0));
    forward->indices = backward->indices = at(load(api, folder, "indices", 4 * rows * K, tokens > 0));
    forward->weights = backward->weights = at(load(api, folder, "weights", 4 * rows * K, tokens > 0));
    forward->w1 = backward->w1 = at(load(api, folder, "w1", 2 * LOCAL * 2 * I * H, 1));
    forward->w2 = backward->w2 = at(load(api, folder, "w2", 2 * LOCAL * H * I, 1));
    forward->y = at(load(api, folder, "y", 2 * rows * H, 0));
    backward->dy = at(load(api, folder, "dy", 2 * rows * H, tokens > 0));
    backward->dx = at(load(api, folder, "dx", 2 * rows * H, 0));
    backward->dweights = at(load(api, folder, "dweights", 4 * rows * K, 0));
    backward->dw1 = at(load(api, folder, "dw1", 2 * LOCAL * 2 * I * H, 0));
    backward->dw2 = at(load(api, folder, "dw2", 2 * LOCAL * H * I, 0));
    forward->kept.bytes = bytes.kept;
    forward->kept.data = at(load(api, folder, "kept", bytes.kept, 0));
    forward->scratch.bytes = bytes.forward > bytes.backward ? bytes.forward : bytes.backward;
    forward->scratch.data = at(load(api, folder, "scratch", forward->scratch.bytes, 0));
    backward->kept = forward->kept, backward->scratch = forward->scratch;
    forward->ranks = backward->ranks = &state->ranks;
    if (api->allocate(&checked, 16) != 0 || more->fill(checked, 0, 16) != 0) return 0;
    state->ranks.checked.data = at(checked), state->ranks.checked.bytes = 16;
    return forward->x != NULL && forward->indices != NULL && forward->weights != NULL && forward->w1 != NULL &&
           forward->w2 != NULL && backward->dy != NULL;
}

/* Waits, and looks whether every rank came, and whether the experts had room for all rows. */
static int finished(const driver *api, rank_state *state) {
    int32_t words[4];
    int index, good = api->set_current(state->context) == 0 && api->stream_wait(state->stream) == 0;
    for (index = 0; index < WINDOWS && good; ++index) {
        good = api->download(words, state->own[index] + STATUS, 12) == 0;
        if (good && words[0] != 0)
            good = 0, fprintf(stderr, "rank %d waited in vain for rank %d\n", (int)state->ranks.rank, (int)words[0] - 1);
    }
    good = good && api->download(words, (unsigned long long)(uintptr_t)state->ranks.checked.data, 16) == 0;
    if (good && words[0] != 0) good = 0, fprintf(stderr, "rank %d had %d rows\n", (int)words[1], (int)words[2]);
    return good;
}

static int save_all(const driver *api, const rank_state *state) {
    const moe_ranks_moe_backward_args *backward = &state->backward;
    const size_t rows = (size_t)backward->tokens;
    const struct {
        const char *name;
        const void *data;
        size_t bytes;
    } outputs[] = {
        {"y", state->forward.y, 2 * rows * H}, {"dx", backward->dx, 2 * rows * H}, {"dweights", backward->dweights, 4 * rows * K},
        {"dw1", backward->dw1, 2 * LOCAL * 2 * I * H}, {"dw2", backward->dw2, 2 * LOCAL * H * I},
    };
    size_t index;
    for (index = 0; index < sizeof outputs / sizeof *outputs; ++index)
        if (!save(api, state->folder, outputs[index].name, (unsigned long long)(uintptr_t)outputs[index].data, outputs[index].bytes))
            return 0;
    return 1;
}

int main(int count, char **words) {
    static rank_state states[RANKS];
    static void *addresses[WINDOWS][RANKS];
    int64_t tokens[RANKS], capacity = 1;
    int devices[RANKS], rank, other, index, good = 1;
    moe_driver *loader = NULL;
    more_of_the_driver more;
    size_t bytes[WINDOWS];
    moe_error error;
    driver api;
    if (count != 2 + RANKS && count != 2 + 2 * RANKS) {
        fprintf(stderr, "usage: ranks FOLDER TOKENS TOKENS [DEVICE DEVICE]\n");
        return 2;
    }
    for (rank = 0; rank < RANKS; ++rank) {
        tokens[rank] = strtol(words[2 + rank], NULL, 10);
        devices[rank] = count == 2 + RANKS ? rank : (int)strtol(words[2 + RANKS + rank], NULL, 10);
        if (tokens[rank] > capacity) capacity = tokens[rank]; /* of any rank: a program agrees on it once */
    }
    if (failed(moe_driver_open(&loader, &error), &error)) return 1;
    if (!find(&api) || !find_more(&more)) return 1;
    for (rank = 0; rank < RANKS && good; ++rank) {
        rank_state *state = &states[rank];
        int device;
        snprintf(state->folder, sizeof state->folder, "%s/%d", words[1], rank);
        state->ranks.rank = rank, state->ranks.capacity = capacity, state->ranks.windows = state->windows;
        state->ranks.timeout = 20000;
        good = more.device_get(&device, devices[rank]) == 0 && api.retain(&state->context, device) == 0 &&
               api.set_current(state->context) == 0 && api.stream_create(&state->stream, 1) == 0 &&
               !failed(moe_ranks_moe_load(loader, devices[rank], &state->layer, &error), &error) &&
               !failed(moe_ranks_moe_windows(state->layer, &state->ranks, bytes, &error), &error) &&
               make_windows(&api, &more, state, bytes) && fill_in(&api, &more, state, tokens[rank], &error);
        for (index = 0; index < WINDOWS; ++index) addresses[index][rank] = at(state->own[index]);
    }
    for (rank = 0; rank < RANKS && good; ++rank) /* each rank stores into the windows of the others */
        for (other = 0; other < RANKS && good; ++other)
            if (devices[rank] != devices[other])
                good = api.set_current(states[rank].context) == 0 && more.enable_peer(states[other].context, 0) == 0;
    for (rank = 0; rank < RANKS; ++rank)
        for (index = 0; index < WINDOWS; ++index) {
            states[rank].windows[index].addresses = addresses[index];
            states[rank].windows[index].bytes = bytes[index];
        }
    /* The launches of a rank wait on the GPU for those of the other: queue all of them before waiting for any. */
    for (rank = 0; rank < RANKS && good; ++rank)
        good = !failed(moe_ranks_moe_forward(states[rank].layer, &states[rank].forward, states[rank].stream, &error), &error) &&
               !failed(moe_ranks_moe_backward(states[rank].layer, &states[rank].backward, states[rank].stream, &error), &error);
    for (rank = 0; rank < RANKS && good; ++rank) good = finished(&api, &states[rank]) && save_all(&api, &states[rank]);
    for (rank = 0; rank < RANKS; ++rank)
        if (failed(moe_ranks_moe_unload(states[rank].layer, &error), &error)) good = 0;
    moe_driver_close(loader);
    return good ? 0 : 1;
}
