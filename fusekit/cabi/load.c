/* ---- Loading. */

fusekit_status fusekit_driver_open_with(fusekit_lookup lookup, void *user, fusekit_driver **out,
                                        fusekit_error *error) {
    fusekit_driver *driver = (fusekit_driver *)calloc(1, sizeof *driver);
    int version = 0, result;
    *out = NULL;
    if (driver == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "no memory for the driver's functions");
#define FK_FIND(name, symbol, arguments)                                                                               \
    {                                                                                                                  \
        void *address = lookup(symbol, user);                                                                            \
        if (address == NULL) {                                                                                           \
            free(driver);                                                                                              \
            return fk_fail(error, FUSEKIT_NO_DRIVER, "the CUDA driver has no %s; one for CUDA 12.4 or newer is needed", \
                           symbol);                                                                                    \
        }                                                                                                              \
        memcpy(&driver->name, &address, sizeof address);                                                                   \
    }
    FK_API(FK_FIND)
#undef FK_FIND
    result = driver->version(&version);
    if (result == 0 && version < FK_MINIMUM_DRIVER) {
        free(driver);
        return fk_fail(error, FUSEKIT_NO_DRIVER, "the CUDA driver supports CUDA %d.%d; 12.4 or newer is needed",
                       version / 1000, version % 1000 / 10);
    }
    driver->cuda = version;
    if (result == 0) result = driver->init(0);
    if (result != 0) {
        fk_cuda(driver, error, result, "the driver", "cuInit");
        free(driver);
        return FUSEKIT_CUDA_ERROR;
    }
    *out = driver;
    return fk_ok(error);
}

static void *fk_symbol(const char *symbol, void *handle) { return dlsym(handle, symbol); }

fusekit_status fusekit_driver_open(fusekit_driver **out, fusekit_error *error) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    fusekit_status status;
    *out = NULL;
    if (handle == NULL) {
        const char *why = dlerror();
        return fk_fail(error, FUSEKIT_NO_DRIVER, "no NVIDIA driver: %s", why == NULL ? "libcuda.so.1" : why);
    }
    status = fusekit_driver_open_with(fk_symbol, handle, out, error);
    if (status == FUSEKIT_OK)
        (*out)->handle = handle;
    else
        dlclose(handle);
    return status;
}

void fusekit_driver_close(fusekit_driver *driver) {
    if (driver == NULL) return;
    if (driver->handle != NULL) dlclose(driver->handle);
    free(driver);
}

static int fk_attribute_of(const fusekit_driver *driver, int attribute, int device, int *result) {
    int value = 0;
    if (*result == 0) *result = driver->device_attribute(&value, attribute, device);
    return value;
}

/* Why nothing may be loaded now, or 0: this thread captures a stream, or a blocking stream of the device is captured.
 * Whether an event is done is what the driver refuses to say while this thread captures, unless as relaxed. */
static int fk_capturing(const fusekit_driver *driver) {
    void *event;
    int capturing, result = driver->stream_capturing((void *)(uintptr_t)FK_LEGACY, &capturing);
    if (result == 0) result = driver->event_create(&event, 0);
    if (result == 0) {
        result = driver->event_query(event);
        driver->event_destroy(event);
    }
    return result;
}

static fusekit_status fk_open_cubin(fk_kernel *kernel, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const fk_source *source = kernel->source;
    const fk_record *record = kernel->record;
    int index, result;
    if (source->cubin_size > FK_ELF_ABI && source->cubin[FK_ELF_ABI] >= FK_FORMAT_13 && driver->cuda < FK_CUDA_13)
        return fk_fail(error, FUSEKIT_NO_DRIVER,
                       "%s: the CUDA driver supports CUDA %d.%d; the cubin is of CUDA 13's format; update the driver",
                       record->name, driver->cuda / 1000, driver->cuda % 1000 / 10);
    result = driver->library_load(&kernel->library, source->cubin, NULL, NULL, 0, NULL, NULL, 0);
    for (index = 0; index < record->node_count && result == 0; ++index)
        result = driver->library_kernel(&kernel->kernels[index], kernel->library, record->nodes[index].symbol);
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, record->name, "loading the cubin");
}

static uint64_t fk_little(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    while (bytes-- > 0) value = value << 8 | at[bytes];
    return value;
}

static const unsigned char *fk_elf_section(const unsigned char *elf, uint64_t index) {
    return elf + fk_little(elf + 40, 8) + index * fk_little(elf + 58, 2);
}

/* How many parameters a whole ELF file lists for a kernel, in its section .nv.info.SYMBOL; -1 where it has none. */
static int64_t fk_elf_parameters(const unsigned char *elf, const char *symbol) {
    static const char prefix[] = ".nv.info.";
    uint64_t sections = fk_little(elf + 60, 2), strings = fk_little(elf + 62, 2), length = strlen(symbol) + 1, index;
    const unsigned char *names = strings < sections ? fk_elf_section(elf, strings) : NULL;
    if (names == NULL || fk_little(names + 4, 4) == 8) return -1;
    for (index = 0; index < sections; ++index) {
        const unsigned char *section = fk_elf_section(elf, index), *name, *data;
        uint64_t at = fk_little(section, 4), most = fk_little(names + 32, 8), size = fk_little(section + 32, 8);
        int64_t count = 0;
        if (fk_little(section + 4, 4) == 8 || most < 9 + length || at > most - 9 - length) continue;
        name = elf + fk_little(names + 24, 8) + at;
        if (memcmp(name, prefix, 9) != 0 || memcmp(name + 9, symbol, length) != 0) continue;
        data = elf + fk_little(section + 24, 8);
        /* attributes: format, kind, 16 bits of value, which of format 4 is the length of what follows */
        for (at = 0; at <= size && size - at >= 4; at += 4 + (data[at] == 4 ? fk_little(data + at + 2, 2) : 0))
            count += data[at + 1] == 0x17; /* a kernel's parameter */
        return at == size ? count : 0; /* 0: the last one is cut short */
    }
    return -1;
}

/* The driver's account of a node's parameters against the record's. How many there are is the cubin's word: the driver
 * has no function for that before CUDA 13, and compute-sanitizer reports a call that fails. */
static fusekit_status fk_check_cubin(const fk_kernel *kernel, int64_t at, fusekit_error *error) {
    const fk_record *record = kernel->record;
    const fk_node *node = &record->nodes[at];
    int64_t count = fk_elf_parameters(kernel->source->cubin, node->symbol);
    int index;
    if (count >= 0 && count != node->parameter_count)
        return fk_fail(error, FUSEKIT_MISMATCH, "%s: the cubin has %d parameters, the record %d", record->name, (int)count,
                       (int)node->parameter_count);
    for (index = 0; index < node->parameter_count; ++index) {
        size_t offset = 0, size = 0;
        int result = kernel->driver->kernel_parameter(kernel->kernels[at], (size_t)index, &offset, &size);
        if (result != 0) return fk_cuda(kernel->driver, error, result, record->name, "cuKernelGetParamInfo");
        if (offset != (size_t)node->parameters[index].offset || size != (size_t)node->parameters[index].size)
            return fk_fail(error, FUSEKIT_MISMATCH, "%s: parameter %s is %d+%d in the record and %u+%u in the cubin",
                           record->name, node->parameters[index].name, (int)node->parameters[index].offset,
                           (int)node->parameters[index].size, (unsigned)offset, (unsigned)size);
    }
    return FUSEKIT_OK;
}

/* The function of a node, its attributes set. Where the arguments decide how much shared memory it has, it may have all. */
static fusekit_status fk_take_function(fk_kernel *kernel, int64_t at, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const fk_node *node = &kernel->record->nodes[at];
    void *handle = kernel->kernels[at];
    int device = kernel->device, result = 0, own = 0;
    kernel->most_shared[at] = (int)node->shared;
    if (kernel->more != NULL && kernel->more->nodes[at].shared.count > 0) {
        kernel->most_shared[at] = fk_attribute_of(driver, FK_DEVICE_SHARED, device, &result);
        if (result == 0) result = driver->kernel_fact(&own, FK_FUNCTION_OWN_SHARED, handle, device);
        kernel->most_shared[at] -= own;
    }
    if (result == 0) result = driver->kernel_attribute(FK_FUNCTION_SHARED, kernel->most_shared[at], handle, device);
    if (result == 0 && node->non_portable_cluster)
        result = driver->kernel_attribute(FK_FUNCTION_NON_PORTABLE_CLUSTER, 1, handle, device);
    if (result == 0 && node->carveout >= 0)
        result = driver->kernel_attribute(FK_FUNCTION_CARVEOUT, (int)node->carveout, handle, device);
    if (result != 0) return fk_cuda(driver, error, result, kernel->record->name, "cuKernelSetAttribute");
    result = driver->kernel_function(&kernel->functions[at], handle);
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, kernel->record->name, "cuKernelGetFunction");
}

/* How many clusters of the last node the device runs at a time. */
static fusekit_status fk_ask_clusters(fk_kernel *kernel, fusekit_error *error) {
    const fk_record *record = kernel->record;
    const fk_node *last = &record->nodes[record->node_count - 1];
    fk_attribute attributes[FK_MOST_ATTRIBUTES];
    fk_config config;
    unsigned cluster[3];
    int axis, result;
    for (axis = 0; axis < 3; ++axis) cluster[axis] = (unsigned)last->cluster[axis];
    fk_configure(last, cluster, attributes, fk_attributes(kernel, record->node_count - 1, attributes), &config);
    result = kernel->driver->active_clusters(&kernel->active_clusters, kernel->functions[record->node_count - 1], &config);
    return result == 0 ? FUSEKIT_OK
                       : fk_cuda(kernel->driver, error, result, record->name, "cuOccupancyMaxActiveClusters");
}

static fusekit_status fk_take_memory(fk_kernel *kernel, fusekit_error *error) {
    const fk_record *record = kernel->record;
    int64_t workspace, variables[FK_MOST_VARIABLES] = {0};
    variables[FK_SM_COUNT] = kernel->sm_count;
    if (!fk_evaluate(&record->workspace, variables, 0, &workspace) || workspace < 0) workspace = 0;
    if (workspace == 0 && record->scratch.count == 0) return FUSEKIT_OK;
    return fk_make_workspaces(kernel->driver, record->name, kernel->context, workspace, (int)record->workspace_zeroed,
                              &kernel->workspaces, error);
}

static fusekit_status fk_open_kernel(fk_kernel *kernel, fusekit_error *error) {
    const fk_record *record = kernel->record;
    fusekit_status status = fk_open_cubin(kernel, error);
    int index;
    for (index = 0; index < record->node_count && status == FUSEKIT_OK; ++index) {
        status = fk_check_cubin(kernel, index, error);
        if (status == FUSEKIT_OK) status = fk_take_function(kernel, index, error);
    }
    if (status == FUSEKIT_OK && record->asks_clusters) status = fk_ask_clusters(kernel, error);
    return status == FUSEKIT_OK ? fk_take_memory(kernel, error) : status;
}

static fusekit_status fk_unload(fk_kernel *kernel, fusekit_error *error) {
    const fusekit_driver *driver;
    fusekit_status status;
    int result = 0, other, mode;
    if (kernel == NULL) return fk_ok(error);
    driver = kernel->driver;
    if (kernel->workspaces != NULL) result = fk_free_workspaces(kernel->workspaces);
    if (kernel->library != NULL) {
        other = fk_apart(driver, FK_THREAD_LOCAL, &mode);
        if (other != 0 || (other = driver->library_unload(kernel->library)) != 0) result = other;
        driver->capture_mode(&mode);
    }
    if (kernel->context != NULL && (other = driver->release(kernel->device)) != 0) result = other;
    status = result == 0 ? fk_ok(error) : fk_cuda(driver, error, result, kernel->record->name, "unloading");
    free((void *)(uintptr_t)kernel->record);
    free(kernel);
    return status;
}

/* The device of a kernel, whose context this thread then has: parameters are known only inside one. */
static fusekit_status fk_open_device(fk_kernel *kernel, int ordinal, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const fk_record *record = kernel->record;
    int minor, result = driver->device_get(&kernel->device, ordinal);
    if (result != 0) return fk_cuda(driver, error, result, record->name, "cuDeviceGet");
    kernel->major = fk_attribute_of(driver, FK_DEVICE_MAJOR, kernel->device, &result);
    minor = fk_attribute_of(driver, FK_DEVICE_MINOR, kernel->device, &result);
    kernel->sm_count = fk_attribute_of(driver, FK_DEVICE_SM_COUNT, kernel->device, &result);
    if (result == 0 &&
        (kernel->major != record->major || minor < record->minor || (record->exact && minor != record->minor)))
        return fk_fail(error, FUSEKIT_WRONG_ARCH, "%s is for %s; device %d is of capability %d.%d", record->name,
                       record->arch, ordinal, kernel->major, minor);
    if (result == 0) result = driver->retain(&kernel->context, kernel->device);
    if (result == 0) result = driver->push(kernel->context);
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, record->name, "opening the device");
}

/* The cubin in the context that is current. */
static fusekit_status fk_open_apart(fk_kernel *kernel, fusekit_error *error) {
    const fusekit_driver *driver = kernel->driver;
    const char *name = kernel->record->name;
    fusekit_status status;
    int mode, result = fk_apart(driver, FK_THREAD_LOCAL, &mode);
    if (result != 0) return fk_cuda(driver, error, result, name, "cuThreadExchangeStreamCaptureMode");
    result = fk_capturing(driver);
    status = result == 0 ? fk_open_kernel(kernel, error)
                         : fk_cuda(driver, error, result, name, "loading before the end of a stream's capture");
    driver->capture_mode(&mode);
    return status;
}

/* title: what the kernel is called until its record is read. */
static fusekit_status fk_load(const fusekit_driver *driver, const fk_source *source, const char *title, int ordinal,
                              fk_kernel **out, fusekit_error *error) {
    fk_kernel *kernel = (fk_kernel *)calloc(1, sizeof *kernel);
    fusekit_status status;
    void *before;
    *out = NULL;
    if (kernel == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", title);
    kernel->driver = driver;
    kernel->source = source;
    status = fk_read_record(source, title, &kernel->record, &kernel->more, error);
    if (status == FUSEKIT_OK) status = fk_open_device(kernel, ordinal, error);
    if (status == FUSEKIT_OK) {
        status = fk_open_apart(kernel, error);
        driver->pop(&before);
    }
    if (status != FUSEKIT_OK) {
        fk_unload(kernel, NULL);
        return status;
    }
    *out = kernel;
    return fk_ok(error);
}
