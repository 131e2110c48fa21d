/* ---- Reading a launch record: each field by name and type, every one of them, and none beside them. */

enum { FK_MOST_EXPRESSION = 32, FK_MOST_SCALARS = 64, FK_DTYPES = 20 };

/* By CUtensorMapDataType, then by fusekit_dtype. */
static const char *const fk_dtype_names[] = {
    "u8",       "u16",  "u32",      "i32",       "u64",        "i64",        "fp16", "f32",  "f64",  "bf16",
    "f32_ftz",  "tf32", "tf32_ftz", "u4_align8", "u4_align16", "u6_align16", "e4m3", "e5m2", "e8m0", "e2m1x2", NULL};
static const unsigned char fk_dtype_bits[] = {8,  16, 32, 32, 64, 64, 16, 32, 64, 16,
                                              32, 32, 32, 4,  4,  6,  8,  8,  8,  8};

/* Sets of them: of schema 1, of tensors, of tensor maps. */
enum { FK_DTYPES_1 = 0x3FF, FK_TENSOR_DTYPES = FK_DTYPES_1 | 0xF0000, FK_MAP_DTYPES = FK_DTYPES_1 | 0xE800 };

/* Kinds of variables, and what an expression of each place may read. */
enum {
    FK_OF_DIMS = 1,
    FK_OF_STRIDES = 2,
    FK_OF_ADDRESSES = 4,
    FK_OF_SCALARS = 8,
    FK_OF_DEVICE = 16,
    FK_OF_MARGIN = 32,
    FK_OF_CLUSTERS = 64,
    FK_OF_VALUES = 128,
    FK_OF_FLOATS = 256, /* a float expression, which reads nothing else */
    FK_OF_HOST = FK_OF_DIMS | FK_OF_STRIDES,
    FK_OF_LAUNCH = FK_OF_HOST | FK_OF_DEVICE | FK_OF_MARGIN,
    FK_OF_SCHEMA_2 = FK_OF_LAUNCH | FK_OF_SCALARS | FK_OF_CLUSTERS | FK_OF_VALUES
};

typedef struct {
    fk_arena *arena;
    fusekit_error *error;
    fusekit_status status;
    const char *title; /* the kernel's name */
    char node[24];     /* the launch that is being read: empty, or such as then[0]. */
    char where[64];    /* the field that is being read, such as parameters[2] */
    fk_record *record;
    fusekit_argument *arguments; /* in the record's order */
    int argument_count;
    int schema;
    const char **values; /* their names; those read so far are counted in the record */
} fk_reader;

/* Returns 0, the failure of every function here. `what`: what is wrong, and what it must be. */
static int fk_refuse(fk_reader *reader, const char *key, const char *what) {
    reader->status = fk_fail(reader->error, FUSEKIT_BAD_BUNDLE,
                             "%s: launch record: %s%s%s%s %s; write loader and bundle with one version of fusekit",
                             reader->title, reader->node, reader->where, *reader->where && *key ? "." : "", key, what);
    return 0;
}

static int fk_no_memory(fk_reader *reader) {
    reader->status = fk_fail(reader->error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to read its launch record", reader->title);
    return 0;
}

/* What only a record of schema 2 may have. */
static int fk_is_newer(fk_reader *reader, const char *key) {
    return reader->schema > 1 || fk_refuse(reader, key, "is of schema 2, which the record does not say");
}

/* What an expression of a launch may read. */
static unsigned fk_of_launch(const fk_reader *reader) { return reader->schema > 1 ? FK_OF_SCHEMA_2 : FK_OF_LAUNCH; }

static int fk_get(fk_reader *reader, fk_json object, const char *key, fk_json *value) {
    return fk_json_member(object, key, value) || fk_refuse(reader, key, "is missing");
}

/* An object of exactly `count` members; that each is there is seen when it is read. */
static int fk_get_object(fk_reader *reader, fk_json value, int count) {
    if (!fk_json_is(value, '{')) return fk_refuse(reader, "", "must be an object");
    return fk_json_count(value) == count || fk_refuse(reader, "", "lacks a field, or has one that is not known");
}

static int fk_get_array(fk_reader *reader, fk_json object, const char *key, fk_json *value) {
    if (!fk_get(reader, object, key, value)) return 0;
    return fk_json_is(*value, '[') || fk_refuse(reader, key, "must be an array");
}

static int fk_get_integer(fk_reader *reader, fk_json object, const char *key, int64_t low, int64_t high,
                          int64_t *result) {
    fk_json value;
    if (!fk_get(reader, object, key, &value)) return 0;
    if (fk_json_integer(value, result) && *result >= low && *result <= high) return 1;
    return fk_refuse(reader, key, "is out of its range, or no integer");
}

static int fk_get_flag(fk_reader *reader, fk_json object, const char *key, int *result) {
    fk_json value;
    if (!fk_get(reader, object, key, &value)) return 0;
    *result = fk_json_says(value, "true");
    return *result || fk_json_says(value, "false") || fk_refuse(reader, key, "must be true or false");
}

static int fk_get_text(fk_reader *reader, fk_json object, const char *key, const char **result) {
    fk_json value;
    size_t length;
    if (!fk_get(reader, object, key, &value)) return 0;
    if (!fk_json_is(value, '"')) return fk_refuse(reader, key, "must be a string");
    *result = fk_json_string(reader->arena, value, &length);
    if (*result == NULL) return fk_no_memory(reader);
    return strlen(*result) == length || fk_refuse(reader, key, "holds a 0 byte");
}

/* Letters, digits and _, beginning with no digit. */
static int fk_get_name(fk_reader *reader, fk_json object, const char **result) {
    const char *at;
    if (!fk_get_text(reader, object, "name", result)) return 0;
    for (at = *result; *at; ++at)
        if (!((*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') || *at == '_' ||
              (at > *result && fk_is_digit(*at))))
            return fk_refuse(reader, "name", "must be letters, digits and _, and begin with no digit");
    return at > *result || fk_refuse(reader, "name", "is empty");
}

/* A dim's, an argument's or a value's: not one of those that the launcher itself provides. */
static int fk_get_own_name(fk_reader *reader, fk_json object, const char **result) {
    static const char *const reserved[] = {"sm_count", "active_clusters", "cluster_margin", "workspace", "scratch",
                                           "stream", "inf", "nan", NULL};
    int index;
    if (!fk_get_name(reader, object, result)) return 0;
    for (index = 0; reserved[index] != NULL; ++index)
        if (strcmp(*result, reserved[index]) == 0) return fk_refuse(reader, "name", "is reserved");
    return 1;
}

/* One of `choices`, which NULL ends; its index. */
static int fk_get_choice(fk_reader *reader, fk_json object, const char *key, const char *const *choices, int *result) {
    const char *text;
    if (!fk_get_text(reader, object, key, &text)) return 0;
    for (*result = 0; choices[*result] != NULL; ++*result)
        if (strcmp(text, choices[*result]) == 0) return 1;
    return fk_refuse(reader, key, "is none of the values that it may have");
}

/* A type of the set `allowed`. */
static int fk_get_dtype(fk_reader *reader, fk_json object, unsigned allowed, int *result) {
    if (!fk_get_choice(reader, object, "dtype", fk_dtype_names, result)) return 0;
    if (!(allowed >> *result & 1)) return fk_refuse(reader, "dtype", "is none of the values that it may have");
    return (FK_DTYPES_1 >> *result & 1) || fk_is_newer(reader, "dtype");
}

/* Three integers from 1, of a product up to `most`. */
static int fk_get_triple(fk_reader *reader, fk_json object, const char *key, int64_t most, unsigned result[3]) {
    fk_json value, rest, item;
    int64_t product = 1;
    int index = 0;
    if (!fk_get_array(reader, object, key, &value)) return 0;
    for (rest = fk_json_inside(value); fk_json_next(&rest, NULL, &item); ++index) {
        int64_t extent;
        if (index == 3 || !fk_json_integer(item, &extent) || extent < 1 || extent > most)
            return fk_refuse(reader, key, "must be three integers from 1, whose product the device allows");
        result[index] = (unsigned)extent;
        product *= extent;
    }
    return (index == 3 && product <= most) ||
           fk_refuse(reader, key, "must be three integers from 1, whose product the device allows");
}

/* Whether a scalar of the type takes the number: a whole one of 32 bits; a float that is finite after rounding, or was
 * not finite before. */
static int fk_fits(fusekit_dtype dtype, double number) {
    const double most = 3.4028235677973366e38; /* half a step beyond FLT_MAX */
    if (dtype == FUSEKIT_I32)
        return number >= INT32_MIN && number <= INT32_MAX && number == (double)(int32_t)number;
    return (number > -most && number < most) || !(number >= -DBL_MAX && number <= DBL_MAX);
}

static int fk_names_differ(fk_reader *reader, const char *name, const char *other) {
    return strcmp(name, other) != 0 || fk_refuse(reader, "name", "stands twice");
}

/* Memory for the items of the array `key`, of which there may be `most`. */
static int fk_get_items(fk_reader *reader, fk_json object, const char *key, int most, size_t size, fk_json *rest,
                        void **items) {
    fk_json value;
    int count;
    *reader->where = 0;
    if (!fk_get_array(reader, object, key, &value)) return 0;
    count = fk_json_count(value);
    if (count > most) return fk_refuse(reader, key, "has more entries than the launcher takes");
    *items = fk_take(reader->arena, (size_t)count, size);
    if (*items == NULL) return fk_no_memory(reader);
    *rest = fk_json_inside(value);
    return 1;
}
