/* ---- From a name to a loaded kernel: name record, entry, cubin, each checked before it is used. */

struct fusekit_kernel {
    fk_kernel *loaded;
    fk_record record;
    fk_arena arena;
    const char *name;
    fusekit_argument *arguments; /* in the record's order */
    int argument_count;
    int64_t margin; /* the spec's */
};

static const fk_member *fk_find_member(const fusekit_bundle *bundle, fk_member_kind kind, const char *subject) {
    size_t low = 0, high = bundle->of[kind].count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(bundle->of[kind].first[middle].subject, subject);
        if (order == 0) return &bundle->of[kind].first[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* A sealed document: canonical JSON of exactly `count` members, of which `digest` is the SHA-256 of the line without it.
 * Its text is to be freed. */
static fusekit_status fk_document(const fusekit_bundle *bundle, const fk_member *member, int count,
                                  unsigned char **text, fk_json *root, fusekit_error *error) {
    char digest[FK_DIGEST + 1], path[FK_MOST_PATH];
    size_t size = (size_t)member->size - 1; /* without the line feed */
    fk_json stated;
    fk_sha256 hash;
    fusekit_status status = fk_content(bundle, member, text, error);
    if (status != FUSEKIT_OK) return status;
    fk_path(member, path);
    if ((*text)[size] != '\n' || !fk_json_check((const char *)*text, size, root) || fk_json_count(*root) != count ||
        !fk_json_member(*root, "digest", &stated) || !fk_json_is(stated, '"') ||
        !fk_is_hex(fk_json_inside(stated), FK_DIGEST) || *stated.end != ',') {
        status = fk_damaged(bundle, error, "has %.160s in another form than the one that a store writes", path);
    } else {
        const char *before = stated.at - strlen("\"digest\":"), *after = stated.end + 1;
        fk_sha256_begin(&hash);
        fk_sha256_add(&hash, root->at, (size_t)(before - root->at));
        fk_sha256_add(&hash, after, (size_t)(root->end - after));
        fk_sha256_end(&hash, digest);
        if (memcmp(digest, stated.at + 1, FK_DIGEST) != 0)
            status = fk_damaged(bundle, error, "has %.160s, which does not have the digest that it states", path);
    }
    if (status != FUSEKIT_OK) {
        free(*text);
        *text = NULL;
    }
    return status;
}

/* Whether the document's member `key` is the string `text`. */
static int fk_states(fk_json document, const char *key, const char *text) {
    fk_json value;
    return fk_json_member(document, key, &value) && fk_json_is(value, '"') && fk_json_says(fk_json_inside(value), text);
}

static int fk_states_number(fk_json document, const char *key, uint64_t number) {
    fk_json value;
    int64_t found;
    return fk_json_member(document, key, &value) && fk_json_integer(value, &found) && found >= 0 &&
           (uint64_t)found == number;
}

static void fk_hash_sized(fk_sha256 *hash, const void *data, size_t size) {
    unsigned char length[8];
    int index;
    for (index = 0; index < 8; ++index) length[index] = (unsigned char)((uint64_t)size >> (8 * index));
    fk_sha256_add(hash, length, sizeof length);
    if (data != NULL) fk_sha256_add(hash, data, size);
}

/* Whether `key` is the hash of the entry's fields: an entry that was filed under another key betrays itself. */
static int fk_is_key_of(fk_arena *arena, fk_json fields, const char *key) {
    char digest[FK_DIGEST + 1];
    fk_json rest = fk_json_inside(fields), label, value;
    fk_sha256 hash;
    fk_sha256_begin(&hash);
    fk_sha256_add(&hash, "fusekit-store-key", 18); /* with its 0 */
    fk_hash_sized(&hash, NULL, (size_t)fk_json_count(fields));
    while (fk_json_next(&rest, &label, &value)) {
        const char *text;
        size_t length;
        if (!fk_json_is(value, '"')) return 0;
        text = fk_json_string(arena, value, &length);
        if (text == NULL) return 0;
        fk_hash_sized(&hash, label.at, (size_t)(label.end - label.at));
        fk_hash_sized(&hash, text, length);
    }
    fk_sha256_end(&hash, digest);
    return strcmp(digest, key) == 0;
}

/* The record out of an entry, and its cubin's member. */
static fusekit_status fk_read_entry(const fusekit_bundle *bundle, const fk_member *member, const char *arch,
                                    fusekit_kernel *kernel, const fk_member **blob, fusekit_error *error) {
    fk_json root, fields, cubin, launch, sha;
    unsigned char *text = NULL;
    char digest[FK_DIGEST + 1];
    fk_reader reader;
    fusekit_status status = fk_document(bundle, member, 10, &text, &root, error);
    if (status != FUSEKIT_OK) return status;
    if (!fk_states_number(root, "schema", 1) || !fk_states(root, "key", member->subject) ||
        !fk_json_member(root, "fields", &fields) || !fk_json_is(fields, '{') || !fk_states(fields, "arch", arch) ||
        !fk_is_key_of(&kernel->arena, fields, member->subject)) {
        status = fk_damaged(bundle, error, "has an entry of schema 1 for %s, key %.12s... that is none", arch,
                            member->subject);
    } else if (!fk_json_member(root, "cubin", &cubin) || !fk_json_is(cubin, '{') || fk_json_count(cubin) != 2 ||
               !fk_json_member(cubin, "sha256", &sha) || !fk_json_is(sha, '"') ||
               !fk_is_hex(fk_json_inside(sha), FK_DIGEST)) {
        status = fk_damaged(bundle, error, "has the entry %.12s... without its cubin's digest", member->subject);
    } else {
        memcpy(digest, sha.at + 1, FK_DIGEST);
        digest[FK_DIGEST] = 0;
        *blob = fk_find_member(bundle, FK_BLOB, digest);
        if (*blob == NULL || !fk_states_number(cubin, "bytes", (*blob)->size))
            status = fk_damaged(bundle, error, "has the entry %.12s..., but not its cubin", member->subject);
    }
    if (status == FUSEKIT_OK && (!fk_json_member(root, "launch", &launch) || !fk_json_is(launch, '{') ||
                                 !fk_states(launch, "arch", arch)))
        status = fk_damaged(bundle, error, "has the entry %.12s... without a launch record for %s", member->subject, arch);
    if (status == FUSEKIT_OK) {
        memset(&reader, 0, sizeof reader);
        reader.arena = &kernel->arena;
        reader.error = error;
        reader.title = kernel->name;
        reader.record = &kernel->record;
        fk_read_record(&reader, launch);
        status = reader.status;
        kernel->arguments = reader.arguments;
        kernel->argument_count = reader.argument_count;
    }
    free(text);
    return status;
}

/* The spec's defaults come before the record's. */
static int fk_apply_defaults(fusekit_kernel *kernel, fk_json defaults) {
    fk_json rest = fk_json_inside(defaults), key, value;
    int index;
    while (fk_json_next(&rest, &key, &value)) {
        double number;
        if (fk_json_says(value, "\"inf\""))
            number = (double)INFINITY;
        else if (fk_json_says(value, "\"-inf\""))
            number = -(double)INFINITY;
        else if (!fk_json_number(value, &number))
            return 0;
        if (fk_json_says(key, "cluster_margin")) {
            if (!fk_json_integer(value, &kernel->margin) || kernel->margin < 0 || kernel->margin > INT32_MAX) return 0;
            continue;
        }
        for (index = 0; index < kernel->argument_count; ++index) {
            fusekit_argument *argument = &kernel->arguments[index];
            if (argument->rank >= 0 || !fk_json_says(key, argument->name)) continue;
            if (!fk_fits(argument->dtype, number)) return 0;
            argument->has_default = 1;
            argument->default_value = number;
        }
    }
    return 1;
}

static fusekit_status fk_read_name(const fusekit_bundle *bundle, const fk_member *member, fusekit_kernel *kernel,
                                   const fk_member **blob, fusekit_error *error) {
    const fk_member *entry = NULL;
    fk_json root, key, defaults;
    unsigned char *text = NULL;
    char digest[FK_DIGEST + 1];
    fusekit_status status = fk_document(bundle, member, 8, &text, &root, error);
    if (status != FUSEKIT_OK) return status;
    if (!fk_states_number(root, "schema", 2) || !fk_states(root, "name", member->subject) ||
        !fk_states(root, "arch", member->second) || !fk_json_member(root, "key", &key) || !fk_json_is(key, '"') ||
        !fk_is_hex(fk_json_inside(key), FK_DIGEST) || !fk_json_member(root, "defaults", &defaults) ||
        !fk_json_is(defaults, '{')) {
        status = fk_damaged(bundle, error, "has a name record of schema 2 for %.150s that is none", member->subject);
    } else {
        memcpy(digest, key.at + 1, FK_DIGEST);
        digest[FK_DIGEST] = 0;
        entry = fk_find_member(bundle, FK_ENTRY, digest);
        if (entry == NULL)
            status = fk_damaged(bundle, error, "has the name %.150s, but no entry %.12s...", member->subject, digest);
    }
    if (status == FUSEKIT_OK) status = fk_read_entry(bundle, entry, member->second, kernel, blob, error);
    if (status == FUSEKIT_OK && !fk_apply_defaults(kernel, defaults))
        status = fk_damaged(bundle, error, "has a default of %.150s that its argument does not take", member->subject);
    free(text);
    return status;
}

/* ---- The cubin, as far as the driver has to trust it: it is handed an address, and no size. */

static uint64_t fk_little(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    while (bytes-- > 0) value = value << 8 | at[bytes];
    return value;
}

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

/* ---- Which kernel a name means. */

/* How well a kernel for `arch` suits a device: 0 not at all; best the one for exactly this capability, then the one for
 * the latest before it. */
static int fk_suits(const char *arch, int major, int minor) {
    int of, from, exact;
    if (!fk_read_arch(arch, &of, &from, &exact) || of != major || from > minor || (exact && from != minor)) return 0;
    return 1 + 3 * from + (exact ? 2 : arch[strlen(arch) - 1] == 'f');
}

static fusekit_status fk_choose(const fusekit_bundle *bundle, const char *name, int ordinal, int major, int minor,
                                const fk_member **chosen, fusekit_error *error) {
    const fk_members *names = &bundle->of[FK_NAME];
    size_t length = strlen(name), index;
    const char *elsewhere = NULL;
    int best = 0, whole = strchr(name, '@') != NULL;
    *chosen = NULL;
    for (index = 0; index < names->count; ++index) {
        const fk_member *member = &names->first[index];
        int suits;
        if (strncmp(member->subject, name, length) != 0 || member->subject[length] != (whole ? 0 : '@')) continue;
        elsewhere = member->second;
        suits = fk_suits(member->second, major, minor);
        if (suits == 0 || suits < best) continue;
        if (suits == best)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%.60s has the variants %.110s and %.110s; name one of them",
                           name, (*chosen)->subject + length, member->subject + length);
        best = suits;
        *chosen = member;
    }
    if (*chosen != NULL) return FUSEKIT_OK;
    if (elsewhere != NULL)
        return fk_fail(error, FUSEKIT_WRONG_ARCH, "%.120s is in %.100s for %s; device %d is of capability %d.%d", name,
                       bundle->title, elsewhere, ordinal, major, minor);
    return fk_fail(error, FUSEKIT_NOT_FOUND, "%.100s has no kernel %.100s; put it in with: fusekit export FILE %.60s",
                   bundle->title, name, name);
}

static fusekit_status fk_load_member(const fusekit_driver *driver, const fusekit_bundle *bundle,
                                     const fk_member *member, int device, fusekit_kernel *kernel,
                                     fusekit_error *error) {
    const fk_member *blob = NULL;
    unsigned char *cubin = NULL;
    size_t length = strlen(member->subject);
    fusekit_status status;
    char *name = (char *)fk_take(&kernel->arena, length + 1, 1);
    if (name == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", member->subject);
    memcpy(name, member->subject, length);
    kernel->name = name;
    status = fk_read_name(bundle, member, kernel, &blob, error);
    if (status == FUSEKIT_OK) status = fk_content(bundle, blob, &cubin, error);
    if (status != FUSEKIT_OK) return status;
    if (fk_is_elf(cubin, blob->size)) {
        kernel->record.cubin = cubin;
        kernel->record.cubin_size = (size_t)blob->size;
        status = fk_load(driver, &kernel->record, device, &kernel->loaded, error);
        kernel->record.cubin = NULL; /* the driver has its own copy now */
    } else {
        status = fk_damaged(bundle, error, "has a cubin for %.150s that is no whole ELF file", member->subject);
    }
    free(cubin);
    return status;
}

fusekit_status fusekit_kernel_load(const fusekit_driver *driver, const fusekit_bundle *bundle, const char *name,
                                   int ordinal, fusekit_kernel **made, fusekit_error *error) {
    const fk_member *member;
    fusekit_kernel *kernel;
    int device = 0, major, minor, result;
    fusekit_status status;
    *made = NULL;
    if (driver == NULL || bundle == NULL || name == NULL)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "driver, bundle or name is NULL; give all three");
    result = driver->device_get(&device, ordinal);
    if (result != 0) return fk_cuda(driver, error, result, name, "cuDeviceGet");
    major = fk_attribute_of(driver, FK_DEVICE_MAJOR, device, &result);
    minor = fk_attribute_of(driver, FK_DEVICE_MINOR, device, &result);
    if (result != 0) return fk_cuda(driver, error, result, name, "cuDeviceGetAttribute");
    status = fk_choose(bundle, name, ordinal, major, minor, &member, error);
    if (status != FUSEKIT_OK) return status;
    kernel = (fusekit_kernel *)calloc(1, sizeof *kernel);
    if (kernel == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory to load", name);
    status = fk_load_member(driver, bundle, member, ordinal, kernel, error);
    if (status == FUSEKIT_OK) {
        *made = kernel;
        return fk_ok(error);
    }
    fk_drop(&kernel->arena);
    free(kernel);
    return status;
}

fusekit_status fusekit_kernel_unload(fusekit_kernel *kernel, fusekit_error *error) {
    fusekit_status status;
    if (kernel == NULL) return fk_ok(error);
    status = fk_unload(kernel->loaded, error);
    fk_drop(&kernel->arena);
    free(kernel);
    return status;
}

/* ---- All of a bundle. */

fusekit_status fusekit_bundle_verify(const fusekit_bundle *bundle, fusekit_error *error) {
    int kind;
    size_t index;
    for (kind = 0; kind < 4; ++kind)
        for (index = 0; index < bundle->of[kind].count; ++index) {
            const fk_member *member = &bundle->of[kind].first[index], *blob;
            unsigned char *content;
            fusekit_kernel kernel;
            fusekit_status status = fk_content(bundle, member, &content, error);
            if (status == FUSEKIT_OK && kind == FK_BLOB && !fk_is_elf(content, member->size))
                status = fk_damaged(bundle, error, "has a cubin %.12s... that is no whole ELF file", member->subject);
            free(content);
            if (status == FUSEKIT_OK)
                status = fk_check_zeros(bundle, member->offset + member->size, (size_t)fk_padding(member->size), error);
            if (status == FUSEKIT_OK && kind == FK_NAME) {
                memset(&kernel, 0, sizeof kernel);
                kernel.name = member->subject;
                status = fk_read_name(bundle, member, &kernel, &blob, error);
                fk_drop(&kernel.arena);
            }
            if (status != FUSEKIT_OK) return status;
        }
    return fk_ok(error);
}
