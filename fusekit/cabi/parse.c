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
        !fk_get_dtype(reader, item, FK_TENSOR_DTYPES, &dtype) ||
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
        else if (!fk_compile(reader, "strides", stride, FK_OF_DIMS, &tensor->strides[index], NULL))
            return 0;
    }
    if (fk_json_count(strides) != tensor->rank) return fk_refuse(reader, "strides", "must be as many as the shape has");
    tensor->name = argument->name;
    tensor->written = argument->written = role != 0;
    tensor->itemsize = fk_dtype_bits[dtype] / 8;
    tensor->alignment = argument->alignment = (int)alignment;
    argument->dtype = (fusekit_dtype)dtype;
    argument->rank = tensor->rank;
    return 1;
}

/* null, a number, "inf", "-inf" or "nan". */
static int fk_read_default(fk_reader *reader, fk_json value, fusekit_argument *argument) {
    double number;
    if (fk_json_says(value, "null")) return 1;
    if (!fk_not_finite(value, &number) && !fk_json_number(value, &number))
        return fk_refuse(reader, "default", "must be null, a number, \"inf\", \"-inf\" or \"nan\"");
    if (!fk_fits(argument->dtype, number)) return fk_refuse(reader, "default", "does not fit into the argument");
    argument->has_default = 1;
    argument->default_value = number;
    return 1;
}

static int fk_read_scalar(fk_reader *reader, fk_json item, fusekit_argument *argument) {
    fk_json value;
    int dtype;
    argument->rank = -1;
    if (!fk_get_object(reader, item, 4) || !fk_get_dtype(reader, item, FK_TENSOR_DTYPES, &dtype)) return 0;
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
    record->clusters = record->margin + 1;
    record->first_value = record->clusters + 1;
    *reader->where = 0;
    return record->first_value <= FK_MOST_VARIABLES ||
           fk_refuse(reader, "arguments", "have more extents, strides and scalars than the launcher takes");
}

static int fk_read_values(fk_reader *reader, fk_json launch) {
    fk_record *record = reader->record;
    fk_expression *values;
    fk_json rest, item;
    void *items;
    int index, other;
    if (!fk_json_member(launch, "values", &item)) return 1;
    if (!fk_is_newer(reader, "values") ||
        !fk_get_items(reader, launch, "values", FK_MOST_VARIABLES - record->first_value, sizeof *values, &rest, &items))
        return 0;
    record->values = values = (fk_expression *)items;
    reader->values = (const char **)fk_take(reader->arena, FK_MOST_VARIABLES, sizeof *reader->values);
    if (reader->values == NULL) return fk_no_memory(reader);
    for (index = 0; fk_json_next(&rest, NULL, &item); ++index) {
        snprintf(reader->where, sizeof reader->where, "values[%d]", index);
        if (!fk_get_object(reader, item, 2) || !fk_get_own_name(reader, item, &reader->values[index]) ||
            !fk_get_expression(reader, item, "value", FK_OF_SCHEMA_2, &values[index]))
            return 0;
        for (other = 0; other < record->dim_count; ++other)
            if (!fk_names_differ(reader, reader->values[index], record->dims[other].name)) return 0;
        for (other = 0; other < reader->argument_count; ++other)
            if (!fk_names_differ(reader, reader->values[index], reader->arguments[other].name)) return 0;
        for (other = 0; other < index; ++other)
            if (!fk_names_differ(reader, reader->values[index], reader->values[other])) return 0;
        record->value_count = index + 1;
    }
    *reader->where = 0;
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
    const unsigned allowed = reader->schema > 1 ? FK_OF_SCHEMA_2 : FK_OF_HOST;
    fk_constraint *constraints;
    fk_json rest, item, expression;
    void *items;
    int index;
    if (!fk_get_items(reader, launch, "constraints", 1024, sizeof *constraints, &rest, &items)) return 0;
    reader->record->constraints = constraints = (fk_constraint *)items;
    for (index = 0; fk_json_next(&rest, NULL, &item); ++index) {
        unsigned kinds;
        snprintf(reader->where, sizeof reader->where, "constraints[%d]", index);
        if (!fk_get_object(reader, item, 2) || !fk_get_text(reader, item, "message", &constraints[index].message) ||
            !fk_get(reader, item, "expr", &expression) ||
            !fk_compile(reader, "expr", expression, allowed, &constraints[index].expression, &kinds))
            return 0;
        constraints[index].late = (kinds & ~(unsigned)FK_OF_HOST) != 0;
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

static int fk_read_attributes(fk_reader *reader, fk_json launch, fk_node *node) {
    fk_json value, rest, key, item;
    int64_t number;
    node->carveout = -1;
    if (!fk_get(reader, launch, "attributes", &value)) return 0;
    if (!fk_json_is(value, '{')) return fk_refuse(reader, "attributes", "must be an object");
    for (rest = fk_json_inside(value); fk_json_next(&rest, &key, &item);) {
        if (!fk_json_integer(item, &number) || number < INT32_MIN || number > INT32_MAX)
            return fk_refuse(reader, "attributes", "are integers of 32 bits");
        if (fk_json_says(key, "cooperative"))
            node->cooperative = number != 0;
        else if (fk_json_says(key, "programmatic_stream_serialization"))
            node->serialization = number != 0;
        else if (fk_json_says(key, "non_portable_cluster_size_allowed"))
            node->non_portable_cluster = number != 0;
        else if (fk_json_says(key, "preferred_shared_memory_carveout"))
            node->carveout = (int)number;
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

/* One launch: the record's own fields, or those of an object in its `then`. */
static int fk_read_node(fk_reader *reader, fk_json launch, fk_node *node) {
    int64_t shared;
    if (!fk_get_text(reader, launch, "symbol", &node->symbol)) return 0;
    if (*node->symbol == 0) return fk_refuse(reader, "symbol", "is empty");
    if (!fk_read_attributes(reader, launch, node) ||
        !fk_get_expressions(reader, launch, "grid", fk_of_launch(reader), 3, node->grid, NULL) ||
        !fk_get_triple(reader, launch, "block", 1024, node->block) ||
        !fk_get_triple(reader, launch, "cluster", 16, node->cluster) ||
        !fk_get_integer(reader, launch, "dynamic_shared", 0, INT32_MAX, &shared))
        return 0;
    node->shared = (unsigned)shared;
    return fk_read_parameters(reader, launch, node);
}

static int fk_read_nodes(fk_reader *reader, fk_json launch, int several) {
    fk_record *record = reader->record;
    fk_json rest, item;
    fk_node *nodes;
    void *items;
    record->nodes = nodes = (fk_node *)fk_take(reader->arena, FK_MOST_NODES, sizeof *nodes);
    if (nodes == NULL) return fk_no_memory(reader);
    record->node_count = 1;
    if (!fk_read_node(reader, launch, nodes)) return 0;
    if (!several) return 1;
    if (!fk_is_newer(reader, "then") || !fk_get_items(reader, launch, "then", FK_MOST_NODES - 1, 1, &rest, &items)) return 0;
    while (fk_json_next(&rest, NULL, &item)) {
        snprintf(reader->node, sizeof reader->node, "then[%d].", record->node_count - 1);
        if (!fk_get_object(reader, item, 7) || !fk_read_node(reader, item, &nodes[record->node_count])) return 0;
        ++record->node_count;
    }
    return 1;
}

static int fk_read_memory(fk_reader *reader, fk_json launch) {
    fk_record *record = reader->record;
    fk_json workspace, scratch;
    if (!fk_get(reader, launch, "workspace", &workspace)) return 0;
    snprintf(reader->where, sizeof reader->where, "workspace");
    if (!fk_get_object(reader, workspace, 2) ||
        !fk_get_expression(reader, workspace, "bytes", FK_OF_DEVICE, &record->workspace) ||
        !fk_get_flag(reader, workspace, "zeroed", &record->workspace_zeroed))
        return 0;
    if (fk_json_member(launch, "scratch", &scratch)) {
        snprintf(reader->where, sizeof reader->where, "scratch");
        if (!fk_get_object(reader, scratch, 1) ||
            !fk_get_expression(reader, scratch, "bytes", FK_OF_DIMS | FK_OF_DEVICE, &record->scratch))
            return 0;
        if (fk_is_zero(&record->scratch)) record->scratch.count = 0;
    }
    *reader->where = 0;
    return 1;
}

/* Reads `launch` into `reader->record`, which is all zero, and the arguments beside it. */
static int fk_read_record(fk_reader *reader, fk_json launch) {
    fk_record *record = reader->record;
    fk_json found;
    const char *arch;
    int64_t schema;
    int values, then, scratch; /* the fields that may be left out */
    *reader->where = 0;
    record->name = reader->title;
    if (!fk_json_is(launch, '{')) return fk_refuse(reader, "", "must be an object");
    if (!fk_get_integer(reader, launch, "schema", 0, INT64_MAX, &schema)) return 0;
    if (schema < 1 || schema > 2) return fk_refuse(reader, "schema", "is neither 1 nor 2, which this loader reads");
    reader->schema = (int)schema;
    values = fk_json_member(launch, "values", &found);
    then = fk_json_member(launch, "then", &found);
    scratch = fk_json_member(launch, "scratch", &found);
    if (!fk_get_object(reader, launch, 14 + values + then + scratch) || !fk_get_text(reader, launch, "arch", &arch)) return 0;
    if (!fk_read_arch(arch, &record->major, &record->minor, &record->exact))
        return fk_refuse(reader, "arch", "does not look like sm_90a");
    return fk_read_dims(reader, launch) && fk_read_arguments(reader, launch) && fk_check_dims_stand(reader) &&
           fk_read_values(reader, launch) && fk_read_constraints(reader, launch) && fk_read_skip(reader, launch) &&
           fk_read_memory(reader, launch) && fk_read_nodes(reader, launch, then);
}
