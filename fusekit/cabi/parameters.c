/* ---- A launch record's parameters out of their JSON. */

static int fk_get_boxes(fk_reader *reader, fk_json item, const char *key, int rank, int64_t most, unsigned *result) {
    fk_json value, rest, extent;
    int index = 0;
    int64_t number;
    if (!fk_get_array(reader, item, key, &value)) return 0;
    if (fk_json_count(value) != rank) return fk_refuse(reader, key, "must have as many entries as dims");
    for (rest = fk_json_inside(value); fk_json_next(&rest, NULL, &extent); ++index) {
        if (!fk_json_integer(extent, &number) || number < 1 || number > most)
            return fk_refuse(reader, key, "is out of what a tensor map allows");
        result[index] = (unsigned)number;
    }
    return 1;
}

static int fk_read_map(fk_reader *reader, fk_json item, fk_parameter *parameter) {
    static const char *const interleaves[] = {"none", "16B", "32B", NULL};
    static const char *const swizzles[] = {"none", "32B", "64B", "128B", NULL};
    static const char *const promotions[] = {"none", "64B", "128B", "256B", NULL};
    static const char *const fills[] = {"none", "nan_zero", NULL};
    fk_map *map = (fk_map *)fk_take(reader->arena, 1, sizeof *map);
    unsigned inner;
    if (map == NULL) return fk_no_memory(reader);
    parameter->map = map;
    if (!fk_get_object(reader, item, 15) || !fk_get_choice(reader, item, "dtype", fk_dtype_names, &map->dtype) ||
        !fk_get_choice(reader, item, "interleave", interleaves, &map->interleave) ||
        !fk_get_choice(reader, item, "swizzle", swizzles, &map->swizzle) ||
        !fk_get_choice(reader, item, "l2_promotion", promotions, &map->promotion) ||
        !fk_get_choice(reader, item, "oob_fill", fills, &map->fill) ||
        !fk_get_expression(reader, item, "address", FK_OF_LAUNCH | FK_OF_ADDRESSES, &map->address) ||
        !fk_get_expressions(reader, item, "dims", FK_OF_LAUNCH, -1, map->dims, &map->rank))
        return 0;
    if (map->rank == 0) return fk_refuse(reader, "dims", "must have 1 to 5 entries");
    if (!fk_get_expressions(reader, item, "strides", FK_OF_LAUNCH, map->rank - 1, map->strides, NULL) ||
        !fk_get_boxes(reader, item, "box", map->rank, 256, map->box) ||
        !fk_get_boxes(reader, item, "element_strides", map->rank, 8, map->element_strides))
        return 0;
    inner = map->box[0] * (unsigned)fk_dtype_bytes[map->dtype];
    if ((map->interleave == 0 && inner % 16 != 0) || (map->swizzle != 0 && inner > 16u << map->swizzle))
        return fk_refuse(reader, "box", "has an inner extent that is no multiple of 16 bytes, or beyond the swizzle");
    return 1;
}

static int fk_is_zero(const fk_expression *expression) {
    return expression->count == 1 && expression->steps->operation == FK_PUSH && expression->steps->value == 0;
}

/* The tensor or the float that a parameter is of, or that it is the workspace or the scratch, where there is one. */
static int fk_read_source(fk_reader *reader, fk_json item, fk_parameter *parameter) {
    const fk_record *record = reader->record;
    const char *name;
    int index, floats = 0;
    if (!fk_get_text(reader, item, "argument", &name)) return 0;
    if (parameter->kind == FK_POINTER && !fk_is_zero(&record->workspace) && strcmp(name, "workspace") == 0) {
        parameter->kind = FK_WORKSPACE;
        return 1;
    }
    if (parameter->kind == FK_POINTER && record->scratch.count > 0 && strcmp(name, "scratch") == 0) {
        parameter->kind = FK_SCRATCH;
        return 1;
    }
    if (parameter->kind != FK_FLOAT) {
        parameter->argument = fk_find_tensor(record, name, strlen(name));
        return parameter->argument >= 0 || fk_refuse(reader, "argument", "names no tensor");
    }
    for (index = 0; index < reader->argument_count; ++index)
        if (reader->arguments[index].rank < 0 && reader->arguments[index].dtype == FUSEKIT_F32) {
            parameter->argument = floats++;
            if (strcmp(name, reader->arguments[index].name) == 0) return 1;
        }
    return fk_refuse(reader, "argument", "names no f32 scalar");
}

static int fk_read_parameter(fk_reader *reader, fk_json item, fk_parameter *parameter) {
    static const char *const kinds[] = {"tensor_map", "pointer", "integer", "float", NULL};
    static const char *const integers[] = {"i32", "i64", NULL};
    int64_t offset, size, expected = 8;
    int kind, wide;
    if (!fk_json_is(item, '{')) return fk_refuse(reader, "", "must be an object");
    if (!fk_get_choice(reader, item, "kind", kinds, &kind) || !fk_get_name(reader, item, &parameter->name) ||
        !fk_get_integer(reader, item, "offset", 0, 1 << 20, &offset) ||
        !fk_get_integer(reader, item, "size", 1, FK_MAP_BYTES, &size))
        return 0;
    if (kind == 0) {
        expected = FK_MAP_BYTES;
        parameter->kind = FK_TENSOR_MAP;
        if (!fk_read_map(reader, item, parameter)) return 0;
    } else if (kind == 2) {
        if (!fk_get_object(reader, item, 6) || !fk_get_choice(reader, item, "dtype", integers, &wide) ||
            !fk_get_expression(reader, item, "value", FK_OF_LAUNCH | FK_OF_SCALARS, &parameter->value))
            return 0;
        expected = wide ? 8 : 4;
        parameter->kind = wide ? FK_INT64 : FK_INT32;
    } else {
        expected = kind == 1 ? 8 : 4;
        parameter->kind = kind == 1 ? FK_POINTER : FK_FLOAT;
        if (!fk_get_object(reader, item, 5)) return 0;
    }
    if (kind != 2 && !fk_read_source(reader, item, parameter)) return 0;
    if (size != expected || offset % (kind == 0 ? 16 : expected) != 0)
        return fk_refuse(reader, "offset", "and size are not those of such a parameter");
    parameter->offset = (unsigned)offset;
    parameter->size = (unsigned)size;
    return 1;
}

static int fk_read_parameters(fk_reader *reader, fk_json launch) {
    fk_record *record = reader->record;
    fk_json rest, item;
    fk_parameter *parameters;
    void *items;
    int index, other;
    if (!fk_get_items(reader, launch, "parameters", FK_MOST_PARAMETERS, sizeof *parameters, &rest, &items)) return 0;
    record->parameters = parameters = (fk_parameter *)items;
    for (index = 0; fk_json_next(&rest, NULL, &item); ++index) {
        fk_parameter made;
        memset(&made, 0, sizeof made);
        snprintf(reader->where, sizeof reader->where, "parameters[%d]", index);
        if (!fk_read_parameter(reader, item, &made)) return 0;
        for (other = 0; other < index; ++other)
            if (!fk_names_differ(reader, made.name, parameters[other].name)) return 0;
        record->map_count += made.kind == FK_TENSOR_MAP;
        if (record->map_count > FK_MOST_MAPS)
            return fk_refuse(reader, "", "is one tensor map more than the launcher takes");
        for (other = index; other > 0 && parameters[other - 1].offset > made.offset; --other)
            parameters[other] = parameters[other - 1];
        parameters[other] = made;
    }
    record->parameter_count = index;
    *reader->where = 0;
    for (index = 1; index < record->parameter_count; ++index)
        if (parameters[index - 1].offset + parameters[index - 1].size > parameters[index].offset)
            return fk_refuse(reader, "parameters", "overlap");
    return 1;
}
