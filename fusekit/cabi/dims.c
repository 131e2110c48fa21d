/* ---- Dims: a tensor's shape says what they are, as everywhere but in the typed structures of kernels. */

/* The dim that an expression is, or -1. */
static int fk_bare_dim(const fk_expression *expression) {
    return expression->count == 1 && expression->steps->operation == FK_VARIABLE
               ? (int)expression->steps->value - FK_FIRST_DIM
               : -1;
}

/* Each dim off the first shape that has it by its bare name, inputs before outputs: an output is what gets blamed. */
static void fk_take_dims(const fk_record *record, const fk_given *given, int64_t *dims) {
    unsigned char known[FK_MOST_VARIABLES];
    int written, tensor, index;
    memset(known, 0, sizeof known);
    for (written = 0; written < 2; ++written)
        for (tensor = 0; tensor < record->tensor_count; ++tensor) {
            if ((record->tensors[tensor].written != 0) != written) continue;
            for (index = 0; index < record->tensors[tensor].rank; ++index) {
                int dim = fk_bare_dim(&record->tensors[tensor].shape[index]);
                if (dim < 0 || known[dim]) continue;
                known[dim] = 1;
                dims[dim] = given[tensor].shape[index];
            }
        }
}
