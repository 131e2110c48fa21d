/* ---- Bundles, as files: a plain tar file whose index decides every other byte of it. No header is interpreted: the one
 * that must stand there is computed, and compared. */

enum {
    FK_BLOCK = 512,
    FK_END = 2 * FK_BLOCK,
    FK_SIGNATURE = 64,
    FK_MOST_SIGNERS = 64,
    FK_MOST_INDEX = 16 << 20,
    FK_MOST_DOCUMENT = 16 << 20,
    FK_MOST_CUBIN = 1 << 30,
    FK_MOST_PATH = 400, /* a name has 302 letters at most, an architecture 32 */
    FK_MOST_HEADER = 3 * FK_BLOCK
};

typedef enum { FK_BLOB, FK_SIGNED, FK_ENTRY, FK_NAME } fk_member_kind;

typedef struct { /* subject: of a blob its digest, of an entry its key; a signature's and a name's have two parts */
    fk_member_kind kind;
    const char *subject, *second, *digest;
    uint64_t offset, size;
} fk_member;

typedef struct {
    fk_member *first;
    size_t count;
} fk_members;

struct fusekit_bundle {
    int file;
    const unsigned char *data; /* instead of a file */
    uint64_t size;
    char *index; /* its text, in which the strings of members lie */
    fk_arena arena;
    fk_members of[4]; /* by kind */
    char digest[FK_DIGEST + 1], title[200];
};

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static fusekit_status fk_damaged(const fusekit_bundle *bundle, fusekit_error *error, const char *format, ...) {
    char what[280];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return fk_fail(error, FUSEKIT_BAD_BUNDLE, "%s %s; export or copy the bundle again", bundle->title, what);
}

static fusekit_status fk_read(const fusekit_bundle *bundle, uint64_t offset, void *into, size_t count,
                              fusekit_error *error) {
    unsigned char *at = (unsigned char *)into;
    if (offset > bundle->size || count > bundle->size - offset) return fk_damaged(bundle, error, "ends too early");
    if (bundle->data != NULL) {
        memcpy(at, bundle->data + offset, count);
        return FUSEKIT_OK;
    }
    while (count > 0) {
        ssize_t got = pread(bundle->file, at, count, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fk_fail(error, FUSEKIT_FILE_ERROR, "%s cannot be read (errno %d)", bundle->title, errno);
        if (got == 0) return fk_damaged(bundle, error, "became shorter while it was read");
        at += got;
        offset += (uint64_t)got;
        count -= (size_t)got;
    }
    return FUSEKIT_OK;
}

/* ---- Headers, as Python's tarfile writes them in the PAX format: all that varies is path and size. */

static void fk_header_block(unsigned char *block, const char *path, size_t length, unsigned mode, uint64_t size,
                            char type) {
    unsigned sum = 0;
    char number[24];
    int index;
    memset(block, 0, FK_BLOCK);
    memcpy(block, path, length < 100 ? length : 100);
    snprintf(number, sizeof number, "%07o", mode);
    memcpy(block + 100, number, 7);
    memcpy(block + 108, "0000000", 7);
    memcpy(block + 116, "0000000", 7);
    snprintf(number, sizeof number, "%011llo", (unsigned long long)size);
    memcpy(block + 124, number, 11);
    memcpy(block + 136, "00000000000", 11);
    memcpy(block + 148, "        ", 8);
    block[156] = (unsigned char)type;
    memcpy(block + 257, "ustar", 6);
    memcpy(block + 263, "00", 2);
    for (index = 0; index < FK_BLOCK; ++index) sum += block[index];
    snprintf(number, sizeof number, "%06o", sum);
    memcpy(block + 148, number, 7); /* with its 0; the last space stays */
}

/* The header of a member, and its length: a path of more than 100 letters takes two blocks in front. */
static size_t fk_header(const char *path, uint64_t size, unsigned char header[FK_MOST_HEADER]) {
    size_t length = strlen(path), before = 0;
    if (length > 100) {
        char record[FK_MOST_PATH + 16];
        int count = snprintf(record, sizeof record, "%d path=%s\n", (int)length + 10, path);
        fk_header_block(header, "././@PaxHeader", 14, 0, (uint64_t)count, 'x');
        memset(header + FK_BLOCK, 0, FK_BLOCK);
        memcpy(header + FK_BLOCK, record, (size_t)count);
        before = 2 * FK_BLOCK;
    }
    fk_header_block(header + before, path, length, 0644, size, '0');
    return before + FK_BLOCK;
}

static uint64_t fk_padding(uint64_t size) { return (FK_BLOCK - size % FK_BLOCK) % FK_BLOCK; }

static void fk_path(const fk_member *member, char path[FK_MOST_PATH]) {
    const char *subject = member->subject;
    switch (member->kind) {
    case FK_BLOB: snprintf(path, FK_MOST_PATH, "blobs/sha256/%.2s/%s", subject, subject); break;
    case FK_SIGNED: snprintf(path, FK_MOST_PATH, "signatures/%.2s/%s.%s", subject, subject, member->second); break;
    case FK_ENTRY: snprintf(path, FK_MOST_PATH, "entries/%.2s/%s.json", subject, subject); break;
    case FK_NAME: snprintf(path, FK_MOST_PATH, "names/%s.%s.json", subject, member->second); break;
    }
}

/* Name and size out of a leading header, which must be the one header that they have. */
static fusekit_status fk_leading_header(const fusekit_bundle *bundle, uint64_t at, char name[101], uint64_t *size,
                                        fusekit_error *error) {
    unsigned char found[FK_BLOCK], expected[FK_MOST_HEADER];
    fusekit_status status = fk_read(bundle, at, found, sizeof found, error);
    int index;
    if (status != FUSEKIT_OK) return status;
    memcpy(name, found, 100);
    name[100] = 0;
    for (*size = 0, index = 124; index < 135; ++index) *size = *size * 8 + (unsigned)(found[index] & 7);
    if (fk_header(name, *size, expected) != FK_BLOCK || memcmp(found, expected, FK_BLOCK) != 0)
        return fk_damaged(bundle, error, "is no bundle: a plain tar file that begins with bundle.json");
    return FUSEKIT_OK;
}

/* Whether bytes that only fill a block are 0. */
static fusekit_status fk_check_zeros(const fusekit_bundle *bundle, uint64_t at, size_t count, fusekit_error *error) {
    unsigned char bytes[FK_END];
    fusekit_status status = fk_read(bundle, at, bytes, count, error);
    size_t index;
    for (index = 0; index < count && status == FUSEKIT_OK; ++index)
        if (bytes[index] != 0) status = fk_damaged(bundle, error, "has bytes between two members, or behind the last");
    return status;
}

/* The bytes of a member, in memory of their own, once their digest is the index's. */
static fusekit_status fk_content(const fusekit_bundle *bundle, const fk_member *member, unsigned char **content,
                                 fusekit_error *error) {
    char digest[FK_DIGEST + 1], path[FK_MOST_PATH];
    unsigned char *made = (unsigned char *)malloc((size_t)member->size);
    fusekit_status status;
    *content = NULL;
    fk_path(member, path);
    if (made == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for %.160s", bundle->title, path);
    status = fk_read(bundle, member->offset, made, (size_t)member->size, error);
    if (status == FUSEKIT_OK) {
        fk_sha256_of(made, (size_t)member->size, digest);
        if (strcmp(digest, member->digest) != 0)
            status = fk_damaged(bundle, error, "has %.160s with another digest than its index says", path);
    }
    if (status == FUSEKIT_OK)
        *content = made;
    else
        free(made);
    return status;
}
