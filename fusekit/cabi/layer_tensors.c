/* ---- Tensors of a call with shapes. */

enum { FK_NOWHERE = 4096 }; /* the address of a tensor without elements that has none: it is given all the same */

/* A tensor that the caller gives for a buffer. strides: NULL for the compact ones. */
static fusekit_status fk_take_buffer(const fk_layer *layer, int64_t number, const int64_t *shape, const int64_t *strides,
                                     uint64_t address, const fk_layer_plan *plan, fk_layer_call *call, fusekit_error *error) {
    const fk_layer_buffer *buffer = &layer->buffers[number];
    int axis, empty = 0;
    for (axis = 0; axis < buffer->rank; ++axis) {
        int64_t wanted = plan->shape[number][axis], stride = strides == NULL ? 0 : strides[axis];
        if (shape[axis] != wanted)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has %lld at dim %d; it must have %lld there", layer->name,
                           buffer->name, (long long)shape[axis], axis, (long long)wanted);
        if (strides != NULL && wanted > 1 && stride <= 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has stride %lld at dim %d; it must be positive",
                           layer->name, buffer->name, (long long)stride, axis);
        call->strides[number][axis] = stride;
        empty |= wanted == 0;
    }
    call->addresses[number] = address == 0 && empty ? (uint64_t)FK_NOWHERE : address;
    return FUSEKIT_OK;
}

/* The tokens of a tensor for a buffer, or -1: its shape does not say. */
static int64_t fk_tokens_of(const fk_layer_buffer *buffer, const int64_t *shape) {
    int axis;
    for (axis = 0; axis < buffer->rank; ++axis) {
        const fk_expression *extent = &buffer->shape[axis];
        if (extent->count == 1 && extent->steps->operation == FK_VARIABLE && extent->steps->value == 0) return shape[axis];
    }
    return -1;
}
