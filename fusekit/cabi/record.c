/* ---- The launch record, as constants. */

typedef enum {
    FK_PUSH, FK_VARIABLE, FK_ADD, FK_SUB, FK_MUL, FK_FLOORDIV, FK_CEILDIV, FK_MOD, FK_MIN, FK_MAX
} fk_operator;

typedef struct { /* one step of an expression in postfix order; `value` is the constant, or the variable's index */
    fk_operator operation;
    int64_t value;
} fk_step;

typedef struct {
    const fk_step *steps;
    int count;
} fk_expression;

typedef struct {
    const char *name;
    int64_t divisor, minimum, maximum;
} fk_dim;

enum { FK_MOST_RANK = 5, FK_MOST_VARIABLES = 256, FK_MOST_STACK = 40 };

typedef struct {
    const char *name;
    int written, itemsize, rank, alignment;
    int64_t stride_divisor;
    fk_expression shape[FK_MOST_RANK], strides[FK_MOST_RANK];
    unsigned free_strides; /* bit i: stride i is the caller's */
    int first_stride;      /* index of its first stride among the variables */
} fk_tensor;

typedef enum { FK_TENSOR_MAP, FK_POINTER, FK_WORKSPACE, FK_SCRATCH, FK_INT32, FK_INT64, FK_FLOAT } fk_kind;

typedef struct {
    int dtype, rank; /* CUtensorMapDataType */
    fk_expression address, dims[FK_MOST_RANK], strides[FK_MOST_RANK];
    unsigned box[FK_MOST_RANK], element_strides[FK_MOST_RANK];
    int interleave, swizzle, promotion, fill;
} fk_map;

typedef struct { /* in the order of offsets */
    const char *name;
    fk_kind kind;
    unsigned offset, size;
    int argument;        /* index of the tensor, or of the float */
    fk_expression value; /* of an integer */
    const fk_map *map;
} fk_parameter;

typedef struct {
    fk_expression expression;
    const char *message;
} fk_constraint;

typedef struct {
    const char *name, *symbol;
    int major, minor, exact; /* exact: runs on this capability only, else on later minors of the major as well */
    const unsigned char *cubin;
    size_t cubin_size;
    const fk_dim *dims;
    int dim_count;
    const fk_tensor *tensors;
    int tensor_count;
    const fk_constraint *constraints;
    int constraint_count;
    const fk_parameter *parameters;
    int parameter_count, map_count;
    int first_address, first_integer, sm_count, margin, variable_count; /* indices among the variables */
    fk_expression grid[3];
    unsigned block[3], cluster[3], shared;
    int cooperative, serialization, non_portable_cluster, carveout; /* carveout: -1 leaves the driver's */
    fk_expression workspace;
    int workspace_zeroed;
    fk_expression scratch; /* without steps: none */
    const int *skip; /* dims */
    int skip_count;
} fk_record;

typedef struct { /* a call: everything that the typed structures hold, by index */
    const int64_t *dims, *strides; /* strides: rank entries for each tensor; 0 is the compact one */
    const uint64_t *addresses;
    const int64_t *integers;
    const float *floats;
    int integer_count;
    int64_t margin;
    int has_priority, priority;
} fk_call;

typedef struct fk_workspaces fk_workspaces;

typedef struct {
    const fusekit_driver *driver;
    const fk_record *record;
    int device, sm_count, major;
    void *context, *library, *kernel, *function;
    fk_workspaces *workspaces; /* and scratch; NULL: it has neither */
} fk_kernel;

enum { FK_MAP_BYTES = 128, FK_MAP_ALIGNMENT = 64, FK_MOST_MAPS = 16, FK_MOST_PARAMETERS = 96, FK_MOST_TENSORS = 32 };

struct fusekit_launch {
    const fk_kernel *kernel;
    int skip;
    int64_t scratch; /* bytes */
    unsigned grid[3], attribute_count;
    fk_attribute attributes[4];
    void *pointers[FK_MOST_PARAMETERS];
    uint64_t values[FK_MOST_PARAMETERS];
    unsigned char maps[FK_MOST_MAPS * FK_MAP_BYTES + FK_MAP_ALIGNMENT];
};
