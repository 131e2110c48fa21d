// A C++17 program that runs GPT-OSS's fc1 through a bound launch, without Python, fusekit or the CUDA toolkit.
//
//     fusekit export --lang c build gpt-oss-20b/fc1-fwd --prefix moe
//     g++ -std=c++17 -O2 -Ibuild examples/c/fc1.cpp -x c++ build/moe.c -ldl -o fc1
//     ./fc1 FOLDER E M H I            (files as in fc1.c)
#include "moe.h"

#include <dlfcn.h>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Driver functions that the program needs for itself, by name.
class Cuda {
  public:
    Cuda() : handle_(dlopen("libcuda.so.1", RTLD_NOW)) {
        if (handle_ == nullptr) throw std::runtime_error("no libcuda.so.1");
    }

    template <class... Arguments> void operator()(const char *name, Arguments... arguments) const {
        auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(handle_, name));
        if (function == nullptr) throw std::runtime_error(std::string("libcuda has no ") + name);
        if (int result = function(arguments...); result != 0)
            throw std::runtime_error(std::string(name) + ": " + std::to_string(result));
    }

  private:
    void *handle_;
};

void check(moe_status status, const moe_error &error) {
    if (status != MOE_OK) throw std::runtime_error(error.text);
}

class Memory {
  public:
    Memory(const Cuda &cuda, std::size_t size) : cuda_(cuda), size_(size) {
        cuda_("cuMemAlloc_v2", &address_, size_);
    }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() {
        try {
            cuda_("cuMemFree_v2", address_);
        } catch (const std::exception &error) {
            std::cerr << error.what() << '\n';
        }
    }

    Memory &read(const std::string &path) {
        std::vector<char> data(size_);
        if (!std::ifstream(path, std::ios::binary).read(data.data(), static_cast<std::streamsize>(size_)))
            throw std::runtime_error(path + " is too short");
        cuda_("cuMemcpyHtoD_v2", address_, static_cast<const void *>(data.data()), size_);
        return *this;
    }

    void write(const std::string &path) const {
        std::vector<char> data(size_);
        cuda_("cuMemcpyDtoH_v2", static_cast<void *>(data.data()), address_, size_);
        std::ofstream(path, std::ios::binary).write(data.data(), static_cast<std::streamsize>(size_));
    }

    void *pointer() const { return reinterpret_cast<void *>(static_cast<std::uintptr_t>(address_)); }

  private:
    const Cuda &cuda_;
    std::size_t size_;
    unsigned long long address_ = 0;
};

void run(const std::string &folder, std::size_t e, std::size_t m, std::size_t h, std::size_t i) {
    moe_error error;
    moe_driver *opened = nullptr;
    check(moe_driver_open(&opened, &error), error);
    std::unique_ptr<moe_driver, void (*)(moe_driver *)> driver(opened, moe_driver_close);

    Cuda cuda;
    void *context = nullptr, *stream = nullptr;
    cuda("cuDevicePrimaryCtxRetain", &context, 0);
    cuda("cuCtxSetCurrent", context);
    cuda("cuStreamCreate", &stream, 1u);

    moe_gpt_oss_20b_fc1_fwd *loaded = nullptr;
    check(moe_gpt_oss_20b_fc1_fwd_load(driver.get(), 0, &loaded, &error), error);
    auto unload = [](moe_gpt_oss_20b_fc1_fwd *kernel) { moe_gpt_oss_20b_fc1_fwd_unload(kernel, nullptr); };
    std::unique_ptr<moe_gpt_oss_20b_fc1_fwd, decltype(unload)> kernel(loaded, unload);

    Memory x(cuda, 2 * m * h), w(cuda, 2 * e * 2 * i * h), bias(cuda, 2 * e * 2 * i), offsets(cuda, 4 * e);
    Memory y(cuda, 2 * m * i), preactivation(cuda, 2 * m * 2 * i);
    auto args = moe_gpt_oss_20b_fc1_fwd_defaults();
    args.m = static_cast<std::int64_t>(m), args.e = static_cast<std::int64_t>(e);
    args.k = static_cast<std::int64_t>(h), args.i = static_cast<std::int64_t>(i);
    args.x = x.read(folder + "/x.bin").pointer();
    args.w = w.read(folder + "/w.bin").pointer();
    args.bias = bias.read(folder + "/bias.bin").pointer();
    args.offsets = offsets.read(folder + "/offsets.bin").pointer();
    args.y = y.pointer();
    args.preactivation = preactivation.pointer();

    moe_launch *bound = nullptr;
    check(moe_gpt_oss_20b_fc1_fwd_bind(kernel.get(), &args, &bound, &error), error);
    std::unique_ptr<moe_launch, void (*)(moe_launch *)> launch(bound, moe_launch_free);
    for (int time = 0; time < 3; ++time) check(moe_launch_run(launch.get(), stream, &error), error);
    cuda("cuStreamSynchronize", stream);
    y.write(folder + "/y.bin");
    preactivation.write(folder + "/preactivation.bin");
}

} // namespace

int main(int count, char **words) {
    if (count != 6) {
        std::cerr << "usage: fc1 FOLDER E M H I\n";
        return 2;
    }
    try {
        run(words[1], std::stoul(words[2]), std::stoul(words[3]), std::stoul(words[4]), std::stoul(words[5]));
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
    return 0;
}
