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
} fk_loaded_layer;

typedef struct { /* a pass as its caller wants it; by the number of a buffer: address, 0 where it is not given; strides */
    int64_t tokens;
    uint64_t addresses[FK_MOST_BUFFERS];
    int64_t strides[FK_MOST_BUFFERS][FK_MOST_RANK]; /* 0: the compact one */
    fusekit_memory kept, scratch;
    fusekit_settings settings;
} fk_layer_call;

typedef struct { /* by the number of a buffer */
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
    if (step->part >= layer->part_count || step->outputs >> most != 0 || step->needs >= most || step->unless >= most)
        return fk_refuse(reader, place, "part", "or an output of it is none of the layer's");
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
            return fk_refuse(reader, &at, "rungs", "has no kernel for any number of tokens");
    }
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
    if (fk_read_whole(&reader, &fk_type_layer) && fk_check_layer(&reader, (const fk_layer *)words)) {
        *record = (const fk_layer *)words;
        return FUSEKIT_OK;
    }
    free(words);
    return FUSEKIT_BAD_BUNDLE;
}

/* ---- Loading. */

/* Which operand of a step each tensor of a kernel is. */
static fusekit_status fk_match_operands(const fk_layer *layer, const fk_layer_step *step, const fk_record *kernel,
                                        unsigned char *operands, fusekit_error *error) {
    int64_t tensor, index, argument;
    if (kernel->tensor_count != step->operand_count)
        return fk_fail(error, FUSEKIT_MISMATCH, "%s: %s takes %lld tensors, and the layer gives %lld; export it again",
                       layer->name, kernel->name, (long long)kernel->tensor_count, (long long)step->operand_count);
    for (tensor = 0; tensor < kernel->tensor_count; ++tensor) {
        for (index = 0; index < step->operand_count; ++index)
            if (strcmp(step->operands[index].name, kernel->tensors[tensor].name) == 0) break;
        if (index == step->operand_count || layer->buffers[step->operands[index].buffer].rank != kernel->tensors[tensor].rank)
            return fk_fail(error, FUSEKIT_MISMATCH, "%s: %s takes %s, which the layer does not give; export it again",
                           layer->name, kernel->name, kernel->tensors[tensor].name);
        operands[tensor] = (unsigned char)index;
    }
    for (argument = 0; argument < kernel->argument_count; ++argument)
        if (kernel->arguments[argument].tensor < 0 && !kernel->arguments[argument].has_default)
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
                const fk_kernel *kernel = loaded->kernels[layer->parts[step->part].rungs[rung].kernel];
                size_t size = fk_launch_bytes(kernel->record);
                if (size > most) most = size;
                status = fk_match_operands(layer, step, kernel->record,
                                           loaded->operands + (size_t)rows++ * FK_MOST_TENSORS, error);
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

/* ---- Memory: for so many tokens, where each buffer lies. */

static int64_t fk_padded(int64_t bytes) {
    return (bytes + FK_LAYER_ALIGNMENT - 1) / FK_LAYER_ALIGNMENT * FK_LAYER_ALIGNMENT;
}

static fusekit_status fk_too_many(const fk_layer *layer, int64_t tokens, fusekit_error *error) {
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %lld tokens; there must be 0 or more, and no tensor of 2^57 bytes",
                   layer->name, (long long)tokens);
}

/* Shapes and sizes of all buffers, and what lies in kept memory. */
static fusekit_status fk_extents(const fk_layer *layer, int64_t tokens, fk_layer_plan *plan, fusekit_error *error) {
    int64_t variables[FK_MOST_VARIABLES], index;
    int axis;
    if (tokens < 0 || tokens > INT32_MAX) return fk_too_many(layer, tokens, error);
    variables[0] = tokens;
    for (index = 0; index < layer->dim_count; ++index)
        if (!fk_evaluate(&layer->dims[index].expression, variables, 0, &variables[FK_FIRST_LAYER_DIM + index]))
            return fk_too_many(layer, tokens, error);
    plan->kept_bytes = 0;
    for (index = 0; index < layer->buffer_count; ++index) {
        const fk_layer_buffer *buffer = &layer->buffers[index];
        int64_t bytes = buffer->itemsize;
        for (axis = 0; axis < buffer->rank; ++axis) {
            int64_t *extent = &plan->shape[index][axis];
            if (!fk_evaluate(&buffer->shape[axis], variables, 0, extent) || *extent < 0) return fk_too_many(layer, tokens, error);
            if (*extent > 1 && bytes > ((int64_t)1 << 57) / *extent) return fk_too_many(layer, tokens, error);
            bytes *= *extent > 1 ? *extent : 1; /* of one element at least, so that it has an address */
        }
        plan->bytes[index] = bytes;
        if (buffer->place != FK_IN_KEPT) continue;
        plan->kept[index] = plan->kept_bytes;
        plan->kept_bytes += fk_padded(bytes);
    }
    return FUSEKIT_OK;
}

static int fk_is_queued(const fk_layer_step *step, int64_t asked) {
    if (step->outputs != 0 && (step->outputs & asked) == 0) return 0;
    return (step->needs < 0 || (asked >> step->needs & 1)) && (step->unless < 0 || !(asked >> step->unless & 1));
}

/* The bytes that a home has for other buffers. */
static int64_t fk_room(const fk_layer *layer, const fk_layer_plan *plan, int64_t home) {
    int axis;
    if (layer->buffers[home].place == FK_IN_KEPT) return fk_padded(plan->bytes[home]);
    for (axis = 0; axis < layer->buffers[home].rank; ++axis)
        if (plan->shape[home][axis] == 0) return 0;
    return plan->bytes[home];
}

/* Where a layout places the buffers that are used, the scratch memory that it takes, and whether every home has room. */
static int64_t fk_lay_out(const fk_layer *layer, const fk_layer_plan *plan, const fk_layer_layout *layout,
                          const unsigned char *used, int64_t *begins, int *fits) {
    int64_t ends[FK_MOST_BUFFERS], scratch = 0, index, above;
    *fits = 1;
    for (index = 0; index < layout->place_count; ++index) {
        const fk_layer_place *place = &layout->places[index];
        int64_t begin = 0, end;
        for (above = 0; above < place->above_count; ++above)
            if (ends[place->above[above].index] > begin) begin = ends[place->above[above].index];
        begins[place->buffer] = begin;
        end = begin + (used == NULL || used[place->buffer] ? plan->bytes[place->buffer] : 0);
        ends[place->buffer] = fk_padded(end);
        if (place->home >= 0)
            *fits &= end <= fk_room(layer, plan, place->home);
        else if (end > scratch)
            scratch = end;
    }
    return scratch;
}

/* Whether a layout is for passes with the outputs `asked`: it has the buffers of all of their steps. */
static int fk_suits_outputs(const fk_layer_pass *pass, const fk_layer_layout *layout, int64_t asked, int in_place) {
    int64_t index;
    if (layout->in_place != in_place || (asked & ~layout->outputs) != 0) return 0;
    for (index = 0; index < pass->step_count; ++index) {
        int64_t spared = pass->steps[index].unless;
        if (spared >= 0 && ((layout->outputs & ~asked) >> spared & 1)) return 0;
    }
    return 1;
}

/* The layout of a pass that takes the least scratch memory. `plan` has asked, lent and used. */
static fusekit_status fk_choose_layout(const fk_layer *layer, int64_t which, int in_place, int64_t tokens,
                                       fk_layer_plan *plan, fusekit_error *error) {
    const fk_layer_pass *pass = &layer->passes[which];
    const fk_layer_layout *best = NULL;
    int64_t begins[FK_MOST_BUFFERS], index, bytes;
    int fits;
    plan->scratch_bytes = 0;
    for (index = 0; index < pass->layout_count; ++index) {
        const fk_layer_layout *layout = &pass->layouts[index];
        if ((layout->lends & ~plan->lent) != 0 || tokens < layout->since || tokens > layout->until ||
            !fk_suits_outputs(pass, layout, plan->asked, in_place))
            continue;
        bytes = fk_lay_out(layer, plan, layout, plan->used, begins, &fits);
        if (!fits || (best != NULL && bytes >= plan->scratch_bytes)) continue;
        best = layout;
        plan->scratch_bytes = bytes;
    }
    if (best == NULL)
        return fk_fail(error, FUSEKIT_BAD_BUNDLE, "%s: no layout of its %s pass is for these outputs; export it again",
                       layer->name, fk_pass_names[which]);
    fk_lay_out(layer, plan, best, plan->used, plan->begin, &fits);
    plan->scratch_bytes = fk_padded(plan->scratch_bytes);
    for (index = 0; index < layer->buffer_count; ++index) plan->home[index] = -2;
    for (index = 0; index < best->place_count; ++index) plan->home[best->places[index].buffer] = best->places[index].home;
    return FUSEKIT_OK;
}

/* Which buffers the launches for the outputs `asked` use, less those outputs. */
static void fk_mark_used(const fk_layer_pass *pass, fk_layer_plan *plan) {
    int64_t index, operand;
    memset(plan->used, 0, sizeof plan->used);
    for (index = 0; index < pass->step_count; ++index)
        if (fk_is_queued(&pass->steps[index], plan->asked))
            for (operand = 0; operand < pass->steps[index].operand_count; ++operand)
                plan->used[pass->steps[index].operands[operand].buffer] = 1;
    for (index = 0; index < pass->output_count; ++index)
        if (plan->asked >> index & 1) plan->used[pass->outputs[index].index] = 0;
}

/* Whether no call comes to a layout, because one before it has room and is for all the calls that it is for. */
static int fk_comes_after(const fk_layer_pass *pass, int64_t at, const unsigned char *sure) {
    int64_t index;
    for (index = 0; index < at; ++index)
        if (sure[index] && pass->layouts[index].outputs == pass->layouts[at].outputs &&
            (pass->layouts[index].lends & ~pass->layouts[at].lends) == 0)
            return 1;
    return 0;
}

enum { FK_MOST_LAYOUTS = 1024 };

/* The scratch memory that is enough for one number of tokens. asked: the outputs of all passes, contiguous; -1: any. */
static fusekit_status fk_enough_for(const fk_layer *layer, int64_t which, int64_t asked, int in_place, int64_t tokens,
                                    int64_t *most, fusekit_error *error) {
    const fk_layer_pass *pass = &layer->passes[which];
    unsigned char sure[FK_MOST_LAYOUTS] = {0};
    fk_layer_plan plan;
    int64_t begins[FK_MOST_BUFFERS], index, bytes;
    int fits;
    fusekit_status status = fk_extents(layer, tokens, &plan, error);
    if (status != FUSEKIT_OK) return status;
    if (asked >= 0) {
        plan.asked = plan.lent = asked;
        fk_mark_used(pass, &plan);
        status = fk_choose_layout(layer, which, in_place, tokens, &plan, error);
        if (status == FUSEKIT_OK && plan.scratch_bytes > *most) *most = plan.scratch_bytes;
        return status;
    }
    for (index = 0; index < pass->layout_count; ++index) {
        const fk_layer_layout *layout = &pass->layouts[index];
        if (layout->in_place != in_place || tokens < layout->since || tokens > layout->until ||
            fk_comes_after(pass, index, sure))
            continue;
        bytes = fk_padded(fk_lay_out(layer, &plan, layout, NULL, begins, &fits));
        if (bytes > *most) *most = bytes;
        if (index < FK_MOST_LAYOUTS) sure[index] = (unsigned char)fits;
    }
    return FUSEKIT_OK;
}

/* The same for at most so many tokens: up to the end of a layout's range, more tokens need more memory. */
static fusekit_status fk_enough(const fk_layer *layer, int64_t which, int64_t asked, int in_place, int64_t tokens,
                                size_t *bytes, fusekit_error *error) {
    const fk_layer_pass *pass = &layer->passes[which];
    int64_t most = 0, index, before = -1;
    fusekit_status status = FUSEKIT_OK;
    *bytes = 0;
    if (pass->step_count == 0) return FUSEKIT_OK;
    status = fk_enough_for(layer, which, asked, in_place, tokens, &most, error);
    for (index = 0; index < pass->layout_count && status == FUSEKIT_OK; ++index) {
        const fk_layer_layout *layout = &pass->layouts[index];
        if (layout->until >= tokens || layout->until == before || layout->in_place != in_place ||
            (asked >= 0 && !fk_suits_outputs(pass, layout, asked, in_place)))
            continue;
        before = layout->until;
        status = fk_enough_for(layer, which, asked, in_place, layout->until, &most, error);
    }
    *bytes = (size_t)most;
    return status;
}

/* The outputs of a pass that the caller gives. */
static int64_t fk_asked(const fk_layer_pass *pass, const fk_layer_call *call) {
    int64_t asked = 0, index;
    for (index = 0; index < pass->output_count; ++index)
        if (call->addresses[pass->outputs[index].index] != 0) asked |= (int64_t)1 << index;
    return asked;
}

/* like: a backward call with all the outputs that every one will have; NULL: any. */
static fusekit_status fk_layer_sizes(const fk_loaded_layer *loaded, int64_t tokens, const fk_layer_call *like,
                                     fusekit_sizes *sizes, fusekit_error *error) {
    const fk_layer *layer = loaded->record;
    const fk_layer_pass *backward = &layer->passes[FK_PASS_BACKWARD];
    int64_t asked = like == NULL ? -1 : fk_asked(backward, like);
    fk_layer_plan plan;
    fusekit_status status = fk_extents(layer, tokens, &plan, error);
    memset(sizes, 0, sizeof *sizes);
    if (status == FUSEKIT_OK) sizes->kept = (size_t)plan.kept_bytes;
    if (status == FUSEKIT_OK) status = fk_enough(layer, FK_PASS_FORWARD, -1, 0, tokens, &sizes->forward, error);
    if (status == FUSEKIT_OK) status = fk_enough(layer, FK_PASS_INFERENCE, -1, 0, tokens, &sizes->inference, error);
    if (status == FUSEKIT_OK)
        status = fk_enough(layer, FK_PASS_BACKWARD, asked, like != NULL && like->settings.in_place != 0, tokens,
                           &sizes->backward, error);
    return status == FUSEKIT_OK ? fk_ok(error) : status;
}

/* ---- Checks of a call. */

/* Whether a tensor of the caller has its elements one after the other, and the bytes from its first to its last. */
static int64_t fk_span(const fk_layer *layer, const fk_layer_plan *plan, const fk_layer_call *call, int64_t index,
                       int *compact) {
    const fk_layer_buffer *buffer = &layer->buffers[index];
    int64_t step = 1, last = 0;
    int axis, empty = 0;
    *compact = 1;
    for (axis = (int)buffer->rank - 1; axis >= 0; --axis) {
        int64_t extent = plan->shape[index][axis], stride = call->strides[index][axis];
        if (stride == 0) stride = step;
        *compact &= stride == step;
        empty |= extent == 0;
        if (extent <= 1) continue;
        if (stride < 0 || stride > ((int64_t)1 << 57) / extent) return (int64_t)1 << 57; /* its kernels refuse it */
        last += stride * (extent - 1);
        step *= extent;
    }
    if (empty) return 0;
    return (last + 1) * buffer->itemsize;
}

/* An output that shares memory with another tensor: until it is written, it serves as scratch memory. */
static fusekit_status fk_check_apart(const fk_layer *layer, const fk_layer_pass *pass, const fk_layer_call *call,
                                     const int64_t *spans, fusekit_error *error) {
    int64_t one, other, inputs = pass->input_count, count = inputs + pass->output_count;
    for (one = inputs; one < count; ++one) {
        int64_t written = pass->outputs[one - inputs].index;
        for (other = 0; other < one; ++other) {
            int64_t index = other < inputs ? pass->inputs[other].index : pass->outputs[other - inputs].index;
            uint64_t first = call->addresses[written], second = call->addresses[index];
            if (first == 0 || second == 0 || spans[written] == 0 || spans[index] == 0) continue;
            if (first < second + (uint64_t)spans[index] && second < first + (uint64_t)spans[written])
                return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                               "%s: the output %s shares memory with %s; give it memory of its own", layer->name,
                               layer->buffers[written].name, layer->buffers[index].name);
        }
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_check_memory(const fk_layer *layer, const char *name, const fusekit_memory *memory, int64_t bytes,
                                      fusekit_error *error) {
    if (bytes > 0 && (memory->data == NULL || memory->bytes < (size_t)bytes))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has %llu bytes; the pass needs %lld", layer->name, name,
                       (unsigned long long)(memory->data == NULL ? 0 : memory->bytes), (long long)bytes);
    if ((uintptr_t)memory->data % FK_MEMORY_ALIGNMENT != 0)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s begins at %p; it must be a multiple of %d bytes",
                       layer->name, name, memory->data, (int)FK_MEMORY_ALIGNMENT);
    return FUSEKIT_OK;
}

/* Whether all is given that the launches read; of the quantise pass, which has no scratch memory, also what they write. */
static fusekit_status fk_check_given(const fk_layer *layer, int64_t which, const fk_layer_call *call,
                                     const fk_layer_plan *plan, fusekit_error *error) {
    const fk_layer_pass *pass = &layer->passes[which];
    int64_t index, at, known, count = pass->input_count + pass->output_count;
    int queued = 0;
    for (index = 0; index < pass->step_count; ++index) {
        const fk_layer_step *step = &pass->steps[index];
        if (!fk_is_queued(step, plan->asked)) continue;
        queued = 1;
        for (at = 0; at < step->operand_count; ++at) {
            int64_t buffer = step->operands[at].buffer;
            if (call->addresses[buffer] != 0 || (step->operands[at].written && which != FK_PASS_QUANTISE)) continue;
            for (known = 0; known < count; ++known)
                if (buffer == (known < pass->input_count ? pass->inputs[known].index
                                                         : pass->outputs[known - pass->input_count].index))
                    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the %s pass needs %s, too; it is NULL",
                                   layer->name, fk_pass_names[which], layer->buffers[buffer].name);
        }
    }
    if (queued) return FUSEKIT_OK;
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: no output is given, so the %s pass has nothing to do", layer->name,
                   fk_pass_names[which]);
}

static fusekit_status fk_plan_pass(const fk_layer *layer, int64_t which, const fk_layer_call *call, fk_layer_plan *plan,
                                   fusekit_error *error) {
    const fk_layer_pass *pass = &layer->passes[which];
    int64_t spans[FK_MOST_BUFFERS], index;
    int compact, in_place = which == FK_PASS_BACKWARD && call->settings.in_place;
    fusekit_status status;
    if (pass->step_count == 0)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s has no %s pass; build it with one", layer->name,
                       fk_pass_names[which]);
    status = fk_extents(layer, call->tokens, plan, error);
    if (status != FUSEKIT_OK) return status;
    plan->asked = fk_asked(pass, call);
    plan->lent = 0;
    for (index = 0; index < pass->input_count; ++index)
        spans[pass->inputs[index].index] = fk_span(layer, plan, call, pass->inputs[index].index, &compact);
    for (index = 0; index < pass->output_count; ++index) {
        spans[pass->outputs[index].index] = fk_span(layer, plan, call, pass->outputs[index].index, &compact);
        if (compact && (plan->asked >> index & 1)) plan->lent |= (int64_t)1 << index;
    }
    fk_mark_used(pass, plan);
    status = fk_check_given(layer, which, call, plan, error);
    if (status == FUSEKIT_OK) status = fk_check_apart(layer, pass, call, spans, error);
    if (status == FUSEKIT_OK) status = fk_choose_layout(layer, which, in_place, call->tokens, plan, error);
    if (status == FUSEKIT_OK && (which == FK_PASS_FORWARD || which == FK_PASS_BACKWARD))
        status = fk_check_memory(layer, "kept", &call->kept, plan->kept_bytes, error);
    if (status == FUSEKIT_OK) status = fk_check_memory(layer, "scratch", &call->scratch, plan->scratch_bytes, error);
    return status;
}

/* ---- Launches. */

/* Where a buffer lies: with the caller, in scratch memory, in a kept buffer, or where an output will be. */
static uint64_t fk_address(const fk_layer *layer, const fk_layer_call *call, const fk_layer_plan *plan, int64_t buffer) {
    uint64_t kept = (uint64_t)(uintptr_t)call->kept.data;
    int64_t home = plan->home[buffer];
    if (call->addresses[buffer] != 0) return call->addresses[buffer];
    if (home == -1) return (uint64_t)(uintptr_t)call->scratch.data + (uint64_t)plan->begin[buffer];
    if (home == -2) return kept + (uint64_t)plan->kept[buffer];
    if (layer->buffers[home].place == FK_IN_KEPT) return kept + (uint64_t)(plan->kept[home] + plan->begin[buffer]);
    return call->addresses[home] + (uint64_t)plan->begin[buffer];
}

/* One launch of a pass, packed. */
static fusekit_status fk_pack_step(const fk_loaded_layer *loaded, const fk_layer_step *step, const unsigned char *operands,
                                   const fk_kernel *kernel, const fk_layer_call *call, const fk_layer_plan *plan,
                                   fusekit_launch *launch, fusekit_error *error) {
    const fk_record *record = kernel->record;
    int64_t dims[FK_MOST_VARIABLES] = {0}, strides[FK_MOST_TENSORS][FK_MOST_RANK], integers[FK_MOST_SCALARS], index;
    uint64_t addresses[FK_MOST_TENSORS];
    float floats[FK_MOST_SCALARS];
    fk_given given[FK_MOST_TENSORS];
    int integer_count = 0, float_count = 0;
    fk_call packed;
    for (index = 0; index < record->tensor_count; ++index) {
        int64_t buffer = step->operands[operands[index]].buffer, compact = 1;
        const int64_t *asked = call->strides[buffer];
        int axis, own = call->addresses[buffer] != 0;
        given[index].shape = plan->shape[buffer];
        for (axis = (int)record->tensors[index].rank - 1; axis >= 0; --axis) {
            strides[index][axis] = own && asked[axis] != 0 ? asked[axis] : compact;
            compact *= plan->shape[buffer][axis] > 1 ? plan->shape[buffer][axis] : 1;
        }
        given[index].strides = strides[index];
        addresses[index] = fk_address(loaded->record, call, plan, buffer);
    }
    fk_take_dims(record, given, dims);
    for (index = 0; index < record->argument_count; ++index) {
        const fk_argument *argument = &record->arguments[index];
        double value;
        if (argument->tensor >= 0) continue;
        memcpy(&value, &argument->default_bits, sizeof value);
        if (argument->dtype == FK_I32)
            integers[integer_count++] = (int64_t)value;
        else
            floats[float_count++] = (float)value;
    }
    memset(&packed, 0, sizeof packed);
    packed.dims = dims;
    packed.given = given;
    packed.addresses = addresses;
    packed.integers = integers;
    packed.floats = floats;
    packed.margin = call->settings.has_cluster_margin ? call->settings.cluster_margin : record->margin;
    return fk_pack(kernel, &packed, launch, error);
}

/* Packs the launches of a pass into `memory`, which is zeroed, one after the other; NULL: counts the bytes. */
static fusekit_status fk_pack_pass(const fk_loaded_layer *loaded, int64_t which, const fk_layer_call *call,
                                   const fk_layer_plan *plan, unsigned char *memory, size_t *bytes,
                                   fusekit_launch **launches, size_t *count, fusekit_error *error) {
    const fk_layer *layer = loaded->record;
    const fk_layer_pass *pass = &layer->passes[which];
    int rows[FK_MOST_STEPS], row = loaded->first[which];
    int in_place = which == FK_PASS_BACKWARD && call->settings.in_place && pass->in_place_count > 0;
    fusekit_status status = FUSEKIT_OK;
    int64_t index, at, rung;
    for (index = 0; index < pass->step_count; ++index) {
        rows[index] = row;
        row += (int)layer->parts[pass->steps[index].part].rung_count;
    }
    *bytes = *count = 0;
    for (index = 0; index < pass->step_count && status == FUSEKIT_OK; ++index) {
        const fk_layer_step *step = &pass->steps[at = in_place ? pass->in_place[index].index : index];
        const fk_layer_part *part = &layer->parts[step->part];
        const fk_kernel *kernel;
        if (!fk_is_queued(step, plan->asked)) continue;
        for (rung = 0; call->tokens > part->rungs[rung].tokens; ++rung) continue;
        kernel = loaded->kernels[part->rungs[rung].kernel];
        if (memory != NULL) {
            fusekit_launch *launch = fk_place_launch(kernel, memory + *bytes);
            launches[*count] = launch;
            status = fk_pack_step(loaded, step, loaded->operands + (size_t)(rows[at] + rung) * FK_MOST_TENSORS, kernel, call,
                                  plan, launch, error);
        }
        *bytes += fk_launch_bytes(kernel->record);
        ++*count;
    }
    return status;
}

static fusekit_status fk_queue_pass(fusekit_launch *const *launches, size_t count, void *stream, fusekit_error *error) {
    fusekit_status status = fk_ok(error);
    size_t index;
    for (index = 0; index < count && status == FUSEKIT_OK; ++index)
        status = fusekit_launch_run(launches[index], stream, error);
    return status;
}

static fusekit_status fk_check_layer_handle(const fk_loaded_layer *loaded, const fk_source *source, const char *title,
                                            const void *args, fusekit_error *error) {
    if (loaded == NULL || loaded->source != source)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the handle is of no such layer; load it first", title);
    if (args == NULL) return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the arguments are NULL; give them", title);
    return FUSEKIT_OK;
}

static fusekit_status fk_run_pass(const fk_loaded_layer *loaded, int64_t which, const fk_layer_call *call, void *stream,
                                  fusekit_error *error) {
    fk_layer_plan plan;
    union {
        unsigned char bytes[FK_PASS_BYTES];
        int64_t aligned;
    } memory;
    fusekit_launch *launches[FK_MOST_STEPS];
    size_t bytes, count;
    fusekit_status status = fk_plan_pass(loaded->record, which, call, &plan, error);
    if (status == FUSEKIT_OK)
        status = fk_pack_pass(loaded, which, call, &plan, memory.bytes, &bytes, launches, &count, error);
    return status == FUSEKIT_OK ? fk_queue_pass(launches, count, stream, error) : status;
}

static fusekit_status fk_bind_pass(const fk_loaded_layer *loaded, int64_t which, const fk_layer_call *call,
                                   fusekit_pass **out, fusekit_error *error) {
    fk_layer_plan plan;
    fusekit_pass *pass;
    size_t bytes, count;
    fusekit_status status = fk_plan_pass(loaded->record, which, call, &plan, error);
    *out = NULL;
    if (status == FUSEKIT_OK) status = fk_pack_pass(loaded, which, call, &plan, NULL, &bytes, NULL, &count, error);
    if (status != FUSEKIT_OK) return status;
    pass = (fusekit_pass *)malloc(sizeof *pass + bytes);
    if (pass == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a pass", loaded->record->name);
    status = fk_pack_pass(loaded, which, call, &plan, (unsigned char *)(pass + 1), &bytes, pass->launches, &pass->count,
                          error);
    if (status != FUSEKIT_OK) {
        free(pass);
        return status;
    }
    *out = pass;
    return fk_ok(error);
}

fusekit_status fusekit_pass_run(const fusekit_pass *pass, void *stream, fusekit_error *error) {
    return fk_queue_pass(pass->launches, pass->count, stream, error);
}

void fusekit_pass_free(fusekit_pass *pass) { free(pass); }
