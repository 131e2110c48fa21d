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
        empty |= extent == 0;
        if (extent <= 1) continue; /* its stride has no meaning */
        *compact &= stride == step;
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

static fusekit_status fk_check_memories(const fk_layer *layer, int64_t which, const fk_layer_call *call,
                                        const fk_layer_plan *plan, fusekit_error *error) {
    fusekit_status status = FUSEKIT_OK;
    if (which == FK_PASS_FORWARD || which == FK_PASS_BACKWARD)
        status = fk_check_memory(layer, "kept", &call->kept, plan->kept_bytes, FK_MEMORY_ALIGNMENT, error);
    if (status != FUSEKIT_OK) return status;
    return fk_check_memory(layer, "scratch", &call->scratch, plan->scratch_bytes, FK_MEMORY_ALIGNMENT, error);
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
    fk_counts counts;
    fusekit_status status;
    if (pass->step_count == 0)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s has no %s pass; build it with one", layer->name,
                       fk_pass_names[which]);
    status = fk_count_pass(layer, which, call, &counts, error);
    if (status == FUSEKIT_OK) status = fk_extents(layer, counts, plan, error);
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
    return status == FUSEKIT_OK ? fk_choose_layout(layer, which, in_place, plan, error) : status;
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
    double floats[FK_MOST_SCALARS];
    fk_given given[FK_MOST_TENSORS];
    int64_t scalars[3] = {0, plan->variables[1], 0}; /* rank, capacity, timeout */
    int integer_count = 0, float_count = 0, scalar;
    fk_call packed;
    for (index = 0; index < record->tensor_count; ++index) {
        int64_t buffer, compact = 1;
        const int64_t *asked;
        int axis, own;
        if (operands[index] >= FK_MOST_TENSORS) { /* a window, which has no dims */
            fusekit_status status = fk_window_at(loaded->record, call, plan, step->window, operands[index] - FK_MOST_TENSORS,
                                                 &addresses[index], error);
            if (status != FUSEKIT_OK) return status;
            given[index].shape = given[index].strides = strides[index];
            continue;
        }
        buffer = step->operands[operands[index]].buffer;
        asked = call->strides[buffer];
        own = call->addresses[buffer] != 0;
        given[index].shape = plan->shape[buffer];
        for (axis = (int)record->tensors[index].rank - 1; axis >= 0; --axis) {
            strides[index][axis] = own && asked[axis] != 0 ? asked[axis] : compact;
            compact *= plan->shape[buffer][axis] > 1 ? plan->shape[buffer][axis] : 1;
        }
        given[index].strides = strides[index];
        if (loaded->record->buffers[buffer].place >= FK_IN_CHECKED) {
            fusekit_status status = fk_rank_address(loaded->record, call, plan, buffer, &addresses[index], error);
            if (status != FUSEKIT_OK) return status;
        } else {
            addresses[index] = fk_address(loaded->record, call, plan, buffer);
        }
    }
    fk_take_dims(record, given, dims);
    if (call->ranks != NULL) {
        scalars[0] = call->ranks->rank;
        scalars[2] = call->ranks->timeout > 0 ? call->ranks->timeout : FK_MINUTE;
    }
    for (index = 0; index < record->argument_count; ++index) {
        const fk_argument *argument = &record->arguments[index];
        double value;
        if (argument->tensor >= 0) continue;
        memcpy(&value, &argument->default_bits, sizeof value);
        scalar = step->window < 0 ? -1 : fk_rank_scalar(argument);
        if (scalar >= 0) value = (double)scalars[scalar];
        if (fk_is_whole(argument->dtype))
            integers[integer_count++] = (int64_t)value;
        else
            floats[float_count++] = fk_scalar(argument->dtype, value);
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
                                   const fk_layer_plan *plan, unsigned char *memory, size_t *bytes, fusekit_pass *packed,
                                   fusekit_error *error) {
    const fk_layer *layer = loaded->record;
    const fk_layer_pass *pass = &layer->passes[which];
    int rows[FK_MOST_STEPS], row = loaded->first[which];
    int in_place = which == FK_PASS_BACKWARD && call->settings.in_place && pass->in_place_count > 0;
    int64_t index, at, rung, tokens = plan->variables[layer->window_count > 0]; /* over ranks, capacity */
    fusekit_status status = fk_check_ranks(loaded, call->ranks, error);
    fk_side side;
    for (index = 0; index < pass->step_count; ++index) {
        rows[index] = row;
        row += (int)layer->parts[pass->steps[index].part].rung_count;
    }
    memset(&side, 0, sizeof side);
    packed->count = *bytes = 0;
    packed->side_stream = NULL;
    for (index = 0; index < pass->step_count && status == FUSEKIT_OK; ++index) {
        const fk_layer_step *step = &pass->steps[at = in_place ? pass->in_place[index].index : index];
        const fk_layer_part *part = &layer->parts[step->part];
        const fk_kernel *kernel;
        if (!fk_is_queued(step, plan->asked)) continue;
        for (rung = 0; tokens > part->rungs[rung].tokens; ++rung) continue;
        if (part->rungs[rung].kernel < 0) continue;
        kernel = loaded->kernels[part->rungs[rung].kernel];
        if (memory != NULL) {
            fusekit_launch *launch = fk_place_launch(kernel, memory + *bytes);
            packed->launches[packed->count] = launch;
            status = fk_pack_step(loaded, step, loaded->operands + (size_t)(rows[at] + rung) * FK_MOST_TENSORS, kernel, call,
                                  plan, launch, error);
        }
        packed->turns[packed->count++] = (unsigned char)fk_turn(step, &side);
        if (step->on_side && status == FUSEKIT_OK) status = fk_take_side_stream(layer, call->ranks, packed, error);
        *bytes += fk_launch_bytes(kernel->record);
    }
    return status;
}

static fusekit_status fk_run_pass(const fk_loaded_layer *loaded, int64_t which, const fk_layer_call *call, void *stream,
                                  fusekit_error *error) {
    fk_layer_plan plan;
    union {
        unsigned char bytes[FK_PASS_BYTES];
        int64_t aligned;
    } memory;
    fusekit_pass pass;
    size_t bytes;
    fusekit_status status = fk_plan_pass(loaded->record, which, call, &plan, error);
    if (status == FUSEKIT_OK) status = fk_check_memories(loaded->record, which, call, &plan, error);
    if (status == FUSEKIT_OK) status = fk_pack_pass(loaded, which, call, &plan, memory.bytes, &bytes, &pass, error);
    return status == FUSEKIT_OK ? fk_run_launches(&pass, stream, error) : status;
}

/* A pass by its plan. */
static fusekit_status fk_bind_planned(const fk_loaded_layer *loaded, int64_t which, const fk_layer_call *call,
                                      const fk_layer_plan *plan, fusekit_pass **out, fusekit_error *error) {
    fusekit_pass *pass, counted;
    size_t bytes;
    fusekit_status status = fk_check_memories(loaded->record, which, call, plan, error);
    *out = NULL;
    if (status == FUSEKIT_OK) status = fk_pack_pass(loaded, which, call, plan, NULL, &bytes, &counted, error);
    if (status != FUSEKIT_OK) return status;
    pass = (fusekit_pass *)malloc(sizeof *pass + bytes);
    if (pass == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a pass", loaded->record->name);
    status = fk_pack_pass(loaded, which, call, plan, (unsigned char *)(pass + 1), &bytes, pass, error);
    if (status != FUSEKIT_OK) {
        free(pass);
        return status;
    }
    *out = pass;
    return fk_ok(error);
}

static fusekit_status fk_bind_pass(const fk_loaded_layer *loaded, int64_t which, const fk_layer_call *call,
                                   fusekit_pass **out, fusekit_error *error) {
    fk_layer_plan plan;
    fusekit_status status = fk_plan_pass(loaded->record, which, call, &plan, error);
    *out = NULL;
    return status == FUSEKIT_OK ? fk_bind_planned(loaded, which, call, &plan, out, error) : status;
}

fusekit_status fusekit_pass_run(const fusekit_pass *pass, void *stream, fusekit_error *error) {
    return fk_run_launches(pass, stream, error);
}

void fusekit_pass_free(fusekit_pass *pass) { free(pass); }
