/* ---- Reading a launch record, which may come from anybody. What is read here is not checked again: `fk_read_rows` holds
 * every field against its rule, `fk_check_record` those that belong together. */

typedef char fk_needs_64_bits[sizeof(void *) == sizeof(int64_t) ? 1 : -1];

typedef struct fk_place { /* of what is read: a row of a table, in a row of another one */
    const struct fk_place *outer;
    const char *name;
    int64_t row;
} fk_place;

typedef struct {
    int64_t *next; /* words that were not taken yet */
    size_t left;
    int64_t limits[FK_BELOW_WHOLE + 1];
    const char *title;
    fusekit_error *error;
} fk_reader;

static size_t fk_show_place(const fk_place *place, char *text, size_t size) {
    size_t length = place->outer == NULL ? 0 : fk_show_place(place->outer, text, size);
    if (place->name != NULL && length < size)
        length += (size_t)snprintf(text + length, size - length, "%s[%lld].", place->name, (long long)place->row);
    return length;
}

/* Returns 0, the failure of every function here. `rule`: what is wrong, and what it must be. */
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static int fk_refuse(const fk_reader *reader, const fk_place *place, const char *field, const char *rule, ...) {
    char where[96] = "", what[120];
    va_list arguments;
    va_start(arguments, rule);
    vsnprintf(what, sizeof what, rule, arguments);
    va_end(arguments);
    fk_show_place(place, where, sizeof where);
    fk_fail(reader->error, FUSEKIT_BAD_BUNDLE, "%.60s: %s%s %s; write loader and bundle with one version of fusekit",
            reader->title, where, field, what);
    return 0;
}

/* The next `count` items of `size` words; NULL where there are not so many. */
static int64_t *fk_take(fk_reader *reader, int64_t count, size_t size) {
    int64_t *taken = reader->next;
    if (count < 0 || (uint64_t)count > reader->left / size) return NULL;
    reader->next += (size_t)count * size;
    reader->left -= (size_t)count * size;
    return taken;
}

static int fk_check_whole(const fk_reader *reader, const fk_place *place, const fk_field *field, const int64_t *slot) {
    int64_t high = field->limit == FK_BELOW_NONE ? field->high : reader->limits[field->limit] - 1;
    int index;
    for (index = 0; index < field->count; ++index)
        if (slot[index] < field->low || slot[index] > high)
            return fk_refuse(reader, place, field->name, "is %lld; it must be %lld to %lld", (long long)slot[index],
                             (long long)field->low, (long long)high);
    return 1;
}

static int fk_read_text(fk_reader *reader, const fk_place *place, const fk_field *field, int64_t *slot) {
    int64_t length = slot[0];
    const char *text;
    if (length < 0 || length > field->high)
        return fk_refuse(reader, place, field->name, "has %lld bytes; there may be %lld", (long long)length,
                         (long long)field->high);
    text = (const char *)fk_take(reader, length / 8 + 1, 1);
    if (text == NULL) return fk_refuse(reader, place, field->name, "is cut");
    if (memchr(text, 0, (size_t)(length / 8 + 1) * 8) != text + length)
        return fk_refuse(reader, place, field->name, "holds a 0 byte, or does not end with one");
    memcpy(slot, &text, sizeof text);
    return 1;
}

static int fk_read_steps(fk_reader *reader, const fk_place *place, const fk_field *field, int64_t *slot) {
    const fk_step *steps;
    int64_t index, count = slot[1];
    if (count < 0 || count > field->high || (steps = (const fk_step *)fk_take(reader, count, 2)) == NULL)
        return fk_refuse(reader, place, field->name, "has %lld steps, and is cut, or has more than %lld",
                         (long long)count, (long long)field->high);
    for (index = 0; index < count; ++index) {
        int64_t operation = steps[index].operation, value = steps[index].value, limit = reader->limits[field->limit];
        int floats = field->limit == FK_BELOW_FLOAT_COUNT, pushes = floats && operation >= FK_NUMBER && operation <= FK_DINT;
        if (operation < 0 || operation > (floats ? FK_ABS : FK_FDIV) || (count == 1 && operation > FK_VARIABLE && !pushes))
            return fk_refuse(reader, place, field->name, "has a step that is not known, or no expression alone");
        if (operation == FK_FINT || operation == FK_DINT) limit = reader->limits[FK_BELOW_WHOLE];
        if ((operation == FK_VARIABLE || operation == FK_FINT || operation == FK_DINT) && (value < 0 || value >= limit))
            return fk_refuse(reader, place, field->name, "reads variable %lld; it must be 0 to %lld", (long long)value,
                             (long long)limit - 1);
        if ((operation == FK_JUMP || operation == FK_UNLESS) && (value < 0 || value >= count - index))
            return fk_refuse(reader, place, field->name, "leaves out %lld steps, of which there are fewer",
                             (long long)value);
    }
    memcpy(slot, &steps, sizeof steps);
    return 1;
}

static int fk_read_rows(fk_reader *reader, const fk_place *outer, const fk_field *field, int64_t *slot);

/* What follows a row: its texts, expressions and tables, in the order of its fields. */
static int fk_read_row(fk_reader *reader, const fk_place *place, const fk_type *type, int64_t *slot) {
    int index, part;
    for (index = 0; index < type->count; ++index) {
        const fk_field *field = &type->fields[index];
        switch (field->kind) {
        case FK_WHOLE: slot += field->count; break;
        case FK_TEXT:
            if (!fk_read_text(reader, place, field, slot++)) return 0;
            break;
        case FK_ROWS:
            if (!fk_read_rows(reader, place, field, slot)) return 0;
            slot += 2;
            break;
        case FK_EXPRESSION:
            for (part = 0; part < field->count; ++part, slot += 2)
                if (!fk_read_steps(reader, place, field, slot)) return 0;
            break;
        }
    }
    return 1;
}

/* Numbers first: what follows the rows may be bounded by them. */
static int fk_check_row(const fk_reader *reader, const fk_place *place, const fk_type *type, const int64_t *slot) {
    int index;
    for (index = 0; index < type->count; ++index) {
        const fk_field *field = &type->fields[index];
        if (field->kind == FK_WHOLE && !fk_check_whole(reader, place, field, slot)) return 0;
        slot += field->kind == FK_WHOLE ? field->count : field->kind == FK_TEXT ? 1 : 2 * field->count;
    }
    return 1;
}

static int fk_read_rows(fk_reader *reader, const fk_place *outer, const fk_field *field, int64_t *slot) {
    const fk_type *type = field->of;
    int64_t count = slot[1], *rows;
    fk_place place = {NULL, NULL, 0};
    if (count < field->low || count > field->high)
        return fk_refuse(reader, outer, field->name, "has %lld rows; there may be %lld to %lld", (long long)count,
                         (long long)field->low, (long long)field->high);
    rows = fk_take(reader, count, type->words);
    if (rows == NULL) return fk_refuse(reader, outer, field->name, "is cut");
    place.outer = outer;
    place.name = field->name;
    for (place.row = 0; place.row < count; ++place.row)
        if (!fk_check_row(reader, &place, type, rows + (size_t)place.row * type->words)) return 0;
    for (place.row = 0; place.row < count; ++place.row) {
        if (type == &fk_type_constraint) reader->limits[FK_BELOW_OUTER] = reader->limits[field->limit];
        if (type == &fk_type_own_value) reader->limits[FK_BELOW_VALUE] = reader->limits[FK_BELOW_FIRST_VALUE] + place.row;
        if (type == &fk_type_more_value) reader->limits[FK_BELOW_WHOLE] = reader->limits[FK_BELOW_FIRST_VALUE] + place.row;
        if (!fk_read_row(reader, &place, type, rows + (size_t)place.row * type->words)) return 0;
    }
    memcpy(slot, &rows, sizeof rows);
    return 1;
}

static const fk_place fk_top = {NULL, NULL, 0};

/* The next row of `type` and what follows it; NULL where it is refused. */
static const void *fk_read_one(fk_reader *reader, const fk_type *type) {
    int64_t *row = fk_take(reader, 1, type->words);
    if (row == NULL) {
        fk_refuse(reader, &fk_top, "it", "is cut");
        return NULL;
    }
    if (!fk_check_row(reader, &fk_top, type, row)) return NULL;
    if (type == &fk_type_record) {
        const fk_record *record = (const fk_record *)row;
        reader->limits[FK_BELOW_FIRST_STRIDE] = record->first_stride;
        reader->limits[FK_BELOW_FIRST_VALUE] = record->first_value;
        reader->limits[FK_BELOW_VARIABLE_COUNT] = reader->limits[FK_BELOW_WHOLE] = record->variable_count;
        reader->limits[FK_BELOW_FLOAT_COUNT] = record->float_count;
        reader->limits[FK_BELOW_TENSOR_COUNT] = record->tensor_count;
    }
    return fk_read_row(reader, &fk_top, type, row) ? row : NULL;
}

/* All words as one row of `type` and what follows it, and, where there is more, one of `then`, else NULL. The first lies
 * at their beginning. */
static int fk_read_whole(fk_reader *reader, const fk_type *type, const fk_type *then, const void **more) {
    if (fk_read_one(reader, type) == NULL) return 0;
    if (then != NULL && reader->left > 0 && (*more = fk_read_one(reader, then)) == NULL) return 0;
    return reader->left == 0 ||
           fk_refuse(reader, &fk_top, "it", "has %llu words too many", (unsigned long long)reader->left);
}

/* ---- What belongs together. */

/* Bytes of a part; of an integer as many as it says. */
static int64_t fk_part_size(const fk_part *part) {
    static const unsigned char integers[9] = {0, 1, 2, 0, 4, 0, 0, 0, 8};
    switch (part->kind) {
    case FK_TENSOR_MAP: return FK_MAP_BYTES;
    case FK_FLOAT: return 4;
    case FK_HALF:
    case FK_BFLOAT: return 2;
    case FK_INT:
    case FK_UINT: return part->size <= 8 ? integers[part->size] : 0;
    default: return 8;
    }
}

static int fk_check_node(const fk_reader *reader, const fk_place *place, const fk_node *node) {
    int64_t index, end = 0;
    fk_place at = {place, "parameters", 0};
    for (index = 0; index < node->parameter_count; ++index) {
        const fk_parameter *parameter = &node->parameters[at.row = index];
        if (parameter->offset < end || parameter->size > FK_MOST_SPACE - parameter->offset)
            return fk_refuse(reader, &at, "offset", "is %lld; it must be %lld to %lld", (long long)parameter->offset,
                             (long long)end, (long long)(FK_MOST_SPACE - parameter->size));
        end = parameter->offset + parameter->size;
    }
    at.name = "parts";
    for (index = 0; index < node->part_count; ++index) {
        const fk_part *part = &node->parts[at.row = index];
        if (part->size != fk_part_size(part) || part->size > end - part->offset)
            return fk_refuse(reader, &at, "size", "is %lld, which is not its kind's, or reaches beyond the parameters",
                             (long long)part->size);
        if (part->map_count != (part->kind == FK_TENSOR_MAP))
            return fk_refuse(reader, &at, "map", "is there or not against its kind");
        if (part->kind == FK_POINTER && part->argument < 0) return fk_refuse(reader, &at, "argument", "is no tensor");
    }
    return 1;
}

/* Whether the variables are as many as there are dims, strides, addresses, integers and values, in this order. */
static int fk_check_record(const fk_reader *reader, const fk_record *record, const fk_more *more) {
    fk_place at = {NULL, "tensors", 0};
    int64_t next = FK_FIRST_DIM + record->dim_count, index, integers = 0, floats = 0;
    int fits = record->first_stride == next;
    for (; fits && at.row < record->tensor_count; ++at.row) {
        const fk_tensor *tensor = &record->tensors[at.row];
        if (tensor->first_stride != next)
            return fk_refuse(reader, &at, "first_stride", "is %lld; it must be %lld", (long long)tensor->first_stride,
                             (long long)next);
        if (tensor->written > 1 && (tensor->written - 2 >= record->tensor_count ||
                                    record->tensors[tensor->written - 2].rank != tensor->rank))
            return fk_refuse(reader, &at, "written", "is over no such tensor");
        next += tensor->rank;
    }
    for (index = 0; index < record->argument_count; ++index) {
        const fk_argument *argument = &record->arguments[index];
        integers += argument->tensor < 0 && fk_is_whole(argument->dtype);
        floats += argument->tensor < 0 && !fk_is_whole(argument->dtype);
    }
    fits = fits && record->first_address == next && record->first_integer == next + record->tensor_count &&
           record->first_value == record->first_integer + integers && integers <= FK_MOST_SCALARS &&
           record->float_count == floats && record->variable_count == record->first_value + record->value_count;
    at.name = NULL;
    if (!fits) return fk_refuse(reader, &at, "variable_count", "is not that of its dims, tensors, scalars and values");
    if (more != NULL && more->node_count != record->node_count)
        return fk_refuse(reader, &at, "nodes", "are not so many twice");
    if (more != NULL && more->value_count != 0 && more->value_count != record->value_count)
        return fk_refuse(reader, &at, "values", "are not so many twice");
    at.name = "nodes";
    for (at.row = 0; at.row < record->node_count; ++at.row)
        if (!fk_check_node(reader, &at, &record->nodes[at.row])) return 0;
    return 1;
}

/* The record out of a copy of the words, which is to be freed, and what follows it: NULL for nothing. */
static fusekit_status fk_read_record(const fk_source *source, const char *title, const fk_record **record,
                                     const fk_more **more, fusekit_error *error) {
    size_t bytes = source->count * sizeof(int64_t);
    int64_t *words = (int64_t *)malloc(bytes > 0 ? bytes : 1);
    fk_reader reader = {words, source->count, {0}, title, error};
    *record = NULL;
    *more = NULL;
    if (words == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for its launch record", title);
    memcpy(words, source->words, bytes);
    if (fk_read_whole(&reader, &fk_type_record, &fk_type_more, (const void **)more) &&
        fk_check_record(&reader, (const fk_record *)words, *more)) {
        *record = (const fk_record *)words;
        return FUSEKIT_OK;
    }
    free(words);
    return FUSEKIT_BAD_BUNDLE;
}
