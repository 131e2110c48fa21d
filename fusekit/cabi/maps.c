/* ---- Tensor maps. */

/* Extents and strides of a tensor map, with which the driver's encoder may be asked. */
static fusekit_status fk_check_map(const fk_record *record, const fk_part *part, const int64_t *extents,
                                   const int64_t *strides, fusekit_error *error) {
    int index;
    for (index = 0; index < part->map->rank; ++index)
        if (extents[index] < 1 || extents[index] > (int64_t)1 << 32)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has extent %lld; a tensor map takes 1 to 2^32",
                           record->name, part->name, (long long)extents[index]);
    for (index = 0; index + 1 < part->map->rank; ++index)
        if (strides[index] < 0 || strides[index] >= (int64_t)1 << 40 || strides[index] % 16 != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: %s has stride %lld bytes; a tensor map takes multiples of 16 below 2^40", record->name,
                           part->name, (long long)strides[index]);
    return FUSEKIT_OK;
}

static fusekit_status fk_ask_encoder(const fk_kernel *kernel, const fk_map *map, uint64_t at, const int64_t *extents,
                                     const int64_t *strides, unsigned char *place, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    unsigned char room[FK_MAP_BYTES + FK_MAP_ALIGNMENT]; /* it wants alignment, which a parameter need not have */
    unsigned char *descriptor = room + (FK_MAP_ALIGNMENT - (uintptr_t)room % FK_MAP_ALIGNMENT) % FK_MAP_ALIGNMENT;
    uint64_t dims[FK_MOST_RANK] = {0}, steps[FK_MOST_RANK] = {0};
    unsigned box[FK_MOST_RANK] = {0}, element_strides[FK_MOST_RANK] = {0};
    void *before, *current = NULL;
    int index, result, inside;
    for (index = 0; index < map->rank; ++index) {
        dims[index] = (uint64_t)extents[index];
        box[index] = (unsigned)map->box[index];
        element_strides[index] = (unsigned)map->element_strides[index];
    }
    for (index = 0; index + 1 < map->rank; ++index) steps[index] = (uint64_t)strides[index];
    /* It takes a context, and one of a device that has tensor maps. */
    inside = driver->current(&current) == 0 && current == kernel->context;
    result = inside ? 0 : driver->push(kernel->context);
    if (result == 0) {
        result = driver->encode(descriptor, (int)map->dtype, (unsigned)map->rank, (void *)(uintptr_t)at, dims, steps, box,
                                element_strides, (int)map->interleave, (int)map->swizzle, (int)map->promotion,
                                (int)map->fill);
        if (!inside) driver->pop(&before);
    }
    if (result == 0) {
        memcpy(place, descriptor, FK_MAP_BYTES);
        return FUSEKIT_OK;
    }
    fk_cuda(driver, error, result, kernel->record->name, "cuTensorMapEncodeTiled");
    if (result != FK_INVALID_VALUE) return FUSEKIT_CUDA_ERROR;
    if (error != NULL) error->status = FUSEKIT_INVALID_ARGUMENT; /* extents, strides or address are none of a map's */
    return FUSEKIT_INVALID_ARGUMENT;
}

/* The descriptor as the compiler's host code writes it, whatever the driver would say: fusekit/abi/tensormap.py. */
static void fk_write_map(const fk_map *map, uint64_t at, const int64_t *extents, const int64_t *strides,
                         unsigned char *place) {
    /* By CUtensorMapDataType: bits 7-10 of word 2, and bit 16 for TF32. */
    static const int codes[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7 | 1 << 9, 8 | 1 << 9, 11, 12, 13};
    uint32_t words[FK_MAP_BYTES / 4] = {0};
    int index;
    words[0] = (uint32_t)at;
    words[1] = (uint32_t)(at >> 32) & 0x1FFFFFF;
    words[2] = (uint32_t)((map->rank - 1) << 4 | codes[map->dtype] << 7 | map->interleave << 11 | map->swizzle << 13 |
                          map->fill << 15 | map->promotion << 17);
    for (index = 0; index + 1 < map->rank; ++index) {
        words[3 + index] = (uint32_t)((uint64_t)strides[index] >> 4);
        words[7] |= (uint32_t)((uint64_t)strides[index] >> 36 & 0xF) << 4 * index;
    }
    for (index = 0; index < map->rank; ++index) {
        words[8 + index] = (uint32_t)extents[index] - 1;
        words[13] |= ((uint32_t)map->element_strides[index] - 1) << 3 * index;
        if (index > 0) words[14] |= ((uint32_t)map->box[index] - 1) << 8 * (index - 1);
    }
    words[13] |= ((uint32_t)map->box[0] - 1) << 24;
    memcpy(place, words, sizeof words);
}

static fusekit_status fk_encode(const fk_kernel *kernel, const fk_part *part, const int64_t *variables,
                                unsigned char *place, fusekit_error *error) {
    const fk_map *map = part->map;
    int64_t extents[FK_MOST_RANK] = {0}, strides[FK_MOST_RANK] = {0}, at;
    int index, known = fk_evaluate(&map->address, variables, 1, &at);
    fusekit_status status;
    for (index = 0; index < map->rank && known; ++index)
        known = fk_evaluate(&map->dims[index], variables, (int)map->raw, &extents[index]);
    for (index = 0; index + 1 < map->rank && known; ++index)
        known = fk_evaluate(&map->strides[index], variables, (int)map->raw, &strides[index]);
    if (!known) return fk_no_value(kernel->record, part->name, error);
    if (map->raw) {
        fk_write_map(map, (uint64_t)at, extents, strides, place);
        return FUSEKIT_OK;
    }
    status = fk_check_map(kernel->record, part, extents, strides, error);
    return status == FUSEKIT_OK ? fk_ask_encoder(kernel, map, (uint64_t)at, extents, strides, place, error) : status;
}
