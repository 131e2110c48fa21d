/* ---- From a name to a loaded kernel: launch record and cubin, each checked before it is used. */

struct fusekit_kernel {
    fk_kernel *loaded;
    fusekit_argument *arguments; /* in the record's order */
};

/* ---- The cubin, as far as the driver has to trust it: it is handed an address, and no size. */

/* Whether a table of `count` rows lies within the file, and what each row points to: `fields` are where offset and size
 * stand in a row. Sections of type 8 (NOBITS) have nothing in the file. */
static int fk_elf_table(const unsigned char *elf, uint64_t size, uint64_t at, uint64_t row, uint64_t count,
                        const int fields[2], int sections) {
    uint64_t index;
    if (count == 0) return 1;
    if (row < (sections ? 64u : 56u) || at > size || count > (size - at) / row) return 0;
    for (index = 0; index < count; ++index) {
        const unsigned char *entry = elf + at + index * row;
        uint64_t offset = fk_little(entry + fields[0], 8), length = fk_little(entry + fields[1], 8);
        if (sections && fk_little(entry + 4, 4) == 8) continue;
        if (offset > size || length > size - offset) return 0;
    }
    return 1;
}

static int fk_is_elf(const unsigned char *elf, uint64_t size) {
    static const int sections[] = {24, 32}, segments[] = {8, 32};
    return size >= 64 && memcmp(elf, "\177ELF\2\1", 6) == 0 &&
           fk_elf_table(elf, size, fk_little(elf + 40, 8), fk_little(elf + 58, 2), fk_little(elf + 60, 2), sections, 1) &&
           fk_elf_table(elf, size, fk_little(elf + 32, 8), fk_little(elf + 54, 2), fk_little(elf + 56, 2), segments, 0);
}

/* Whether a whole ELF file defines a function of that name. */
static int fk_elf_defines(const unsigned char *elf, const char *name) {
    uint64_t count = fk_little(elf + 60, 2), length = strlen(name) + 1, index, symbol;
    for (index = 0; index < count; ++index) {
        const unsigned char *table = fk_elf_section(elf, index), *strings;
        uint64_t link = fk_little(table + 40, 4), size = fk_little(table + 32, 8) / 24 * 24, most;
        if (fk_little(table + 4, 4) != 2 || link >= count) continue;
        strings = fk_elf_section(elf, link);
        if (fk_little(strings + 4, 4) == 8) continue;
        most = fk_little(strings + 32, 8);
        for (symbol = 0; symbol < size; symbol += 24) {
            const unsigned char *row = elf + fk_little(table + 24, 8) + symbol;
            uint64_t at = fk_little(row, 4);
            if ((row[4] & 15) == 2 && fk_little(row + 6, 2) != 0 && at <= most && length <= most - at &&
                memcmp(elf + fk_little(strings + 24, 8) + at, name, length) == 0)
                return 1;
        }
    }
    return 0;
}

/* ---- Which kernel a name means. */

/* How well a kernel suits a device: 0 not at all; best the one for exactly this capability, then the one for the latest
 * before it. */
static int fk_suits(const fk_listed *listed, int major, int minor) {
    if (listed->major != major || listed->minor > minor || (listed->suffix == 2 && listed->minor != minor)) return 0;
    return 1 + 3 * (int)listed->minor + (int)listed->suffix;
}

static fusekit_status fk_choose(const fusekit_bundle *bundle, const char *name, int ordinal, int major, int minor,
                                const fk_listed **chosen, fusekit_error *error) {
    size_t length = strlen(name), index;
    const char *elsewhere = NULL;
    const fk_listed *listed;
    int best = 0, whole = strchr(name, '@') != NULL;
    *chosen = NULL;
    for (index = 0; (listed = fk_listing(bundle, index)) != NULL; ++index) {
        int suits;
        if (strncmp(listed->name, name, length) != 0 || listed->name[length] != (whole ? 0 : '@')) continue;
        elsewhere = listed->arch;
        suits = fk_suits(listed, major, minor);
        if (suits == 0 || suits < best) continue;
        if (suits == best)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%.60s has the variants %.110s and %.110s; name one of them",
                           name, (*chosen)->name + length, listed->name + length);
        best = suits;
        *chosen = listed;
    }
    if (*chosen != NULL) return FUSEKIT_OK;
    if (elsewhere != NULL)
        return fk_fail(error, FUSEKIT_WRONG_ARCH, "%.120s is in %.100s for %s; device %d is of capability %d.%d", name,
                       bundle->title, elsewhere, ordinal, major, minor);
    return fk_fail(error, FUSEKIT_NOT_FOUND, "%.100s has no kernel %.100s; put it in with: fusekit export FILE %.60s",
                   bundle->title, name, name);
}

/* The format of a listed cubin, EI_ABIVERSION; -1 if it is not there to be read. */
static int fk_format(const fusekit_bundle *bundle, const fk_listed *listed) {
    unsigned char format;
    if ((uint64_t)listed->cubin_before > bundle->start || listed->cubin_before < listed->cubin_bytes ||
        listed->cubin_bytes <= FK_ELF_ABI ||
        fk_read(bundle, bundle->start - (uint64_t)listed->cubin_before + FK_ELF_ABI, &format, 1, NULL) != FUSEKIT_OK)
        return -1;
    return format;
}

/* The build of a name that the driver reads: its last one, else the one of the latest format; the last if there is none. */
static const fk_listed *fk_readable(const fusekit_driver *driver, const fusekit_bundle *bundle, const fk_listed *last) {
    const fk_listed *listed, *best = last;
    size_t index;
    int latest = -1;
    if (driver->cuda >= FK_CUDA_13 || fk_format(bundle, last) < FK_FORMAT_13) return last;
    for (index = 0; (listed = fk_listing(bundle, index)) != NULL; ++index) {
        int format;
        if (listed->major != FK_CANDIDATE || strcmp(listed->name, last->name) != 0 || strcmp(listed->arch, last->arch) != 0)
            continue;
        format = fk_format(bundle, listed);
        if (format <= latest || format >= FK_FORMAT_13) continue;
        latest = format;
        best = listed;
    }
    return best;
}

/* Whether a listed kernel's record is its own, and its cubin has what the record launches. */
static fusekit_status fk_check_listed(const fusekit_bundle *bundle, const fk_listed *listed, const fk_source *source,
                                      fusekit_error *error) {
    const fk_record *record;
    const fk_more *more;
    int64_t index;
    fusekit_status status = fk_read_record(source, listed->name, &record, &more, error);
    if (status != FUSEKIT_OK) return status;
    if (strcmp(record->name, listed->name) != 0 || strcmp(record->arch, listed->arch) != 0)
        status = fk_damaged(bundle, error, "lists %.100s with the launch record of another kernel; export it again",
                            listed->name);
    for (index = 0; index < record->node_count && status == FUSEKIT_OK; ++index)
        if (!fk_elf_defines(source->cubin, record->nodes[index].symbol))
            status = fk_damaged(bundle, error, "has a cubin for %.80s without its kernel %.80s; export it again",
                                listed->name, record->nodes[index].symbol);
    free((void *)(uintptr_t)record);
    return status;
}

/* Record and cubin of a kernel, whose memory is to be freed. */
static fusekit_status fk_fetch(const fusekit_bundle *bundle, const fk_listed *listed, fk_source *source, void *memory[2],
                               fusekit_error *error) {
    fusekit_status status;
    memory[0] = memory[1] = NULL;
    if (*listed->problem != 0)
        return fk_fail(error, FUSEKIT_BAD_BUNDLE, "%.100s is for Python alone: %.150s", listed->name, listed->problem);
    status = fk_content(bundle, bundle->start, listed->record_before, listed->record_bytes, listed->record_digest,
                        listed->name, "launch record", &memory[0], error);
    if (status == FUSEKIT_OK)
        status = fk_content(bundle, bundle->start, listed->cubin_before, listed->cubin_bytes, listed->cubin_digest,
                            listed->name, "cubin", &memory[1], error);
    if (status != FUSEKIT_OK) return status;
    source->words = (const int64_t *)memory[0];
    source->count = (size_t)listed->record_bytes / 8;
    source->cubin = (const unsigned char *)memory[1];
    source->cubin_size = (size_t)listed->cubin_bytes;
    if (!fk_is_elf(source->cubin, source->cubin_size))
        return fk_damaged(bundle, error, "has a cubin for %.120s that is no whole ELF file; export it again", listed->name);
    return fk_check_listed(bundle, listed, source, error);
}

/* What the caller may ask of the arguments. */
static fusekit_status fk_describe(fusekit_kernel *kernel, fusekit_error *error) {
    const fk_record *record = kernel->loaded->record;
    int64_t index;
    kernel->arguments = (fusekit_argument *)calloc((size_t)record->argument_count + 1, sizeof *kernel->arguments);
    if (kernel->arguments == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", record->name);
    for (index = 0; index < record->argument_count; ++index) {
        const fk_argument *from = &record->arguments[index];
        const fk_tensor *tensor = from->tensor < 0 ? NULL : &record->tensors[from->tensor];
        fusekit_argument *argument = &kernel->arguments[index];
        argument->name = from->name;
        argument->dtype = (fusekit_dtype)from->dtype;
        argument->rank = tensor == NULL ? -1 : (int)tensor->rank;
        argument->written = tensor != NULL && tensor->written;
        argument->alignment = tensor == NULL ? 0 : (int)tensor->alignment;
        argument->has_default = (int)from->has_default;
        memcpy(&argument->default_value, &from->default_bits, sizeof argument->default_value);
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_load_listed(const fusekit_driver *driver, const fusekit_bundle *bundle, const fk_listed *listed,
                                     int ordinal, fusekit_kernel *kernel, fusekit_error *error) {
    fk_source source;
    void *memory[2];
    fusekit_status status = fk_fetch(bundle, listed, &source, memory, error);
    if (status == FUSEKIT_OK) status = fk_load(driver, &source, listed->name, ordinal, &kernel->loaded, error);
    free(memory[0]);
    free(memory[1]); /* the driver has its own copy now */
    if (status == FUSEKIT_OK) {
        kernel->loaded->source = NULL;
        status = fk_describe(kernel, error);
    }
    return status;
}

static fusekit_status fk_capability(const fusekit_driver *driver, const char *name, int ordinal, int *major, int *minor,
                                    fusekit_error *error) {
    int device = 0, result = driver->device_get(&device, ordinal);
    if (result != 0) return fk_cuda(driver, error, result, name, "cuDeviceGet");
    *major = fk_attribute_of(driver, FK_DEVICE_MAJOR, device, &result);
    *minor = fk_attribute_of(driver, FK_DEVICE_MINOR, device, &result);
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, name, "cuDeviceGetAttribute");
}

fusekit_status fusekit_kernel_load(const fusekit_driver *driver, const fusekit_bundle *bundle, const char *name,
                                   int ordinal, fusekit_kernel **out, fusekit_error *error) {
    const fk_listed *listed;
    fusekit_kernel *kernel;
    int major, minor;
    fusekit_status status;
    *out = NULL;
    if (driver == NULL || bundle == NULL || name == NULL)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "driver, bundle or name is NULL; give all three");
    status = fk_capability(driver, name, ordinal, &major, &minor, error);
    if (status != FUSEKIT_OK) return status;
    status = fk_choose(bundle, name, ordinal, major, minor, &listed, error);
    if (status != FUSEKIT_OK) return status;
    kernel = (fusekit_kernel *)calloc(1, sizeof *kernel);
    if (kernel == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", name);
    listed = fk_readable(driver, bundle, listed);
    status = fk_load_listed(driver, bundle, listed, ordinal, kernel, error);
    if (status == FUSEKIT_OK) {
        *out = kernel;
        return fk_ok(error);
    }
    fusekit_kernel_unload(kernel, NULL);
    return status;
}

fusekit_status fusekit_kernel_unload(fusekit_kernel *kernel, fusekit_error *error) {
    fusekit_status status;
    if (kernel == NULL) return fk_ok(error);
    status = fk_unload(kernel->loaded, error);
    free(kernel->arguments);
    free(kernel);
    return status;
}
