/* ---- Calls by name. */

typedef struct {
    int64_t dims[FK_MOST_VARIABLES], integers[FK_MOST_SCALARS];
    uint64_t addresses[FK_MOST_TENSORS];
    double floats[FK_MOST_SCALARS];
    fk_given given[FK_MOST_TENSORS]; /* in the record's order */
    unsigned char taken[FK_MOST_TENSORS];
} fk_named;

/* Whether a scalar of the type takes the number: a whole one of its bits; a float that is finite after rounding, or was
 * not finite before. */
static int fk_fits(fusekit_dtype dtype, double number) {
    const double most = 3.4028235677973366e38; /* half a step beyond FLT_MAX */
    if (dtype == FUSEKIT_I32)
        return number >= INT32_MIN && number <= INT32_MAX && number == (double)(int32_t)number;
    if (dtype == FUSEKIT_F64) return 1;
    if (dtype == FUSEKIT_I64) /* what a double holds one by one */
        return number >= -9007199254740992.0 && number <= 9007199254740992.0 && number == (double)(int64_t)number;
    return (number > -most && number < most) || !(number >= -DBL_MAX && number <= DBL_MAX);
}

/* The index of the argument of that name, or -1 with the error set. `tensor`: which kind is looked for. */
static int fk_argument_of(const fusekit_kernel *kernel, const char *name, int tensor, fusekit_error *error) {
    const fk_record *record = kernel->loaded->record;
    char known[200];
    size_t length = 0;
    int index;
    known[0] = 0;
    for (index = 0; index < record->argument_count; ++index) {
        const fusekit_argument *argument = &kernel->arguments[index];
        if ((argument->rank >= 0) != tensor) continue;
        if (name != NULL && strcmp(name, argument->name) == 0) return index;
        if (length < sizeof known)
            length += (size_t)snprintf(known + length, sizeof known - length, "%s%s", length ? ", " : "", argument->name);
    }
    fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %.40s is no %s of it; it takes %s", record->name,
            name == NULL ? "NULL" : name, tensor ? "tensor" : "scalar", known[0] ? known : "none");
    return -1;
}

static fusekit_status fk_take_tensors(const fusekit_kernel *kernel, const fusekit_arguments *arguments,
                                      fk_named *values, fusekit_error *error) {
    const fk_record *record = kernel->loaded->record;
    int64_t at;
    int index;
    for (index = 0; index < arguments->tensor_count; ++index) {
        const fusekit_tensor *given = &arguments->tensors[index];
        int which = fk_argument_of(kernel, given->name, 1, error);
        const fusekit_argument *argument = &kernel->arguments[which < 0 ? 0 : which];
        if (which < 0) return FUSEKIT_INVALID_ARGUMENT;
        at = record->arguments[which].tensor;
        if (values->taken[at])
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is given twice; give it once", record->name,
                           given->name);
        if (given->dtype != argument->dtype)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is %s; it must be %s", record->name, given->name,
                           (unsigned)given->dtype < FK_DTYPES ? fk_dtype_names[given->dtype] : "of no known type",
                           fk_dtype_names[argument->dtype]);
        if (given->rank != argument->rank || (given->rank > 0 && given->shape == NULL))
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has rank %d; it must have rank %d, and a shape",
                           record->name, given->name, given->rank, argument->rank);
        values->taken[at] = 1;
        values->given[at].shape = given->shape;
        values->given[at].strides = given->strides;
        values->addresses[at] = (uint64_t)(uintptr_t)given->data;
    }
    for (at = 0; at < record->tensor_count; ++at)
        if (!values->taken[at])
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is missing; it is a tensor of rank %d",
                           record->name, record->tensors[at].name, (int)record->tensors[at].rank);
    return FUSEKIT_OK;
}

static fusekit_status fk_take_scalars(const fusekit_kernel *kernel, const fusekit_arguments *arguments,
                                      fk_named *values, fusekit_error *error) {
    const fk_record *record = kernel->loaded->record;
    int index, given, floats = 0, integers = 0;
    for (given = 0; given < arguments->scalar_count; ++given) {
        if (fk_argument_of(kernel, arguments->scalars[given].name, 0, error) < 0) return FUSEKIT_INVALID_ARGUMENT;
        for (index = 0; index < given; ++index)
            if (strcmp(arguments->scalars[index].name, arguments->scalars[given].name) == 0)
                return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is given twice; give it once", record->name,
                               arguments->scalars[given].name);
    }
    for (index = 0; index < record->argument_count; ++index) {
        const fusekit_argument *argument = &kernel->arguments[index];
        double value = argument->default_value;
        int has_value = argument->has_default;
        if (argument->rank >= 0) continue;
        for (given = 0; given < arguments->scalar_count; ++given)
            if (strcmp(arguments->scalars[given].name, argument->name) == 0) {
                value = arguments->scalars[given].value;
                has_value = 1;
            }
        if (!has_value)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s must be set", record->name, argument->name);
        if (!fk_fits(argument->dtype, value))
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is %g; it must be an %s", record->name,
                           argument->name, value,
                           !fk_is_whole(argument->dtype)            ? "f32 number"
                           : argument->dtype == FUSEKIT_I32 ? "i32 integer"
                                                            : "integer of at most 2^53");
        if (fk_is_whole(argument->dtype))
            values->integers[integers++] = (int64_t)value;
        else
            values->floats[floats++] = fk_scalar(argument->dtype, value);
    }
    return FUSEKIT_OK;
}

/* A call by name as a call by index. */
static fusekit_status fk_by_index(const fusekit_kernel *kernel, const fusekit_arguments *arguments, fk_named *values,
                                  fk_call *call, fusekit_error *error) {
    fusekit_status status;
    if (kernel == NULL || arguments == NULL || (arguments->tensor_count > 0 && arguments->tensors == NULL) ||
        (arguments->scalar_count > 0 && arguments->scalars == NULL))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "kernel or arguments are NULL; load the kernel, and give both");
    memset(values, 0, sizeof *values);
    memset(call, 0, sizeof *call);
    call->dims = values->dims;
    call->given = values->given;
    call->addresses = values->addresses;
    call->integers = values->integers;
    call->floats = values->floats;
    call->margin = arguments->has_cluster_margin ? arguments->cluster_margin : kernel->loaded->record->margin;
    call->has_priority = arguments->has_priority;
    call->priority = arguments->priority;
    status = fk_take_tensors(kernel, arguments, values, error);
    if (status != FUSEKIT_OK) return status;
    fk_take_dims(kernel->loaded->record, values->given, values->dims);
    return fk_take_scalars(kernel, arguments, values, error);
}

fusekit_status fusekit_kernel_launch(const fusekit_kernel *kernel, const fusekit_arguments *arguments, void *stream,
                                     fusekit_error *error) {
    fk_named values;
    fk_call call;
    fusekit_status status = fk_by_index(kernel, arguments, &values, &call, error);
    return status == FUSEKIT_OK ? fk_launch(kernel->loaded, &call, stream, error) : status;
}

fusekit_status fusekit_kernel_bind(const fusekit_kernel *kernel, const fusekit_arguments *arguments,
                                   fusekit_launch **launch, fusekit_error *error) {
    fk_named values;
    fk_call call;
    fusekit_status status = fk_by_index(kernel, arguments, &values, &call, error);
    *launch = NULL;
    return status == FUSEKIT_OK ? fk_bind(kernel->loaded, &call, launch, error) : status;
}

const char *fusekit_kernel_name(const fusekit_kernel *kernel) { return kernel->loaded->record->name; }

const fusekit_argument *fusekit_kernel_argument(const fusekit_kernel *kernel, int index) {
    return index >= 0 && index < kernel->loaded->record->argument_count ? &kernel->arguments[index] : NULL;
}
