/* ---- What the program allocates for ranks. */

/* Bytes of each window. */
static fusekit_status fk_window_bytes(const fk_layer *layer, const fusekit_ranks *ranks, size_t *bytes,
                                      fusekit_error *error) {
    fk_layer_plan plan;
    fk_counts counts;
    int64_t index, size;
    fusekit_status status = fk_count(layer, ranks, 0, &counts, error);
    if (status == FUSEKIT_OK) status = fk_extents(layer, counts, &plan, error);
    for (index = 0; index < layer->window_count && status == FUSEKIT_OK; ++index) {
        if (!fk_evaluate(&layer->windows[index].bytes, plan.variables, 0, &size) || size < 0)
            status = fk_too_many(layer, ranks->capacity, error);
        else
            bytes[index] = (size_t)size;
    }
    return status == FUSEKIT_OK ? fk_ok(error) : status;
}
