/* ---- Handles of exported layers. */

static fusekit_status fk_check_layer_handle(const fk_loaded_layer *loaded, const fk_source *source, const char *title,
                                            const void *args, fusekit_error *error) {
    if (loaded == NULL || loaded->source != source)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the handle is of no such layer; load it first", title);
    if (args == NULL) return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: the arguments are NULL; give them", title);
    return FUSEKIT_OK;
}
