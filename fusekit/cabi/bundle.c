/* ---- Bundles, as files: the last member is this loader's. POSIX: files are read with pread. */
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    FK_END = 1024,   /* zeros at the end of a tar file */
    FK_CANDIDATE = 0 /* as a major number: an earlier build of a name */
};

struct fusekit_bundle {
    int file;
    const unsigned char *data; /* instead of a file */
    uint64_t size, start;      /* where the directory begins */
    int64_t *words;            /* the directory */
    char digest[2 * FK_DIGEST + 1], title[200];
};

static const fk_directory *fk_kernels(const fusekit_bundle *bundle) { return (const fk_directory *)bundle->words; }

static const fk_listed *fk_listing(const fusekit_bundle *bundle, size_t index) {
    return index < (size_t)fk_kernels(bundle)->kernel_count ? &fk_kernels(bundle)->kernels[index] : NULL;
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static fusekit_status fk_damaged(const fusekit_bundle *bundle, fusekit_error *error, const char *format, ...) {
    char what[240];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return fk_fail(error, FUSEKIT_BAD_BUNDLE, "%.120s %s", bundle->title, what);
}

static fusekit_status fk_read(const fusekit_bundle *bundle, uint64_t offset, void *into, size_t count,
                              fusekit_error *error) {
    unsigned char *at = (unsigned char *)into;
    if (bundle->data != NULL) {
        memcpy(at, bundle->data + offset, count);
        return FUSEKIT_OK;
    }
    while (count > 0) {
        ssize_t got = pread(bundle->file, at, count, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fk_fail(error, FUSEKIT_FILE_ERROR, "%s cannot be read (errno %d); check the file", bundle->title, errno);
        if (got == 0) return fk_damaged(bundle, error, "became shorter while it was read; export or copy it again");
        at += got;
        offset += (uint64_t)got;
        count -= (size_t)got;
    }
    return FUSEKIT_OK;
}

/* What begins `before` bytes before `end`, in memory of its own, once its digest is right. `name`: of whose bytes. */
static fusekit_status fk_content(const fusekit_bundle *bundle, uint64_t end, int64_t before, int64_t bytes,
                                 const int64_t *digest, const char *name, const char *what, void **content,
                                 fusekit_error *error) {
    unsigned char actual[FK_DIGEST];
    fusekit_status status;
    *content = NULL;
    if (before < 0 || (uint64_t)before > end || bytes < 1 || bytes > before)
        return fk_damaged(bundle, error, "has the %s of %.120s beyond its ends; export or copy it again", what, name);
    *content = malloc((size_t)bytes);
    if (*content == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%.150s: no memory for the %s", name, what);
    status = fk_read(bundle, end - (uint64_t)before, *content, (size_t)bytes, error);
    if (status == FUSEKIT_OK) {
        fk_sha256_of(*content, (size_t)bytes, actual);
        if (memcmp(actual, digest, FK_DIGEST) != 0)
            status = fk_damaged(bundle, error, "has the %s of %.120s with another digest; export or copy it again", what,
                                name);
    }
    if (status == FUSEKIT_OK) return FUSEKIT_OK;
    free(*content);
    *content = NULL;
    return status;
}

static fusekit_status fk_read_directory(fusekit_bundle *bundle, fusekit_error *error) {
    fk_footer footer;
    fk_reader of_footer = {(int64_t *)&footer, sizeof footer / 8, {0}, bundle->title, error}, reader = of_footer;
    fusekit_status status;
    uint64_t end;
    void *content;
    int index;
    if (bundle->size < FK_END + sizeof footer)
        return fk_damaged(bundle, error, "is too short for a bundle; check the path");
    end = bundle->size - FK_END;
    status = fk_read(bundle, end - sizeof footer, &footer, sizeof footer, error);
    if (status != FUSEKIT_OK) return status;
    if (footer.magic != FK_MAGIC)
        return fk_damaged(bundle, error, "is cut, or was not exported for this loader (as by a fusekit before it); "
                                         "write it again with: fusekit export FILE NAME");
    if (footer.version != FK_VERSION)
        return fk_damaged(bundle, error, "is of version %lld; this loader reads %d; write both with one version of "
                                         "fusekit", (long long)footer.version, FK_VERSION);
    if (!fk_read_whole(&of_footer, &fk_type_footer, NULL, NULL)) return FUSEKIT_BAD_BUNDLE;
    status = fk_content(bundle, end, footer.before, footer.bytes, footer.digest, bundle->title, "directory", &content,
                        error);
    if (status != FUSEKIT_OK) return status;
    bundle->words = reader.next = (int64_t *)content;
    bundle->start = end - (uint64_t)footer.before;
    reader.left = (size_t)footer.bytes / 8;
    for (index = 0; index < FK_DIGEST; ++index)
        snprintf(bundle->digest + 2 * index, 3, "%02x", ((const unsigned char *)footer.digest)[index]);
    return fk_read_whole(&reader, &fk_type_directory, NULL, NULL) ? FUSEKIT_OK : FUSEKIT_BAD_BUNDLE;
}

static fusekit_status fk_open(const char *path, const void *data, size_t size, fusekit_bundle *bundle,
                              fusekit_error *error) {
    struct stat status;
    bundle->data = (const unsigned char *)data;
    bundle->size = size;
    snprintf(bundle->title, sizeof bundle->title, "%s", path);
    if (data != NULL) return fk_read_directory(bundle, error);
    bundle->file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not wait for a writer */
    if (bundle->file < 0 || fstat(bundle->file, &status) != 0)
        return fk_fail(error, FUSEKIT_FILE_ERROR, "%s cannot be opened (errno %d); check the path", bundle->title, errno);
    if (!S_ISREG(status.st_mode))
        return fk_fail(error, FUSEKIT_FILE_ERROR, "%s is no plain file; a bundle is; check the path", bundle->title);
    bundle->size = (uint64_t)status.st_size;
    return fk_read_directory(bundle, error);
}

static fusekit_status fk_new_bundle(const char *path, const void *data, size_t size, fusekit_bundle **out,
                                    fusekit_error *error) {
    fusekit_bundle *bundle = (fusekit_bundle *)calloc(1, sizeof *bundle);
    fusekit_status status;
    *out = NULL;
    if (bundle == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "no memory for a bundle");
    bundle->file = -1;
    status = fk_open(path, data, size, bundle, error);
    if (status != FUSEKIT_OK) {
        fusekit_bundle_close(bundle);
        return status;
    }
    *out = bundle;
    return fk_ok(error);
}

fusekit_status fusekit_bundle_open(const char *path, fusekit_bundle **out, fusekit_error *error) {
    *out = NULL;
    if (path == NULL) return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "the bundle's path is NULL; give one");
    return fk_new_bundle(path, NULL, 0, out, error);
}

fusekit_status fusekit_bundle_open_bytes(const void *data, size_t size, fusekit_bundle **out, fusekit_error *error) {
    *out = NULL;
    if (data == NULL) return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "the bundle's bytes are NULL; give them");
    return fk_new_bundle("the bundle in memory", data, size, out, error);
}

void fusekit_bundle_close(fusekit_bundle *bundle) {
    if (bundle == NULL) return;
    if (bundle->file >= 0) close(bundle->file);
    free(bundle->words);
    free(bundle);
}

const char *fusekit_bundle_digest(const fusekit_bundle *bundle) { return bundle->digest; }

/* A name for a caller: candidates, which are last, have those that were counted before. */
static const fk_listed *fk_named_at(const fusekit_bundle *bundle, size_t index) {
    const fk_listed *listed = fk_listing(bundle, index);
    return listed == NULL || listed->major == FK_CANDIDATE ? NULL : listed;
}

size_t fusekit_bundle_count(const fusekit_bundle *bundle) {
    size_t count = 0;
    while (fk_named_at(bundle, count) != NULL) ++count;
    return count;
}

const char *fusekit_bundle_name(const fusekit_bundle *bundle, size_t index) {
    const fk_listed *listed = fk_named_at(bundle, index);
    return listed == NULL ? NULL : listed->name;
}

const char *fusekit_bundle_arch(const fusekit_bundle *bundle, size_t index) {
    const fk_listed *listed = fk_named_at(bundle, index);
    return listed == NULL ? NULL : listed->arch;
}
