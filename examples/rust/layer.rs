// A layer from Rust, over its C export:
//     fusekit export --lang c build layer/moe --prefix moe
//     gcc -std=c11 -O2 -c build/moe.c -o build/moe.o && ar rcs build/libmoe.a build/moe.o
//     rustc --edition 2021 -O -L build -l static=moe -l dl examples/rust/layer.rs && ./layer
use std::{ffi::{c_char, c_int, CStr}, mem::{transmute, zeroed}};
#[repr(C)] struct Error { status: c_int, cuda: c_int, text: [c_char; 320] }
#[repr(C)] struct Args { // moe_layer_moe_inference_args: x, router, w1, w2, y as address and stride of rows, 0: no padding
    tokens: i64, tensors: [[usize; 2]; 5], scratch: usize, scratch_bytes: usize, settings: [i32; 3],
}
extern "C" { // handles and device pointers are addresses
    fn moe_driver_open(driver: &mut usize, error: &mut Error) -> c_int;
    fn moe_layer_moe_load(driver: usize, device: c_int, layer: &mut usize, error: &mut Error) -> c_int;
    fn moe_layer_moe_sizes(layer: usize, tokens: i64, like: usize, sizes: &mut [usize; 4], error: &mut Error) -> c_int;
    fn moe_layer_moe_inference(layer: usize, args: &Args, stream: usize, error: &mut Error) -> c_int;
    fn dlopen(file: *const c_char, flags: c_int) -> usize;
    fn dlsym(library: usize, name: *const c_char) -> usize;
}
unsafe fn cuda(name: &CStr, a: usize, b: usize, c: usize) { // a function of the driver
    let function = dlsym(dlopen(c"libcuda.so.1".as_ptr(), 2), name.as_ptr());
    assert_eq!(transmute::<usize, extern "C" fn(usize, usize, usize) -> c_int>(function)(a, b, c), 0, "{name:?}");
}
unsafe fn new(name: &CStr, b: usize) -> usize { let mut out = 0; cuda(name, &raw mut out as usize, b, 0); out }
fn main() { unsafe {
    let (mut error, mut driver, mut layer, mut sizes, mut y) = (zeroed::<Error>(), 0, 0, [0; 4], [0u16; 4]);
    let check = |status, error: &Error| assert_eq!(status, 0, "{:?}", CStr::from_ptr(error.text.as_ptr()));
    check(moe_driver_open(&mut driver, &mut error), &error);
    check(moe_layer_moe_load(driver, 0, &mut layer, &mut error), &error);
    check(moe_layer_moe_sizes(layer, 1000, 0, &mut sizes, &mut error), &error); // [2]: scratch memory of an inference
    cuda(c"cuCtxSetCurrent", new(c"cuDevicePrimaryCtxRetain", 0), 0, 0);
    let (same, out) = (new(c"cuMemAlloc_v2", 2 * 8 * 512 * 512), new(c"cuMemAlloc_v2", 2 * 1000 * 512));
    cuda(c"cuMemsetD16_v2", same, 0x3C00, 8 * 512 * 512); // all inputs are one memory here, of bf16 values 2**-7
    let (tensors, scratch) = ([[same, 0], [same, 0], [same, 0], [same, 0], [out, 0]], new(c"cuMemAlloc_v2", sizes[2]));
    let args = Args { tokens: 1000, tensors, scratch, scratch_bytes: sizes[2], settings: [0; 3] };
    check(moe_layer_moe_inference(layer, &args, 0, &mut error), &error);
    cuda(c"cuMemcpyDtoH_v2", y.as_mut_ptr() as usize, out, 8); // which waits for the launches
    println!("y begins with {:?}", y.map(|bits| f32::from_bits((bits as u32) << 16)));
} }
