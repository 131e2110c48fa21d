/* ---- Memory: for so many tokens, where each buffer lies. */

static int64_t fk_padded(int64_t bytes) {
    return (bytes + FK_LAYER_ALIGNMENT - 1) / FK_LAYER_ALIGNMENT * FK_LAYER_ALIGNMENT;
}

static fusekit_status fk_too_many(const fk_layer *layer, int64_t tokens, fusekit_error *error) {
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %lld tokens; there must be 0 or more, and no tensor of 2^57 bytes",
                   layer->name, (long long)tokens);
}

static fusekit_status fk_check_memory(const fk_layer *layer, const char *name, const fusekit_memory *memory, int64_t bytes,
                                      int alignment, fusekit_error *error) {
    if (bytes > 0 && (memory->data == NULL || memory->bytes < (size_t)bytes))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has %llu bytes; the pass needs %lld", layer->name, name,
                       (unsigned long long)(memory->data == NULL ? 0 : memory->bytes), (long long)bytes);
    if ((uintptr_t)memory->data % (uintptr_t)alignment != 0)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s begins at %p; it must be a multiple of %d bytes",
                       layer->name, name, memory->data, alignment);
    return FUSEKIT_OK;
}

/* Shapes and sizes of all buffers, and what lies in kept memory. */
static fusekit_status fk_extents(const fk_layer *layer, fk_counts counts, fk_layer_plan *plan, fusekit_error *error) {
    int64_t *variables = plan->variables, tokens = counts.tokens, index;
    int axis;
    if (tokens < 0 || tokens > INT32_MAX) return fk_too_many(layer, tokens, error);
    memcpy(variables, &counts, sizeof counts);
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
static fusekit_status fk_choose_layout(const fk_layer *layer, int64_t which, int in_place, fk_layer_plan *plan,
                                       fusekit_error *error) {
    const fk_layer_pass *pass = &layer->passes[which];
    const fk_layer_layout *best = NULL;
    int64_t begins[FK_MOST_BUFFERS], range = plan->variables[layer->ranges], index, bytes;
    int fits;
    plan->scratch_bytes = 0;
    for (index = 0; index < pass->layout_count; ++index) {
        const fk_layer_layout *layout = &pass->layouts[index];
        if ((layout->lends & ~plan->lent) != 0 || range < layout->since || range > layout->until ||
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
