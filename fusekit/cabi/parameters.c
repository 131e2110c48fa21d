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

static int fk_read_map(fk_reader *reader, fk_json item, fk_part *part) {
    static const char *const interleaves[] = {"none", "16B", "32B", NULL};
    static const char *const swizzles[] = {"none", "32B", "64B", "128B", NULL};
    static const char *const promotions[] = {"none", "64B", "128B", "256B", NULL};
    static const char *const fills[] = {"none", "nan_zero", NULL};
    static const char *const encodings[] = {"driver", "raw", NULL};
    fk_map *map = (fk_map *)fk_take(reader->arena, 1, sizeof *map);
    const unsigned launch = fk_of_launch(reader);
    unsigned inner; /* bits */
    fk_json encoding;
    int encoded = fk_json_member(item, "encoding", &encoding);
    if (map == NULL) return fk_no_memory(reader);
    part->map = map;
    if (encoded && !fk_get_choice(reader, item, "encoding", encodings, &map->raw)) return 0;
    if (map->raw && !fk_is_newer(reader, "encoding")) return 0;
    if (!fk_get_object(reader, item, 15 + encoded) || !fk_get_dtype(reader, item, FK_MAP_DTYPES, &map->dtype) ||
        !fk_get_choice(reader, item, "interleave", interleaves, &map->interleave) ||
        !fk_get_choice(reader, item, "swizzle", swizzles, &map->swizzle) ||
        !fk_get_choice(reader, item, "l2_promotion", promotions, &map->promotion) ||
        !fk_get_choice(reader, item, "oob_fill", fills, &map->fill) ||
        !fk_get_expression(reader, item, "address", launch | FK_OF_ADDRESSES, &map->address) ||
        !fk_get_expressions(reader, item, "dims", launch, -1, map->dims, &map->rank))
        return 0;
    if (map->rank == 0) return fk_refuse(reader, "dims", "must have 1 to 5 entries");
    if (!fk_get_expressions(reader, item, "strides", launch, map->rank - 1, map->strides, NULL) ||
        !fk_get_boxes(reader, item, "box", map->rank, 256, map->box) ||
        !fk_get_boxes(reader, item, "element_strides", map->rank, 8, map->element_strides))
        return 0;
    inner = map->box[0] * fk_dtype_bits[map->dtype];
    if ((map->interleave == 0 && inner % 128 != 0) || (map->swizzle != 0 && inner > 128u << map->swizzle))
        return fk_refuse(reader, "box", "has an inner extent that is no multiple of 16 bytes, or beyond the swizzle");
    return 1;
}

static int fk_is_zero(const fk_expression *expression) {
    return expression->count == 1 && expression->steps->operation == FK_PUSH && expression->steps->value == 0;
}

/* The tensor of a pointer or a tensor map; or that a pointer is the workspace's or the scratch's, where there is one. */
static int fk_read_source(fk_reader *reader, fk_json item, fk_part *part) {
    const fk_record *record = reader->record;
    const char *name;
    if (!fk_get_text(reader, item, "argument", &name)) return 0;
    if (part->kind == FK_POINTER && !fk_is_zero(&record->workspace) && strcmp(name, "workspace") == 0) {
        part->kind = FK_WORKSPACE;
        return 1;
    }
    if (part->kind == FK_POINTER && record->scratch.count > 0 && strcmp(name, "scratch") == 0) {
        part->kind = FK_SCRATCH;
        return 1;
    }
    part->argument = fk_find_tensor(record, name, strlen(name));
    return part->argument >= 0 || fk_refuse(reader, "argument", "names no tensor");
}

static int fk_read_pointer(fk_reader *reader, fk_json item, fk_part *part) {
    fk_json shift;
    int shifted = fk_json_member(item, "shift", &shift);
    part->kind = FK_POINTER;
    if (!fk_get_object(reader, item, 5 + shifted) || !fk_read_source(reader, item, part)) return 0;
    return !shifted || (fk_is_newer(reader, "shift") &&
                        fk_compile(reader, "shift", shift, fk_of_launch(reader), &part->value, NULL));
}

static int fk_read_integer(fk_reader *reader, fk_json item, fk_part *part) {
    static const char *const dtypes[] = {"i32", "i64", "i8", "i16", "u8", "u16", "u32", "u64", NULL};
    static const unsigned char sizes[] = {4, 8, 1, 2, 1, 2, 4, 8};
    int which;
    if (!fk_get_object(reader, item, 6) || !fk_get_choice(reader, item, "dtype", dtypes, &which) ||
        (which > 1 && !fk_is_newer(reader, "dtype")))
        return 0;
    part->kind = which < 4 ? FK_INT : FK_UINT;
    part->size = sizes[which];
    return fk_get_expression(reader, item, "value", fk_of_launch(reader) | FK_OF_SCALARS, &part->value);
}

static int fk_read_float(fk_reader *reader, fk_json item, fk_part *part) {
    fk_json value;
    const char *name;
    double number;
    part->kind = FK_FLOAT;
    part->size = 4;
    if (!fk_get_object(reader, item, 5)) return 0;
    if (fk_json_member(item, "value", &value))
        return fk_is_newer(reader, "value") && fk_compile(reader, "value", value, FK_OF_FLOATS, &part->value, NULL);
    if (!fk_get_text(reader, item, "argument", &name) || !fk_get(reader, item, "argument", &value)) return 0;
    if (fk_not_finite(value, &number)) return fk_refuse(reader, "argument", "names no f32 scalar");
    return fk_compile(reader, "argument", value, FK_OF_FLOATS, &part->value, NULL);
}

/* A parameter with one value: `most` of the kinds are allowed. */
static int fk_read_part(fk_reader *reader, fk_json item, int most, fk_part *part) {
    static const char *const kinds[] = {"pointer", "integer", "float", "tensor_map", NULL};
    int64_t offset, size;
    int kind;
    if (!fk_json_is(item, '{')) return fk_refuse(reader, "", "must be an object");
    if (!fk_get_choice(reader, item, "kind", kinds, &kind) || !fk_get_name(reader, item, &part->name) ||
        !fk_get_integer(reader, item, "offset", 0, FK_MOST_SPACE, &offset) ||
        !fk_get_integer(reader, item, "size", 1, FK_MAP_BYTES, &size))
        return 0;
    if (kind >= most) return fk_refuse(reader, "kind", "is none of those that a struct may have");
    part->size = kind == 3 ? FK_MAP_BYTES : 8;
    if (!(kind == 0   ? fk_read_pointer(reader, item, part)
          : kind == 1 ? fk_read_integer(reader, item, part)
          : kind == 2 ? fk_read_float(reader, item, part)
                      : fk_read_map(reader, item, part) && fk_read_source(reader, item, part)))
        return 0;
    part->offset = (unsigned)offset;
    return (size == part->size && offset % (kind == 3 ? 16 : size) == 0) ||
           fk_refuse(reader, "offset", "and size are not those of such a parameter");
}

/* A struct's fields into `parts`, where `count` of them may be; its alignment, or 0. */
static unsigned fk_read_fields(fk_reader *reader, fk_json item, fk_parameter *parameter, fk_part *parts) {
    char where[sizeof reader->where];
    unsigned alignment = 1, end = 0;
    fk_json fields, rest, field;
    int64_t offset, size;
    int index, other;
    if (!fk_is_newer(reader, "kind") || !fk_get_object(reader, item, 5) || !fk_get_name(reader, item, &parameter->name) ||
        !fk_get_integer(reader, item, "offset", 0, FK_MOST_SPACE, &offset) ||
        !fk_get_integer(reader, item, "size", 1, FK_MOST_SPACE, &size) || !fk_get_array(reader, item, "fields", &fields))
        return 0;
    parameter->offset = (unsigned)offset;
    parameter->size = (unsigned)size;
    memcpy(where, reader->where, sizeof where);
    rest = fk_json_inside(fields);
    for (index = 0; fk_json_next(&rest, NULL, &field); ++index) {
        fk_part *part = &parts[index];
        snprintf(reader->where, sizeof reader->where, "%.40s.fields[%d]", where, index);
        if (!fk_read_part(reader, field, 3, part)) return 0;
        for (other = 0; other < index; ++other)
            if (!fk_names_differ(reader, part->name, parts[other].name)) return 0;
        if (part->offset < end || part->offset + part->size > parameter->size)
            return (unsigned)fk_refuse(reader, "offset", "lies in the field before, or the field beyond the struct");
        end = part->offset + part->size;
        part->offset += parameter->offset;
        if (part->size > alignment) alignment = part->size;
    }
    memcpy(reader->where, where, sizeof where);
    return alignment;
}

/* Whether it is a struct, and how many parts a parameter has. */
static int fk_is_struct(fk_json item, int *parts) {
    fk_json kind, fields;
    *parts = 1;
    if (!fk_json_is(item, '{') || !fk_json_member(item, "kind", &kind) || !fk_json_says(kind, "\"struct\"")) return 0;
    *parts = fk_json_member(item, "fields", &fields) && fk_json_is(fields, '[') ? fk_json_count(fields) : 0;
    return 1;
}

/* Its parts into `parts`, of which there are as many as `fk_is_struct` says. */
static int fk_read_parameter(fk_reader *reader, fk_json item, fk_parameter *parameter, fk_part *parts) {
    int count;
    unsigned alignment;
    if (!fk_is_struct(item, &count)) {
        if (!fk_read_part(reader, item, 4, parts)) return 0;
        parameter->name = parts->name;
        parameter->offset = parts->offset;
        parameter->size = parts->size;
        alignment = 1; /* it was looked at */
    } else if ((alignment = fk_read_fields(reader, item, parameter, parts)) == 0) {
        return 0;
    }
    if (parameter->offset % alignment != 0) return fk_refuse(reader, "offset", "is no multiple of the struct's alignment");
    return parameter->offset + parameter->size <= FK_MOST_SPACE ||
           fk_refuse(reader, "offset", "and size are beyond what a kernel's parameters may have");
}

static int fk_read_parameters(fk_reader *reader, fk_json launch, fk_node *node) {
    fk_json rest, count, item;
    fk_parameter *parameters;
    fk_part *parts;
    void *items;
    int index, other, own;
    if (!fk_get_items(reader, launch, "parameters", FK_MOST_PARAMETERS, sizeof *parameters, &rest, &items)) return 0;
    node->parameters = parameters = (fk_parameter *)items;
    for (count = rest; fk_json_next(&count, NULL, &item); node->part_count += own) fk_is_struct(item, &own);
    node->parts = parts = (fk_part *)fk_take(reader->arena, (size_t)node->part_count, sizeof *parts);
    if (parts == NULL) return fk_no_memory(reader);
    for (index = 0; fk_json_next(&rest, NULL, &item); ++index) {
        fk_parameter made;
        memset(&made, 0, sizeof made);
        snprintf(reader->where, sizeof reader->where, "parameters[%d]", index);
        if (!fk_read_parameter(reader, item, &made, parts)) return 0;
        fk_is_struct(item, &own);
        parts += own;
        for (other = 0; other < index; ++other)
            if (!fk_names_differ(reader, made.name, parameters[other].name)) return 0;
        for (other = index; other > 0 && parameters[other - 1].offset > made.offset; --other)
            parameters[other] = parameters[other - 1];
        parameters[other] = made;
    }
    node->parameter_count = index;
    *reader->where = 0;
    for (index = 1; index < node->parameter_count; ++index)
        if (parameters[index - 1].offset + parameters[index - 1].size > parameters[index].offset)
            return fk_refuse(reader, "parameters", "overlap");
    return 1;
}
