// A layer from Rust, over its C export:
//     fusekit export --lang c build layer/moe --prefix moe
//     gcc -std=c11 -O2 -c build/moe.c -o build/moe.o && ar rcs build/libmoe.a build/moe.o
//     rustc --edition 2021 -O -L build -l static=moe -l dl examples/rust/layer.rs && ./layer
use std::{ffi::{c_char, c_int, c_void, CStr}, mem::transmute_copy, ptr::{null, null_mut}};
type Ptr = *mut c_void;
#[repr(C)] struct Error { status: c_int, cuda: c_int, text: [c_char; 320] }
#[repr(C)] struct Memory { data: Ptr, bytes: usize }
#[repr(C)] struct Tensor { data: Ptr, stride0: i64 } // of its rows; 0: without padding
#[repr(C)] #[derive(Default)] struct Sizes { kept: usize, forward: usize, inference: usize, backward: usize }
#[repr(C)] struct Args { // moe_layer_moe_inference_args
    tokens: i64, x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, y: Tensor, scratch: Memory, settings: [i32; 3],
}
extern "C" {
    fn moe_driver_open(driver: *mut Ptr, error: *mut Error) -> c_int;
    fn moe_layer_moe_load(driver: Ptr, device: c_int, layer: *mut Ptr, error: *mut Error) -> c_int;
    fn moe_layer_moe_sizes(layer: Ptr, tokens: i64, like: *const Args, sizes: *mut Sizes, error: *mut Error) -> c_int;
    fn moe_layer_moe_inference(layer: Ptr, args: *const Args, stream: Ptr, error: *mut Error) -> c_int;
    fn dlopen(file: *const c_char, flags: c_int) -> Ptr;
    fn dlsym(library: Ptr, name: *const c_char) -> Ptr;
}
fn main() { unsafe {
    let mut error = Error { status: 0, cuda: 0, text: [0; 320] };
    let check = |status: c_int, error: &Error| if status != 0 {
        eprintln!("{}", CStr::from_ptr(error.text.as_ptr()).to_string_lossy());
        std::process::exit(status);
    };
    let (tokens, mut driver, mut layer, mut sizes) = (1000, null_mut(), null_mut(), Sizes::default());
    check(moe_driver_open(&mut driver, &mut error), &error);
    check(moe_layer_moe_load(driver, 0, &mut layer, &mut error), &error);
    check(moe_layer_moe_sizes(layer, tokens, null(), &mut sizes, &mut error), &error);
    let cuda = |name: &CStr| dlsym(dlopen(c"libcuda.so.1".as_ptr(), 2), name.as_ptr());
    let retain: extern "C" fn(*mut Ptr, c_int) -> c_int = transmute_copy(&cuda(c"cuDevicePrimaryCtxRetain"));
    let current: extern "C" fn(Ptr) -> c_int = transmute_copy(&cuda(c"cuCtxSetCurrent"));
    let allocate: extern "C" fn(*mut Ptr, usize) -> c_int = transmute_copy(&cuda(c"cuMemAlloc_v2"));
    let fill: extern "C" fn(Ptr, u16, usize) -> c_int = transmute_copy(&cuda(c"cuMemsetD16_v2"));
    let read: extern "C" fn(*mut u16, Ptr, usize) -> c_int = transmute_copy(&cuda(c"cuMemcpyDtoH_v2"));
    let mut context = null_mut();
    assert_eq!(retain(&mut context, 0) + current(context), 0);
    let tensor = |count: usize, bits: u16| { // bf16, all of one value
        let mut data = null_mut();
        assert_eq!(allocate(&mut data, 2 * count.max(1)) + fill(data, bits, count), 0);
        Tensor { data, stride0: 0 }
    };
    let scratch = Memory { data: tensor(sizes.inference / 2, 0).data, bytes: sizes.inference };
    let args = Args { tokens, x: tensor(1000 * 512, 0x3F80), router: tensor(8 * 512, 0), w1: tensor(8 * 512 * 512, 0x3C00),
        w2: tensor(8 * 512 * 256, 0x3C00), y: tensor(1000 * 512, 0), scratch, settings: [0; 3] };
    check(moe_layer_moe_inference(layer, &args, null_mut(), &mut error), &error);
    let mut y = [0u16; 4];
    assert_eq!(read(y.as_mut_ptr(), args.y.data, 8), 0); // which waits for the launches
    println!("y begins with {:?}", y.map(|bits| f32::from_bits((bits as u32) << 16)));
} }
