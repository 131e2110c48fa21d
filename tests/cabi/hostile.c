/* Bundles that are damaged or made up, under the sanitizers. Includes the loader, to play the driver with its own tables.
 *
 *     hostile sweep FILE     every cut of the bundle and every byte of it changed: each must be refused
 *     hostile try FILE       FILE holds bundles, each behind its size in 8 bytes; prints one line a bundle:
 *                            status of opening or checking, status of loading, launches that were made
 */
#include "demo.c"

static fk_record pretended; /* what the driver says of the cubin's parameters */
static unsigned launches;

static int done(void) { return 0; }

static int version(int *out) { return *out = 13000, 0; }

static int text(int status, const char **out) { return (void)status, *out = "a test", 0; }

static int device(int *out, int ordinal) { return *out = ordinal, 0; }

static int attribute(int *out, int kind, int ordinal) {
    (void)ordinal;
    *out = kind == FK_DEVICE_MAJOR ? 9 : kind == FK_DEVICE_MINOR ? 0 : 132;
    return 0;
}

static int handle(void **out) { return *out = (void *)&pretended, 0; }

/* A kernel's handle, and its function's, is its node. */
static int kernel_of(void **out, void *library, const char *symbol) {
    int index;
    (void)library;
    for (index = 0; index < pretended.node_count; ++index)
        if (strcmp(pretended.nodes[index].symbol, symbol) == 0) {
            *out = (void *)(uintptr_t)&pretended.nodes[index];
            return 0;
        }
    return 500;
}

static int function_of(void **out, void *kernel) { return *out = kernel, 0; }

static int parameter(void *kernel, size_t index, size_t *offset, size_t *size) {
    const fk_node *node = (const fk_node *)kernel;
    if (index >= (size_t)node->parameter_count) return FK_INVALID_VALUE;
    *offset = node->parameters[index].offset;
    *size = node->parameters[index].size;
    return 0;
}

static int clusters(int *out, void *function, const fk_config *config) { return (void)function, (void)config, *out = 61, 0; }

static int encode(void *place, int dtype, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                  const unsigned *box, const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
    (void)dtype, (void)rank, (void)address, (void)dims, (void)strides, (void)box, (void)steps, (void)interleave;
    (void)swizzle, (void)promotion, (void)fill;
    memset(place, 0xAB, FK_MAP_BYTES);
    return 0;
}

static int launch(const fk_config *config, void *function, void **parameters, void **extra) {
    static volatile unsigned char sum;
    const fk_node *node = (const fk_node *)function;
    int index;
    unsigned byte;
    (void)config, (void)extra;
    for (index = 0; index < node->parameter_count; ++index) /* the driver reads every byte of them */
        for (byte = 0; byte < node->parameters[index].size; ++byte)
            sum = (unsigned char)(sum + ((unsigned char *)parameters[index])[byte]);
    ++launches;
    return 0;
}

static int allocate(unsigned long long *out, size_t size) { return (void)size, *out = 4096, 0; }

static void play(demo_driver *driver) {
    memset(driver, 0, sizeof *driver);
    driver->version = version;
    driver->cuda = 13000;
    driver->error_name = driver->error_string = text;
    driver->device_get = device;
    driver->device_attribute = attribute;
    driver->kernel_parameter = parameter;
    driver->encode = encode;
    driver->launch = launch;
    driver->library_kernel = kernel_of;
    driver->kernel_function = function_of;
    driver->active_clusters = clusters;
    driver->allocate = allocate;
#define HANDLE(name, type) memcpy(&driver->name, &(type){handle}, sizeof driver->name)
#define DONE(name) memcpy(&driver->name, &(int (*)(void)){done}, sizeof driver->name)
    HANDLE(retain, int (*)(void **));
    HANDLE(current, int (*)(void **));
    HANDLE(library_load, int (*)(void **));
    HANDLE(stream_create, int (*)(void **));
    DONE(release), DONE(push), DONE(pop), DONE(library_unload), DONE(kernel_attribute);
    DONE(free_memory), DONE(fill), DONE(stream_wait), DONE(stream_destroy), DONE(capture_mode);
    DONE(stream_capturing), DONE(event_query), DONE(event_destroy);
    HANDLE(event_create, int (*)(void **));
}

/* Launches on extents from the least to the greatest that the record allows. */
static void launch_all(const demo_kernel *kernel) {
    const fk_record *record = &kernel->record;
    int64_t variables[FK_MOST_VARIABLES] = {0}, shapes[FK_MOST_TENSORS][FK_MOST_RANK];
    demo_tensor tensors[FK_MOST_TENSORS];
    demo_scalar scalars[FK_MOST_SCALARS];
    demo_arguments arguments;
    demo_error error;
    int round, index, axis, count = 0;
    memset(&arguments, 0, sizeof arguments);
    for (index = 0; index < kernel->argument_count; ++index)
        if (kernel->arguments[index].rank < 0) {
            scalars[count].name = kernel->arguments[index].name;
            scalars[count++].value = 1;
        }
    arguments.tensors = tensors, arguments.tensor_count = record->tensor_count;
    arguments.scalars = scalars, arguments.scalar_count = count;
    for (round = 0; round < 6; ++round) {
        for (index = 0; index < record->dim_count; ++index) {
            const fk_dim *dim = &record->dims[index];
            int64_t wanted = round == 0 ? dim->minimum : round == 1 ? dim->maximum : (int64_t)16 << 5 * (round - 2);
            variables[index] = wanted - wanted % dim->divisor;
        }
        for (index = 0, count = 0; index < record->tensor_count; ++index) {
            const fk_tensor *tensor = &record->tensors[index];
            demo_tensor *given = &tensors[index];
            memset(given, 0, sizeof *given);
            given->name = tensor->name;
            given->data = (void *)((uintptr_t)(index + 1) << 44);
            given->shape = shapes[index];
            given->rank = tensor->rank;
            for (axis = 0; axis < tensor->rank; ++axis)
                if (!fk_evaluate(&tensor->shape[axis], variables, 0, &shapes[index][axis])) shapes[index][axis] = 1;
            for (axis = 0; axis < kernel->argument_count; ++axis)
                if (strcmp(kernel->arguments[axis].name, tensor->name) == 0) given->dtype = kernel->arguments[axis].dtype;
        }
        (void)demo_kernel_launch(kernel, &arguments, NULL, &error);
        arguments.has_cluster_margin = 1;
        arguments.cluster_margin = round == 4 ? INT32_MAX : round;
    }
}

/* Opens, checks and loads; what came of it. */
static int attempt(const demo_driver *driver, const unsigned char *data, size_t size, demo_status *loaded) {
    demo_bundle *bundle;
    demo_kernel *kernel, read;
    demo_error error;
    const fk_member *blob;
    size_t index;
    demo_status status = demo_bundle_open_bytes(data, size, &bundle, &error);
    *loaded = DEMO_BAD_BUNDLE;
    if (status != DEMO_OK) return (int)status;
    status = demo_bundle_verify(bundle, &error);
    for (index = 0; index < bundle->of[FK_NAME].count; ++index) {
        memset(&read, 0, sizeof read);
        read.name = "pretended";
        if (fk_read_name(bundle, &bundle->of[FK_NAME].first[index], &read, &blob, NULL) == DEMO_OK)
            pretended = read.record;
        *loaded = demo_kernel_load(driver, bundle, demo_bundle_name(bundle, index), 0, &kernel, &error);
        if (*loaded == DEMO_OK) {
            launch_all(kernel);
            demo_kernel_unload(kernel, &error);
        }
        fk_drop(&read.arena);
    }
    demo_bundle_close(bundle);
    return (int)status;
}

/* A copy of exactly that size, so that a read beyond it is seen. */
static int attempt_copy(const demo_driver *driver, const unsigned char *data, size_t size, demo_status *loaded) {
    unsigned char *copy = (unsigned char *)malloc(size ? size : 1);
    int status;
    memcpy(copy, data, size);
    status = attempt(driver, copy, size, loaded);
    free(copy);
    return status;
}

static int sweep(const demo_driver *driver, unsigned char *data, size_t size) {
    demo_status loaded;
    size_t at;
    if (attempt(driver, data, size, &loaded) != DEMO_OK || loaded != DEMO_OK) return printf("the bundle is refused\n"), 1;
    for (at = 0; at < size; ++at) {
        static const unsigned char changes[] = {1, 0x80, 0x20};
        unsigned char before = data[at];
        data[at] = (unsigned char)(before ^ changes[at % 3]);
        if (attempt(driver, data, size, &loaded) != DEMO_BAD_BUNDLE) return printf("byte %zu is not missed\n", at), 1;
        data[at] = before;
    }
    for (at = 0; at < size; at += at < 4096 || size - at < 4096 ? 1 : 61)
        if (attempt_copy(driver, data, at, &loaded) != DEMO_BAD_BUNDLE) return printf("cut at %zu is taken\n", at), 1;
    printf("%zu bytes\n", size);
    return 0;
}

int main(int count, char **words) {
    unsigned char *data;
    demo_driver driver;
    demo_status loaded;
    size_t size, at;
    FILE *file = count == 3 ? fopen(words[2], "rb") : NULL;
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) return 2;
    size = (size_t)ftell(file);
    rewind(file);
    data = (unsigned char *)malloc(size + 1);
    if (data == NULL || fread(data, 1, size, file) != size) return 2;
    fclose(file);
    play(&driver);
    if (strcmp(words[1], "sweep") == 0) {
        int failed = sweep(&driver, data, size);
        free(data);
        return failed;
    }
    for (at = 0; at < size;) {
        size_t length = (size_t)fk_little(data + at, 8);
        int status;
        launches = 0;
        status = attempt_copy(&driver, data + at + 8, length, &loaded);
        printf("%d %d %u\n", status, (int)loaded, launches);
        at += 8 + length;
    }
    free(data);
    return 0;
}
