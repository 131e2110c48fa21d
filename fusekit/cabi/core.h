/* Kernels compiled ahead of time, launched through the CUDA driver API, which is found by dlopen.
 *
 * No global state, no exit(), nothing printed. Every function that can fail returns a status and, where `error` is not
 * NULL, explains it there; nothing has been launched or kept then. Handles may be used from many threads and in many
 * streams at once, as long as none of them is being freed. Streams are CUstream or cudaStream_t; NULL is the legacy default
 * stream. A stream may be destroyed once its launches are done.
 *
 *     fusekit_driver *driver;
 *     fusekit_driver_open(&driver, &error)              once
 *     fusekit_NAME_load(driver, device, &kernel, ...)   once for each kernel and device; not while a stream is captured
 *     fusekit_NAME_launch(kernel, &args, stream, ...)   as often as you like; safe while a stream is captured
 *     fusekit_NAME_unload(kernel, ...)                  when no launch is pending and no graph holds one
 *     fusekit_driver_close(driver)                      last
 */
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fusekit_status {
    FUSEKIT_OK = 0,
    FUSEKIT_INVALID_ARGUMENT = 1, /* an argument breaks a rule of the kernel */
    FUSEKIT_NO_DRIVER = 2,        /* no libcuda.so.1, or one that is too old: CUDA 12.4, for some cubins CUDA 13 */
    FUSEKIT_WRONG_ARCH = 3,       /* the device is not of the architecture that the kernel was built for */
    FUSEKIT_MISMATCH = 4,         /* the driver sees other parameters in the cubin than the launch record */
    FUSEKIT_OUT_OF_MEMORY = 5,    /* host memory */
    FUSEKIT_CUDA_ERROR = 6,       /* the driver refused; fusekit_error.cuda is its CUresult */
    /* Of bundles: */
    FUSEKIT_FILE_ERROR = 7, /* the file cannot be opened or read */
    FUSEKIT_BAD_BUNDLE = 8, /* it is damaged, cut, forged, or of another version */
    FUSEKIT_NOT_FOUND = 9   /* it has no kernel of that name */
} fusekit_status;

typedef struct fusekit_error {
    fusekit_status status;
    int cuda; /* CUresult of the driver call that failed, else 0 */
    char text[320];
} fusekit_error;

/* One line for a status, without the details that an error has. */
const char *fusekit_status_text(fusekit_status status);

typedef struct fusekit_driver fusekit_driver;

/* The address of a function of the driver API by its exported name ("cuMemAlloc_v2"), or NULL. */
typedef void *(*fusekit_lookup)(const char *symbol, void *user);

/* Finds libcuda.so.1 and initialises it. */
fusekit_status fusekit_driver_open(fusekit_driver **driver, fusekit_error *error);

/* The same, over functions that the caller has: another way to find the driver, or a stand-in for it. */
fusekit_status fusekit_driver_open_with(fusekit_lookup lookup, void *user, fusekit_driver **driver,
                                        fusekit_error *error);

/* After every kernel of it was unloaded. NULL is allowed. */
void fusekit_driver_close(fusekit_driver *driver);

/* A launch checked and packed once by one of the _bind functions. It holds addresses, not memory. */
typedef struct fusekit_launch fusekit_launch;

/* One driver call for each launch of the kernel's record, as a rule one; none where an extent of 0 leaves nothing to do. */
fusekit_status fusekit_launch_run(const fusekit_launch *launch, void *stream, fusekit_error *error);

/* NULL is allowed. */
void fusekit_launch_free(fusekit_launch *launch);
