/* Bundles that are damaged or forged, under the sanitizers. Includes the loader, to play the driver with its own tables.
 *
 *     hostile sweep FILE [N]  cuts of the bundle, and every byte (every Nth) of it changed: each must be refused, unless it
 *                             is of what only Python reads; that changes nothing
 *     hostile words FILE [N]  every word (every Nth) of its launch records changed, with new digests
 *     hostile try FILE       FILE holds bundles, each behind its size in 8 bytes; prints one line a bundle: status of
 *                            opening or checking, status of loading, launches that were made, and the error's text
 */
#include "demo.c"

static const fk_record *pretended; /* what the driver says of the cubin's parameters */
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
    for (index = 0; index < pretended->node_count; ++index)
        if (strcmp(pretended->nodes[index].symbol, symbol) == 0) {
            *out = (void *)(uintptr_t)&pretended->nodes[index];
            return 0;
        }
    return 500;
}

static int function_of(void **out, void *kernel) { return *out = kernel, 0; }

static int parameter(void *kernel, size_t index, size_t *offset, size_t *size) {
    const fk_node *node = (const fk_node *)kernel;
    if (index >= (size_t)node->parameter_count) return FK_INVALID_VALUE;
    *offset = (size_t)node->parameters[index].offset;
    *size = (size_t)node->parameters[index].size;
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
        for (byte = 0; byte < (unsigned)node->parameters[index].size; ++byte)
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
    DONE(release), DONE(push), DONE(pop), DONE(library_unload), DONE(kernel_attribute), DONE(kernel_fact);
    DONE(free_memory), DONE(fill), DONE(stream_wait), DONE(stream_destroy), DONE(capture_mode);
    DONE(stream_capturing), DONE(event_query), DONE(event_destroy);
    HANDLE(event_create, int (*)(void **));
}

/* Launches on extents from the least to the greatest that the record allows. */
static void launch_all(const demo_kernel *kernel) {
    const fk_record *record = kernel->loaded->record;
    int64_t variables[FK_MOST_VARIABLES] = {0}, shapes[FK_MOST_TENSORS][FK_MOST_RANK];
    demo_tensor tensors[FK_MOST_TENSORS];
    demo_scalar scalars[FK_MOST_SCALARS];
    demo_arguments arguments;
    demo_error error;
    int round, index, axis, count = 0;
    memset(&arguments, 0, sizeof arguments);
    for (index = 0; index < record->argument_count; ++index)
        if (kernel->arguments[index].rank < 0 && count < FK_MOST_SCALARS) {
            scalars[count].name = kernel->arguments[index].name;
            scalars[count++].value = kernel->arguments[index].has_default ? kernel->arguments[index].default_value : 1;
        }
    arguments.tensors = tensors, arguments.tensor_count = (int)record->tensor_count;
    arguments.scalars = scalars, arguments.scalar_count = count;
    for (round = 0; round < 6; ++round) {
        for (index = 0; index < record->dim_count; ++index) {
            const fk_dim *dim = &record->dims[index];
            int64_t wanted = round == 0 ? dim->minimum : round == 1 ? dim->maximum : (int64_t)16 << 5 * (round - 2);
            variables[FK_FIRST_DIM + index] = wanted - wanted % dim->divisor;
        }
        for (index = 0, count = 0; index < record->tensor_count; ++index) {
            const fk_tensor *tensor = &record->tensors[index];
            demo_tensor *given = &tensors[index];
            memset(given, 0, sizeof *given);
            given->name = tensor->name;
            given->data = (void *)((uintptr_t)(index + 1) << 44);
            given->shape = shapes[index];
            given->rank = (int)tensor->rank;
            for (axis = 0; axis < tensor->rank; ++axis)
                if (!fk_evaluate(&tensor->shape[axis], variables, 0, &shapes[index][axis])) shapes[index][axis] = 1;
            for (axis = 0; axis < record->argument_count; ++axis)
                if (strcmp(kernel->arguments[axis].name, tensor->name) == 0) given->dtype = kernel->arguments[axis].dtype;
        }
        (void)demo_kernel_launch(kernel, &arguments, NULL, &error);
        arguments.has_cluster_margin = 1;
        arguments.cluster_margin = round == 4 ? INT32_MAX : round;
    }
}

/* Opens, checks and loads; what came of it, and the first words about it. */
static int attempt(const demo_driver *driver, const unsigned char *data, size_t size, demo_status *loaded,
                   demo_error *said) {
    demo_bundle *bundle;
    demo_kernel *kernel;
    demo_error error;
    demo_status status = demo_bundle_open_bytes(data, size, &bundle, said);
    const fk_listed *listed;
    size_t index;
    *loaded = DEMO_BAD_BUNDLE;
    if (status != DEMO_OK) return (int)status;
    status = demo_bundle_verify(bundle, said);
    for (index = 0; (listed = fk_listing(bundle, index)) != NULL; ++index) {
        fk_source source;
        void *memory[2];
        const fk_record *record = NULL;
        const fk_more *more;
        if (fk_fetch(bundle, listed, &source, memory, NULL) == DEMO_OK)
            fk_read_record(&source, "pretended", &record, &more, NULL);
        pretended = record;
        *loaded = demo_kernel_load(driver, bundle, listed->name, 0, &kernel, &error);
        if (*loaded == DEMO_OK) {
            launch_all(kernel);
            demo_kernel_unload(kernel, &error);
        } else if (status == DEMO_OK) {
            *said = error;
        }
        free((void *)(uintptr_t)record);
        free(memory[0]);
        free(memory[1]);
    }
    demo_bundle_close(bundle);
    return (int)status;
}

/* A copy of exactly that size, so that a read beyond it is seen. */
static int attempt_copy(const demo_driver *driver, const unsigned char *data, size_t size, demo_status *loaded,
                        demo_error *said) {
    unsigned char *copy = (unsigned char *)malloc(size ? size : 1);
    int status;
    memcpy(copy, data, size);
    status = attempt(driver, copy, size, loaded, said);
    free(copy);
    return status;
}

/* Marks what the loader reads of a bundle: records, cubins, directory and footer. */
static int mark(const unsigned char *data, size_t size, unsigned char *marks) {
    const size_t end = size - FK_END, footer = end - sizeof(fk_footer);
    demo_bundle *bundle;
    const fk_listed *listed;
    size_t index;
    if (demo_bundle_open_bytes(data, size, &bundle, NULL) != DEMO_OK) return 0;
    memset(marks + footer, 1, sizeof(fk_footer));
    memset(marks + bundle->start, 1, (size_t)fk_little(data + footer + offsetof(fk_footer, bytes), 8));
    for (index = 0; (listed = fk_listing(bundle, index)) != NULL; ++index) {
        memset(marks + bundle->start - listed->record_before, 1, (size_t)listed->record_bytes);
        memset(marks + bundle->start - listed->cubin_before, 1, (size_t)listed->cubin_bytes);
    }
    demo_bundle_close(bundle);
    return 1;
}

static int sweep(const demo_driver *driver, unsigned char *data, size_t size, size_t step) {
    unsigned char *marks = (unsigned char *)calloc(1, size);
    demo_status loaded;
    demo_error said;
    size_t at, count = 0;
    if (!mark(data, size, marks)) return printf("the bundle is refused\n"), 1;
    for (at = 0; at < size; at += step) {
        static const unsigned char changes[] = {1, 0x80, 0x20};
        unsigned char before = data[at];
        int status;
        data[at] = (unsigned char)(before ^ changes[at % 3]);
        status = attempt(driver, data, size, &loaded, &said);
        data[at] = before;
        if (status != (marks[at] ? DEMO_BAD_BUNDLE : DEMO_OK) || (int)loaded != status)
            return printf("byte %zu, %sread: %d\n", at, marks[at] ? "" : "not ", status), 1;
        count += marks[at];
    }
    for (at = 0; at < size; at += at < 4096 || size - at < 4096 ? 1 : 61)
        if (attempt_copy(driver, data, at, &loaded, &said) != DEMO_BAD_BUNDLE) return printf("cut at %zu is taken\n", at), 1;
    printf("%zu bytes, %zu of them read\n", size, count);
    free(marks);
    return 0;
}

/* A kernel of these words, as if a bundle had it; whether it was taken. */
static int attempt_words(const demo_driver *driver, const fk_source *source) {
    demo_kernel kernel;
    demo_error error;
    demo_status status;
    const fk_more *more;
    memset(&kernel, 0, sizeof kernel);
    if (fk_read_record(source, "words", &pretended, &more, &error) != DEMO_OK) return 0;
    status = fk_load(driver, source, "words", 0, &kernel.loaded, &error);
    if (status == DEMO_OK && fk_describe(&kernel, &error) == DEMO_OK) {
        launch_all(&kernel);
        fk_unload(kernel.loaded, NULL);
    }
    free(kernel.arguments);
    free((void *)(uintptr_t)pretended);
    return status == DEMO_OK;
}

/* Every word of the records of a bundle with other values: small and large ones, near what it is, and of its neighbours. */
static int change_words(const demo_driver *driver, const unsigned char *data, size_t size, size_t step) {
    static const int64_t values[] = {0, 1, -1, 2, 3, 5, 6, 8, 40, 127, 129, 511, 513, 32764, INT32_MAX, (int64_t)1 << 32,
                                     INT64_MAX, INT64_MIN, INT64_MAX / 8, INT64_MAX / 16 + 1, (int64_t)1 << 57};
    const size_t strange = sizeof values / sizeof *values;
    size_t index, at, which, tried = 0, taken = 0;
    const fk_listed *listed;
    demo_bundle *bundle;
    if (demo_bundle_open_bytes(data, size, &bundle, NULL) != DEMO_OK) return 1;
    for (index = 0; (listed = fk_listing(bundle, index)) != NULL; ++index) {
        fk_source source;
        void *memory[2];
        int64_t *words;
        if (fk_fetch(bundle, listed, &source, memory, NULL) != DEMO_OK || !attempt_words(driver, &source)) return 1;
        words = (int64_t *)memory[0];
        for (at = 0; at < source.count; at += step) {
            int64_t before = words[at], next = words[(at + 1) % source.count];
            for (which = 0; which < strange + 3; ++which) {
                words[at] = which < strange ? values[which] : which == strange ? next : before + (which == strange + 1 ? 1 : -1);
                if (words[at] == before) continue;
                ++tried;
                taken += (size_t)attempt_words(driver, &source);
            }
            words[at] = before;
        }
        free(memory[0]);
        free(memory[1]);
    }
    demo_bundle_close(bundle);
    printf("%zu tried, %zu taken, %u launches\n", tried, taken, launches);
    return 0;
}

int main(int count, char **words) {
    unsigned char *data;
    demo_driver driver;
    demo_status loaded;
    size_t size, at, step = count == 4 ? strtoul(words[3], NULL, 10) : 1;
    char *text;
    FILE *file = count >= 3 && step ? fopen(words[2], "rb") : NULL;
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) return 2;
    size = (size_t)ftell(file);
    rewind(file);
    data = (unsigned char *)malloc(size + 1);
    if (data == NULL || fread(data, 1, size, file) != size) return 2;
    fclose(file);
    play(&driver);
    if (strcmp(words[1], "try") != 0) {
        int failed = strcmp(words[1], "sweep") == 0 ? sweep(&driver, data, size, step) : change_words(&driver, data, size, step);
        free(data);
        return failed;
    }
    for (at = 0; at < size;) {
        size_t length = (size_t)fk_little(data + at, 8);
        demo_error said = {0};
        int status;
        launches = 0;
        status = attempt_copy(&driver, data + at + 8, length, &loaded, &said);
        for (text = said.text; *text; ++text)
            if (*text < ' ') *text = '?';
        printf("%d %d %u %s\n", status, (int)loaded, launches, said.text);
        at += 8 + length;
    }
    free(data);
    return 0;
}
