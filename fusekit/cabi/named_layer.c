/* ---- Layers of a bundle. */

struct fusekit_layer {
    fk_loaded_layer *loaded;
};

/* The row of a layer for the device: NAME.layer@record. */
static fusekit_status fk_choose_layer(const fusekit_bundle *bundle, const char *name, int ordinal, int major, int minor,
                                      const fk_listed **chosen, fusekit_error *error) {
    const fk_listed *listed;
    const char *elsewhere = NULL;
    size_t length = strlen(name), index;
    int best = 0;
    *chosen = NULL;
    for (index = 0; (listed = fk_named_at(bundle, index)) != NULL; ++index) {
        int suits = fk_suits(listed, major, minor);
        if (strncmp(listed->name, name, length) != 0 || strcmp(listed->name + length, ".layer@record") != 0) continue;
        elsewhere = listed->arch;
        if (suits <= best) continue;
        best = suits;
        *chosen = listed;
    }
    if (*chosen != NULL) return FUSEKIT_OK;
    if (elsewhere != NULL)
        return fk_fail(error, FUSEKIT_WRONG_ARCH, "%.120s is in %.100s for %s; device %d is of capability %d.%d", name,
                       bundle->title, elsewhere, ordinal, major, minor);
    return fk_fail(error, FUSEKIT_NOT_FOUND, "%.100s has no layer %.100s; put it in with: fusekit export FILE %.60s",
                   bundle->title, name, name);
}

typedef struct { /* what a layer is loaded from */
    void *words;
    fk_source source, *kernels;
    const fk_source **sources;
    const char **titles;
    void *(*memory)[2]; /* of each kernel */
    int64_t count;
} fk_fetched_layer;

static void fk_free_fetched(fk_fetched_layer *fetched) {
    int64_t index;
    for (index = 0; fetched->memory != NULL && index < fetched->count; ++index) {
        free(fetched->memory[index][0]);
        free(fetched->memory[index][1]);
    }
    free(fetched->memory);
    free(fetched->kernels);
    free((void *)(uintptr_t)fetched->sources);
    free((void *)(uintptr_t)fetched->titles);
    free(fetched->words);
}

/* The record of a layer: how many kernels it has, the row of each, then its own words. */
static fusekit_status fk_fetch_layer(const fusekit_bundle *bundle, const fk_listed *listed, fk_fetched_layer *fetched,
                                     fusekit_error *error) {
    const int64_t *words;
    int64_t index, total = listed->record_bytes / 8;
    fusekit_status status;
    memset(fetched, 0, sizeof *fetched);
    if (strcmp(listed->problem, FK_LAYER_ROW) != 0)
        return fk_fail(error, FUSEKIT_BAD_BUNDLE, "%.100s is for Python alone: %.150s", listed->name, listed->problem);
    status = fk_content(bundle, bundle->start, listed->record_before, listed->record_bytes, listed->record_digest,
                        listed->name, "layer record", &fetched->words, error);
    if (status != FUSEKIT_OK) return status;
    words = (const int64_t *)fetched->words;
    if (total < 1 || words[0] < 1 || words[0] >= total - 1)
        return fk_damaged(bundle, error, "has a cut record of %.120s; export it again", listed->name);
    for (index = 1; index <= words[0]; ++index) {
        const fk_listed *kernel = words[index] < 0 ? NULL : fk_listing(bundle, (size_t)words[index]);
        if (kernel == NULL || *kernel->problem != 0)
            return fk_damaged(bundle, error, "has no kernel of %.120s that C loads; export it again", listed->name);
    }
    fetched->count = words[0];
    fetched->source.words = words + 1 + words[0];
    fetched->source.count = (size_t)(total - 1 - words[0]);
    return FUSEKIT_OK;
}

static fusekit_status fk_fetch_kernels(const fusekit_driver *driver, const fusekit_bundle *bundle, fk_fetched_layer *fetched,
                                       fusekit_error *error) {
    const int64_t *rows = (const int64_t *)fetched->words + 1;
    size_t count = (size_t)fetched->count;
    fusekit_status status = FUSEKIT_OK;
    int64_t index;
    fetched->memory = (void *(*)[2])calloc(count, sizeof *fetched->memory);
    fetched->kernels = (fk_source *)calloc(count, sizeof *fetched->kernels);
    fetched->sources = (const fk_source **)calloc(count, sizeof *fetched->sources);
    fetched->titles = (const char **)calloc(count, sizeof *fetched->titles);
    if (fetched->memory == NULL || fetched->kernels == NULL || fetched->sources == NULL || fetched->titles == NULL)
        return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "no memory for the kernels of a layer");
    for (index = 0; index < fetched->count && status == FUSEKIT_OK; ++index) {
        const fk_listed *listed = fk_readable(driver, bundle, fk_listing(bundle, (size_t)rows[index]));
        fetched->sources[index] = &fetched->kernels[index];
        fetched->titles[index] = listed->name;
        status = fk_fetch(bundle, listed, &fetched->kernels[index], fetched->memory[index], error);
    }
    return status;
}

static fusekit_status fk_load_fetched(const fusekit_driver *driver, const char *title, const fk_fetched_layer *fetched,
                                      int ordinal, fusekit_layer **out, fusekit_error *error) {
    fusekit_layer *layer = (fusekit_layer *)calloc(1, sizeof *layer);
    fusekit_status status;
    int64_t index;
    if (layer == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", title);
    status = fk_load_layer(driver, &fetched->source, title, fetched->sources, fetched->titles, ordinal, &layer->loaded, error);
    if (status != FUSEKIT_OK) {
        free(layer);
        return status;
    }
    layer->loaded->source = NULL; /* the driver has its own copies now */
    for (index = 0; index < fetched->count; ++index) layer->loaded->kernels[index]->source = NULL;
    *out = layer;
    return fk_ok(error);
}

fusekit_status fusekit_layer_load(const fusekit_driver *driver, const fusekit_bundle *bundle, const char *name, int ordinal,
                                  fusekit_layer **out, fusekit_error *error) {
    const fk_listed *listed;
    fk_fetched_layer fetched;
    int major, minor;
    fusekit_status status;
    *out = NULL;
    if (driver == NULL || bundle == NULL || name == NULL)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "driver, bundle or name is NULL; give all three");
    status = fk_capability(driver, name, ordinal, &major, &minor, error);
    if (status == FUSEKIT_OK) status = fk_choose_layer(bundle, name, ordinal, major, minor, &listed, error);
    if (status != FUSEKIT_OK) return status;
    status = fk_fetch_layer(bundle, listed, &fetched, error);
    if (status == FUSEKIT_OK) status = fk_fetch_kernels(driver, bundle, &fetched, error);
    if (status == FUSEKIT_OK) status = fk_load_fetched(driver, name, &fetched, ordinal, out, error);
    fk_free_fetched(&fetched);
    return status;
}

fusekit_status fusekit_layer_unload(fusekit_layer *layer, fusekit_error *error) {
    fusekit_status status;
    if (layer == NULL) return fk_ok(error);
    status = fk_unload_layer(layer->loaded, error);
    free(layer);
    return status;
}

fusekit_status fusekit_layer_sizes(const fusekit_layer *layer, int64_t tokens, fusekit_sizes *sizes, fusekit_error *error) {
    return fk_layer_sizes(layer->loaded->record, NULL, tokens, NULL, sizes, error);
}

int fusekit_layer_ranks(const fusekit_layer *layer) { return (int)layer->loaded->ranks; }

const char *fusekit_layer_window(const fusekit_layer *layer, int index) {
    const fk_layer *record = layer->loaded->record;
    return index < 0 || index >= record->window_count ? NULL : record->windows[index].name;
}

fusekit_status fusekit_layer_windows(const fusekit_layer *layer, const fusekit_ranks *ranks, size_t *bytes,
                                     fusekit_error *error) {
    return fk_window_bytes(layer->loaded->record, ranks, bytes, error);
}

fusekit_status fusekit_layer_rank_sizes(const fusekit_layer *layer, const fusekit_ranks *ranks, int64_t tokens,
                                        fusekit_sizes *sizes, fusekit_error *error) {
    return fk_layer_sizes(layer->loaded->record, ranks, tokens, NULL, sizes, error);
}

/* The number of the buffer that a pass has for the name, or -1 with the error set. */
static int64_t fk_buffer_of(const fk_layer *layer, fusekit_pass_kind which, const fusekit_tensor *given, fusekit_error *error) {
    const fk_layer_pass *pass = &layer->passes[which];
    int64_t index, count = pass->input_count + pass->output_count;
    for (index = 0; index < count; ++index) {
        int64_t number = index < pass->input_count ? pass->inputs[index].index : pass->outputs[index - pass->input_count].index;
        const fk_layer_buffer *buffer = &layer->buffers[number];
        if (given->name == NULL || strcmp(given->name, buffer->name) != 0) continue;
        if (given->rank == buffer->rank && given->dtype == (fusekit_dtype)buffer->dtype && (given->rank == 0 || given->shape != NULL))
            return number;
        fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has rank %d and type %d; it must have rank %lld and be %s", layer->name,
                given->name, given->rank, (int)given->dtype, (long long)buffer->rank, fk_dtype_names[buffer->dtype]);
        return -1;
    }
    fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %.40s is no tensor of its %s pass", layer->name,
            given->name == NULL ? "NULL" : given->name, fk_pass_names[which]);
    return -1;
}

/* A call by name as a call by index. */
static fusekit_status fk_named_call(const fusekit_layer *layer, fusekit_pass_kind which,
                                    const fusekit_layer_arguments *arguments, fk_layer_call *call, fusekit_error *error) {
    const fk_layer *record;
    fk_layer_plan plan;
    fk_counts counts;
    int64_t tokens = -1, number;
    int index, take;
    fusekit_status status = FUSEKIT_OK;
    if (layer == NULL || arguments == NULL || (arguments->tensor_count > 0 && arguments->tensors == NULL))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "layer or arguments are NULL; load the layer, and give both");
    record = layer->loaded->record;
    if ((unsigned)which >= FK_PASSES)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: pass %d; it must be 0 to %d", record->name, (int)which, FK_PASSES - 1);
    memset(call, 0, sizeof *call);
    call->kept = arguments->kept;
    call->scratch = arguments->scratch;
    call->settings = arguments->settings;
    call->ranks = arguments->ranks;
    for (take = 0; take < 2 && status == FUSEKIT_OK; ++take) { /* first the tokens, which all shapes follow from */
        for (index = 0; index < arguments->tensor_count && status == FUSEKIT_OK; ++index) {
            const fusekit_tensor *given = &arguments->tensors[index];
            number = fk_buffer_of(record, which, given, error);
            if (number < 0) return FUSEKIT_INVALID_ARGUMENT;
            if (take)
                status = fk_take_buffer(record, number, given->shape, given->strides, (uint64_t)(uintptr_t)given->data, &plan,
                                        call, error);
            else if (tokens < 0)
                tokens = fk_tokens_of(&record->buffers[number], given->shape);
        }
        call->tokens = tokens < 0 ? 0 : tokens;
        if (!take && status == FUSEKIT_OK) status = fk_count_pass(record, which, call, &counts, error);
        if (!take && status == FUSEKIT_OK) status = fk_extents(record, counts, &plan, error);
    }
    return status;
}

fusekit_status fusekit_layer_launch(const fusekit_layer *layer, fusekit_pass_kind which,
                                    const fusekit_layer_arguments *arguments, void *stream, fusekit_error *error) {
    fk_layer_call call;
    fusekit_status status = fk_named_call(layer, which, arguments, &call, error);
    return status == FUSEKIT_OK ? fk_run_pass(layer->loaded, which, &call, stream, error) : status;
}

fusekit_status fusekit_layer_bind(const fusekit_layer *layer, fusekit_pass_kind which,
                                  const fusekit_layer_arguments *arguments, fusekit_pass **pass, fusekit_error *error) {
    fk_layer_call call;
    fusekit_status status = fk_named_call(layer, which, arguments, &call, error);
    *pass = NULL;
    return status == FUSEKIT_OK ? fk_bind_pass(layer->loaded, which, &call, pass, error) : status;
}

/* ---- All of a bundle that can be loaded. */

static fusekit_status fk_verify_layer(const fusekit_bundle *bundle, const fk_listed *listed, fusekit_error *error) {
    fk_fetched_layer fetched;
    const fk_layer *record = NULL;
    fusekit_status status = fk_fetch_layer(bundle, listed, &fetched, error);
    if (status == FUSEKIT_OK) status = fk_read_layer(&fetched.source, listed->name, &record, error);
    if (status == FUSEKIT_OK && record->kernel_count != ((const int64_t *)fetched.words)[0])
        status = fk_damaged(bundle, error, "has a record of %.120s for other kernels; export it again", listed->name);
    free((void *)(uintptr_t)record);
    fk_free_fetched(&fetched);
    return status;
}

fusekit_status fusekit_bundle_verify(const fusekit_bundle *bundle, fusekit_error *error) {
    const fk_listed *listed;
    fk_source source;
    void *memory[2];
    size_t index;
    for (index = 0; (listed = fk_listing(bundle, index)) != NULL; ++index) {
        fusekit_status status;
        if (strcmp(listed->problem, FK_LAYER_ROW) == 0 && (status = fk_verify_layer(bundle, listed, error)) != FUSEKIT_OK)
            return status;
        if (*listed->problem != 0) continue;
        status = fk_fetch(bundle, listed, &source, memory, error);
        free(memory[0]);
        free(memory[1]);
        if (status != FUSEKIT_OK) return status;
    }
    return fk_ok(error);
}
