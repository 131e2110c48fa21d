/* ---- Parameters. */

static fusekit_status fk_encode(const fk_kernel *kernel, const fk_parameter *parameter, const int64_t *variables,
                                void *place, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const fk_record *record = kernel->record;
    const fk_map *map = parameter->map;
    uint64_t dims[FK_MOST_RANK], strides[FK_MOST_RANK];
    int64_t value;
    void *address, *before;
    int index, result, attempt;
    for (index = 0; index < map->rank; ++index) {
        fusekit_status status = fk_value(record, &map->dims[index], variables, parameter->name, &value, error);
        if (status != FUSEKIT_OK) return status;
        if (value < 1 || value > (int64_t)1 << 32)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has extent %lld; a tensor map takes 1 to 2^32",
                           record->name, parameter->name, (long long)value);
        dims[index] = (uint64_t)value;
    }
    for (index = 0; index + 1 < map->rank; ++index) {
        fusekit_status status = fk_value(record, &map->strides[index], variables, parameter->name, &value, error);
        if (status != FUSEKIT_OK) return status;
        if (value < 0 || value >= (int64_t)1 << 40 || value % 16 != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: %s has stride %lld bytes; a tensor map takes multiples of 16 below 2^40", record->name,
                           parameter->name, (long long)value);
        strides[index] = (uint64_t)value;
    }
    if (!fk_evaluate(&map->address, variables, 1, &value))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has no address", record->name, parameter->name);
    address = (void *)(uintptr_t)(uint64_t)value;
    result = FK_INVALID_CONTEXT;
    for (attempt = 0; attempt < 2 && result != 0; ++attempt) {
        /* It takes a context, and one of a device that has tensor maps: this thread's may do, the kernel's does. */
        if (attempt == 1 && driver->push(kernel->context) != 0) break;
        result = driver->encode(place, map->dtype, (unsigned)map->rank, address, dims, strides, map->box,
                                map->element_strides, map->interleave, map->swizzle, map->promotion, map->fill);
        if (attempt == 1) driver->pop(&before);
    }
    if (result == 0) return FUSEKIT_OK;
    fk_cuda(driver, error, result, record->name, "cuTensorMapEncodeTiled");
    if (result != FK_INVALID_VALUE) return FUSEKIT_CUDA_ERROR;
    if (error != NULL) error->status = FUSEKIT_INVALID_ARGUMENT; /* extents, strides or address are none of a map's */
    return FUSEKIT_INVALID_ARGUMENT;
}

static fusekit_status fk_integer(const fk_record *record, const fk_parameter *parameter, const int64_t *variables,
                                 uint64_t *place, fusekit_error *error) {
    int64_t value;
    fusekit_status status = fk_value(record, &parameter->value, variables, parameter->name, &value, error);
    if (status != FUSEKIT_OK) return status;
    if (parameter->kind == FK_INT32) {
        int32_t narrow = (int32_t)value;
        if (narrow != value)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is %lld; it does not fit into 32 bits",
                           record->name, parameter->name, (long long)value);
        memcpy(place, &narrow, sizeof narrow);
    } else {
        memcpy(place, &value, sizeof value);
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_parameters(fusekit_launch *launch, const fk_call *call, const int64_t *variables,
                                    fusekit_error *error) {
    const fk_record *record = launch->kernel->record;
    unsigned char *map = launch->maps + (FK_MAP_ALIGNMENT - (uintptr_t)launch->maps % FK_MAP_ALIGNMENT) % FK_MAP_ALIGNMENT;
    int index;
    for (index = 0; index < record->parameter_count; ++index) {
        const fk_parameter *parameter = &record->parameters[index];
        uint64_t *place = &launch->values[index];
        fusekit_status status = FUSEKIT_OK;
        launch->pointers[index] = place;
        switch (parameter->kind) {
        case FK_TENSOR_MAP:
            launch->pointers[index] = map;
            status = fk_encode(launch->kernel, parameter, variables, map, error);
            map += FK_MAP_BYTES;
            break;
        case FK_POINTER: *place = call->addresses[parameter->argument]; break;
        case FK_WORKSPACE:
        case FK_SCRATCH: break; /* the stream's, which is known when it is launched */
        case FK_INT32:
        case FK_INT64: status = fk_integer(record, parameter, variables, place, error); break;
        case FK_FLOAT: memcpy(place, &call->floats[parameter->argument], sizeof(float)); break;
        }
        if (status != FUSEKIT_OK) return status;
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_grid(fusekit_launch *launch, const int64_t *variables, fusekit_error *error) {
    const fk_record *record = launch->kernel->record;
    int axis;
    for (axis = 0; axis < 3; ++axis) {
        int64_t blocks, limit = axis == 0 ? INT32_MAX : 65535;
        fusekit_status status = fk_value(record, &record->grid[axis], variables, "the grid", &blocks, error);
        if (status != FUSEKIT_OK) return status;
        if (blocks < 1 || blocks > limit || blocks % record->cluster[axis] != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: grid %c is %lld blocks; it must be 1 to %lld, a multiple of %u (the cluster)",
                           record->name, "xyz"[axis], (long long)blocks, (long long)limit, record->cluster[axis]);
        launch->grid[axis] = (unsigned)blocks;
    }
    return FUSEKIT_OK;
}

static fk_attribute *fk_add_attribute(fusekit_launch *launch, int id) {
    fk_attribute *attribute = &launch->attributes[launch->attribute_count++];
    memset(attribute, 0, sizeof *attribute);
    attribute->id = id;
    return attribute;
}

static void fk_attributes(fusekit_launch *launch, const fk_call *call) {
    const fk_record *record = launch->kernel->record;
    launch->attribute_count = 0;
    if (launch->kernel->major >= 9) {
        fk_attribute *cluster = fk_add_attribute(launch, FK_LAUNCH_CLUSTER);
        memcpy(cluster->value.dims, record->cluster, sizeof cluster->value.dims);
    }
    if (record->cooperative) fk_add_attribute(launch, FK_LAUNCH_COOPERATIVE)->value.number = 1;
    if (record->serialization) fk_add_attribute(launch, FK_LAUNCH_SERIALIZATION)->value.number = 1;
    if (call->has_priority) fk_add_attribute(launch, FK_LAUNCH_PRIORITY)->value.number = call->priority;
}

/* Checks a call and packs it into `launch`. */
static fusekit_status fk_pack(const fk_kernel *kernel, const fk_call *call, fusekit_launch *launch,
                              fusekit_error *error) {
    const fk_record *record = kernel->record;
    int64_t variables[FK_MOST_VARIABLES];
    fk_extent extents[FK_MOST_TENSORS];
    const int64_t *given = call->strides;
    int index;
    fusekit_status status = fk_check_dims(record, call, variables, error);
    launch->kernel = kernel;
    launch->skip = 0;
    for (index = 0; index < record->tensor_count && status == FUSEKIT_OK; ++index) {
        const fk_tensor *tensor = &record->tensors[index];
        status = fk_check_tensor(record, tensor, given, variables, &extents[index], error);
        variables[record->first_address + index] = (int64_t)call->addresses[index];
        given += tensor->rank;
    }
    for (index = 0; index < record->constraint_count && status == FUSEKIT_OK; ++index) {
        int64_t value = 0;
        status = fk_value(record, &record->constraints[index].expression, variables, "a constraint", &value, error);
        if (status == FUSEKIT_OK && value != 0)
            status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s", record->name,
                             record->constraints[index].message);
    }
    if (status == FUSEKIT_OK && (call->margin < 0 || call->margin > INT32_MAX))
        status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: cluster_margin is %lld; it must be at least 0",
                         record->name, (long long)call->margin);
    if (status != FUSEKIT_OK) return status;
    for (index = 0; index < record->skip_count; ++index)
        if (variables[record->skip[index]] == 0) launch->skip = 1;
    if (launch->skip) return fk_ok(error);
    status = fk_check_places(record, call, extents, error);
    if (status != FUSEKIT_OK) return status;
    for (index = 0; index < call->integer_count; ++index)
        variables[record->first_integer + index] = call->integers[index];
    variables[record->sm_count] = kernel->sm_count;
    variables[record->margin] = call->margin;
    status = fk_grid(launch, variables, error);
    launch->scratch = 0;
    if (status == FUSEKIT_OK && record->scratch.count > 0)
        status = fk_value(record, &record->scratch, variables, "its scratch", &launch->scratch, error);
    if (status == FUSEKIT_OK && launch->scratch > (int64_t)1 << 57)
        status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: it needs %lld bytes of scratch; no device has so many",
                         record->name, (long long)launch->scratch);
    if (status == FUSEKIT_OK) status = fk_parameters(launch, call, variables, error);
    if (status != FUSEKIT_OK) return status;
    fk_attributes(launch, call);
    return fk_ok(error);
}

/* One driver call; `inside`: with the kernel's context current. */
static int fk_launch_once(const fk_kernel *kernel, const fk_config *config, void **parameters, int inside) {
    void *before;
    int result = inside ? kernel->driver->push(kernel->context) : 0;
    if (result != 0) return result;
    result = kernel->driver->launch(config, kernel->function, parameters, NULL);
    if (inside) kernel->driver->pop(&before);
    return result;
}

fusekit_status fusekit_launch_run(const fusekit_launch *launch, void *stream, fusekit_error *error) {
    const fk_kernel *kernel = launch->kernel;
    const fusekit_driver *driver = kernel->driver;
    const fk_record *record = kernel->record;
    void *current = kernel->context, *pointers[FK_MOST_PARAMETERS], **parameters = (void **)launch->pointers;
    unsigned long long workspace = 0, scratch = 0;
    fk_config config;
    int result = 0, own = (uintptr_t)stream > FK_PER_THREAD, index;
    if (launch->skip) return fk_ok(error);
    if (kernel->workspaces != NULL) { /* a launch may run in two streams at once, so it stays as it is */
        fusekit_status status = FUSEKIT_OK;
        if (kernel->workspaces->stocks != NULL) status = fk_workspace(kernel->workspaces, stream, &workspace, error);
        if (status == FUSEKIT_OK && record->scratch.count > 0)
            status = fk_scratch(kernel->workspaces, stream, launch->scratch, &scratch, error);
        if (status != FUSEKIT_OK) return status;
        parameters = pointers;
        for (index = 0; index < record->parameter_count; ++index) {
            fk_kind kind = record->parameters[index].kind;
            pointers[index] = kind == FK_WORKSPACE ? &workspace : kind == FK_SCRATCH ? &scratch : launch->pointers[index];
        }
    }
    memset(&config, 0, sizeof config);
    memcpy(config.grid, launch->grid, sizeof config.grid);
    memcpy(config.block, record->block, sizeof config.block);
    config.shared = record->shared;
    config.stream = stream;
    config.attributes = (fk_attribute *)launch->attributes; /* the driver only reads them */
    config.count = launch->attribute_count;
    /* A stream knows its context; for the default streams (0, 1, 2) the driver takes the current one. */
    if (!own) result = driver->current(&current);
    if (result == 0) result = fk_launch_once(kernel, &config, parameters, current != kernel->context);
    /* Another device's context may be current, and be why the driver refused. */
    if (own && (result == FK_INVALID_CONTEXT || result == FK_INVALID_HANDLE) && driver->current(&current) == 0 &&
        current != kernel->context)
        result = fk_launch_once(kernel, &config, parameters, 1);
    return result == 0 ? fk_ok(error) : fk_cuda(driver, error, result, record->name, "cuLaunchKernelEx");
}

void fusekit_launch_free(fusekit_launch *launch) { free(launch); }

static fusekit_status fk_bind(const fk_kernel *kernel, const fk_call *call, fusekit_launch **made,
                              fusekit_error *error) {
    fusekit_launch *launch = (fusekit_launch *)malloc(sizeof *launch);
    fusekit_status status;
    *made = NULL;
    if (launch == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a launch", kernel->record->name);
    status = fk_pack(kernel, call, launch, error);
    if (status == FUSEKIT_OK)
        *made = launch;
    else
        free(launch);
    return status;
}

static fusekit_status fk_launch(const fk_kernel *kernel, const fk_call *call, void *stream, fusekit_error *error) {
    fusekit_launch launch;
    fusekit_status status = fk_pack(kernel, call, &launch, error);
    return status == FUSEKIT_OK ? fusekit_launch_run(&launch, stream, error) : status;
}
