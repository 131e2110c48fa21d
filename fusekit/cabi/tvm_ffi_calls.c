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
