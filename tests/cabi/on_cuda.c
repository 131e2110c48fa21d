/* TVM-FFI functions that hand tensors of the host on as tensors of a CUDA device, for a stand-in driver. */
#include <tvm/ffi/c_api.h>

static TVMFFIObjectHandle target;

int __tvm_ffi_empty(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    (void)self, (void)args, (void)count, (void)result;
    return 0;
}

/* The function that on_cuda calls. */
int __tvm_ffi_aim(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    (void)self, (void)count, (void)result;
    target = args[0].v_obj;
    return TVMFFIObjectIncRef(target);
}

int __tvm_ffi_on_cuda(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    DLTensor tensors[64];
    TVMFFIAny changed[64];
    int32_t index;
    (void)self;
    for (index = 0; index < count; ++index) {
        changed[index] = args[index];
        if (args[index].type_index == kTVMFFITensor)
            tensors[index] = *(DLTensor *)((char *)args[index].v_ptr + sizeof(TVMFFIObject));
        else if (args[index].type_index == kTVMFFIDLTensorPtr)
            tensors[index] = *(DLTensor *)args[index].v_ptr;
        else
            continue;
        if (tensors[index].dtype.code != kDLInt || tensors[index].dtype.bits != 64) /* those of ranks are of the host */
            tensors[index].device.device_type = kDLCUDA;
        changed[index].type_index = kTVMFFIDLTensorPtr;
        changed[index].v_ptr = &tensors[index];
    }
    return TVMFFIFunctionCall(target, changed, count, result);
}
