/* ---- TVM-FFI functions. Tensors come first, in the record's order; what is left out at the end counts as None. A function
 * keeps the launches of the calls that it saw, so a call with the same tensors again is neither checked nor packed. */
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

enum {
    FK_FFI_DEVICES = 64,
    FK_FFI_CALLS = 64,    /* that a function keeps */
    FK_FFI_ARGUMENTS = 96,
    FK_FFI_RANKS = 8,     /* words of ranks before those of windows: see fk_ffi_ranks */
    FK_FFI_MOST_RANKS = FK_FFI_RANKS + FK_MOST_WINDOWS * (1 + FK_MOST_RANKS),
    FK_FFI_WORDS = FK_FFI_ARGUMENTS * (2 + 2 * FK_MOST_RANK) + FK_FFI_MOST_RANKS,
    FK_FFI_NONE = 0,      /* what an argument is, in the lowest bits of its first word */
    FK_FFI_TENSOR = 1,
    FK_FFI_INTEGER = 2,
    FK_FFI_NUMBER = 3,
    FK_FFI_KEPT_BYTES = -1, /* instead of a pass; before it, the first window and so on */
    FK_FFI_WINDOW_BYTES = -2
};

typedef struct { /* a kernel or a layer, and it on each device */
    const fk_source *source;
    const char *title;
    const fk_source *const *kernels; /* of a layer, with their titles; else NULL */
    const char *const *titles;
    void *loaded[FK_FFI_DEVICES]; /* fk_kernel or fk_loaded_layer */
    const fk_layer *layer;        /* its record, once asked for sizes */
} fk_ffi_item;

typedef struct { /* the launches of a call */
    int64_t *words;
    size_t count;
    fusekit_launch *launch; /* of a kernel, or */
    fusekit_pass *pass;
    int64_t scratch_bytes; /* of the environment's memory, and where that was */
    void *scratch;
} fk_ffi_kept;

typedef struct {
    const char *name;
    fk_ffi_item *item;
    int64_t pass;  /* -1 for a kernel */
    int64_t ranks; /* the argument that has them, -1: none */
    pthread_mutex_t lock;
    fk_ffi_kept calls[FK_FFI_CALLS];
} fk_ffi_function;

typedef struct {
    fk_ffi_function *function;
    const TVMFFIAny *args;
    int32_t given;
    int device; /* of the first tensor; -1: there is none */
    const DLTensor *tensors[FK_FFI_ARGUMENTS]; /* NULL: it is no tensor */
    const int64_t *ranks; /* words of the host, so many; NULL: none are given */
    int64_t rank_words;
    size_t count, slot;
    int64_t words[FK_FFI_WORDS]; /* that tell it from other calls; last, since few are used */
} fk_ffi_call;

static pthread_mutex_t fk_ffi_lock = PTHREAD_MUTEX_INITIALIZER; /* of loading */
static fusekit_driver *fk_ffi_driver;

static int fk_ffi_raise(const fusekit_error *error) {
    const char *kind = error->status == FUSEKIT_INVALID_ARGUMENT ? "ValueError"
                       : error->status == FUSEKIT_OUT_OF_MEMORY  ? "MemoryError"
                                                                 : "RuntimeError";
    TVMFFIErrorSetRaisedFromCStr(kind, error->text);
    return -1;
}

/* ---- Loading. */

static fusekit_status fk_ffi_load(fk_ffi_item *item, int device, void **loaded, fusekit_error *error) {
    fusekit_status status = FUSEKIT_OK;
    fk_loaded_layer *layer = NULL;
    fk_kernel *kernel = NULL;
    if (device < 0 || device >= FK_FFI_DEVICES)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: device %d; it must be 0 to %d", item->title, device,
                       FK_FFI_DEVICES - 1);
    *loaded = __atomic_load_n(&item->loaded[device], __ATOMIC_ACQUIRE);
    if (*loaded != NULL) return FUSEKIT_OK;
    pthread_mutex_lock(&fk_ffi_lock);
    *loaded = item->loaded[device];
    if (*loaded == NULL) {
        if (fk_ffi_driver == NULL) status = fusekit_driver_open(&fk_ffi_driver, error);
        if (status == FUSEKIT_OK && item->kernels == NULL)
            status = fk_load(fk_ffi_driver, item->source, item->title, device, &kernel, error);
        else if (status == FUSEKIT_OK)
            status = fk_load_layer(fk_ffi_driver, item->source, item->title, item->kernels, item->titles, device, &layer,
                                   error);
        *loaded = kernel != NULL ? (void *)kernel : (void *)layer;
        __atomic_store_n(&item->loaded[device], *loaded, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&fk_ffi_lock);
    return status;
}

/* Arguments that are integers: `least` of them at least, the others 0. what: which they are, in words. */
static int fk_ffi_counts(const TVMFFIAny *args, int32_t count, const char *name, const char *what, int64_t most, int least,
                         int all, int64_t *values) {
    fusekit_error error;
    int index, right = count >= least && count <= all;
    for (index = 0; index < all && right; ++index) {
        values[index] = 0;
        if (index >= least && (index >= count || args[index].type_index == kTVMFFINone)) continue;
        values[index] = args[index].v_int64;
        right = args[index].type_index == kTVMFFIInt && values[index] >= 0 && values[index] <= most;
    }
    if (right) return 0;
    fk_fail(&error, FUSEKIT_INVALID_ARGUMENT, "%s takes %s from 0 to %lld", name, what, (long long)most);
    return fk_ffi_raise(&error);
}

static int fk_ffi_prepare(fk_ffi_item *items, size_t item_count, const TVMFFIAny *args, int32_t count) {
    fusekit_error error;
    int64_t device;
    size_t index;
    void *loaded;
    if (fk_ffi_counts(args, count, "prepare", "one argument, a device", FK_FFI_DEVICES - 1, 1, 1, &device) != 0) return -1;
    for (index = 0; index < item_count; ++index)
        if (fk_ffi_load(&items[index], (int)device, &loaded, &error) != FUSEKIT_OK) return fk_ffi_raise(&error);
    return 0;
}

/* ---- Reading a call. */

static uint64_t fk_ffi_address(const DLTensor *tensor) { return (uint64_t)(uintptr_t)tensor->data + tensor->byte_offset; }

#define FK_FFI_MIX UINT64_C(0x9E3779B97F4A7C15)

/* The words of ranks: a tensor of the host, whose content counts. */
static fusekit_status fk_ffi_take_ranks(fk_ffi_call *call, const DLTensor *tensor, int64_t **words, fusekit_error *error) {
    const char *name = call->function->name;
    if (tensor->device.device_type != kDLCPU || tensor->ndim != 1 || tensor->dtype.code != kDLInt ||
        tensor->dtype.bits != 64 || tensor->dtype.lanes != 1 || (tensor->strides != NULL && tensor->strides[0] != 1))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: ranks must be a tensor of the CPU, int64, contiguous, of rank 1",
                       name);
    if (tensor->shape[0] < FK_FFI_RANKS || tensor->shape[0] > FK_FFI_MOST_RANKS)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: ranks has %lld words; there must be %d, and more for each window",
                       name, (long long)tensor->shape[0], (int)FK_FFI_RANKS);
    call->ranks = (const int64_t *)(const void *)((const char *)tensor->data + tensor->byte_offset);
    call->rank_words = tensor->shape[0];
    *(*words)++ = call->rank_words << 2 | FK_FFI_NUMBER;
    memcpy(*words, call->ranks, (size_t)call->rank_words * sizeof **words);
    *words += call->rank_words;
    return FUSEKIT_OK;
}

/* The words of a call, and its tensors. They hold all that packing reads. */
static fusekit_status fk_ffi_read(fk_ffi_call *call, fusekit_error *error) {
    int64_t *words = call->words;
    uint64_t hash = 0;
    int32_t index;
    int axis;
    call->device = -1;
    call->ranks = NULL;
    if (call->given > FK_FFI_ARGUMENTS)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %d arguments are too many", call->function->name, (int)call->given);
    for (index = 0; index < call->given; ++index) {
        const TVMFFIAny *value = &call->args[index];
        const DLTensor *tensor = NULL;
        call->tensors[index] = NULL;
        switch (value->type_index) {
        case kTVMFFITensor: tensor = (const DLTensor *)(const void *)((const char *)value->v_ptr + sizeof(TVMFFIObject)); break;
        case kTVMFFIDLTensorPtr: tensor = (const DLTensor *)value->v_ptr; break;
        case kTVMFFINone: *words++ = FK_FFI_NONE; continue;
        case kTVMFFIInt:
        case kTVMFFIBool: *words++ = FK_FFI_INTEGER; *words++ = value->v_int64; continue;
        case kTVMFFIFloat: *words++ = FK_FFI_NUMBER; *words++ = value->v_int64; continue;
        default:
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: argument %d is no tensor, number or None",
                           call->function->name, (int)index);
        }
        if (tensor->ndim < 0 || tensor->ndim > FK_MOST_RANK)
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: argument %d has rank %d; there may be %d",
                           call->function->name, (int)index, (int)tensor->ndim, (int)FK_MOST_RANK);
        if (index == call->function->ranks) {
            fusekit_status status = fk_ffi_take_ranks(call, tensor, &words, error);
            if (status != FUSEKIT_OK) return status;
            continue;
        }
        call->tensors[index] = tensor;
        if (call->device < 0) call->device = (int)tensor->device.device_id;
        *words++ = FK_FFI_TENSOR | (int64_t)(tensor->strides != NULL) << 2 | (int64_t)tensor->ndim << 3 |
                   (int64_t)(tensor->device.device_id & 0xFF) << 8 | (int64_t)(tensor->device.device_type & 0xFF) << 16 |
                   (int64_t)tensor->dtype.code << 24 | (int64_t)tensor->dtype.bits << 32 | (int64_t)tensor->dtype.lanes << 40;
        *words++ = (int64_t)fk_ffi_address(tensor);
        hash = (hash ^ fk_ffi_address(tensor) ^ (uint64_t)(tensor->ndim > 0 ? tensor->shape[0] : 0)) * FK_FFI_MIX;
        for (axis = 0; axis < tensor->ndim; ++axis) *words++ = tensor->shape[axis];
        for (axis = 0; tensor->strides != NULL && axis < tensor->ndim; ++axis) *words++ = tensor->strides[axis];
    }
    call->count = (size_t)(words - call->words);
    call->slot = (size_t)(hash >> 32) % FK_FFI_CALLS;
    return FUSEKIT_OK;
}

/* A tensor of that rank and type, by its number in DTYPES, on the call's device. */
static fusekit_status fk_ffi_tensor(const fk_ffi_call *call, int64_t index, const char *name, int64_t dtype, int64_t rank,
                                    fusekit_error *error) {
    const DLTensor *tensor = index < call->given ? call->tensors[index] : NULL;
    const fk_dlpack *wanted = &fk_dlpack_types[dtype];
    const char *title = call->function->name;
    if (tensor == NULL)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is missing; it is argument %lld, a tensor of rank %lld",
                       title, name, (long long)index, (long long)rank);
    if (tensor->device.device_type != kDLCUDA && tensor->device.device_type != kDLCUDAManaged)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is on a device of DLPack's type %d; it must be on CUDA's, %d",
                       title, name, (int)tensor->device.device_type, (int)kDLCUDA);
    if (tensor->device.device_id != call->device)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is on device %d; it must be on device %d, where the first"
                       " tensor is", title, name, (int)tensor->device.device_id, call->device);
    if (tensor->ndim != rank)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has rank %d; it must have rank %lld", title, name,
                       (int)tensor->ndim, (long long)rank);
    if ((tensor->dtype.code != wanted->code || tensor->dtype.bits != wanted->bits || tensor->dtype.lanes != wanted->lanes) &&
        (wanted->lanes == 1 || tensor->dtype.code != kDLUInt || tensor->dtype.bits != 8 || tensor->dtype.lanes != 1))
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s has DLPack's dtype (%d, %d, %d); it must be %s, (%d, %d, %d)",
                       title, name, (int)tensor->dtype.code, (int)tensor->dtype.bits, (int)tensor->dtype.lanes, wanted->name,
                       wanted->code, wanted->bits, wanted->lanes);
    return FUSEKIT_OK;
}

/* A number, `fallback` where it is left out. */
static fusekit_status fk_ffi_number(const fk_ffi_call *call, int64_t index, const char *name, int whole, double fallback,
                                    double *number, fusekit_error *error) {
    const TVMFFIAny *value = index < call->given ? &call->args[index] : NULL;
    *number = fallback;
    if (value == NULL || value->type_index == kTVMFFINone) return FUSEKIT_OK;
    if (value->type_index == kTVMFFIInt || value->type_index == kTVMFFIBool)
        *number = (double)value->v_int64;
    else if (value->type_index == kTVMFFIFloat)
        *number = value->v_float64;
    if ((value->type_index == kTVMFFIFloat && !whole) ||
        ((value->type_index == kTVMFFIInt || value->type_index == kTVMFFIBool) && *number >= INT32_MIN && *number <= INT32_MAX))
        return FUSEKIT_OK;
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s is argument %lld; it must be %s, or None", call->function->name,
                   name, (long long)index, whole ? "an integer of 32 bits" : "a number");
}

static fusekit_status fk_ffi_no_more(const fk_ffi_call *call, int64_t most, fusekit_error *error) {
    if (call->given <= most) return FUSEKIT_OK;
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %d arguments; it takes at most %lld", call->function->name,
                   (int)call->given, (long long)most);
}

/* ---- Kernels: the record's arguments, then the cluster margin. */

static fusekit_status fk_ffi_bind_kernel(const fk_kernel *kernel, const fk_ffi_call *call, fk_ffi_kept *kept,
                                         fusekit_error *error) {
    const fk_record *record = kernel->record;
    int64_t dims[FK_MOST_VARIABLES] = {0}, integers[FK_MOST_SCALARS], index;
    uint64_t addresses[FK_MOST_TENSORS];
    double floats[FK_MOST_SCALARS];
    fk_given given[FK_MOST_TENSORS];
    int integer_count = 0, float_count = 0;
    fk_call packed;
    double value;
    fusekit_status status = fk_ffi_no_more(call, record->argument_count + 1, error);
    for (index = 0; index < record->argument_count && status == FUSEKIT_OK; ++index) {
        const fk_argument *argument = &record->arguments[index];
        int64_t tensor = argument->tensor;
        if (tensor >= 0) {
            status = fk_ffi_tensor(call, index, argument->name, argument->dtype, record->tensors[tensor].rank, error);
            if (status != FUSEKIT_OK) return status;
            given[tensor].shape = call->tensors[index]->shape;
            given[tensor].strides = call->tensors[index]->strides;
            addresses[tensor] = fk_ffi_address(call->tensors[index]);
            continue;
        }
        memcpy(&value, &argument->default_bits, sizeof value);
        if (!argument->has_default && (index >= call->given || call->args[index].type_index == kTVMFFINone))
            return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s must be set; it is argument %lld", call->function->name,
                           argument->name, (long long)index);
        if (argument->dtype == FK_TYPE_I64 && index < call->given && call->args[index].type_index == kTVMFFIInt) {
            integers[integer_count++] = call->args[index].v_int64;
            continue;
        }
        status = fk_ffi_number(call, index, argument->name, fk_is_whole(argument->dtype), value, &value, error);
        if (fk_is_whole(argument->dtype))
            integers[integer_count++] = (int64_t)value;
        else
            floats[float_count++] = fk_scalar(argument->dtype, value);
    }
    if (status == FUSEKIT_OK)
        status = fk_ffi_number(call, index, "cluster_margin", 1, (double)record->margin, &value, error);
    if (status != FUSEKIT_OK) return status;
    fk_take_dims(record, given, dims);
    memset(&packed, 0, sizeof packed);
    packed.dims = dims;
    packed.given = given;
    packed.addresses = addresses;
    packed.integers = integers;
    packed.floats = floats;
    packed.margin = (int64_t)value;
    return fk_bind(kernel, &packed, &kept->launch, error);
}
