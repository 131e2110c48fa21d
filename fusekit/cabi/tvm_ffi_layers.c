/* ---- Passes of layers: inputs and outputs, kept memory, ranks, scratch memory, the cluster margin, whether kept memory is
 * overwritten; less those that the pass does not have. */

/* Bytes of memory of a layer for at most so many tokens, over ranks also for a capacity and rows; or of a window. */
static int fk_ffi_bytes(fk_ffi_item *item, int64_t which, const char *name, const TVMFFIAny *args, int32_t count,
                        TVMFFIAny *result) {
    fusekit_status status = FUSEKIT_OK;
    fusekit_error error;
    fusekit_sizes sizes;
    fusekit_ranks ranks;
    size_t windows[FK_MOST_WINDOWS];
    int64_t given[3] = {0, 0, 0}; /* tokens, capacity, rows */
    int wrong, of_window = which <= FK_FFI_WINDOW_BYTES;
    pthread_mutex_lock(&fk_ffi_lock);
    if (item->layer == NULL) status = fk_read_layer(item->source, item->title, &item->layer, &error);
    pthread_mutex_unlock(&fk_ffi_lock);
    if (status != FUSEKIT_OK) return fk_ffi_raise(&error);
    if (of_window)
        wrong = fk_ffi_counts(args, count, name, "one argument, the capacity,", INT32_MAX, 1, 1, given + 1);
    else if (item->layer->window_count > 0)
        wrong = fk_ffi_counts(args, count, name, "the number of tokens, the capacity and, if it is given, rows, each",
                              INT32_MAX, 2, 3, given);
    else
        wrong = fk_ffi_counts(args, count, name, "one argument, the number of tokens", INT32_MAX, 1, 1, given);
    if (wrong != 0) return -1;
    memset(&ranks, 0, sizeof ranks);
    ranks.capacity = given[1];
    ranks.rows = given[2];
    if (of_window)
        status = fk_window_bytes(item->layer, &ranks, windows, &error);
    else
        status = fk_layer_sizes(item->layer, item->layer->window_count > 0 ? &ranks : NULL, given[0], NULL, &sizes, &error);
    if (status != FUSEKIT_OK) return fk_ffi_raise(&error);
    result->type_index = kTVMFFIInt;
    result->zero_padding = 0;
    result->v_int64 = (int64_t)(of_window                    ? windows[FK_FFI_WINDOW_BYTES - which]
                                : which == FK_FFI_KEPT_BYTES ? sizes.kept
                                : which == FK_PASS_FORWARD   ? sizes.forward
                                : which == FK_PASS_INFERENCE ? sizes.inference
                                                             : sizes.backward);
    return 0;
}

/* The words of ranks: rank, timeout, capacity, rows, address of checked memory, side stream, two events; then of each window
 * its bytes, and its address on each rank. */
static fusekit_status fk_ffi_ranks(const fk_loaded_layer *loaded, const fk_ffi_call *call, fusekit_window *windows,
                                   fusekit_ranks *ranks, fusekit_error *error) {
    const int64_t *words = call->ranks;
    int64_t index, count = loaded->record->window_count, wanted = FK_FFI_RANKS + count * (1 + loaded->ranks);
    if (words == NULL || call->rank_words != wanted)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: ranks has %lld words; it must have %lld, %d and %lld for each of %lld windows",
                       call->function->name, (long long)(words == NULL ? 0 : call->rank_words), (long long)wanted,
                       (int)FK_FFI_RANKS, (long long)loaded->ranks + 1, (long long)count);
    for (index = 0; index < 2; ++index)
        if (words[index] < INT32_MIN || words[index] > INT32_MAX)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: word %lld of ranks is %lld; it must have 32 bits",
                           call->function->name, (long long)index, (long long)words[index]);
    memset(ranks, 0, sizeof *ranks);
    ranks->rank = (int32_t)words[0];
    ranks->timeout = (int32_t)words[1];
    ranks->capacity = words[2];
    ranks->rows = words[3];
    ranks->checked.data = (void *)(uintptr_t)words[4];
    ranks->checked.bytes = FK_CHECKED_BYTES;
    ranks->side_stream = (void *)(uintptr_t)words[5];
    for (index = 0; index < 2; ++index) ranks->events[index] = (void *)(uintptr_t)words[6 + index];
    for (index = 0, words += FK_FFI_RANKS; index < count; ++index, words += 1 + loaded->ranks) {
        windows[index].bytes = (size_t)words[0];
        windows[index].addresses = (void *const *)(const void *)(words + 1);
    }
    ranks->windows = windows;
    return FUSEKIT_OK;
}

/* The tokens, which some tensor has as an extent. */
static int64_t fk_ffi_tokens(const fk_layer *layer, const fk_ffi_call *call, const fk_layer_pass *pass) {
    int64_t index, tokens = -1;
    for (index = 0; index < pass->input_count && index < call->given && tokens < 0; ++index) {
        const fk_layer_buffer *buffer = &layer->buffers[pass->inputs[index].index];
        if (call->tensors[index] != NULL && call->tensors[index]->ndim == buffer->rank)
            tokens = fk_tokens_of(buffer, call->tensors[index]->shape);
    }
    return tokens < 0 ? 0 : tokens;
}

static fusekit_status fk_ffi_take_buffer(const fk_layer *layer, const fk_ffi_call *call, int64_t index, int64_t number,
                                         const fk_layer_plan *plan, fk_layer_call *taken, fusekit_error *error) {
    const fk_layer_buffer *buffer = &layer->buffers[number];
    const DLTensor *tensor = index < call->given ? call->tensors[index] : NULL;
    fusekit_status status;
    if (index >= call->given || call->args[index].type_index == kTVMFFINone) return FUSEKIT_OK;
    status = fk_ffi_tensor(call, index, buffer->name, buffer->dtype, buffer->rank, error);
    if (status != FUSEKIT_OK) return status;
    return fk_take_buffer(layer, number, tensor->shape, tensor->strides, fk_ffi_address(tensor), plan, taken, error);
}

/* Memory that the caller gives as a tensor of bytes; none where it is left out. */
static fusekit_status fk_ffi_memory(const fk_ffi_call *call, int64_t index, const char *name, fusekit_memory *memory,
                                    fusekit_error *error) {
    const DLTensor *tensor = index < call->given ? call->tensors[index] : NULL;
    fusekit_status status;
    if (index >= call->given || call->args[index].type_index == kTVMFFINone) return FUSEKIT_OK;
    status = fk_ffi_tensor(call, index, name, FK_U8, 1, error);
    if (status == FUSEKIT_OK && tensor->strides != NULL && tensor->shape[0] > 1 && tensor->strides[0] != 1)
        status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s must be contiguous", call->function->name, name);
    if (status != FUSEKIT_OK) return status;
    memory->data = (void *)(uintptr_t)fk_ffi_address(tensor);
    memory->bytes = (size_t)tensor->shape[0];
    return FUSEKIT_OK;
}

/* scratch: the environment's, once its size is known. */
static fusekit_status fk_ffi_bind_pass(const fk_loaded_layer *loaded, const fk_ffi_call *call, void *scratch,
                                       fk_ffi_kept *kept, fusekit_error *error) {
    const fk_layer *layer = loaded->record;
    const int64_t which = call->function->pass;
    const fk_layer_pass *pass = &layer->passes[which];
    const int has_kept = which == FK_PASS_FORWARD || which == FK_PASS_BACKWARD, has_scratch = which != FK_PASS_QUANTISE;
    int64_t index, at = pass->input_count + pass->output_count;
    fusekit_window windows[FK_MOST_WINDOWS];
    fusekit_ranks ranks;
    fk_layer_call taken;
    fk_layer_plan plan;
    fk_counts counts;
    double margin = -1, in_place = 0;
    fusekit_status status = FUSEKIT_OK;
    memset(&taken, 0, sizeof taken);
    taken.tokens = fk_ffi_tokens(layer, call, pass);
    if (call->function->ranks >= 0) {
        status = fk_ffi_ranks(loaded, call, windows, &ranks, error);
        taken.ranks = &ranks;
    }
    if (status == FUSEKIT_OK) status = fk_count_pass(layer, which, &taken, &counts, error);
    if (status == FUSEKIT_OK) status = fk_extents(layer, counts, &plan, error);
    for (index = 0; index < at && status == FUSEKIT_OK; ++index)
        status = fk_ffi_take_buffer(layer, call, index,
                                    index < pass->input_count ? pass->inputs[index].index
                                                              : pass->outputs[index - pass->input_count].index,
                                    &plan, &taken, error);
    if (status == FUSEKIT_OK && has_kept) status = fk_ffi_memory(call, at++, "kept", &taken.kept, error);
    at += call->function->ranks >= 0;
    if (status == FUSEKIT_OK && has_scratch) status = fk_ffi_memory(call, at++, "scratch", &taken.scratch, error);
    if (status == FUSEKIT_OK && has_scratch) status = fk_ffi_number(call, at++, "cluster_margin", 1, -1, &margin, error);
    if (status == FUSEKIT_OK && which == FK_PASS_BACKWARD)
        status = fk_ffi_number(call, at++, "in_place", 1, 0, &in_place, error);
    if (status == FUSEKIT_OK) status = fk_ffi_no_more(call, at, error);
    if (status != FUSEKIT_OK) return status;
    taken.settings.has_cluster_margin = margin >= 0;
    taken.settings.cluster_margin = (int32_t)margin;
    taken.settings.in_place = in_place != 0;
    status = fk_plan_pass(layer, which, &taken, &plan, error);
    if (status != FUSEKIT_OK) return status;
    kept->scratch_bytes = taken.scratch.data == NULL ? plan.scratch_bytes : 0;
    kept->scratch = scratch;
    if (kept->scratch_bytes > 0) {
        if (scratch == NULL) /* what is wrong with kept memory is known before the environment is asked */
            return has_kept ? fk_check_memory(layer, "kept", &taken.kept, plan.kept_bytes, FK_MEMORY_ALIGNMENT, error) : FUSEKIT_OK;
        taken.scratch.data = scratch;
        taken.scratch.bytes = (size_t)kept->scratch_bytes;
    }
    return fk_bind_planned(loaded, which, &taken, &plan, &kept->pass, error);
}
