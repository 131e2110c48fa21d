/* ---- Errors. */

const char *fusekit_status_text(fusekit_status status) {
    switch (status) {
    case FUSEKIT_OK: return "done";
    case FUSEKIT_INVALID_ARGUMENT: return "an argument breaks a rule of the kernel";
    case FUSEKIT_NO_DRIVER: return "no CUDA driver that is new enough";
    case FUSEKIT_WRONG_ARCH: return "the kernel was built for another architecture";
    case FUSEKIT_MISMATCH: return "the cubin and its launch record are of two builds";
    case FUSEKIT_OUT_OF_MEMORY: return "out of host memory";
    case FUSEKIT_CUDA_ERROR: return "the CUDA driver refused";
    case FUSEKIT_FILE_ERROR: return "the file cannot be read";
    case FUSEKIT_BAD_BUNDLE: return "the bundle is damaged, or of another version";
    case FUSEKIT_NOT_FOUND: return "the bundle has no such kernel";
    }
    return "unknown status";
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static fusekit_status fk_fail(fusekit_error *error, fusekit_status status, const char *format, ...) {
    if (error != NULL) {
        va_list arguments;
        error->status = status;
        error->cuda = 0;
        va_start(arguments, format);
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
    }
    return status;
}

static fusekit_status fk_ok(fusekit_error *error) {
    if (error != NULL) {
        error->status = FUSEKIT_OK;
        error->cuda = 0;
        error->text[0] = 0;
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_cuda(const fusekit_driver *driver, fusekit_error *error, int result, const char *name,
                              const char *what) {
    const char *label = NULL, *text = NULL;
    if (driver->error_name(result, &label) != 0 || label == NULL) label = "an unknown CUresult";
    if (driver->error_string(result, &text) != 0 || text == NULL) text = "";
    fk_fail(error, FUSEKIT_CUDA_ERROR, "%s: %s failed: %s (%d) %s", name, what, label, result, text);
    if (error != NULL) error->cuda = result;
    return FUSEKIT_CUDA_ERROR;
}

/* ---- Expressions: signed 64-bit; an overflow is an error, except in an address, which wraps modulo 2^64. */

static int fk_overflows(int64_t operation, int64_t a, int64_t b) {
    switch (operation) {
    case FK_ADD: return b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b;
    case FK_SUB: return b < 0 ? a > INT64_MAX + b : a < INT64_MIN + b;
    case FK_MUL:
        if (a == 0 || b == 0) return 0;
        if (a > 0) return b > 0 ? a > INT64_MAX / b : b < INT64_MIN / a;
        return b > 0 ? a < INT64_MIN / b : b < INT64_MAX / a;
    default: return 0;
    }
}

static int64_t fk_floordiv(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static int64_t fk_apply(int64_t operation, int64_t a, int64_t b) {
    switch (operation) {
    case FK_ADD: return (int64_t)((uint64_t)a + (uint64_t)b);
    case FK_SUB: return (int64_t)((uint64_t)a - (uint64_t)b);
    case FK_MUL: return (int64_t)((uint64_t)a * (uint64_t)b);
    case FK_FLOORDIV: return fk_floordiv(a, b);
    case FK_CEILDIV: return fk_floordiv(a, b) + (a % b != 0);
    case FK_MOD: return a % b < 0 ? a % b + b : a % b;
    case FK_MIN: return a < b ? a : b;
    case FK_MAX: return a > b ? a : b;
    case FK_EQ: return a == b;
    case FK_NE: return a != b;
    case FK_LT: return a < b;
    case FK_LE: return a <= b;
    case FK_EXP2: return (int64_t)1 << b;
    case FK_BIT_LENGTH:
        for (a = 0; b != 0; b >>= 1) ++a;
        return a;
    default: return 0;
    }
}

/* Whether the operator takes `b` for its only or second operand. */
static int fk_takes(int64_t operation, int64_t b) {
    switch (operation) {
    case FK_FLOORDIV:
    case FK_CEILDIV:
    case FK_MOD: return b > 0;
    case FK_BIT_LENGTH: return b >= 0;
    case FK_EXP2: return b >= 0 && b <= 62;
    default: return 1;
    }
}

/* Returns 0 where the expression has no value: it overflows, or an operator does not take an operand. `wraps`: sums and
 * products wrap modulo 2^64, as long as nothing but sums and products is made of them. */
static int fk_evaluate(const fk_expression *expression, const int64_t *variables, int wraps, int64_t *result) {
    int64_t stack[FK_MOST_STACK];
    char wrapped[FK_MOST_STACK];
    int depth = 0, index;
    if (expression->count == 1) { /* a constant or a variable, as most are */
        *result = expression->steps->operation == FK_PUSH ? expression->steps->value : variables[expression->steps->value];
        return 1;
    }
    for (index = 0; index < expression->count; ++index) {
        const fk_step *step = &expression->steps[index];
        int64_t a = 0, b;
        int lost;
        if (step->operation <= FK_VARIABLE) {
            if (depth == FK_MOST_STACK) return 0;
            wrapped[depth] = 0;
            stack[depth++] = step->operation == FK_PUSH ? step->value : variables[step->value];
            continue;
        }
        if (step->operation == FK_JUMP) {
            index += (int)step->value;
            continue;
        }
        if (depth < (step->operation < FK_ADD ? 1 : 2)) return 0;
        b = stack[--depth];
        lost = wrapped[depth];
        if (step->operation >= FK_ADD) {
            a = stack[--depth];
            lost |= wrapped[depth] | fk_overflows(step->operation, a, b);
        }
        if (lost && (!wraps || step->operation < FK_ADD || step->operation > FK_MUL)) return 0;
        if (step->operation == FK_UNLESS) {
            if (b == 0) index += (int)step->value;
            continue;
        }
        if (!fk_takes(step->operation, b)) return 0;
        wrapped[depth] = (char)lost;
        stack[depth++] = fk_apply(step->operation, a, b);
    }
    if (depth != 1) return 0;
    *result = stack[0];
    return 1;
}

/* Of numbers and f32 scalars. The exact result of a step, rounded to binary64 and then to binary32, is the one rounded
 * once: 53 bits are more than 2 * 24 + 2. */
static float fk_evaluate_float(const fk_expression *expression, const float *floats) {
    float stack[FK_MOST_STACK] = {0};
    int depth = 0, index;
    for (index = 0; index < expression->count; ++index) {
        const fk_step *step = &expression->steps[index];
        double a, b;
        if (step->operation <= FK_VARIABLE) {
            uint32_t bits = (uint32_t)step->value;
            if (depth == FK_MOST_STACK) return 0;
            if (step->operation == FK_VARIABLE)
                stack[depth++] = floats[step->value];
            else
                memcpy(&stack[depth++], &bits, sizeof bits);
            continue;
        }
        if (depth < 2) return 0;
        b = (double)stack[--depth];
        a = (double)stack[depth - 1];
        switch (step->operation) {
        case FK_FADD: a += b; break;
        case FK_FSUB: a -= b; break;
        case FK_FMUL: a *= b; break;
        default: a /= b; break;
        }
        stack[depth - 1] = (float)a;
    }
    return stack[0];
}

static fusekit_status fk_no_value(const fk_record *record, const char *what, fusekit_error *error) {
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s cannot be computed in 64 bits for these extents",
                   record->name, what);
}

static fusekit_status fk_value(const fk_record *record, const fk_expression *expression, const int64_t *variables,
                               const char *what, int64_t *result, fusekit_error *error) {
    return fk_evaluate(expression, variables, 0, result) ? FUSEKIT_OK : fk_no_value(record, what, error);
}
