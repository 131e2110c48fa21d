/* ---- Device memory that a kernel needs next to its arguments, for each stream: launches that may overlap in time must not
 * share it. A launch leaves its workspace (a scheduler's counters) as the next one needs it. Workspaces are made in stocks,
 * the first at load: a launch in a stream not seen before takes one from it, and only where it is used up asks the driver.
 * Scratch (partial sums) is of any content, and grows with the largest launch there was in the stream. What a thread's
 * default stream was given stays when the thread ends, since its launches may be pending: threads that come and go launch
 * on streams that the program makes and keeps. */
#include <pthread.h>
#include <time.h>

enum { FK_WORKSPACE_ALIGNMENT = 256, FK_STOCK_BYTES = 1 << 16, FK_MOST_STOCK = 64 };

typedef struct {
    uintptr_t stream;
    pthread_t thread; /* of a per-thread default stream, of which every thread has one with the same handle */
    uint64_t begun;   /* distinguishes that thread from those that had the same pthread_self() before it, and ended */
} fk_owner;

typedef struct fk_stock { /* memory for some workspaces; the stocks form a list, the newest first */
    struct fk_stock *next;
    unsigned long long base;
    int used;
    fk_owner owners[FK_MOST_STOCK];
} fk_stock;

typedef struct fk_piece { /* scratch of a stream; pieces form a list, the newest first, and stay: graphs may use them */
    struct fk_piece *next;
    unsigned long long address;
    int64_t size;
    fk_owner owner;
} fk_piece;

struct fk_workspaces {
    const fusekit_driver *driver;
    const char *name; /* of the kernel */
    void *context;
    size_t size; /* bytes of each, aligned */
    int zeroed, count; /* of each stock */
    pthread_mutex_t lock; /* of whoever adds to the lists; nobody waits for it to find his own */
    pthread_mutex_t together; /* of whoever queues several launches, which share scratch with others of their stream */
    fk_stock *stocks;
    fk_piece *pieces;
};

/* Nanoseconds at which this thread first asked. */
static uint64_t fk_begun(void) {
    static __thread uint64_t begun;
    struct timespec now;
    if (begun == 0 && timespec_get(&now, TIME_UTC) == TIME_UTC)
        begun = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    return begun;
}

static fk_owner fk_owner_of(void *handle) {
    fk_owner owner;
    owner.stream = handle == NULL ? (uintptr_t)FK_LEGACY : (uintptr_t)handle;
    owner.thread = pthread_self();
    owner.begun = owner.stream == FK_PER_THREAD ? fk_begun() : 0;
    return owner;
}

static int fk_owns(const fk_owner *one, const fk_owner *other) {
    if (one->stream != other->stream) return 0;
    return one->stream != FK_PER_THREAD || (one->begun == other->begun && pthread_equal(one->thread, other->thread));
}

/* On a stream of its own, and finished on return: whichever stream launches next finds zeros. */
static int fk_zero(const fusekit_driver *driver, unsigned long long address, size_t size) {
    void *stream;
    int result = driver->stream_create(&stream, 1), other;
    if (result != 0) return result;
    result = driver->fill(address, 0, size, stream);
    if (result == 0) result = driver->stream_wait(stream);
    other = driver->stream_destroy(stream);
    return result != 0 ? result : other;
}

enum { FK_THREAD_LOCAL = 1, FK_RELAXED = 2 };

/* Inside, what this thread asks of the driver is no danger to streams that other threads capture; relaxed: nor to those that
 * this one does. */
static int fk_apart(const fusekit_driver *driver, int kind, int *mode) {
    *mode = kind;
    return driver->capture_mode(mode);
}

static fusekit_status fk_allocate(const fk_workspaces *memory, size_t size, int zeroed, unsigned long long *address,
                                  fusekit_error *error) {
    const fusekit_driver *driver = memory->driver;
    void *before;
    int mode, result = driver->push(memory->context);
    if (result == 0) {
        result = fk_apart(driver, FK_RELAXED, &mode); /* the first launch in a stream may be one that is captured */
        if (result == 0) {
            result = driver->allocate(address, size);
            if (result == 0 && zeroed && (result = fk_zero(driver, *address, size)) != 0) driver->free_memory(*address);
            driver->capture_mode(&mode);
        }
        driver->pop(&before);
    }
    return result == 0 ? FUSEKIT_OK : fk_cuda(driver, error, result, memory->name, "allocating a workspace");
}

static fusekit_status fk_add_stock(fk_workspaces *memory, fusekit_error *error) {
    fk_stock *stock = (fk_stock *)calloc(1, sizeof *stock);
    fusekit_status status;
    if (stock == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for workspaces", memory->name);
    status = fk_allocate(memory, memory->size * (size_t)memory->count, memory->zeroed, &stock->base, error);
    if (status != FUSEKIT_OK) {
        free(stock);
        return status;
    }
    stock->next = memory->stocks;
    __atomic_store_n(&memory->stocks, stock, __ATOMIC_RELEASE);
    return FUSEKIT_OK;
}

/* The workspace of a stream, or 0. A stock only ever grows, and says so last. */
static unsigned long long fk_find_workspace(const fk_workspaces *memory, const fk_owner *owner) {
    const fk_stock *stock = __atomic_load_n(&memory->stocks, __ATOMIC_ACQUIRE);
    for (; stock != NULL; stock = stock->next) {
        int used = __atomic_load_n(&stock->used, __ATOMIC_ACQUIRE), index;
        for (index = 0; index < used; ++index)
            if (fk_owns(&stock->owners[index], owner)) return stock->base + (size_t)index * memory->size;
    }
    return 0;
}

/* The workspace for launches in a stream. */
static fusekit_status fk_workspace(fk_workspaces *memory, void *stream, unsigned long long *address, fusekit_error *error) {
    fk_owner owner = fk_owner_of(stream);
    fusekit_status status = FUSEKIT_OK;
    *address = fk_find_workspace(memory, &owner);
    if (*address != 0) return FUSEKIT_OK;
    pthread_mutex_lock(&memory->lock);
    *address = fk_find_workspace(memory, &owner);
    if (*address == 0 && memory->stocks->used == memory->count) status = fk_add_stock(memory, error);
    if (*address == 0 && status == FUSEKIT_OK) {
        fk_stock *stock = memory->stocks;
        stock->owners[stock->used] = owner;
        *address = stock->base + (size_t)stock->used * memory->size;
        __atomic_store_n(&stock->used, stock->used + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&memory->lock);
    return status;
}

/* The newest piece of a stream, which is its largest; NULL where it has none. */
static const fk_piece *fk_find_piece(const fk_workspaces *memory, const fk_owner *owner) {
    const fk_piece *piece = __atomic_load_n(&memory->pieces, __ATOMIC_ACQUIRE);
    while (piece != NULL && !fk_owns(&piece->owner, owner)) piece = piece->next;
    return piece;
}

/* Half as much again as before: a slowly growing batch takes few allocations, three times its size at most. */
static fusekit_status fk_add_piece(fk_workspaces *memory, const fk_owner *owner, const fk_piece *before, int64_t size,
                                   fusekit_error *error) {
    const int64_t granule = 1 << 21; /* what the driver allocates at least */
    fk_piece *piece = (fk_piece *)calloc(1, sizeof *piece);
    fusekit_status status;
    if (piece == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for scratch", memory->name);
    if (before != NULL && before->size / 2 * 3 > size) size = before->size / 2 * 3;
    piece->owner = *owner;
    piece->size = (size + granule - 1) / granule * granule;
    status = fk_allocate(memory, (size_t)piece->size, 0, &piece->address, error);
    if (status != FUSEKIT_OK) {
        free(piece);
        return status;
    }
    piece->next = memory->pieces;
    __atomic_store_n(&memory->pieces, piece, __ATOMIC_RELEASE);
    return FUSEKIT_OK;
}

/* `size` bytes at least for a launch in a stream. */
static fusekit_status fk_scratch(fk_workspaces *memory, void *stream, int64_t size, unsigned long long *address,
                                 fusekit_error *error) {
    fk_owner owner = fk_owner_of(stream);
    const fk_piece *piece = fk_find_piece(memory, &owner);
    fusekit_status status = FUSEKIT_OK;
    if (size > 0 && (piece == NULL || piece->size < size)) {
        pthread_mutex_lock(&memory->lock);
        piece = fk_find_piece(memory, &owner);
        if (piece == NULL || piece->size < size) status = fk_add_piece(memory, &owner, piece, size, error);
        piece = fk_find_piece(memory, &owner);
        pthread_mutex_unlock(&memory->lock);
    }
    *address = piece == NULL ? 0 : piece->address;
    return status;
}

/* Gives the memory back; no launch that uses it may be pending. */
static int fk_free_workspaces(fk_workspaces *memory) {
    const fusekit_driver *driver = memory->driver;
    void *before;
    int result = 0, other, mode;
    if ((memory->stocks != NULL || memory->pieces != NULL) && (result = driver->push(memory->context)) == 0) {
        result = fk_apart(driver, FK_THREAD_LOCAL, &mode);
        while (memory->stocks != NULL) {
            fk_stock *stock = memory->stocks;
            memory->stocks = stock->next;
            if ((other = driver->free_memory(stock->base)) != 0) result = other;
            free(stock);
        }
        while (memory->pieces != NULL) {
            fk_piece *piece = memory->pieces;
            memory->pieces = piece->next;
            if ((other = driver->free_memory(piece->address)) != 0) result = other;
            free(piece);
        }
        driver->capture_mode(&mode);
        driver->pop(&before);
    }
    pthread_mutex_destroy(&memory->lock);
    pthread_mutex_destroy(&memory->together);
    free(memory);
    return result;
}

/* bytes: of each workspace; 0 where the kernel has none. */
static fusekit_status fk_make_workspaces(const fusekit_driver *driver, const char *name, void *context, int64_t bytes,
                                         int zeroed, fk_workspaces **out, fusekit_error *error) {
    fk_workspaces *created = (fk_workspaces *)calloc(1, sizeof *created);
    fusekit_status status;
    *out = NULL;
    if (created == NULL || bytes > INT64_MAX / FK_MOST_STOCK - FK_WORKSPACE_ALIGNMENT ||
        pthread_mutex_init(&created->lock, NULL) != 0 || pthread_mutex_init(&created->together, NULL) != 0) {
        free(created);
        return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a workspace of %lld bytes", name,
                       (long long)bytes);
    }
    created->driver = driver;
    created->name = name;
    created->context = context;
    created->zeroed = zeroed;
    created->size = ((size_t)bytes + FK_WORKSPACE_ALIGNMENT - 1) / FK_WORKSPACE_ALIGNMENT * FK_WORKSPACE_ALIGNMENT;
    created->count = created->size > FK_STOCK_BYTES / FK_MOST_STOCK ? (int)(FK_STOCK_BYTES / created->size) : FK_MOST_STOCK;
    if (created->count == 0) created->count = 1;
    status = bytes > 0 ? fk_add_stock(created, error) : FUSEKIT_OK;
    if (status == FUSEKIT_OK)
        *out = created;
    else
        fk_free_workspaces(created);
    return status;
}
