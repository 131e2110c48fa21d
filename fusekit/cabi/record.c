/* ---- The launch record, as constants. */

typedef enum {
    FK_PUSH, FK_VARIABLE, FK_JUMP, FK_UNLESS, FK_BIT_LENGTH, FK_EXP2, FK_ADD, FK_SUB, FK_MUL, FK_FLOORDIV, FK_CEILDIV,
    FK_MOD, FK_MIN, FK_MAX, FK_EQ, FK_NE, FK_LT, FK_LE, FK_FADD, FK_FSUB, FK_FMUL, FK_FDIV
} fk_operator;

typedef struct { /* one step of an expression in postfix order */
    fk_operator operation;
    int64_t value; /* the constant (of a float its bits), the variable's index, or how many steps to leave out: always, or
                      where the value on top, which is taken, is 0 */
} fk_step;

typedef struct {
    const fk_step *steps;
    int count;
} fk_expression;

typedef struct {
    const char *name;
    int64_t divisor, minimum, maximum;
} fk_dim;

enum { FK_MOST_RANK = 5, FK_MOST_VARIABLES = 512, FK_MOST_STACK = 40, FK_MOST_NODES = 16 };

typedef struct {
    const char *name;
    int written, itemsize, rank, alignment;
    int64_t stride_divisor;
    fk_expression shape[FK_MOST_RANK], strides[FK_MOST_RANK];
    unsigned free_strides; /* bit i: stride i is the caller's */
    int first_stride;      /* index of its first stride among the variables */
} fk_tensor;

typedef enum { FK_TENSOR_MAP, FK_POINTER, FK_WORKSPACE, FK_SCRATCH, FK_INT, FK_UINT, FK_FLOAT } fk_kind;

typedef struct {
    int dtype, rank; /* CUtensorMapDataType */
    fk_expression address, dims[FK_MOST_RANK], strides[FK_MOST_RANK];
    unsigned box[FK_MOST_RANK], element_strides[FK_MOST_RANK];
    int interleave, swizzle, promotion, fill, raw; /* raw: written here, without the driver */
} fk_map;

typedef struct { /* as the cubin has it, in the order of offsets */
    const char *name;
    unsigned offset, size;
} fk_parameter;

typedef struct { /* one value in the parameter space: a parameter, or a field of one */
    const char *name;
    fk_kind kind;
    unsigned offset, size;
    int argument;        /* index of a pointer's tensor */
    fk_expression value; /* of an integer or a float; of a pointer the bytes to add */
    const fk_map *map;
} fk_part;

typedef struct { /* one launch, as a node of a graph */
    const char *symbol;
    const fk_parameter *parameters;
    int parameter_count;
    const fk_part *parts;
    int part_count;
    fk_expression grid[3];
    unsigned block[3], cluster[3], shared;
    int cooperative, serialization, non_portable_cluster, carveout; /* carveout: -1 leaves the driver's */
} fk_node;

typedef struct {
    fk_expression expression;
    const char *message;
    int late; /* it reads more than dims and strides */
} fk_constraint;

typedef struct {
    const char *name;
    int major, minor, exact; /* exact: runs on this capability only, else on later minors of the major as well */
    const unsigned char *cubin;
    size_t cubin_size;
    const fk_dim *dims;
    int dim_count;
    const fk_tensor *tensors;
    int tensor_count;
    const fk_constraint *constraints;
    int constraint_count;
    const fk_expression *values; /* variables of the record's own, each of those before it */
    int value_count;
    const fk_node *nodes;
    int node_count;
    const int *skip; /* dims */
    int skip_count;
    int first_address, first_integer, sm_count, margin, clusters, first_value; /* indices among the variables */
    int asks_clusters; /* something reads active_clusters */
    fk_expression workspace;
    int workspace_zeroed;
    fk_expression scratch; /* without steps: none */
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
    int device, sm_count, major, active_clusters;
    void *context, *library, *kernels[FK_MOST_NODES], *functions[FK_MOST_NODES];
    fk_workspaces *workspaces; /* and scratch; NULL: it has neither */
} fk_kernel;

enum {
    FK_MAP_BYTES = 128,
    FK_MAP_ALIGNMENT = 64,
    FK_MOST_PARAMETERS = 256,
    FK_MOST_SPACE = 32764, /* bytes of a kernel's parameters, by CUDA's own limit */
    FK_MOST_TENSORS = 32
};

typedef struct { /* a node of a call, with memory for its parameters at their offsets */
    unsigned grid[3], attribute_count;
    fk_attribute attributes[4];
    unsigned char *space;
    void **pointers; /* to each parameter in it */
} fk_packed;

struct fusekit_launch { /* one block of memory, with what it points to */
    const fk_kernel *kernel;
    int skip;
    int64_t scratch; /* bytes */
    fk_packed *nodes;
};
