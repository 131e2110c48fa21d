/* ---- The arguments. */

typedef struct {
    int64_t shape[FK_MOST_RANK], strides[FK_MOST_RANK]; /* elements */
    int64_t span;                                       /* bytes from the first element to the end of the last */
    int64_t pitch, width;                               /* bytes; of a matrix with contiguous rows, else 0 */
} fk_extent;

static fusekit_status fk_check_dims(const fk_record *record, const fk_call *call, int64_t *variables,
                                    fusekit_error *error) {
    int64_t index;
    for (index = 0; index < record->dim_count; ++index) {
        const fk_dim *dim = &record->dims[index];
        int64_t value = call->dims[index];
        if (value < dim->minimum || value > dim->maximum || value % dim->divisor != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: %s is %lld; it must be a multiple of %lld from %lld to %lld", record->name, dim->name,
                           (long long)value, (long long)dim->divisor, (long long)dim->minimum,
                           (long long)dim->maximum);
        variables[FK_FIRST_DIM + index] = value;
    }
    return FUSEKIT_OK;
}

/* An output whose elements share memory would be written in a race. */
static int fk_distinct(const fk_tensor *tensor, const fk_extent *extent) {
    int64_t reach = 1;
    unsigned done = 0;
    int round, index;
    for (round = 0; round < tensor->rank; ++round) {
        int least = -1;
        for (index = 0; index < tensor->rank; ++index)
            if (!(done >> index & 1) && (least < 0 || extent->strides[index] < extent->strides[least])) least = index;
        done |= 1u << least;
        if (extent->shape[least] <= 1) continue;
        if (extent->strides[least] < reach) return 0;
        reach += extent->strides[least] * (extent->shape[least] - 1);
    }
    return 1;
}

/* The extents, the strides that they have without padding, and whether one is 0. given: the caller's shape. */
static fusekit_status fk_check_shape(const fk_record *record, const fk_tensor *tensor, const fk_given *given,
                                     const int64_t *variables, fk_extent *extent, int *empty, fusekit_error *error) {
    int64_t step = 1;
    int index;
    *empty = 0;
    for (index = (int)tensor->rank - 1; index >= 0; --index) {
        int64_t *size = &extent->shape[index];
        fusekit_status status = fk_value(record, &tensor->shape[index], variables, tensor->name, size, error);
        if (status != FUSEKIT_OK) return status;
        if (given != NULL && (given->shape[index] != *size || *size < 0))
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has %lld at dim %d; it must have %lld there",
                           record->name, tensor->name, (long long)given->shape[index], index, (long long)*size);
        *empty |= *size == 0;
        extent->strides[index] = step;
        if (*size <= 1) continue;
        if (fk_overflows(FK_MUL, step, *size))
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has more than 2^63 elements", record->name,
                           tensor->name);
        step *= *size;
    }
    return FUSEKIT_OK;
}

/* `stride` is the compact one, and becomes the tensor's. asked: the caller's. */
static fusekit_status fk_check_stride(const fk_record *record, const fk_tensor *tensor, int index, int64_t extent,
                                      const int64_t *asked, const int64_t *variables, int64_t *stride,
                                      fusekit_error *error) {
    int64_t actual = asked == NULL ? *stride : *asked;
    if (tensor->free_strides >> index & 1) {
        if (extent != 1) *stride = actual;
        /* 2^55 elements are beyond every device, and keep the arithmetic with them in range. */
        if (*stride > 0 && *stride < (int64_t)1 << 55 && (extent == 1 || *stride % tensor->stride_divisor == 0))
            return FUSEKIT_OK;
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                       "%s: %s has stride %lld at dim %d (elements); it must be a positive multiple of %lld",
                       record->name, tensor->name, (long long)*stride, index, (long long)tensor->stride_divisor);
    }
    if (!fk_evaluate(&tensor->strides[index], variables, 0, stride)) return fk_no_value(record, tensor->name, error);
    if (asked == NULL || extent == 1 || actual == *stride) return FUSEKIT_OK;
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has stride %lld at dim %d (elements); it must be %lld",
                   record->name, tensor->name, (long long)actual, index, (long long)*stride);
}

/* strides: those of a typed call. */
static fusekit_status fk_check_tensor(const fk_record *record, const fk_tensor *tensor, const fk_given *given,
                                      const int64_t *strides, int64_t *variables, fk_extent *extent,
                                      fusekit_error *error) {
    int64_t last = 0;
    int index, empty;
    fusekit_status status = fk_check_shape(record, tensor, given, variables, extent, &empty, error);
    for (index = 0; index < tensor->rank && status == FUSEKIT_OK; ++index) {
        int64_t extents = extent->shape[index], *stride = &extent->strides[index], compact = *stride;
        const int64_t *asked = given == NULL           ? strides[index] == 0 ? NULL : &strides[index]
                               : given->strides == NULL ? &compact
                                                        : &given->strides[index];
        if (!empty) status = fk_check_stride(record, tensor, index, extents, asked, variables, stride, error);
        variables[tensor->first_stride + index] = *stride;
        if (extents <= 1 || status != FUSEKIT_OK) continue;
        if (*stride < 0 || fk_overflows(FK_MUL, *stride, extents - 1) ||
            *stride * (extents - 1) > ((int64_t)1 << 57) - last)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s reaches over more than 2^57 elements", record->name,
                           tensor->name);
        last += *stride * (extents - 1);
    }
    if (status != FUSEKIT_OK) return status;
    extent->span = empty ? 0 : (last + 1) * tensor->itemsize;
    extent->pitch = extent->width = 0;
    if (tensor->rank == 2 && extent->strides[1] == 1 && extent->shape[0] != 1) {
        extent->pitch = extent->strides[0] * tensor->itemsize;
        extent->width = extent->shape[1] * tensor->itemsize;
    }
    if (tensor->written && !empty && !fk_distinct(tensor, extent))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: elements of %s overlap; an output's must lie apart",
                       record->name, tensor->name);
    return FUSEKIT_OK;
}

static int fk_overlap(const fk_extent *one, uint64_t first, const fk_extent *other, uint64_t second) {
    int64_t distance = (int64_t)(second - first), column;
    if (one->span == 0 || other->span == 0 || distance <= -other->span || distance >= one->span) return 0;
    if (one->pitch == 0 || one->pitch != other->pitch) return 1;
    column = fk_apply(FK_MOD, distance, one->pitch); /* of one buffer, side by side */
    return column < one->width || column + other->width > one->pitch;
}

/* Whether one of two tensors may be written over the other, and is: with the same strides at the same place. */
static int fk_in_place(const fk_record *record, const fk_call *call, const fk_extent *extents, int one, int other) {
    const fk_tensor *first = &record->tensors[one], *second = &record->tensors[other];
    return (first->written == 2 + other || second->written == 2 + one) && call->addresses[one] == call->addresses[other] &&
           memcmp(extents[one].strides, extents[other].strides, (size_t)first->rank * sizeof(int64_t)) == 0;
}

static fusekit_status fk_check_places(const fk_record *record, const fk_call *call, const fk_extent *extents,
                                      fusekit_error *error) {
    int one, other;
    for (one = 0; one < record->tensor_count; ++one) {
        const fk_tensor *tensor = &record->tensors[one];
        if (extents[one].span == 0) continue;
        if (call->addresses[one] == 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is NULL; it must be device memory", record->name,
                           tensor->name);
        if (call->addresses[one] % (uint64_t)tensor->alignment != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s begins at %#llx; it must be a multiple of %lld bytes",
                           record->name, tensor->name, (unsigned long long)call->addresses[one],
                           (long long)tensor->alignment);
        for (other = 0; other < one; ++other)
            if ((tensor->written || record->tensors[other].written) && !fk_in_place(record, call, extents, one, other) &&
                fk_overlap(&extents[other], call->addresses[other], &extents[one], call->addresses[one]))
                return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                               "%s: %s overlaps %s in memory; an output must not share memory with another argument",
                               record->name, tensor->name, record->tensors[other].name);
    }
    return FUSEKIT_OK;
}
