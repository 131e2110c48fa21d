/* ---- TVM-FFI functions. Tensors come first, in the record's order; what is left out at the end counts as None. A function
 * keeps the launches of the calls that it saw, so a call with the same tensors again is neither checked nor packed. */
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

enum {
    FK_FFI_DEVICES = 64,
    FK_FFI_CALLS = 64,    /* that a function keeps */
    FK_FFI_ARGUMENTS = 96,
    FK_FFI_WORDS = FK_FFI_ARGUMENTS * (2 + 2 * FK_MOST_RANK),
    FK_FFI_NONE = 0,      /* what an argument is, in the lowest bits of its first word */
    FK_FFI_TENSOR = 1,
    FK_FFI_INTEGER = 2,
    FK_FFI_NUMBER = 3,
    FK_FFI_KEPT_BYTES = -1 /* instead of a pass */
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
    int64_t pass; /* -1 for a kernel */
    pthread_mutex_t lock;
    fk_ffi_kept calls[FK_FFI_CALLS];
} fk_ffi_function;

typedef struct {
    fk_ffi_function *function;
    const TVMFFIAny *args;
    int32_t given;
    int device; /* of the first tensor; -1: there is none */
    const DLTensor *tensors[FK_FFI_ARGUMENTS]; /* NULL: it is no tensor */
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

static int fk_ffi_count(const TVMFFIAny *args, int32_t count, const char *name, const char *what, int64_t most,
                        int64_t *value) {
    fusekit_error error;
    if (count == 1 && args[0].type_index == kTVMFFIInt && args[0].v_int64 >= 0 && args[0].v_int64 <= most) {
        *value = args[0].v_int64;
        return 0;
    }
    fk_fail(&error, FUSEKIT_INVALID_ARGUMENT, "%s takes one argument, %s from 0 to %lld", name, what, (long long)most);
    return fk_ffi_raise(&error);
}

static int fk_ffi_prepare(fk_ffi_item *items, size_t item_count, const TVMFFIAny *args, int32_t count) {
    fusekit_error error;
    int64_t device;
    size_t index;
    void *loaded;
    if (fk_ffi_count(args, count, "prepare", "a device", FK_FFI_DEVICES - 1, &device) != 0) return -1;
    for (index = 0; index < item_count; ++index)
        if (fk_ffi_load(&items[index], (int)device, &loaded, &error) != FUSEKIT_OK) return fk_ffi_raise(&error);
    return 0;
}

/* Bytes of memory of a layer for at most so many tokens. */
static int fk_ffi_bytes(fk_ffi_item *item, int64_t which, const char *name, const TVMFFIAny *args, int32_t count,
                        TVMFFIAny *result) {
    fusekit_status status = FUSEKIT_OK;
    fusekit_error error;
    fusekit_sizes sizes;
    int64_t tokens;
    if (fk_ffi_count(args, count, name, "the number of tokens", INT32_MAX, &tokens) != 0) return -1;
    pthread_mutex_lock(&fk_ffi_lock);
    if (item->layer == NULL) status = fk_read_layer(item->source, item->title, &item->layer, &error);
    pthread_mutex_unlock(&fk_ffi_lock);
    if (status == FUSEKIT_OK) status = fk_layer_sizes(item->layer, tokens, NULL, &sizes, &error);
    if (status != FUSEKIT_OK) return fk_ffi_raise(&error);
    result->type_index = kTVMFFIInt;
    result->zero_padding = 0;
    result->v_int64 = (int64_t)(which == FK_FFI_KEPT_BYTES     ? sizes.kept
                                : which == FK_PASS_FORWARD   ? sizes.forward
                                : which == FK_PASS_INFERENCE ? sizes.inference
                                                             : sizes.backward);
    return 0;
}

/* ---- Reading a call. */

static uint64_t fk_ffi_address(const DLTensor *tensor) { return (uint64_t)(uintptr_t)tensor->data + tensor->byte_offset; }

#define FK_FFI_MIX UINT64_C(0x9E3779B97F4A7C15)

/* The words of a call, and its tensors. They hold all that packing reads. */
static fusekit_status fk_ffi_read(fk_ffi_call *call, fusekit_error *error) {
    int64_t *words = call->words;
    uint64_t hash = 0;
    int32_t index;
    int axis;
    call->device = -1;
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
    float floats[FK_MOST_SCALARS];
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
        status = fk_ffi_number(call, index, argument->name, argument->dtype == FK_I32, value, &value, error);
        if (argument->dtype == FK_I32)
            integers[integer_count++] = (int64_t)value;
        else
            floats[float_count++] = (float)value;
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

/* ---- Passes of layers: inputs and outputs, kept memory, scratch memory, the cluster margin, whether kept memory is
 * overwritten; less those that the pass does not have. */

/* The tokens, which some tensor has as an extent. */
static int64_t fk_ffi_tokens(const fk_layer *layer, const fk_ffi_call *call, const fk_layer_pass *pass) {
    int64_t index, tokens = -1;
    for (index = 0; index < pass->input_count && index < call->given && tokens < 0; ++index) {
        const fk_layer_buffer *buffer = &layer->buffers[pass->inputs[index].index];
        if (call->tensors[index] != NULL && call->tensors[index]->ndim == buffer->rank)
            tokens = fk_tokens_of(buffer, call->tensors[index]->shape);
    }
    return tokens < 0 ? 0 : tokens;
}

static fusekit_status fk_ffi_take_buffer(const fk_layer *layer, const fk_ffi_call *call, int64_t index, int64_t number,
                                         const fk_layer_plan *plan, fk_layer_call *taken, fusekit_error *error) {
    const fk_layer_buffer *buffer = &layer->buffers[number];
    const DLTensor *tensor = index < call->given ? call->tensors[index] : NULL;
    fusekit_status status;
    if (index >= call->given || call->args[index].type_index == kTVMFFINone) return FUSEKIT_OK;
    status = fk_ffi_tensor(call, index, buffer->name, buffer->dtype, buffer->rank, error);
    if (status != FUSEKIT_OK) return status;
    return fk_take_buffer(layer, number, tensor->shape, tensor->strides, fk_ffi_address(tensor), plan, taken, error);
}

/* Memory that the caller gives as a tensor of bytes; none where it is left out. */
static fusekit_status fk_ffi_memory(const fk_ffi_call *call, int64_t index, const char *name, fusekit_memory *memory,
                                    fusekit_error *error) {
    const DLTensor *tensor = index < call->given ? call->tensors[index] : NULL;
    fusekit_status status;
    if (index >= call->given || call->args[index].type_index == kTVMFFINone) return FUSEKIT_OK;
    status = fk_ffi_tensor(call, index, name, FK_U8, 1, error);
    if (status == FUSEKIT_OK && tensor->strides != NULL && tensor->shape[0] > 1 && tensor->strides[0] != 1)
        status = fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s must be contiguous", call->function->name, name);
    if (status != FUSEKIT_OK) return status;
    memory->data = (void *)(uintptr_t)fk_ffi_address(tensor);
    memory->bytes = (size_t)tensor->shape[0];
    return FUSEKIT_OK;
}

/* scratch: the environment's, once its size is known. */
static fusekit_status fk_ffi_bind_pass(const fk_loaded_layer *loaded, const fk_ffi_call *call, void *scratch,
                                       fk_ffi_kept *kept, fusekit_error *error) {
    const fk_layer *layer = loaded->record;
    const int64_t which = call->function->pass;
    const fk_layer_pass *pass = &layer->passes[which];
    const int has_kept = which == FK_PASS_FORWARD || which == FK_PASS_BACKWARD, has_scratch = which != FK_PASS_QUANTISE;
    int64_t index, at = pass->input_count + pass->output_count;
    fk_layer_call taken;
    fk_layer_plan plan;
    double margin = -1, in_place = 0;
    fusekit_status status;
    memset(&taken, 0, sizeof taken);
    taken.tokens = fk_ffi_tokens(layer, call, pass);
    status = fk_extents(layer, taken.tokens, &plan, error);
    for (index = 0; index < at && status == FUSEKIT_OK; ++index)
        status = fk_ffi_take_buffer(layer, call, index,
                                    index < pass->input_count ? pass->inputs[index].index
                                                              : pass->outputs[index - pass->input_count].index,
                                    &plan, &taken, error);
    if (status == FUSEKIT_OK && has_kept) status = fk_ffi_memory(call, at++, "kept", &taken.kept, error);
    if (status == FUSEKIT_OK && has_scratch) status = fk_ffi_memory(call, at++, "scratch", &taken.scratch, error);
    if (status == FUSEKIT_OK && has_scratch) status = fk_ffi_number(call, at++, "cluster_margin", 1, -1, &margin, error);
    if (status == FUSEKIT_OK && which == FK_PASS_BACKWARD)
        status = fk_ffi_number(call, at++, "in_place", 1, 0, &in_place, error);
    if (status == FUSEKIT_OK) status = fk_ffi_no_more(call, at, error);
    if (status != FUSEKIT_OK) return status;
    taken.settings.has_cluster_margin = margin >= 0;
    taken.settings.cluster_margin = (int32_t)margin;
    taken.settings.in_place = in_place != 0;
    status = fk_plan_pass(layer, which, &taken, &plan, error);
    if (status != FUSEKIT_OK) return status;
    kept->scratch_bytes = taken.scratch.data == NULL ? plan.scratch_bytes : 0;
    kept->scratch = scratch;
    if (kept->scratch_bytes > 0) {
        if (scratch == NULL) /* what is wrong with kept memory is known before the environment is asked */
            return has_kept ? fk_check_memory(layer, "kept", &taken.kept, plan.kept_bytes, error) : FUSEKIT_OK;
        taken.scratch.data = scratch;
        taken.scratch.bytes = (size_t)kept->scratch_bytes;
    }
    return fk_bind_planned(loaded, which, &taken, &plan, &kept->pass, error);
}

/* ---- Calls. */

static void fk_ffi_forget(fk_ffi_kept *kept) {
    free(kept->words);
    fusekit_launch_free(kept->launch);
    fusekit_pass_free(kept->pass);
    memset(kept, 0, sizeof *kept);
}

/* What the function keeps of the call, with its lock held. scratch: as for fk_ffi_bind_pass. */
static fusekit_status fk_ffi_find(const fk_ffi_call *call, void *scratch, fk_ffi_kept **found, fusekit_error *error) {
    fk_ffi_kept *kept = *found = &call->function->calls[call->slot];
    size_t bytes = call->count * sizeof(int64_t);
    fusekit_status status;
    void *loaded;
    if (kept->words != NULL && kept->count == call->count && memcmp(kept->words, call->words, bytes) == 0 &&
        (scratch == NULL || kept->scratch == scratch))
        return FUSEKIT_OK;
    if (call->device < 0)
        return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: no tensor is given; it takes those of a CUDA device",
                       call->function->name);
    status = fk_ffi_load(call->function->item, call->device, &loaded, error);
    if (status != FUSEKIT_OK) return status;
    fk_ffi_forget(kept);
    status = call->function->pass < 0 ? fk_ffi_bind_kernel((const fk_kernel *)loaded, call, kept, error)
                                      : fk_ffi_bind_pass((const fk_loaded_layer *)loaded, call, scratch, kept, error);
    if (status == FUSEKIT_OK && (kept->words = (int64_t *)malloc(bytes)) == NULL)
        status = fk_fail(error, FUSEKIT_OUT_OF_MEMORY, "%s: no memory for a call", call->function->name);
    if (status != FUSEKIT_OK) {
        fk_ffi_forget(kept);
        return status;
    }
    memcpy(kept->words, call->words, bytes);
    kept->count = call->count;
    return FUSEKIT_OK;
}

/* So many bytes of the environment, for as long as the object lives. */
static int fk_ffi_allocate(int device, int64_t bytes, TVMFFIObjectHandle *object, void **data) {
    DLTensor wanted;
    const DLTensor *tensor;
    memset(&wanted, 0, sizeof wanted);
    wanted.device.device_type = kDLCUDA;
    wanted.device.device_id = device;
    wanted.ndim = 1;
    wanted.dtype.code = kDLUInt;
    wanted.dtype.bits = 8;
    wanted.dtype.lanes = 1;
    wanted.shape = &bytes;
    if (TVMFFIEnvTensorAlloc(&wanted, object) != 0) return -1;
    tensor = (const DLTensor *)(const void *)((const char *)*object + sizeof(TVMFFIObject));
    *data = (void *)(uintptr_t)fk_ffi_address(tensor);
    return 0;
}

static int fk_ffi_run(fk_ffi_function *function, const TVMFFIAny *args, int32_t given) {
    TVMFFIObjectHandle object = NULL;
    void *scratch = NULL, *stream;
    int64_t bytes = 0;
    fk_ffi_kept *kept;
    fk_ffi_call call;
    fusekit_error error;
    fusekit_status status;
    call.function = function;
    call.args = args;
    call.given = given;
    status = fk_ffi_read(&call, &error);
    if (status != FUSEKIT_OK) return fk_ffi_raise(&error);
    stream = TVMFFIEnvGetStream(kDLCUDA, call.device);
    pthread_mutex_lock(&function->lock);
    for (;;) {
        status = fk_ffi_find(&call, scratch, &kept, &error);
        if (status != FUSEKIT_OK || kept->scratch_bytes == 0 || scratch != NULL) break;
        bytes = kept->scratch_bytes;
        /* An allocator may wait for a lock that another caller of this function holds, as Python's. */
        pthread_mutex_unlock(&function->lock);
        if (fk_ffi_allocate(call.device, bytes, &object, &scratch) != 0) return -1;
        pthread_mutex_lock(&function->lock);
    }
    if (status == FUSEKIT_OK)
        status = kept->launch != NULL ? fusekit_launch_run(kept->launch, stream, &error)
                                      : fusekit_pass_run(kept->pass, stream, &error);
    pthread_mutex_unlock(&function->lock);
    if (object != NULL) TVMFFIObjectDecRef(object);
    return status == FUSEKIT_OK ? 0 : fk_ffi_raise(&error);
}

#define FK_FFI_SYMBOL(symbol)                                                                                          \
    __attribute__((visibility("default"))) int __tvm_ffi_##symbol(void *self, const TVMFFIAny *args, int32_t count,      \
                                                                  TVMFFIAny *result);                                  \
    int __tvm_ffi_##symbol(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)
#define FK_FFI_FUNCTION(symbol, number)                                                                                \
    FK_FFI_SYMBOL(symbol) { (void)self; (void)result; return fk_ffi_run(&fk_ffi_functions[number], args, count); }
#define FK_FFI_BYTES(symbol, number, which)                                                                            \
    FK_FFI_SYMBOL(symbol) { (void)self; return fk_ffi_bytes(&fk_ffi_items[number], which, #symbol, args, count, result); }
