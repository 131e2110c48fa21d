/* ---- The index. */

static int fk_is_hex(fk_json text, int digits) {
    const char *at;
    if (text.end - text.at != digits) return 0;
    for (at = text.at; at < text.end; ++at)
        if (fk_hex(*at) < 0) return 0;
    return 1;
}

/* One of the three parts of a full name, up to `stop`; its end, or NULL. */
static const char *fk_name_part(const char *at, const char *end, char stop) {
    const char *start = at;
    for (; at < end && *at != stop; ++at) {
        int plain = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') || fk_is_digit(*at);
        if (!plain && (at == start || (*at != '.' && *at != '_' && *at != '-'))) return NULL;
    }
    return at > start && at - start <= 100 && (at < end) == (stop != 0) ? at : NULL;
}

static int fk_is_name(fk_json text) {
    const char *at = fk_name_part(text.at, text.end, '/');
    if (at != NULL) at = fk_name_part(at + 1, text.end, '@');
    return at != NULL && fk_name_part(at + 1, text.end, 0) != NULL;
}

static int fk_is_arch(fk_json text) {
    const char *at;
    for (at = text.at; at < text.end; ++at)
        if (!(*at >= 'a' && *at <= 'z') && !fk_is_digit(*at) && *at != '_') return 0;
    return text.end > text.at && text.end - text.at <= 32;
}

/* Columns of a row, by kind of member: d digest, b size of a blob, s size of a document, k key id, n name, a arch. */
static const char *const fk_columns[] = {"db", "dkd", "dsd", "nasd"};
static const char *const fk_labels[] = {"blobs", "signatures", "entries", "names"};

static int fk_read_column(char column, fk_json value, fk_member *member) {
    int64_t size, most = column == 'b' ? FK_MOST_CUBIN : FK_MOST_DOCUMENT;
    fk_json text = fk_json_inside(value);
    if (column == 'b' || column == 's') {
        if (!fk_json_integer(value, &size) || size < 1 || size > most) return 0;
        member->size = (uint64_t)size;
        return 1;
    }
    if (!fk_json_is(value, '"')) return 0;
    if ((column == 'd' && !fk_is_hex(text, FK_DIGEST)) || (column == 'k' && !fk_is_hex(text, 16)) ||
        (column == 'n' && !fk_is_name(text)) || (column == 'a' && !fk_is_arch(text)))
        return 0;
    *(char *)(uintptr_t)text.end = 0; /* the index is the bundle's own memory, and this string is read */
    if (column == 'd') member->digest = text.at;
    if (member->subject == NULL)
        member->subject = text.at;
    else if (column != 'd')
        member->second = text.at;
    return 1;
}

static int fk_members_differ(const fk_member *before, const fk_member *after) {
    int order = strcmp(before->subject, after->subject);
    if (order == 0 && before->second != NULL) order = strcmp(before->second, after->second);
    return order < 0;
}

static fusekit_status fk_read_rows(fusekit_bundle *bundle, fk_member_kind kind, fk_json rows, fusekit_error *error) {
    fk_members *members = &bundle->of[kind];
    const char *columns = fk_columns[kind];
    size_t count = (size_t)fk_json_count(rows);
    fk_json rest = fk_json_inside(rows), row;
    members->first = (fk_member *)fk_take(&bundle->arena, count, sizeof *members->first);
    if (members->first == NULL)
        return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for its index", bundle->title);
    while (fk_json_next(&rest, NULL, &row)) {
        fk_member *member = &members->first[members->count];
        fk_json cells, cell;
        const char *column = columns;
        int fits = fk_json_is(row, '[') && fk_json_count(row) == (int)strlen(columns);
        member->kind = kind;
        if (kind == FK_SIGNED) member->size = FK_SIGNATURE;
        if (fits)
            for (cells = fk_json_inside(row); fits && fk_json_next(&cells, NULL, &cell); ++column)
                fits = fk_read_column(*column, cell, member);
        if (!fits)
            return fk_damaged(bundle, error, "lists what cannot be one, in row %u of its %s", (unsigned)members->count,
                              fk_labels[kind]);
        if (members->count > 0 && !fk_members_differ(member - 1, member))
            return fk_damaged(bundle, error, "lists %.100s twice or out of order", member->subject);
        ++members->count;
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_parse_index(fusekit_bundle *bundle, size_t size, fusekit_error *error) {
    fk_json root, value, rows[4];
    int64_t schema;
    int kind;
    if (size < 2 || bundle->index[size - 1] != '\n' || !fk_json_check(bundle->index, size - 1, &root))
        return fk_damaged(bundle, error, "has an index that is not in its one form: sorted keys, no spaces");
    if (!fk_json_member(root, "schema", &value) || !fk_json_integer(value, &schema) || schema != 1)
        return fk_damaged(bundle, error, "has an index of another schema than 1, the one that this loader reads");
    if (fk_json_count(root) != 5) return fk_damaged(bundle, error, "has an index with members that are not known");
    for (kind = 0; kind < 4; ++kind)
        if (!fk_json_member(root, fk_labels[kind], &rows[kind]) || !fk_json_is(rows[kind], '['))
            return fk_damaged(bundle, error, "has an index without a list of %s", fk_labels[kind]);
    for (kind = 0; kind < 4; ++kind) { /* only now: reading a row marks the ends of its strings */
        fusekit_status status = fk_read_rows(bundle, (fk_member_kind)kind, rows[kind], error);
        if (status != FUSEKIT_OK) return status;
    }
    return FUSEKIT_OK;
}

/* Gives every member its place, and compares its header. */
static fusekit_status fk_place_members(fusekit_bundle *bundle, uint64_t at, fusekit_error *error) {
    unsigned char expected[FK_MOST_HEADER], found[FK_MOST_HEADER];
    char path[FK_MOST_PATH];
    int kind;
    size_t index;
    for (kind = 0; kind < 4; ++kind)
        for (index = 0; index < bundle->of[kind].count; ++index) {
            fk_member *member = &bundle->of[kind].first[index];
            fusekit_status status;
            size_t length;
            fk_path(member, path);
            length = fk_header(path, member->size, expected);
            status = fk_read(bundle, at, found, length, error);
            if (status != FUSEKIT_OK) return status;
            if (memcmp(found, expected, length) != 0)
                return fk_damaged(bundle, error, "has another header where that of %.160s must stand", path);
            member->offset = at + length;
            at = member->offset + member->size + fk_padding(member->size);
        }
    if (at > bundle->size || bundle->size - at != FK_END)
        return fk_damaged(bundle, error, "has %llu bytes, where its index makes %llu",
                          (unsigned long long)bundle->size, (unsigned long long)at + FK_END);
    return FUSEKIT_OK;
}

static fusekit_status fk_read_index(fusekit_bundle *bundle, fusekit_error *error) {
    char name[101], before[101] = "";
    uint64_t at = 0, size = 0;
    int signers = 0;
    fusekit_status status;
    for (;; ++signers) { /* signatures of the index stand in front of it */
        fk_json id;
        status = fk_leading_header(bundle, at, name, &size, error);
        if (status != FUSEKIT_OK) return status;
        at += FK_BLOCK;
        if (strcmp(name, "bundle.json") == 0) break;
        id.at = name + 12;
        id.end = name + 28;
        if (strlen(name) != 32 || memcmp(name, "bundle.json.", 12) != 0 || !fk_is_hex(id, 16) ||
            strcmp(name + 28, ".sig") != 0 || size != FK_SIGNATURE || signers == FK_MOST_SIGNERS ||
            strcmp(before, name) >= 0)
            return fk_damaged(bundle, error, "begins with %.40s, where bundle.json or a signature of it must stand",
                              name);
        memcpy(before, name, sizeof before);
        status = fk_check_zeros(bundle, at + size, (size_t)fk_padding(size), error);
        if (status != FUSEKIT_OK) return status;
        at += size + fk_padding(size);
    }
    if (size < 1 || size > FK_MOST_INDEX || at > bundle->size || size > bundle->size - at)
        return fk_damaged(bundle, error, "states an index of %llu bytes", (unsigned long long)size);
    bundle->index = (char *)malloc((size_t)size);
    if (bundle->index == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for its index", bundle->title);
    status = fk_read(bundle, at, bundle->index, (size_t)size, error);
    if (status == FUSEKIT_OK) status = fk_check_zeros(bundle, at + size, (size_t)fk_padding(size), error);
    if (status != FUSEKIT_OK) return status;
    fk_sha256_of(bundle->index, (size_t)size, bundle->digest);
    status = fk_parse_index(bundle, (size_t)size, error);
    if (status == FUSEKIT_OK) status = fk_place_members(bundle, at + size + fk_padding(size), error);
    if (status == FUSEKIT_OK) status = fk_check_zeros(bundle, bundle->size - FK_END, FK_END, error);
    return status;
}

/* ---- Opening and closing. */

static fusekit_status fk_open(fusekit_bundle *bundle, fusekit_bundle **made, fusekit_error *error) {
    fusekit_status status = fk_read_index(bundle, error);
    if (status != FUSEKIT_OK) {
        fusekit_bundle_close(bundle);
        return status;
    }
    *made = bundle;
    return fk_ok(error);
}

static fusekit_bundle *fk_new_bundle(fusekit_error *error) {
    fusekit_bundle *bundle = (fusekit_bundle *)calloc(1, sizeof *bundle);
    if (bundle == NULL)
        fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "no memory for a bundle");
    else
        bundle->file = -1;
    return bundle;
}

fusekit_status fusekit_bundle_open(const char *path, fusekit_bundle **made, fusekit_error *error) {
    fusekit_bundle *bundle;
    struct stat status;
    *made = NULL;
    if (path == NULL) return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "the bundle's path is NULL; give one");
    bundle = fk_new_bundle(error);
    if (bundle == NULL) return FUSEKIT_OUT_OF_MEMORY;
    snprintf(bundle->title, sizeof bundle->title, "%s", path);
    bundle->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not wait for a writer */
    if (bundle->file < 0 || fstat(bundle->file, &status) != 0) {
        fk_fail(error, FUSEKIT_FILE_ERROR, "%s cannot be opened (errno %d); check the path", bundle->title, errno);
        fusekit_bundle_close(bundle);
        return FUSEKIT_FILE_ERROR;
    }
    if (!S_ISREG(status.st_mode)) {
        fk_fail(error, FUSEKIT_FILE_ERROR, "%s is no plain file; a bundle is; check the path", bundle->title);
        fusekit_bundle_close(bundle);
        return FUSEKIT_FILE_ERROR;
    }
    bundle->size = (uint64_t)status.st_size;
    return fk_open(bundle, made, error);
}

fusekit_status fusekit_bundle_open_bytes(const void *data, size_t size, fusekit_bundle **made, fusekit_error *error) {
    fusekit_bundle *bundle;
    *made = NULL;
    if (data == NULL) return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "the bundle's bytes are NULL; give them");
    bundle = fk_new_bundle(error);
    if (bundle == NULL) return FUSEKIT_OUT_OF_MEMORY;
    snprintf(bundle->title, sizeof bundle->title, "the bundle in memory");
    bundle->data = (const unsigned char *)data;
    bundle->size = size;
    return fk_open(bundle, made, error);
}

void fusekit_bundle_close(fusekit_bundle *bundle) {
    if (bundle == NULL) return;
    if (bundle->file >= 0) close(bundle->file);
    fk_drop(&bundle->arena);
    free(bundle->index);
    free(bundle);
}

const char *fusekit_bundle_digest(const fusekit_bundle *bundle) { return bundle->digest; }

size_t fusekit_bundle_count(const fusekit_bundle *bundle) { return bundle->of[FK_NAME].count; }

const char *fusekit_bundle_name(const fusekit_bundle *bundle, size_t index) {
    return index < bundle->of[FK_NAME].count ? bundle->of[FK_NAME].first[index].subject : NULL;
}

const char *fusekit_bundle_arch(const fusekit_bundle *bundle, size_t index) {
    return index < bundle->of[FK_NAME].count ? bundle->of[FK_NAME].first[index].second : NULL;
}
