// A layer from Rust, through the C ABI of TVM-FFI:
//     fusekit export --lang tvm-ffi build/libmoe.so layer/moe
//     rustc --edition 2021 -O -L build -L $(tvm-ffi-config --libdir) examples/rust/layer_tvm_ffi.rs
//     LD_LIBRARY_PATH=build:$(tvm-ffi-config --libdir) ./layer_tvm_ffi
use std::{ffi::{c_char, c_int, c_void, CStr}, mem::{transmute_copy, zeroed}, ptr::null_mut};
type Ptr = *mut c_void;
#[repr(C)] #[derive(Clone, Copy)] struct Any { kind: i32, padding: u32, value: u64 } // TVMFFIAny
#[repr(C)] struct Tensor { // DLTensor
    data: Ptr, device: [i32; 2], rank: i32, dtype: (u8, u8, u16), shape: *const i64, strides: *const i64, offset: u64,
}
const INT: i32 = 1;
const TENSOR: i32 = 7; // a DLTensor *
#[link(name = "moe")] extern "C" {
    fn __tvm_ffi_layer_moe_inference(own: Ptr, args: *const Any, count: i32, result: *mut Any) -> c_int;
    fn __tvm_ffi_layer_moe_inference_bytes(own: Ptr, args: *const Any, count: i32, result: *mut Any) -> c_int;
}
#[link(name = "tvm_ffi")] extern "C" { fn TVMFFIErrorMoveFromRaised(error: *mut Ptr); }
extern "C" { fn dlopen(file: *const c_char, flags: c_int) -> Ptr; fn dlsym(library: Ptr, name: *const c_char) -> Ptr; }
fn main() { unsafe {
    let check = |status: c_int| if status != 0 {
        let mut error = null_mut(); // an object: a header of 24 bytes, then the kind and the message, pointer and size each
        TVMFFIErrorMoveFromRaised(&mut error);
        let message = *(error.byte_add(24 + 16) as *const *const c_char);
        eprintln!("{}", CStr::from_ptr(message).to_string_lossy());
        std::process::exit(1);
    };
    let library = dlopen(c"libcuda.so.1".as_ptr(), 2);
    if library.is_null() { eprintln!("no NVIDIA driver"); std::process::exit(2); }
    let cuda = |name: &CStr| dlsym(library, name.as_ptr());
    let init: extern "C" fn(u32) -> c_int = transmute_copy(&cuda(c"cuInit"));
    let retain: extern "C" fn(*mut Ptr, c_int) -> c_int = transmute_copy(&cuda(c"cuDevicePrimaryCtxRetain"));
    let current: extern "C" fn(Ptr) -> c_int = transmute_copy(&cuda(c"cuCtxSetCurrent"));
    let allocate: extern "C" fn(*mut Ptr, usize) -> c_int = transmute_copy(&cuda(c"cuMemAlloc_v2"));
    let fill: extern "C" fn(Ptr, u16, usize) -> c_int = transmute_copy(&cuda(c"cuMemsetD16_v2"));
    let read: extern "C" fn(*mut u16, Ptr, usize) -> c_int = transmute_copy(&cuda(c"cuMemcpyDtoH_v2"));
    let mut context = null_mut();
    assert_eq!(init(0) + retain(&mut context, 0) + current(context), 0);
    let tensor = |shape: &'static [i64], bits: u16, dtype: (u8, u8, u16)| { // all of one value
        let (bytes, mut data) = (shape.iter().product::<i64>() as usize * dtype.1 as usize / 8, null_mut());
        assert_eq!(allocate(&mut data, bytes) + fill(data, bits, bytes / 2), 0);
        Tensor { data, device: [2, 0], rank: shape.len() as i32, dtype, shape: shape.as_ptr(), strides: null_mut(), offset: 0 }
    };
    let mut bytes: Any = zeroed();
    check(__tvm_ffi_layer_moe_inference_bytes(null_mut(), &Any { kind: INT, padding: 0, value: 1000 }, 1, &mut bytes));
    let bf16 = (4, 16, 1);
    let tensors = [tensor(&[1000, 512], 0x3F80, bf16), tensor(&[8, 512], 0, bf16), tensor(&[8, 512, 512], 0x3C00, bf16),
        tensor(&[8, 512, 256], 0x3C00, bf16), tensor(&[1000, 512], 0, bf16), // x, router, w1, w2, y
        tensor(Box::leak(Box::new([bytes.value as i64])), 0, (1, 8, 1))]; // scratch memory
    let args: Vec<Any> = tensors.iter().map(|each| Any { kind: TENSOR, padding: 0, value: each as *const Tensor as u64 }).collect();
    check(__tvm_ffi_layer_moe_inference(null_mut(), args.as_ptr(), 6, &mut zeroed()));
    let mut y = [0u16; 4];
    assert_eq!(read(y.as_mut_ptr(), tensors[4].data, 8), 0); // which waits for the launches
    println!("y begins with {:?}", y.map(|bits| f32::from_bits((bits as u32) << 16)));
} }
