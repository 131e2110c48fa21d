/* ---- Parameters. */

/* Bytes to the end of the last parameter. */
static size_t fk_space(const fk_node *node) {
    const fk_parameter *last = node->parameters + node->parameter_count;
    return node->parameter_count > 0 ? (size_t)(last[-1].offset + last[-1].size) : 0;
}

static fusekit_status fk_integer(const fk_record *record, const fk_part *part, const int64_t *variables,
                                 unsigned char *place, fusekit_error *error) {
    const int bits = (int)part->size * 8;
    int64_t value, most = part->kind == FK_INT || bits == 64 ? INT64_MAX >> (64 - bits) : ((int64_t)1 << bits) - 1;
    fusekit_status status = fk_value(record, &part->value, variables, part->name, &value, error);
    if (status != FUSEKIT_OK) return status;
    if (value > most || value < (part->kind == FK_INT ? -most - 1 : 0))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is %lld; it does not fit into %d bits%s", record->name,
                       part->name, (long long)value, bits, part->kind == FK_INT ? "" : " without sign");
    memcpy(place, &value, (size_t)part->size); /* little-endian, as every host of CUDA's is */
    return FUSEKIT_OK;
}

static void fk_put_float(const fk_part *part, double number, unsigned char *place) {
    float single = (float)number;
    uint32_t bits;
    uint16_t half;
    if (part->kind == FK_DOUBLE) {
        memcpy(place, &number, sizeof number);
    } else if (part->kind == FK_FLOAT) {
        memcpy(place, &single, sizeof single);
    } else {
        single = (float)(part->kind == FK_BFLOAT ? fk_bfloat(number) : fk_half(number));
        memcpy(&bits, &single, sizeof bits);
        half = part->kind == FK_BFLOAT ? (uint16_t)(bits >> 16) : fk_half_bits(single);
        memcpy(place, &half, sizeof half);
    }
}

/* The value of every part of a node's parameters. Of the stream's own memory it is what is added to the address, which is
 * known only when it is launched. */
static fusekit_status fk_parts(const fk_kernel *kernel, const fk_node *node, const fk_call *call,
                               const int64_t *variables, unsigned char *space, fusekit_error *error) {
    int index;
    for (index = 0; index < node->part_count; ++index) {
        const fk_part *part = &node->parts[index];
        unsigned char *place = space + part->offset;
        fusekit_status status = FUSEKIT_OK;
        int64_t shift = 0;
        uint64_t address;
        switch ((fk_kind)part->kind) {
        case FK_TENSOR_MAP: status = fk_encode(kernel, part, variables, place, error); break;
        case FK_POINTER:
        case FK_WORKSPACE:
        case FK_SCRATCH:
            if (part->value.count > 0 && !fk_evaluate(&part->value, variables, 1, &shift))
                return fk_no_value(kernel->record, part->name, error);
            address = (part->kind == FK_POINTER ? call->addresses[part->argument] : 0) + (uint64_t)shift;
            memcpy(place, &address, sizeof address);
            break;
        case FK_INT:
        case FK_UINT: status = fk_integer(kernel->record, part, variables, place, error); break;
        case FK_FLOAT:
        case FK_DOUBLE:
        case FK_HALF:
        case FK_BFLOAT:
            fk_put_float(part, fk_evaluate_float(&part->number, call->floats, variables), place);
            break;
        }
        if (status != FUSEKIT_OK) return status;
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_grid(const fk_record *record, const fk_node *node, const int64_t *variables, unsigned grid[3],
                              fusekit_error *error) {
    int axis;
    for (axis = 0; axis < 3; ++axis) {
        int64_t blocks, limit = axis == 0 ? INT32_MAX : 65535;
        fusekit_status status = fk_value(record, &node->grid[axis], variables, "the grid", &blocks, error);
        if (status != FUSEKIT_OK) return status;
        if (blocks < 1 || blocks > limit || blocks % node->cluster[axis] != 0)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: grid %c is %lld blocks; it must be 1 to %lld, a multiple of %lld (the cluster)",
                           record->name, "xyz"[axis], (long long)blocks, (long long)limit,
                           (long long)node->cluster[axis]);
        grid[axis] = (unsigned)blocks;
    }
    return FUSEKIT_OK;
}

static fk_attribute *fk_add_attribute(fk_attribute *attributes, unsigned *count, int id) {
    fk_attribute *attribute = &attributes[(*count)++];
    memset(attribute, 0, sizeof *attribute);
    attribute->id = id;
    return attribute;
}

/* The launch attributes of a node, without a priority; how many. */
static unsigned fk_attributes(const fk_kernel *kernel, int64_t at, fk_attribute *attributes) {
    const fk_node *node = &kernel->record->nodes[at];
    const int64_t *preferred = kernel->more == NULL ? NULL : kernel->more->nodes[at].preferred;
    unsigned count = 0;
    int axis;
    if (kernel->major >= 9) {
        fk_attribute *cluster = fk_add_attribute(attributes, &count, FK_LAUNCH_CLUSTER);
        for (axis = 0; axis < 3; ++axis) cluster->value.dims[axis] = (unsigned)node->cluster[axis];
        if (preferred != NULL && preferred[0] > 0) {
            cluster = fk_add_attribute(attributes, &count, FK_LAUNCH_PREFERRED_CLUSTER);
            for (axis = 0; axis < 3; ++axis) cluster->value.dims[axis] = (unsigned)preferred[axis];
        }
    }
    if (node->cooperative) fk_add_attribute(attributes, &count, FK_LAUNCH_COOPERATIVE)->value.number = 1;
    if (node->serialization) fk_add_attribute(attributes, &count, FK_LAUNCH_SERIALIZATION)->value.number = 1;
    return count;
}

static void fk_add_event(fk_attribute *attributes, unsigned *count, int id, int64_t handle, int64_t flags, int64_t start) {
    fk_attribute *attribute = fk_add_attribute(attributes, count, id);
    attribute->value.event.handle = handle;
    attribute->value.event.flags = (int)flags;
    attribute->value.event.at_block_start = (int)start;
}

/* The events that a node records. */
static void fk_events(const fk_more_node *more, const int64_t *variables, fk_attribute *attributes, unsigned *count) {
    if (more->programmatic != 0)
        fk_add_event(attributes, count, FK_LAUNCH_PROGRAMMATIC_EVENT, variables[more->programmatic],
                     more->programmatic_flags, more->at_block_start);
    if (more->completion != 0)
        fk_add_event(attributes, count, FK_LAUNCH_COMPLETION_EVENT, variables[more->completion], more->completion_flags, 0);
}

static void fk_configure(const fk_node *node, const unsigned *grid, fk_attribute *attributes, unsigned count,
                         fk_config *config) {
    int axis;
    memset(config, 0, sizeof *config);
    memcpy(config->grid, grid, sizeof config->grid);
    for (axis = 0; axis < 3; ++axis) config->block[axis] = (unsigned)node->block[axis];
    config->shared = (unsigned)node->shared;
    config->attributes = attributes;
    config->count = count;
}

/* What the arguments decide of a node's block and shared memory. */
static fusekit_status fk_block(const fk_kernel *kernel, int64_t at, const int64_t *variables, fk_config *config,
                               fusekit_error *error) {
    const fk_record *record = kernel->record;
    const fk_more_node *more = &kernel->more->nodes[at];
    int64_t size = 1, value;
    int axis;
    fusekit_status status = FUSEKIT_OK;
    for (axis = 0; axis < 3 && more->block[0].count > 0 && status == FUSEKIT_OK; ++axis) {
        status = fk_value(record, &more->block[axis], variables, "the block", &value, error);
        if (status == FUSEKIT_OK && (value < 1 || value > FK_MOST_THREADS || (size *= value) > FK_MOST_THREADS))
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT,
                           "%s: the block has %lld threads along %c; each is at least 1 and their product at most %d",
                           record->name, (long long)value, "xyz"[axis], FK_MOST_THREADS);
        config->block[axis] = (unsigned)value;
    }
    if (status != FUSEKIT_OK || more->shared.count == 0) return status;
    status = fk_value(record, &more->shared, variables, "its shared memory", &value, error);
    if (status == FUSEKIT_OK && (value < 0 || value > kernel->most_shared[at]))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: shared memory is %lld bytes a block; the device has 0 to %d"
                       " for it", record->name, (long long)value, kernel->most_shared[at]);
    config->shared = (unsigned)value;
    return status;
}

static fusekit_status fk_constraints(const fk_record *record, const fk_constraint *constraints, int64_t count,
                                     const int64_t *variables, fusekit_error *error) {
    char dims[160] = "";
    size_t length = 0;
    int index, dim;
    for (index = 0; index < count; ++index) {
        const fk_constraint *constraint = &constraints[index];
        int64_t value = 0;
        fusekit_status status;
        status = fk_value(record, &constraint->expression, variables, "a constraint", &value, error);
        if (status != FUSEKIT_OK) return status;
        if (value == 0) continue;
        for (dim = 0; dim < record->dim_count && length < sizeof dims; ++dim)
            length += (size_t)snprintf(dims + length, sizeof dims - length, "%s%s = %lld", dim ? ", " : "",
                                       record->dims[dim].name, (long long)variables[FK_FIRST_DIM + dim]);
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s; got %s", record->name, constraint->message, dims);
    }
    return FUSEKIT_OK;
}

/* Checks of a call; dims, strides and addresses go into `variables`, whether there is nothing to do into `skip`. */
static fusekit_status fk_check(const fk_kernel *kernel, const fk_call *call, int64_t *variables, fk_extent *extents,
                               int *skip, fusekit_error *error) {
    const fk_record *record = kernel->record;
    const int64_t *strides = call->strides;
    int index;
    fusekit_status status = fk_check_dims(record, call, variables, error);
    for (index = 0; index < record->tensor_count && status == FUSEKIT_OK; ++index) {
        const fk_tensor *tensor = &record->tensors[index];
        status = fk_check_tensor(record, tensor, call->given == NULL ? NULL : &call->given[index], strides, variables,
                                 &extents[index], error);
        variables[record->first_address + index] = (int64_t)call->addresses[index];
        if (strides != NULL) strides += tensor->rank;
    }
    if (status == FUSEKIT_OK)
        status = fk_constraints(record, record->constraints, record->constraint_count, variables, error);
    if (status == FUSEKIT_OK && (call->margin < 0 || call->margin >= kernel->sm_count))
        status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: cluster_margin is %lld; it must be 0 to %lld, all"
                         " multiprocessors but one", record->name, (long long)call->margin,
                         (long long)kernel->sm_count - 1);
    if (status != FUSEKIT_OK) return status;
    for (index = 0; index < record->skip_count; ++index) *skip |= variables[record->skips[index].dim] == 0;
    return FUSEKIT_OK;
}

/* Which nodes are left out; if all are, there is nothing to do. */
static fusekit_status fk_conditions(const fk_kernel *kernel, const int64_t *variables, fusekit_launch *launch,
                                    fusekit_error *error) {
    int64_t index, value, idle = 0;
    fusekit_status status = FUSEKIT_OK;
    for (index = 0; kernel->more != NULL && index < kernel->record->node_count && status == FUSEKIT_OK; ++index) {
        const fk_expression *when = &kernel->more->nodes[index].when;
        if (when->count == 0) continue;
        status = fk_value(kernel->record, when, variables, "its condition", &value, error);
        launch->nodes[index].idle = status == FUSEKIT_OK && value == 0;
        idle += launch->nodes[index].idle;
    }
    launch->skip = idle == kernel->record->node_count;
    return status;
}

/* Whether a value is made of a float. */
static int fk_is_truncated(const fk_kernel *kernel, int64_t value) {
    return kernel->more != NULL && kernel->more->value_count > 0 && kernel->more->values[value].number.count > 0;
}

/* Checks a call and packs it into `launch`. */
static fusekit_status fk_pack(const fk_kernel *kernel, const fk_call *call, fusekit_launch *launch,
                              fusekit_error *error) {
    const fk_record *record = kernel->record;
    int64_t variables[FK_MOST_VARIABLES];
    fk_extent extents[FK_MOST_TENSORS];
    int64_t index;
    fusekit_status status;
    variables[FK_SM_COUNT] = kernel->sm_count;
    variables[FK_CLUSTER_MARGIN] = call->margin;
    variables[FK_ACTIVE_CLUSTERS] = kernel->active_clusters;
    for (index = record->first_integer; index < record->first_value; ++index)
        variables[index] = call->integers[index - record->first_integer];
    status = fk_check(kernel, call, variables, extents, &launch->skip, error);
    if (status != FUSEKIT_OK) return status;
    if (launch->skip) return fk_ok(error);
    for (index = 0; index < record->value_count && status == FUSEKIT_OK; ++index)
        if (fk_is_truncated(kernel, index))
            variables[record->first_value + index] =
                fk_truncated(fk_evaluate_float(&kernel->more->values[index].number, call->floats, variables));
        else
            status = fk_value(record, &record->values[index].expression, variables, "its launch",
                              &variables[record->first_value + index], error);
    if (status == FUSEKIT_OK)
        status = fk_constraints(record, record->late_constraints, record->late_constraint_count, variables, error);
    if (status == FUSEKIT_OK) status = fk_conditions(kernel, variables, launch, error);
    if (status == FUSEKIT_OK && launch->skip) return fk_ok(error);
    if (status == FUSEKIT_OK) status = fk_check_places(record, call, extents, error);
    if (status == FUSEKIT_OK && record->scratch.count > 0)
        status = fk_value(record, &record->scratch, variables, "its scratch", &launch->scratch, error);
    if (status == FUSEKIT_OK && launch->scratch > (int64_t)1 << 57)
        status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: it needs %lld bytes of scratch; no device has so many",
                         record->name, (long long)launch->scratch);
    for (index = 0; index < record->node_count && status == FUSEKIT_OK; ++index) {
        const fk_node *node = &record->nodes[index];
        fk_packed *packed = &launch->nodes[index];
        unsigned grid[3] = {0, 0, 0}, count = fk_attributes(kernel, index, packed->attributes);
        if (packed->idle) continue;
        status = fk_grid(record, node, variables, grid, error);
        if (status == FUSEKIT_OK) status = fk_parts(kernel, node, call, variables, packed->space, error);
        if (kernel->more != NULL) fk_events(&kernel->more->nodes[index], variables, packed->attributes, &count);
        if (call->has_priority)
            fk_add_attribute(packed->attributes, &count, FK_LAUNCH_PRIORITY)->value.number = call->priority;
        fk_configure(node, grid, packed->attributes, count, &packed->config);
        if (status == FUSEKIT_OK && kernel->more != NULL)
            status = fk_block(kernel, index, variables, &packed->config, error);
    }
    return status == FUSEKIT_OK ? fk_ok(error) : status;
}

static int fk_is_own(const fk_part *part) { return part->kind == FK_WORKSPACE || part->kind == FK_SCRATCH; }

static int64_t fk_own_count(const fk_node *node) {
    int64_t count = 0, index;
    for (index = 0; index < node->part_count; ++index) count += fk_is_own(&node->parts[index]);
    return count;
}

/* Of a launch and all that it points to. */
static size_t fk_launch_bytes(const fk_record *record) {
    size_t size = sizeof(fusekit_launch) + (size_t)record->node_count * sizeof(fk_packed);
    int index;
    for (index = 0; index < record->node_count; ++index) {
        const fk_node *node = &record->nodes[index];
        size += (size_t)fk_own_count(node) * sizeof(fk_own_address);
        size += (size_t)node->parameter_count * sizeof(void *) + fk_space(node);
    }
    return (size + sizeof(int64_t) - 1) / sizeof(int64_t) * sizeof(int64_t);
}

static void fk_place_own(const fk_node *node, fk_packed *packed) {
    int64_t index, parameter;
    for (index = 0; index < node->part_count; ++index) {
        const fk_part *part = &node->parts[index];
        for (parameter = 0; fk_is_own(part) && parameter < node->parameter_count; ++parameter) {
            const fk_parameter *place = &node->parameters[parameter];
            fk_own_address *own = &packed->own[packed->own_count];
            if (part->offset < place->offset || part->offset + part->size > place->offset + place->size) continue;
            own->parameter = parameter;
            own->offset = part->offset;
            own->scratch = part->kind == FK_SCRATCH;
            ++packed->own_count;
        }
    }
}

/* A launch in memory of so many bytes. */
static fusekit_launch *fk_place_launch(const fk_kernel *kernel, void *memory) {
    const fk_record *record = kernel->record;
    fusekit_launch *launch = (fusekit_launch *)memory;
    fk_own_address *own;
    void **pointers;
    unsigned char *at;
    int64_t index, parameter;
    memset(memory, 0, fk_launch_bytes(record));
    launch->kernel = kernel;
    launch->nodes = (fk_packed *)(launch + 1);
    own = (fk_own_address *)(launch->nodes + record->node_count);
    for (index = 0; index < record->node_count; ++index) {
        launch->nodes[index].own = own;
        fk_place_own(&record->nodes[index], &launch->nodes[index]);
        own += launch->nodes[index].own_count;
    }
    pointers = (void **)own;
    for (index = 0; index < record->node_count; ++index) {
        launch->nodes[index].pointers = pointers;
        pointers += record->nodes[index].parameter_count;
    }
    at = (unsigned char *)pointers;
    for (index = 0; index < record->node_count; ++index) {
        const fk_node *node = &record->nodes[index];
        launch->nodes[index].space = at;
        for (parameter = 0; parameter < node->parameter_count; ++parameter)
            launch->nodes[index].pointers[parameter] = at + node->parameters[parameter].offset;
        at += fk_space(node);
    }
    return launch;
}

/* Pointers to a node's parameters, with the stream's own memory in those that have it, which are then in `space`: a launch
 * may run in two streams at once, so it stays as it is. */
static void fk_own_parameters(const fk_node *node, const fk_packed *packed, const unsigned long long memory[2],
                              unsigned char *space, void **pointers) {
    uint64_t address;
    int64_t index;
    memcpy(pointers, packed->pointers, (size_t)node->parameter_count * sizeof *pointers);
    for (index = 0; index < packed->own_count; ++index) {
        const fk_own_address *own = &packed->own[index];
        const fk_parameter *parameter = &node->parameters[own->parameter];
        if (pointers[own->parameter] == packed->pointers[own->parameter]) {
            pointers[own->parameter] = space + parameter->offset;
            memcpy(space + parameter->offset, packed->space + parameter->offset, (size_t)parameter->size);
        }
        memcpy(&address, space + own->offset, sizeof address);
        address += memory[own->scratch];
        memcpy(space + own->offset, &address, sizeof address);
    }
}

/* Queues the nodes from `next` on, which is then the first that is not queued; `inside`: with the kernel's context current.
 * Memory: of the stream's own, 0 where there is none. */
static int fk_queue(const fusekit_launch *launch, void *stream, const unsigned long long memory[2], int inside,
                    int *next) {
    const fk_kernel *kernel = launch->kernel;
    unsigned char space[FK_MOST_SPACE];
    void *before, *pointers[FK_MOST_PARAMETERS];
    int result = inside ? kernel->driver->push(kernel->context) : 0, pushed = inside && result == 0;
    while (result == 0 && *next < kernel->record->node_count) {
        const fk_node *node = &kernel->record->nodes[*next];
        const fk_packed *packed = &launch->nodes[*next];
        fk_config config = packed->config;
        if (packed->idle) {
            ++*next;
            continue;
        }
        config.stream = stream;
        if (packed->own_count > 0) fk_own_parameters(node, packed, memory, space, pointers);
        result = kernel->driver->launch(&config, kernel->functions[*next],
                                        packed->own_count > 0 ? pointers : packed->pointers, NULL);
        if (result == 0) ++*next;
    }
    if (pushed) kernel->driver->pop(&before);
    return result;
}

/* A stream knows its context; for the default streams (0, 1, 2) the driver takes the current one. */
static int fk_has_context(void *stream) { return (uintptr_t)stream > FK_PER_THREAD; }

/* The context that launches of a kernel in the stream will have. */
static int fk_context_of(const fk_kernel *kernel, void *stream, void **context) {
    *context = kernel->context;
    return fk_has_context(stream) ? 0 : kernel->driver->current(context);
}

/* current: of fk_context_of. */
static fusekit_status fk_run(const fusekit_launch *launch, void *stream, void *current, fusekit_error *error) {
    const fk_kernel *kernel = launch->kernel;
    const fusekit_driver *driver = kernel->driver;
    unsigned long long memory[2] = {0, 0};
    int result, next = 0;
    pthread_mutex_t *together = NULL;
    if (launch->skip) return FUSEKIT_OK;
    if (kernel->workspaces != NULL) {
        fusekit_status status = FUSEKIT_OK;
        if (kernel->workspaces->stocks != NULL) status = fk_workspace(kernel->workspaces, stream, &memory[0], error);
        if (status == FUSEKIT_OK && kernel->record->scratch.count > 0)
            status = fk_scratch(kernel->workspaces, stream, launch->scratch, &memory[1], error);
        if (status != FUSEKIT_OK) return status;
    }
    if (kernel->workspaces != NULL && kernel->record->node_count > 1) together = &kernel->workspaces->together;
    if (together != NULL) pthread_mutex_lock(together);
    result = fk_queue(launch, stream, memory, current != kernel->context, &next);
    /* Another device's context may be current, and be why the driver refused. */
    if (fk_has_context(stream) && (result == FK_INVALID_CONTEXT || result == FK_INVALID_HANDLE) &&
        driver->current(&current) == 0 && current != kernel->context)
        result = fk_queue(launch, stream, memory, 1, &next);
    if (together != NULL) pthread_mutex_unlock(together);
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, kernel->record->name, "cuLaunchKernelEx");
}

/* Queues the launches of kernels of one device. */
static fusekit_status fk_run_all(const fusekit_launch *const *launches, size_t count, void *stream, fusekit_error *error) {
    fusekit_status status = FUSEKIT_OK;
    void *current = NULL;
    size_t index;
    int result = count == 0 ? 0 : fk_context_of(launches[0]->kernel, stream, &current);
    if (result != 0)
        return fk_cuda(launches[0]->kernel->driver, error, result, launches[0]->kernel->record->name, "cuCtxGetCurrent");
    for (index = 0; index < count && status == FUSEKIT_OK; ++index) status = fk_run(launches[index], stream, current, error);
    return status == FUSEKIT_OK ? fk_ok(error) : status;
}

fusekit_status fusekit_launch_run(const fusekit_launch *launch, void *stream, fusekit_error *error) {
    return fk_run_all(&launch, launch->skip ? 0 : 1, stream, error);
}

void fusekit_launch_free(fusekit_launch *launch) { free(launch); }

static fusekit_status fk_bind(const fk_kernel *kernel, const fk_call *call, fusekit_launch **out,
                              fusekit_error *error) {
    void *memory = malloc(fk_launch_bytes(kernel->record));
    fusekit_launch *launch;
    fusekit_status status;
    *out = NULL;
    if (memory == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a launch", kernel->record->name);
    launch = fk_place_launch(kernel, memory);
    status = fk_pack(kernel, call, launch, error);
    if (status == FUSEKIT_OK)
        *out = launch;
    else
        free(launch);
    return status;
}

static fusekit_status fk_launch(const fk_kernel *kernel, const fk_call *call, void *stream, fusekit_error *error) {
    fusekit_launch *launch;
    fusekit_status status = fk_bind(kernel, call, &launch, error);
    if (status != FUSEKIT_OK) return status;
    status = fusekit_launch_run(launch, stream, error);
    free(launch);
    return status;
}
