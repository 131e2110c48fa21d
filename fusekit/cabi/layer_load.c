/* ---- Layers. */

enum {
    FK_LAYER_ALIGNMENT = 256,  /* of a buffer within kept or scratch memory */
    FK_MEMORY_ALIGNMENT = 128, /* of that memory */
    FK_PASS_BYTES = 1 << 16    /* of the launches of a pass, which are packed on the stack */
};

typedef struct { /* a loaded layer */
    const fusekit_driver *driver;
    const fk_source *source;
    const fk_layer *record; /* in memory of its own */
    fk_kernel **kernels;
    unsigned char *operands; /* of each kernel of each step: which operand each of its tensors is */
    int first[FK_PASSES];    /* the row of `operands` of a pass's first step and rung */
    int64_t ranks;           /* that its kernels are over, 0: none is */
} fk_loaded_layer;

typedef struct { /* a pass as its caller wants it; by the number of a buffer: address, 0 where it is not given; strides */
    int64_t tokens;
    uint64_t addresses[FK_MOST_BUFFERS];
    int64_t strides[FK_MOST_BUFFERS][FK_MOST_RANK]; /* 0: the compact one */
    fusekit_memory kept, scratch;
    fusekit_settings settings;
    const fusekit_ranks *ranks; /* NULL: none are given */
} fk_layer_call;

typedef struct { /* what sizes follow from: the first variables of the record's expressions */
    int64_t tokens, capacity, rows; /* the last two over ranks */
} fk_counts;

typedef struct { /* by the number of a buffer */
    int64_t variables[FK_MOST_VARIABLES];
    int64_t shape[FK_MOST_BUFFERS][FK_MOST_RANK], bytes[FK_MOST_BUFFERS];
    int64_t kept[FK_MOST_BUFFERS], kept_bytes; /* where it begins in kept memory */
    int64_t begin[FK_MOST_BUFFERS];            /* in its home, which has a number, or -1 for scratch memory, -2: none */
    int64_t home[FK_MOST_BUFFERS], scratch_bytes;
    int64_t asked, lent; /* outputs */
    unsigned char used[FK_MOST_BUFFERS];
} fk_layer_plan;

struct fusekit_pass {
    size_t count;
    fusekit_launch *launches[FK_MOST_STEPS];
    unsigned char turns[FK_MOST_STEPS]; /* of each launch, fk_turn */
    void *side_stream, *events[2];      /* NULL: all launches go to the caller's stream */
};

/* ---- Reading the record. */

static int fk_check_indices(const fk_reader *reader, const fk_place *place, const char *field, const fk_layer_index *rows,
                            int64_t count, int64_t limit) {
    int64_t index;
    for (index = 0; index < count; ++index)
        if (rows[index].index >= limit)
            return fk_refuse(reader, place, field, "names %lld; it must be 0 to %lld", (long long)rows[index].index,
                             (long long)limit - 1);
    return 1;
}

static int fk_check_step(const fk_reader *reader, const fk_place *place, const fk_layer *layer, const fk_layer_pass *pass,
                         const fk_layer_step *step) {
    int64_t index, most = pass->output_count;
    if (step->part >= layer->part_count || step->outputs >> most != 0 || step->needs >= most || step->unless >= most ||
        step->window >= layer->window_count)
        return fk_refuse(reader, place, "part", "or an output or a window of it is none of the layer's");
    if (!fk_check_indices(reader, place, "writes", step->writes, step->write_count, layer->buffer_count)) return 0;
    for (index = 0; index < step->operand_count; ++index)
        if (step->operands[index].buffer >= layer->buffer_count)
            return fk_refuse(reader, place, "operands", "has a buffer that is none of the layer's");
    return 1;
}

static int fk_check_layout(const fk_reader *reader, const fk_place *place, const fk_layer *layer,
                           const fk_layer_pass *pass, const fk_layer_layout *layout) {
    unsigned char below[FK_MOST_BUFFERS] = {0};
    int64_t index, above;
    if ((layout->outputs | layout->lends) >> pass->output_count != 0)
        return fk_refuse(reader, place, "outputs", "has one that is none of the pass's");
    for (index = 0; index < layout->place_count; ++index) {
        const fk_layer_place *row = &layout->places[index];
        if (row->buffer >= layer->buffer_count || row->home >= layer->buffer_count)
            return fk_refuse(reader, place, "places", "has a buffer that is none of the layer's");
        for (above = 0; above < row->above_count; ++above)
            if (row->above[above].index >= layer->buffer_count || !below[row->above[above].index])
                return fk_refuse(reader, place, "places", "has a buffer above one that has no place yet");
        below[row->buffer] = 1;
    }
    return 1;
}

static int fk_check_pass(const fk_reader *reader, fk_place *outer, const fk_layer *layer, const fk_layer_pass *pass) {
    unsigned char once[FK_MOST_STEPS] = {0};
    fk_place at = {outer, "steps", 0};
    if (!fk_check_indices(reader, outer, "inputs", pass->inputs, pass->input_count, layer->buffer_count) ||
        !fk_check_indices(reader, outer, "outputs", pass->outputs, pass->output_count, layer->buffer_count) ||
        !fk_check_indices(reader, outer, "in_place", pass->in_place, pass->in_place_count, pass->step_count))
        return 0;
    for (at.row = 0; at.row < pass->in_place_count; ++at.row) once[pass->in_place[at.row].index] = 1;
    for (at.row = 0; at.row < pass->step_count; ++at.row) {
        if (pass->in_place_count > 0 && (pass->in_place_count != pass->step_count || !once[at.row]))
            return fk_refuse(reader, outer, "in_place", "does not have every step once");
        if (!fk_check_step(reader, &at, layer, pass, &pass->steps[at.row])) return 0;
    }
    at.name = "layouts";
    for (at.row = 0; at.row < pass->layout_count; ++at.row)
        if (!fk_check_layout(reader, &at, layer, pass, &pass->layouts[at.row])) return 0;
    return 1;
}

static int fk_check_layer(const fk_reader *reader, const fk_layer *layer) {
    fk_place at = {NULL, "parts", 0};
    int64_t index;
    if (layer->variable_count != FK_FIRST_LAYER_DIM + layer->dim_count) {
        at.name = NULL;
        return fk_refuse(reader, &at, "variable_count", "is not that of its dims");
    }
    for (at.row = 0; at.row < layer->part_count; ++at.row) {
        const fk_layer_part *part = &layer->parts[at.row];
        for (index = 0; index < part->rung_count; ++index)
            if (part->rungs[index].kernel >= layer->kernel_count)
                return fk_refuse(reader, &at, "kernel", "is none of the layer's");
        if (part->rungs[part->rung_count - 1].tokens != INT64_MAX)
            return fk_refuse(reader, &at, "rungs", "has no last rung, for any number of tokens");
    }
    at.name = "buffers";
    for (at.row = 0; at.row < layer->buffer_count; ++at.row)
        if (layer->buffers[at.row].place >= FK_IN_WINDOW + layer->window_count)
            return fk_refuse(reader, &at, "place", "is a window that is none of the layer's");
    at.name = "passes";
    for (at.row = 0; at.row < FK_PASSES; ++at.row)
        if (!fk_check_pass(reader, &at, layer, &layer->passes[at.row])) return 0;
    return 1;
}

/* The record out of a copy of the words, which is to be freed. */
static fusekit_status fk_read_layer(const fk_source *source, const char *title, const fk_layer **record,
                                    fusekit_error *error) {
    size_t bytes = source->count * sizeof(int64_t);
    int64_t *words = (int64_t *)malloc(bytes > 0 ? bytes : 1);
    fk_reader reader = {words, source->count, {0}, title, error};
    *record = NULL;
    if (words == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for its record", title);
    memcpy(words, source->words, bytes);
    reader.limits[FK_BELOW_FIRST_VALUE] = FK_FIRST_LAYER_DIM;
    if (bytes >= sizeof(fk_layer)) reader.limits[FK_BELOW_VARIABLE_COUNT] = ((const fk_layer *)words)->variable_count;
    if (fk_read_whole(&reader, &fk_type_layer, NULL, NULL) && fk_check_layer(&reader, (const fk_layer *)words)) {
        *record = (const fk_layer *)words;
        return FUSEKIT_OK;
    }
    free(words);
    return FUSEKIT_BAD_BUNDLE;
}

/* ---- Loading. */

static const char *const fk_rank_scalars[] = {"rank", "capacity", "timeout"}; /* of kernels that ranks launch together */

/* Which of them an argument is, or -1. */
static int fk_rank_scalar(const fk_argument *argument) {
    int which;
    for (which = 0; which < 3; ++which)
        if (argument->dtype == FK_I32 && strcmp(argument->name, fk_rank_scalars[which]) == 0) return which;
    return -1;
}

/* The rank whose window a tensor of a kernel is, of which there are so many, or -1: "window.0", "window.1" and so on. */
static int64_t fk_window_rank(const char *name, int64_t ranks) {
    char own[16];
    int64_t rank;
    for (rank = 0; rank < ranks; ++rank) {
        snprintf(own, sizeof own, "window.%d", (int)rank);
        if (strcmp(name, own) == 0) return rank;
    }
    return -1;
}

/* Which operand of a step each tensor of a kernel is; from FK_MOST_TENSORS on, the window of which rank. */
static fusekit_status fk_match_operands(fk_loaded_layer *loaded, const fk_layer_step *step, const fk_record *kernel,
                                        unsigned char *operands, fusekit_error *error) {
    const fk_layer *layer = loaded->record;
    int64_t tensor, index, argument, ranks = step->window < 0 ? 0 : kernel->tensor_count - step->operand_count;
    if (step->window >= 0 && loaded->ranks == 0) loaded->ranks = ranks;
    if (step->window >= 0 && (ranks < 1 || ranks > FK_MOST_RANKS || ranks != loaded->ranks))
        return fk_fail(error, FUSEKIT_MISMATCH, "%s: %s is over %lld ranks, and another kernel is not; export it again",
                       layer->name, kernel->name, (long long)ranks);
    if (kernel->tensor_count != step->operand_count + ranks)
        return fk_fail(error, FUSEKIT_MISMATCH, "%s: %s takes %lld tensors, and the layer gives %lld; export it again",
                       layer->name, kernel->name, (long long)kernel->tensor_count, (long long)step->operand_count);
    for (tensor = 0; tensor < kernel->tensor_count; ++tensor) {
        int64_t rank = fk_window_rank(kernel->tensors[tensor].name, ranks);
        if (rank >= 0 && kernel->tensors[tensor].rank == 0) {
            operands[tensor] = (unsigned char)(FK_MOST_TENSORS + rank);
            continue;
        }
        for (index = 0; index < step->operand_count; ++index)
            if (strcmp(step->operands[index].name, kernel->tensors[tensor].name) == 0) break;
        if (index == step->operand_count || layer->buffers[step->operands[index].buffer].rank != kernel->tensors[tensor].rank)
            return fk_fail(error, FUSEKIT_MISMATCH, "%s: %s takes %s, which the layer does not give; export it again",
                           layer->name, kernel->name, kernel->tensors[tensor].name);
        operands[tensor] = (unsigned char)index;
    }
    for (argument = 0; argument < kernel->argument_count; ++argument)
        if (kernel->arguments[argument].tensor < 0 && !kernel->arguments[argument].has_default &&
            (ranks == 0 || fk_rank_scalar(&kernel->arguments[argument]) < 0))
            return fk_fail(error, FUSEKIT_MISMATCH, "%s: %s takes %s, which the layer does not give; export it again",
                           layer->name, kernel->name, kernel->arguments[argument].name);
    return FUSEKIT_OK;
}

static fusekit_status fk_match_passes(fk_loaded_layer *loaded, fusekit_error *error) {
    const fk_layer *layer = loaded->record;
    fusekit_status status = FUSEKIT_OK;
    int64_t which, index, rung;
    int rows = 0;
    for (which = 0; which < FK_PASSES; ++which)
        for (index = 0; index < layer->passes[which].step_count; ++index)
            rows += (int)layer->parts[layer->passes[which].steps[index].part].rung_count;
    loaded->operands = (unsigned char *)calloc((size_t)rows + 1, FK_MOST_TENSORS);
    if (loaded->operands == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", layer->name);
    rows = 0;
    for (which = 0; which < FK_PASSES; ++which) {
        size_t bytes = 0;
        loaded->first[which] = rows;
        for (index = 0; index < layer->passes[which].step_count; ++index) {
            const fk_layer_step *step = &layer->passes[which].steps[index];
            size_t most = 0;
            for (rung = 0; rung < layer->parts[step->part].rung_count && status == FUSEKIT_OK; ++rung) {
                int64_t number = layer->parts[step->part].rungs[rung].kernel;
                const fk_kernel *kernel = number < 0 ? NULL : loaded->kernels[number];
                size_t size = kernel == NULL ? 0 : fk_launch_bytes(kernel->record);
                if (size > most) most = size;
                if (kernel != NULL)
                    status = fk_match_operands(loaded, step, kernel->record,
                                               loaded->operands + (size_t)rows * FK_MOST_TENSORS, error);
                ++rows;
            }
            if (status != FUSEKIT_OK) return status;
            bytes += most;
        }
        if (bytes > FK_PASS_BYTES)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: the launches of its %s pass take %llu bytes; there may be %d; launch its kernels one by one",
                           layer->name, fk_pass_names[which], (unsigned long long)bytes, (int)FK_PASS_BYTES);
    }
    return status;
}

static fusekit_status fk_unload_layer(fk_loaded_layer *loaded, fusekit_error *error) {
    fusekit_status status = fk_ok(error), other;
    int64_t index;
    if (loaded == NULL) return status;
    for (index = 0; loaded->kernels != NULL && index < loaded->record->kernel_count; ++index) {
        other = fk_unload(loaded->kernels[index], status == FUSEKIT_OK ? error : NULL);
        if (status == FUSEKIT_OK) status = other;
    }
    free(loaded->kernels);
    free(loaded->operands);
    free((void *)(uintptr_t)loaded->record);
    free(loaded);
    return status;
}

/* kernels: sources of the layer's kernels, by their numbers; titles: their names. */
static fusekit_status fk_load_layer(const fusekit_driver *driver, const fk_source *source, const char *title,
                                    const fk_source *const *kernels, const char *const *titles, int device,
                                    fk_loaded_layer **out, fusekit_error *error) {
    fk_loaded_layer *loaded = (fk_loaded_layer *)calloc(1, sizeof *loaded);
    fusekit_status status;
    int64_t index;
    *out = NULL;
    if (loaded == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", title);
    loaded->driver = driver;
    loaded->source = source;
    status = fk_read_layer(source, title, &loaded->record, error);
    if (status == FUSEKIT_OK) {
        loaded->kernels = (fk_kernel **)calloc((size_t)loaded->record->kernel_count, sizeof *loaded->kernels);
        if (loaded->kernels == NULL) status = fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", title);
    }
    for (index = 0; status == FUSEKIT_OK && index < loaded->record->kernel_count; ++index)
        status = fk_load(driver, kernels[index], titles[index], device, &loaded->kernels[index], error);
    if (status == FUSEKIT_OK) status = fk_match_passes(loaded, error);
    if (status != FUSEKIT_OK) {
        fk_unload_layer(loaded, NULL);
        return status;
    }
    *out = loaded;
    return fk_ok(error);
}
