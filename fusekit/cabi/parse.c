/* ---- A launch record out of its JSON: tables as an export has them as constants, and what the caller may ask of the
 * arguments. What a table may hold is checked here, once; nothing behind it looks again. */

static int fk_read_dims(fk_reader *reader, fk_json launch) {
    fk_record *record = reader->record;
    fk_json rest, item;
    fk_dim *dims;
    void *items;
    int index, other;
    if (!fk_get_items(reader, launch, "dims", FK_MOST_VARIABLES, sizeof *dims, &rest, &items)) return 0;
    record->dims = dims = (fk_dim *)items;
    for (index = 0; fk_json_next(&rest, NULL, &item); ++index) {
        fk_dim *dim = &dims[index];
        snprintf(reader->where, sizeof reader->where, "dims[%d]", index);
        if (!fk_get_object(reader, item, 4) || !fk_get_own_name(reader, item, &dim->name) ||
            !fk_get_integer(reader, item, "divisor", 1, INT64_MAX, &dim->divisor) ||
            !fk_get_integer(reader, item, "minimum", 0, INT64_MAX, &dim->minimum) ||
            !fk_get_integer(reader, item, "maximum", dim->minimum, INT64_MAX, &dim->maximum))
            return 0;
        for (other = 0; other < index; ++other)
            if (!fk_names_differ(reader, dim->name, dims[other].name)) return 0;
    }
    record->dim_count = index;
    return 1;
}

static int fk_read_tensor(fk_reader *reader, fk_json item, fk_tensor *tensor, fusekit_argument *argument) {
    static const char *const roles[] = {"input", "output", "inout", NULL};
    fk_json strides, rest, stride;
    char own[80];
    int64_t alignment;
    int role, dtype, index = 0;
    if (!fk_get_object(reader, item, 8) || !fk_get_choice(reader, item, "role", roles, &role) ||
        !fk_get_choice(reader, item, "dtype", fk_dtype_names, &dtype) ||
        !fk_get_integer(reader, item, "stride_divisor", 1, INT64_MAX, &tensor->stride_divisor) ||
        !fk_get_integer(reader, item, "alignment", 1, 1 << 30, &alignment) ||
        !fk_get_expressions(reader, item, "shape", FK_OF_DIMS, -1, tensor->shape, &tensor->rank) ||
        !fk_get_array(reader, item, "strides", &strides))
        return 0;
    if ((alignment & (alignment - 1)) != 0) return fk_refuse(reader, "alignment", "must be a power of two");
    if (strlen(argument->name) > 64) return fk_refuse(reader, "name", "has more than 64 letters");
    for (rest = fk_json_inside(strides); fk_json_next(&rest, NULL, &stride); ++index) {
        if (index == tensor->rank) break;
        snprintf(own, sizeof own, "\"%s.stride%d\"", argument->name, index);
        if (fk_json_says(stride, own))
            tensor->free_strides |= 1u << index;
        else if (!fk_compile(reader, "strides", stride, FK_OF_DIMS, &tensor->strides[index]))
            return 0;
    }
    if (fk_json_count(strides) != tensor->rank) return fk_refuse(reader, "strides", "must be as many as the shape has");
    tensor->name = argument->name;
    tensor->written = argument->written = role != 0;
    tensor->itemsize = fk_dtype_bytes[dtype];
    tensor->alignment = argument->alignment = (int)alignment;
    argument->dtype = (fusekit_dtype)dtype;
    argument->rank = tensor->rank;
    return 1;
}

/* null, a number, "inf", "-inf" or "nan". */
static int fk_read_default(fk_reader *reader, fk_json value, fusekit_argument *argument) {
    double number = 0;
    int known = 1;
    if (fk_json_says(value, "null")) return 1;
    if (fk_json_says(value, "\"inf\""))
        number = (double)INFINITY;
    else if (fk_json_says(value, "\"-inf\""))
        number = -(double)INFINITY;
    else if (fk_json_says(value, "\"nan\""))
        number = (double)NAN;
    else
        known = fk_json_number(value, &number);
    if (!known) return fk_refuse(reader, "default", "must be null, a number, \"inf\", \"-inf\" or \"nan\"");
    if (!fk_fits(argument->dtype, number)) return fk_refuse(reader, "default", "does not fit into the argument");
    argument->has_default = 1;
    argument->default_value = number;
    return 1;
}

static int fk_read_scalar(fk_reader *reader, fk_json item, fusekit_argument *argument) {
    fk_json value;
    int dtype;
    argument->rank = -1;
    if (!fk_get_object(reader, item, 4) || !fk_get_choice(reader, item, "dtype", fk_dtype_names, &dtype)) return 0;
    argument->dtype = (fusekit_dtype)dtype;
    if (dtype != FUSEKIT_F32 && dtype != FUSEKIT_I32) return fk_refuse(reader, "dtype", "must be f32 or i32");
    return fk_get(reader, item, "default", &value) && fk_read_default(reader, value, argument);
}

static int fk_read_arguments(fk_reader *reader, fk_json launch) {
    static const char *const kinds[] = {"tensor", "scalar", NULL};
    fk_record *record = reader->record;
    fk_json rest, item;
    fk_tensor *tensors;
    void *items;
    int index, other, kind, scalars = 0, integers = 0, variables = record->dim_count;
    if (!fk_get_items(reader, launch, "arguments", FK_MOST_TENSORS + FK_MOST_SCALARS, sizeof *reader->arguments, &rest,
                      &items))
        return 0;
    reader->arguments = (fusekit_argument *)items;
    tensors = (fk_tensor *)fk_take(reader->arena, FK_MOST_TENSORS, sizeof *tensors);
    if (tensors == NULL) return fk_no_memory(reader);
    record->tensors = tensors;
    for (index = 0; fk_json_next(&rest, NULL, &item); ++index) {
        fusekit_argument *argument = &reader->arguments[index];
        snprintf(reader->where, sizeof reader->where, "arguments[%d]", index);
        if (!fk_json_is(item, '{')) return fk_refuse(reader, "", "must be an object");
        if (!fk_get_choice(reader, item, "kind", kinds, &kind) || !fk_get_own_name(reader, item, &argument->name)) return 0;
        for (other = 0; other < index; ++other)
            if (!fk_names_differ(reader, argument->name, reader->arguments[other].name)) return 0;
        if (kind == 1) {
            if (++scalars > FK_MOST_SCALARS) return fk_refuse(reader, "", "is one scalar more than the launcher takes");
            if (!fk_read_scalar(reader, item, argument)) return 0;
            integers += argument->dtype == FUSEKIT_I32;
        } else {
            fk_tensor *tensor = &tensors[record->tensor_count];
            if (record->tensor_count == FK_MOST_TENSORS)
                return fk_refuse(reader, "", "is one tensor more than the launcher takes");
            if (!fk_read_tensor(reader, item, tensor, argument)) return 0;
            tensor->first_stride = variables;
            variables += tensor->rank;
            ++record->tensor_count;
        }
    }
    reader->argument_count = index;
    record->first_address = variables;
    record->first_integer = record->first_address + record->tensor_count;
    record->sm_count = record->first_integer + integers;
    record->margin = record->sm_count + 1;
    record->variable_count = record->margin + 1;
    *reader->where = 0;
    if (record->variable_count > FK_MOST_VARIABLES)
        return fk_refuse(reader, "arguments", "have more extents, strides and scalars than the launcher takes");
    return 1;
}

/* The dim that an expression is, or -1. */
static int fk_bare_dim(const fk_expression *expression) {
    return expression->count == 1 && expression->steps->operation == FK_VARIABLE ? (int)expression->steps->value : -1;
}

/* A launcher reads each dim off a shape that has it by its bare name. */
static int fk_check_dims_stand(fk_reader *reader) {
    const fk_record *record = reader->record;
    int dim, tensor, index;
    for (dim = 0; dim < record->dim_count; ++dim) {
        int found = 0;
        for (tensor = 0; tensor < record->tensor_count; ++tensor)
            for (index = 0; index < record->tensors[tensor].rank; ++index)
                found |= fk_bare_dim(&record->tensors[tensor].shape[index]) == dim;
        if (!found) return fk_refuse(reader, record->dims[dim].name, "stands in no shape by its bare name");
    }
    return 1;
}

static int fk_read_constraints(fk_reader *reader, fk_json launch) {
    fk_constraint *constraints;
    fk_json rest, item;
    void *items;
    int index;
    if (!fk_get_items(reader, launch, "constraints", 1024, sizeof *constraints, &rest, &items)) return 0;
    reader->record->constraints = constraints = (fk_constraint *)items;
    for (index = 0; fk_json_next(&rest, NULL, &item); ++index) {
        snprintf(reader->where, sizeof reader->where, "constraints[%d]", index);
        if (!fk_get_object(reader, item, 2) || !fk_get_text(reader, item, "message", &constraints[index].message) ||
            !fk_get_expression(reader, item, "expr", FK_OF_HOST, &constraints[index].expression))
            return 0;
    }
    reader->record->constraint_count = index;
    *reader->where = 0;
    return 1;
}

static int fk_read_skip(fk_reader *reader, fk_json launch) {
    fk_record *record = reader->record;
    fk_json rest, item;
    void *items;
    int *skip, index;
    if (!fk_get_items(reader, launch, "skip_if_zero", FK_MOST_VARIABLES, sizeof *skip, &rest, &items)) return 0;
    record->skip = skip = (int *)items;
    for (index = 0; fk_json_next(&rest, NULL, &item); ++index)
        if (!fk_json_is(item, '"') || fk_find_variable(reader, item, FK_OF_DIMS, &skip[index]) == 0)
            return fk_refuse(reader, "skip_if_zero", "names no dim");
    record->skip_count = index;
    return 1;
}

static int fk_read_attributes(fk_reader *reader, fk_json launch) {
    fk_record *record = reader->record;
    fk_json value, rest, key, item;
    int64_t number;
    record->carveout = -1;
    if (!fk_get(reader, launch, "attributes", &value)) return 0;
    if (!fk_json_is(value, '{')) return fk_refuse(reader, "attributes", "must be an object");
    for (rest = fk_json_inside(value); fk_json_next(&rest, &key, &item);) {
        if (!fk_json_integer(item, &number) || number < INT32_MIN || number > INT32_MAX)
            return fk_refuse(reader, "attributes", "are integers of 32 bits");
        if (fk_json_says(key, "cooperative"))
            record->cooperative = number != 0;
        else if (fk_json_says(key, "programmatic_stream_serialization"))
            record->serialization = number != 0;
        else if (fk_json_says(key, "non_portable_cluster_size_allowed"))
            record->non_portable_cluster = number != 0;
        else if (fk_json_says(key, "preferred_shared_memory_carveout"))
            record->carveout = (int)number;
        else
            return fk_refuse(reader, "attributes", "have a name that is not known");
    }
    return 1;
}

/* "sm_90a": 9, 0, and whether it runs on that capability alone. */
static int fk_read_arch(const char *arch, int *major, int *minor, int *exact) {
    size_t length = strlen(arch), digits = 3;
    char last;
    if (length < 5 || memcmp(arch, "sm_", 3) != 0) return 0;
    while (fk_is_digit(arch[digits])) ++digits;
    last = arch[digits];
    *exact = last == 'a';
    if (digits < 5 || digits > 6 || digits + (last != 0) != length || (last != 0 && last != 'a' && last != 'f')) return 0;
    *minor = arch[digits - 1] - '0';
    *major = digits == 5 ? arch[3] - '0' : (arch[3] - '0') * 10 + arch[4] - '0';
    return 1;
}

/* Reads `launch` into `reader->record`, which is all zero, and the arguments beside it. */
static int fk_read_record(fk_reader *reader, fk_json launch) {
    fk_record *record = reader->record;
    fk_json workspace, scratch;
    const char *arch;
    int64_t schema, shared;
    int scratches; /* the one field that may be left out */
    *reader->where = 0;
    record->name = reader->title;
    if (!fk_json_is(launch, '{')) return fk_refuse(reader, "", "must be an object");
    if (!fk_get_integer(reader, launch, "schema", 0, INT64_MAX, &schema)) return 0;
    if (schema != 1) return fk_refuse(reader, "schema", "is not 1, the one that this loader reads");
    scratches = fk_json_member(launch, "scratch", &scratch);
    if (!fk_get_object(reader, launch, 14 + scratches) || !fk_get_text(reader, launch, "symbol", &record->symbol) ||
        !fk_get_text(reader, launch, "arch", &arch))
        return 0;
    if (*record->symbol == 0) return fk_refuse(reader, "symbol", "is empty");
    if (!fk_read_arch(arch, &record->major, &record->minor, &record->exact))
        return fk_refuse(reader, "arch", "does not look like sm_90a");
    if (!fk_read_dims(reader, launch) || !fk_read_arguments(reader, launch) || !fk_check_dims_stand(reader) ||
        !fk_read_constraints(reader, launch) || !fk_read_skip(reader, launch) || !fk_read_attributes(reader, launch) ||
        !fk_get_expressions(reader, launch, "grid", FK_OF_LAUNCH, 3, record->grid, NULL) ||
        !fk_get_triple(reader, launch, "block", 1024, record->block) ||
        !fk_get_triple(reader, launch, "cluster", 16, record->cluster) ||
        !fk_get_integer(reader, launch, "dynamic_shared", 0, INT32_MAX, &shared) ||
        !fk_get(reader, launch, "workspace", &workspace))
        return 0;
    record->shared = (unsigned)shared;
    snprintf(reader->where, sizeof reader->where, "workspace");
    if (!fk_get_object(reader, workspace, 2) ||
        !fk_get_expression(reader, workspace, "bytes", FK_OF_DEVICE, &record->workspace) ||
        !fk_get_flag(reader, workspace, "zeroed", &record->workspace_zeroed))
        return 0;
    snprintf(reader->where, sizeof reader->where, "scratch");
    if (scratches && (!fk_get_object(reader, scratch, 1) ||
                      !fk_get_expression(reader, scratch, "bytes", FK_OF_DIMS | FK_OF_DEVICE, &record->scratch)))
        return 0;
    if (scratches && fk_is_zero(&record->scratch)) record->scratch.count = 0;
    return fk_read_parameters(reader, launch);
}
