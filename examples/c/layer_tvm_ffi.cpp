// A layer from C++, through TVM-FFI:
//     fusekit export --lang tvm-ffi build/moe.so layer/moe
//     g++ -std=c++17 -O2 $(tvm-ffi-config --cxxflags) examples/c/layer_tvm_ffi.cpp $(tvm-ffi-config --ldflags --libs) -ldl -o layer
//     LD_LIBRARY_PATH=$(tvm-ffi-config --libdir) ./layer build/moe.so
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace ffi = tvm::ffi;

template <class Function> Function *cuda(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *symbol = library ? dlsym(library, name) : nullptr;
    if (!symbol) std::fprintf(stderr, "no NVIDIA driver\n"), std::exit(2);
    return reinterpret_cast<Function *>(symbol);
}

void *allocate(size_t bytes, unsigned short bits = 0) { // bf16, all of one value
    void *data = nullptr;
    if (cuda<int(void **, size_t)>("cuMemAlloc_v2")(&data, bytes) ||
        cuda<int(void *, unsigned short, size_t)>("cuMemsetD16_v2")(data, bits, bytes / 2))
        std::fprintf(stderr, "no device memory\n"), std::exit(1);
    return data;
}

struct Tensor : DLTensor {
    std::vector<int64_t> extents;
    Tensor(std::vector<int64_t> shape_, unsigned short bits) : DLTensor{}, extents(std::move(shape_)) {
        size_t bytes = 2;
        for (int64_t extent : extents) bytes *= static_cast<size_t>(extent);
        data = allocate(bytes, bits), device = {kDLCUDA, 0}, ndim = static_cast<int>(extents.size());
        dtype = {kDLBfloat, 16, 1}, shape = extents.data();
    }
};

// Scratch memory comes from here; a framework has its own allocator, and sets it.
int scratch(DLTensor *wanted, DLManagedTensorVersioned **out, void *, void (*)(void *, const char *, const char *)) {
    auto *managed = new DLManagedTensorVersioned{};
    managed->version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    managed->dl_tensor = *wanted;
    managed->dl_tensor.shape = new int64_t[1]{wanted->shape[0]};
    managed->dl_tensor.strides = new int64_t[1]{1};
    managed->dl_tensor.data = allocate(static_cast<size_t>(wanted->shape[0]));
    managed->deleter = [](DLManagedTensorVersioned *self) { // after the launches: cuMemFree waits for them
        cuda<int(void *)>("cuMemFree_v2")(self->dl_tensor.data);
        delete[] self->dl_tensor.shape, delete[] self->dl_tensor.strides, delete self;
    };
    *out = managed;
    return 0;
}

int main(int, char **words) try {
    void *context = nullptr;
    cuda<int(unsigned)>("cuInit")(0);
    if (cuda<int(void **, int)>("cuDevicePrimaryCtxRetain")(&context, 0) || cuda<int(void *)>("cuCtxSetCurrent")(context))
        return 1;
    ffi::Module moe = ffi::Module::LoadFromFile(words[1]);
    TVMFFIEnvSetDLPackManagedTensorAllocator(scratch, 0, nullptr);
    Tensor x({1000, 512}, 0x3F80), router({8, 512}, 0), w1({8, 512, 512}, 0x3C00), w2({8, 512, 256}, 0x3C00), y({1000, 512}, 0);
    auto at = [](Tensor &tensor) { return static_cast<DLTensor *>(&tensor); };
    (*moe->GetFunction("layer_moe_inference"))(at(x), at(router), at(w1), at(w2), at(y));
    unsigned short bits[4];
    if (cuda<int(void *, void *, size_t)>("cuMemcpyDtoH_v2")(bits, y.data, sizeof bits)) return 1; // waits for the launches
    std::printf("y begins with %#x %#x %#x %#x\n", bits[0], bits[1], bits[2], bits[3]);
    return 0;
} catch (const ffi::Error &error) {
    std::fprintf(stderr, "%s\n", error.message().c_str());
    return 1;
}
