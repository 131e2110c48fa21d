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

/* ---- Floats: what `fusekit.abi.floats` says. */

static double fk_of_bits(int64_t bits) {
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The nearest number with so many bits of significand, whose least normal one is 2^lowest and whose largest is below
 * 2^end; ties to even. */
static double fk_nearest(double number, int significand, int lowest, int end) {
    int exponent, spare;
    uint64_t bits, sign, half;
    memcpy(&bits, &number, sizeof bits);
    sign = bits & (UINT64_C(1) << 63);
    bits ^= sign;
    exponent = (int)(bits >> 52) - 1023;
    if (exponent == 1024) return number;
    /* Below the least normal number there are fewer bits. */
    spare = 53 - significand + (exponent < lowest ? lowest - exponent : 0);
    if (spare > 53) { /* at most half of the smallest one; twice that is the least number that is not rounded to 0 */
        bits = 0;
    } else if (spare == 53) { /* between half of the smallest one and all of it */
        bits = (bits & ((UINT64_C(1) << 52) - 1)) != 0 ? (uint64_t)(lowest - significand + 1 + 1023) << 52 : 0;
    } else {
        half = UINT64_C(1) << (spare - 1);
        bits += half - 1 + (spare == 52 ? 1 : bits >> spare & 1); /* the leading bit, which is not there, is odd */
        bits &= ~(half * 2 - 1);
        if ((int)(bits >> 52) - 1023 >= end) bits = UINT64_C(0x7FF) << 52;
    }
    bits |= sign;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static double fk_bfloat(double number) { return fk_nearest(number, 8, -126, 128); }
static double fk_half(double number) { return fk_nearest(number, 11, -14, 16); }

static inline int fk_is_whole(int64_t dtype) { return dtype == FK_I32 || dtype == FK_TYPE_I64; }

/* A number as a scalar of a type. */
static inline double fk_scalar(int64_t dtype, double number) {
    if (dtype == FK_TYPE_F64) return number;
    number = (float)number;
    return dtype == FK_TYPE_BF16 ? fk_bfloat(number) : dtype == FK_TYPE_FP16 ? fk_half(number) : number;
}

/* The square root, rounded: bit by bit, as sqrt() would need another library. */
static double fk_root(double number) {
    uint64_t bits, rest, root = 0, twice = 0, step;
    int exponent;
    memcpy(&bits, &number, sizeof bits);
    if (number != number || number == 0 || bits == UINT64_C(0x7FF) << 52) return number;
    if (bits >> 63) return fk_of_bits((int64_t)0x7FF8 << 48);
    exponent = (int)(bits >> 52) - 1023;
    rest = bits & ((UINT64_C(1) << 52) - 1);
    if (exponent == -1023) /* not normal */
        for (++exponent; rest >> 52 == 0; --exponent) rest <<= 1;
    else
        rest |= UINT64_C(1) << 52;
    if (exponent & 1) { /* an even exponent, which may be negative */
        rest <<= 1;
        --exponent;
    }
    rest <<= 1;
    for (step = UINT64_C(1) << 53; step != 0; step >>= 1) {
        uint64_t next = twice + step;
        if (next <= rest) {
            twice = next + step;
            rest -= next;
            root += step;
        }
        rest <<= 1;
    }
    if (rest != 0) root += root & 1;
    bits = (root >> 1) + ((uint64_t)(exponent / 2 + 1022) << 52);
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* A number that fp16 has, as its bits. */
static uint16_t fk_half_bits(float number) {
    uint32_t bits, size;
    int exponent;
    memcpy(&bits, &number, sizeof bits);
    size = bits & 0x7FFFFF;
    exponent = (int)(bits >> 23 & 0xFF) - 127;
    if (exponent == 128)
        size = 0x7C00 | (size != 0 ? 0x200 : 0);
    else if (exponent >= -14)
        size = (uint32_t)(exponent + 15) << 10 | size >> 13;
    else /* not normal, or 0 */
        size = exponent < -24 ? 0 : (size | 0x800000) >> (-1 - exponent);
    return (uint16_t)((bits >> 16 & 0x8000) | size);
}

/* The next whole number, with the sign of the number; from 2^52 on all are whole. */
static double fk_whole(int64_t operation, double number) {
    double whole;
    if (!(number > -4503599627370496.0 && number < 4503599627370496.0)) return number;
    whole = (double)(int64_t)number;
    if (operation == FK_FLOOR && whole > number) whole -= 1;
    if (operation == FK_CEIL && whole < number) whole += 1;
    return whole == 0 ? number * 0 : whole;
}

static double fk_absolute(double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return fk_of_bits((int64_t)(bits & INT64_MAX));
}

static double fk_float_of_one(int64_t operation, double a) {
    switch (operation) {
    case FK_FSQRT: return (float)fk_root(a);
    case FK_DSQRT: return fk_root(a);
    case FK_F32: return (float)a;
    case FK_BF16: return fk_bfloat(a);
    case FK_FP16: return fk_half(a);
    case FK_FLOOR:
    case FK_CEIL:
    case FK_TRUNC: return fk_whole(operation, a);
    case FK_ABS: return fk_absolute(a);
    default: return -a;
    }
}

/* The exact result of binary32 numbers, rounded to binary64 and then to binary32, is the one rounded once: 53 bits are more
 * than 2 * 24 + 2. */
static double fk_float_of_two(int64_t operation, double a, double b) {
    switch (operation) {
    case FK_FADD: return (float)(a + b);
    case FK_FSUB: return (float)(a - b);
    case FK_FMUL: return (float)(a * b);
    case FK_FDIV: return (float)(a / b);
    case FK_DADD: return a + b;
    case FK_DSUB: return a - b;
    case FK_DMUL: return a * b;
    case FK_DDIV: return a / b;
    case FK_FEQ: return a == b;
    case FK_FLT: return a < b;
    default: return a <= b;
    }
}

/* floats: each a number of its own type. */
static double fk_evaluate_float(const fk_expression *expression, const double *floats, const int64_t *variables) {
    double stack[FK_MOST_STACK] = {0};
    int depth = 0, index;
    for (index = 0; index < expression->count; ++index) {
        const fk_step *step = &expression->steps[index];
        uint32_t bits = (uint32_t)step->value;
        double pushed;
        float single;
        switch (step->operation) {
        case FK_PUSH:
            memcpy(&single, &bits, sizeof single);
            pushed = single;
            break;
        case FK_VARIABLE: pushed = floats[step->value]; break;
        case FK_NUMBER: pushed = fk_of_bits(step->value); break;
        case FK_FINT: pushed = (float)variables[step->value]; break;
        case FK_DINT: pushed = (double)variables[step->value]; break;
        case FK_JUMP: index += (int)step->value; continue;
        case FK_UNLESS:
            if (depth < 1) return 0;
            if (stack[--depth] == 0) index += (int)step->value;
            continue;
        default:
            if ((step->operation >= FK_FSQRT && step->operation <= FK_NEG) || step->operation >= FK_FLOOR) {
                if (depth < 1) return 0;
                stack[depth - 1] = fk_float_of_one(step->operation, stack[depth - 1]);
            } else {
                if (depth < 2) return 0;
                --depth;
                stack[depth - 1] = fk_float_of_two(step->operation, stack[depth - 1], stack[depth]);
            }
            continue;
        }
        if (depth == FK_MOST_STACK) return 0;
        stack[depth++] = pushed;
    }
    return stack[0];
}

/* Without its fraction; -2^62 for a NaN, and from 2^62 or -2^62 on. */
static int64_t fk_truncated(double number) {
    return number > -4611686018427387904.0 && number < 4611686018427387904.0 ? (int64_t)number : -(INT64_C(1) << 62);
}

static fusekit_status fk_no_value(const fk_record *record, const char *what, fusekit_error *error) {
    return fk_fail(error, FUSEKIT_INVALID_ARGUMENT, "%s: %s cannot be computed in 64 bits for these extents",
                   record->name, what);
}

static fusekit_status fk_value(const fk_record *record, const fk_expression *expression, const int64_t *variables,
                               const char *what, int64_t *result, fusekit_error *error) {
    return fk_evaluate(expression, variables, 0, result) ? FUSEKIT_OK : fk_no_value(record, what, error);
}
