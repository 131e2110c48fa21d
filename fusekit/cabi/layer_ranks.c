/* ---- Layers over ranks: windows, what launches that all ranks make together are given, and the side stream. */

enum { FK_CHECKED_BYTES = 16, FK_MINUTE = 60000 };

/* Tokens of a call, and over ranks the capacity and rows of windows and buffers. */
static fusekit_status fk_count(const fk_layer *layer, const fusekit_ranks *ranks, int64_t tokens, fk_counts *counts,
                               fusekit_error *error) {
    int64_t variables[FK_MOST_VARIABLES] = {0}, most = 0;
    counts->tokens = tokens;
    counts->capacity = counts->rows = 0;
    if (layer->window_count == 0) {
        if (ranks == NULL) return FUSEKIT_OK;
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s is on one GPU; leave its ranks NULL", layer->name);
    }
    if (ranks == NULL)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s is over ranks, and they are NULL; give them", layer->name);
    if (ranks->capacity < 1 || ranks->capacity > INT32_MAX)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: capacity is %lld; it must be the most tokens of a rank, 1 or more",
                       layer->name, (long long)ranks->capacity);
    variables[0] = ranks->capacity;
    if (!fk_evaluate(&layer->capacity, variables, 0, &counts->capacity)) counts->capacity = INT32_MAX;
    variables[1] = counts->capacity;
    if (!fk_evaluate(&layer->most_rows, variables, 0, &most) || most > INT32_MAX)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: capacity is %lld; more rows than 2^31 - 1 may come to a rank; give a smaller one", layer->name,
                       (long long)ranks->capacity);
    counts->rows = ranks->rows == 0 ? most : ranks->rows;
    if (counts->rows < 1 || counts->rows > most)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: rows is %lld; it must be 1 to %lld, or 0 for any routing",
                       layer->name, (long long)ranks->rows, (long long)most);
    if (tokens > counts->capacity)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: %lld tokens; the windows have room for %lld; give every rank a larger capacity", layer->name,
                       (long long)tokens, (long long)counts->capacity);
    return FUSEKIT_OK;
}

/* Those of a pass; one that quantises weights is the same on any rank. */
static fusekit_status fk_count_pass(const fk_layer *layer, int64_t which, const fk_layer_call *call, fk_counts *counts,
                                    fusekit_error *error) {
    if (which != FK_PASS_QUANTISE) return fk_count(layer, call->ranks, call->tokens, counts, error);
    memset(counts, 0, sizeof *counts);
    counts->tokens = call->tokens;
    return FUSEKIT_OK;
}

static fusekit_status fk_check_ranks(const fk_loaded_layer *loaded, const fusekit_ranks *ranks, fusekit_error *error) {
    const char *name = loaded->record->name;
    if (ranks == NULL) return FUSEKIT_OK;
    if (ranks->rank < 0 || ranks->rank >= loaded->ranks)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: rank is %d; it must be 0 to %lld", name, (int)ranks->rank,
                       (long long)loaded->ranks - 1);
    if (ranks->timeout < 0)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: timeout is %d; it must be 1 or more milliseconds, or 0 for a minute", name, (int)ranks->timeout);
    if (ranks->windows == NULL)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the windows are NULL; give an array of %lld", name,
                       (long long)loaded->record->window_count);
    return FUSEKIT_OK;
}

/* Where the window of a rank begins; it has all bytes that launches may reach. */
static fusekit_status fk_window_at(const fk_layer *layer, const fk_layer_call *call, const fk_layer_plan *plan,
                                   int64_t window, int64_t rank, uint64_t *address, fusekit_error *error) {
    const char *name = layer->windows[window].name;
    const fusekit_window *given = &call->ranks->windows[window];
    int64_t bytes;
    if (!fk_evaluate(&layer->windows[window].bytes, plan->variables, 0, &bytes) || bytes < 0)
        return fk_too_many(layer, call->tokens, error);
    if (given->addresses == NULL || given->addresses[rank] == NULL)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the window %s of rank %lld is NULL; give the address of each rank's",
                       layer->name, name, (long long)rank);
    if (given->bytes < (size_t)bytes)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the window %s has %llu bytes; it must have %lld", layer->name,
                       name, (unsigned long long)given->bytes, (long long)bytes);
    *address = (uint64_t)(uintptr_t)given->addresses[rank];
    if (*address % FK_MEMORY_ALIGNMENT != 0)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: the window %s of rank %lld begins at %p; it must be a multiple of %d bytes", layer->name, name,
                       (long long)rank, given->addresses[rank], (int)FK_MEMORY_ALIGNMENT);
    return FUSEKIT_OK;
}

/* Where a buffer in a window of this rank lies, or in its checked memory. */
static fusekit_status fk_rank_address(const fk_layer *layer, const fk_layer_call *call, const fk_layer_plan *plan,
                                      int64_t number, uint64_t *address, fusekit_error *error) {
    const fk_layer_buffer *buffer = &layer->buffers[number];
    int64_t offset;
    fusekit_status status;
    if (call->ranks == NULL || !fk_evaluate(&buffer->offset, plan->variables, 0, &offset) || offset < 0)
        return fk_too_many(layer, call->tokens, error);
    if (buffer->place == FK_IN_CHECKED) {
        *address = (uint64_t)(uintptr_t)call->ranks->checked.data;
        status = fk_check_memory(layer, "checked", &call->ranks->checked, FK_CHECKED_BYTES, FK_CHECKED_BYTES, error);
    } else {
        status = fk_window_at(layer, call, plan, buffer->place - FK_IN_WINDOW, call->ranks->rank, address, error);
    }
    *address += (uint64_t)offset;
    return status;
}

/* ---- The side stream. */

enum { FK_ON_SIDE = 1, FK_JOINS = 2 };

typedef struct { /* of the launches so far */
    unsigned char pending[FK_MOST_BUFFERS]; /* what one on the side stream writes */
    int any, awaited;
} fk_side;

/* Whether a launch is on the side stream, or first joins it: for what it reads, or because an earlier one has awaited the
 * rows anyway. */
static int fk_turn(const fk_layer_step *step, fk_side *side) {
    int64_t index;
    int joins = 0;
    if (side->any && !step->on_side && !step->awaits && !step->apart) {
        joins = side->awaited;
        for (index = 0; index < step->operand_count; ++index) joins |= side->pending[step->operands[index].buffer];
    }
    side->awaited = (side->awaited || step->awaits) && !joins && !step->on_side;
    if (joins || step->on_side) {
        memset(side->pending, 0, sizeof side->pending);
        side->any = 0;
    }
    for (index = 0; index < step->write_count; ++index) side->any = side->pending[step->writes[index].index] = 1;
    return step->on_side ? FK_ON_SIDE : joins ? FK_JOINS : 0;
}

static fusekit_status fk_take_side_stream(const fk_layer *layer, const fusekit_ranks *ranks, fusekit_pass *pass,
                                          fusekit_error *error) {
    if (ranks == NULL || (uintptr_t)ranks->side_stream <= FK_PER_THREAD || ranks->events[0] == NULL ||
        ranks->events[1] == NULL || ranks->events[0] == ranks->events[1])
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: its launches overlap; give it a side_stream that is no default stream, and two events", layer->name);
    pass->side_stream = ranks->side_stream;
    memcpy(pass->events, ranks->events, sizeof pass->events);
    return FUSEKIT_OK;
}

/* What is queued in `to` from now on waits for what is in `from`. */
static fusekit_status fk_order(const fk_kernel *kernel, void *event, void *from, void *to, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const char *what = "cuEventRecord";
    void *before;
    int result = driver->push(kernel->context);
    if (result == 0) {
        result = driver->event_record(event, from);
        if (result == 0) result = driver->stream_wait_event(to, event, 0), what = "cuStreamWaitEvent";
        driver->pop(&before);
    }
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, kernel->record->name, what);
}

/* Queues the launches of a pass, some on its side stream, which the caller's has joined in the end, also after an error. */
static fusekit_status fk_run_sided(const fusekit_pass *pass, void *stream, fusekit_error *error) {
    const fk_kernel *kernel = pass->launches[0]->kernel;
    fusekit_status status = FUSEKIT_OK, joined;
    void *current = NULL;
    size_t index;
    int queued = 0, result = fk_context_of(kernel, stream, &current);
    if (result != 0) return fk_cuda(kernel->driver, error, result, kernel->record->name, "cuCtxGetCurrent");
    if (stream == pass->side_stream)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the stream is the side stream; give another one", kernel->record->name);
    for (index = 0; index < pass->count && status == FUSEKIT_OK; ++index) {
        if (pass->turns[index] != 0 && queued) {
            queued = 0;
            status = fk_order(kernel, pass->events[1], pass->side_stream, stream, error);
        }
        if (status != FUSEKIT_OK) break;
        if (pass->turns[index] != FK_ON_SIDE) {
            status = fk_run(pass->launches[index], stream, current, error);
            continue;
        }
        queued = 1;
        status = fk_order(kernel, pass->events[0], stream, pass->side_stream, error);
        if (status == FUSEKIT_OK) status = fk_run(pass->launches[index], pass->side_stream, kernel->context, error);
    }
    if (queued) {
        joined = fk_order(kernel, pass->events[1], pass->side_stream, stream, status == FUSEKIT_OK ? error : NULL);
        if (status == FUSEKIT_OK) status = joined;
    }
    return status == FUSEKIT_OK ? fk_ok(error) : status;
}

static fusekit_status fk_run_launches(const fusekit_pass *pass, void *stream, fusekit_error *error) {
    if (pass->side_stream != NULL) return fk_run_sided(pass, stream, error);
    return fk_run_all((const fusekit_launch *const *)pass->launches, pass->count, stream, error);
}
