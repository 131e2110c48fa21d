/* ---- Workspaces: device memory that a kernel keeps its scheduler's counters in. A launch leaves its workspace as the
 * next one needs it, so those that may overlap in time, of two streams, have one each. They are made in stocks, the
 * first at load: a launch in a stream not seen before takes one from it, and only where it is used up asks the driver. */
#include <pthread.h>

enum { FK_WORKSPACE_ALIGNMENT = 256, FK_STOCK_BYTES = 1 << 16, FK_MOST_STOCK = 64 };

typedef struct fk_stock { /* memory for some workspaces; the stocks form a list, the newest first */
    struct fk_stock *next;
    unsigned long long base;
    int used;
    struct {
        uintptr_t stream;
        pthread_t thread;
    } owners[FK_MOST_STOCK];
} fk_stock;

struct fk_workspaces {
    const fusekit_driver *driver;
    const char *name; /* of the kernel */
    void *context;
    size_t size; /* bytes of each, aligned */
    int zeroed, count; /* of each stock */
    pthread_mutex_t lock; /* of whoever adds one; nobody waits for it to find his own */
    fk_stock *stocks;
};

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

/* Inside, what this thread asks of the driver is no danger to streams that other threads capture. */
static int fk_apart(const fusekit_driver *driver, int *mode) {
    *mode = 1; /* thread-local */
    return driver->capture_mode(mode);
}

static fusekit_status fk_add_stock(fk_workspaces *own, fusekit_error *error) {
    const fusekit_driver *driver = own->driver;
    size_t total = own->size * (size_t)own->count;
    fk_stock *stock = (fk_stock *)calloc(1, sizeof *stock);
    void *before;
    int mode, result;
    if (stock == NULL) return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for workspaces", own->name);
    result = driver->push(own->context);
    if (result == 0) {
        result = fk_apart(driver, &mode);
        if (result == 0) {
            result = driver->allocate(&stock->base, total);
            if (result == 0 && own->zeroed && (result = fk_zero(driver, stock->base, total)) != 0)
                driver->free_memory(stock->base);
            driver->capture_mode(&mode);
        }
        driver->pop(&before);
    }
    if (result != 0) {
        free(stock);
        return fk_cuda(driver, error, result, own->name, "allocating a workspace");
    }
    stock->next = own->stocks;
    __atomic_store_n(&own->stocks, stock, __ATOMIC_RELEASE);
    return FUSEKIT_OK;
}

/* The workspace of a stream, or 0. A stock only ever grows, and says so last. */
static unsigned long long fk_find_workspace(const fk_workspaces *own, uintptr_t stream, pthread_t thread) {
    const fk_stock *stock = __atomic_load_n(&own->stocks, __ATOMIC_ACQUIRE);
    for (; stock != NULL; stock = stock->next) {
        int used = __atomic_load_n(&stock->used, __ATOMIC_ACQUIRE), index;
        for (index = 0; index < used; ++index)
            if (stock->owners[index].stream == stream &&
                (stream != FK_PER_THREAD || pthread_equal(stock->owners[index].thread, thread)))
                return stock->base + (size_t)index * own->size;
    }
    return 0;
}

/* The workspace for launches in `stream`. Every thread has a per-thread default stream of its own. */
static fusekit_status fk_workspace(fk_workspaces *own, void *handle, unsigned long long *address,
                                   fusekit_error *error) {
    uintptr_t stream = handle == NULL ? (uintptr_t)FK_LEGACY : (uintptr_t)handle;
    pthread_t thread = pthread_self();
    fusekit_status status = FUSEKIT_OK;
    *address = fk_find_workspace(own, stream, thread);
    if (*address != 0) return FUSEKIT_OK;
    pthread_mutex_lock(&own->lock);
    *address = fk_find_workspace(own, stream, thread);
    if (*address == 0 && own->stocks->used == own->count) status = fk_add_stock(own, error);
    if (*address == 0 && status == FUSEKIT_OK) {
        fk_stock *stock = own->stocks;
        stock->owners[stock->used].stream = stream;
        stock->owners[stock->used].thread = thread;
        *address = stock->base + (size_t)stock->used * own->size;
        __atomic_store_n(&stock->used, stock->used + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&own->lock);
    return status;
}

/* Gives the memory back; no launch that uses it may be pending. */
static int fk_free_workspaces(fk_workspaces *own) {
    const fusekit_driver *driver = own->driver;
    void *before;
    int result = 0, other, mode;
    if (own->stocks != NULL && (result = driver->push(own->context)) == 0) {
        result = fk_apart(driver, &mode);
        while (own->stocks != NULL) {
            fk_stock *stock = own->stocks;
            own->stocks = stock->next;
            if ((other = driver->free_memory(stock->base)) != 0) result = other;
            free(stock);
        }
        driver->capture_mode(&mode);
        driver->pop(&before);
    }
    pthread_mutex_destroy(&own->lock);
    free(own);
    return result;
}

static fusekit_status fk_make_workspaces(const fusekit_driver *driver, const char *name, void *context, int64_t bytes,
                                         int zeroed, fk_workspaces **made, fusekit_error *error) {
    fk_workspaces *own = (fk_workspaces *)calloc(1, sizeof *own);
    fusekit_status status;
    *made = NULL;
    if (own == NULL || bytes > INT64_MAX / FK_MOST_STOCK - FK_WORKSPACE_ALIGNMENT ||
        pthread_mutex_init(&own->lock, NULL) != 0) {
        free(own);
        return fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a workspace of %lld bytes", name,
                       (long long)bytes);
    }
    own->driver = driver;
    own->name = name;
    own->context = context;
    own->zeroed = zeroed;
    own->size = ((size_t)bytes + FK_WORKSPACE_ALIGNMENT - 1) / FK_WORKSPACE_ALIGNMENT * FK_WORKSPACE_ALIGNMENT;
    own->count = own->size > FK_STOCK_BYTES / FK_MOST_STOCK ? (int)(FK_STOCK_BYTES / own->size) : FK_MOST_STOCK;
    if (own->count == 0) own->count = 1;
    status = fk_add_stock(own, error);
    if (status == FUSEKIT_OK)
        *made = own;
    else
        fk_free_workspaces(own);
    return status;
}
