/* ---- Expressions of a launch record, from JSON to postfix order. */

static int fk_find_tensor(const fk_record *record, const char *name, size_t length) {
    int index;
    for (index = 0; index < record->tensor_count; ++index)
        if (strlen(record->tensors[index].name) == length && memcmp(record->tensors[index].name, name, length) == 0)
            return index;
    return -1;
}

/* The kind of the variable `text`, of those in `allowed`, and its index; 0 where there is none. */
static unsigned fk_find_variable(const fk_reader *reader, fk_json text, unsigned allowed, int *index) {
    const fk_record *record = reader->record;
    fk_json name = fk_json_inside(text);
    const char *dot = (const char *)memchr(name.at, '.', (size_t)(name.end - name.at));
    int at, integers = 0;
    if (dot != NULL) {
        int tensor = fk_find_tensor(record, name.at, (size_t)(dot - name.at));
        fk_json part;
        part.at = dot + 1;
        part.end = name.end;
        if (tensor < 0) return 0;
        if (fk_json_says(part, "address")) {
            *index = record->first_address + tensor;
            return allowed & FK_OF_ADDRESSES;
        }
        if (part.end - part.at != 7 || memcmp(part.at, "stride", 6) != 0 || !fk_is_digit(part.at[6])) return 0;
        at = part.at[6] - '0';
        *index = record->tensors[tensor].first_stride + at;
        return at < record->tensors[tensor].rank ? allowed & FK_OF_STRIDES : 0;
    }
    if (allowed & FK_OF_VALUES)
        for (at = 0; at < record->value_count; ++at) {
            *index = record->first_value + at;
            if (fk_json_says(name, reader->values[at])) return FK_OF_VALUES;
        }
    if (allowed & FK_OF_SCALARS)
        for (at = 0; at < reader->argument_count; ++at) {
            const fusekit_argument *argument = &reader->arguments[at];
            if (argument->rank >= 0 || argument->dtype != FUSEKIT_I32) continue;
            *index = record->first_integer + integers++;
            if (fk_json_says(name, argument->name)) return FK_OF_SCALARS;
        }
    for (*index = 0; *index < record->dim_count; ++*index)
        if (fk_json_says(name, record->dims[*index].name)) return allowed & FK_OF_DIMS;
    *index = record->sm_count;
    if (fk_json_says(name, "sm_count")) return allowed & FK_OF_DEVICE;
    *index = record->clusters;
    if (fk_json_says(name, "active_clusters")) return allowed & FK_OF_CLUSTERS;
    *index = record->margin;
    return fk_json_says(name, "cluster_margin") ? allowed & FK_OF_MARGIN : 0;
}

/* "inf", "-inf" or "nan" with its quotes. */
static int fk_not_finite(fk_json value, double *number) {
    *number = fk_json_says(value, "\"nan\"") ? (double)NAN : (double)INFINITY;
    if (!fk_json_says(value, "\"-inf\"")) return *number != *number || fk_json_says(value, "\"inf\"");
    *number = -*number;
    return 1;
}

/* A number or an f32 scalar as a step of a float expression. */
static int fk_float_leaf(fk_reader *reader, const char *key, fk_json value, fk_step *step) {
    double number;
    float single;
    uint32_t bits;
    int at, floats = 0;
    if (fk_not_finite(value, &number) || fk_json_number(value, &number)) {
        single = (float)number;
        memcpy(&bits, &single, sizeof bits);
        step->value = bits;
        return 1;
    }
    if (!fk_json_is(value, '"')) return fk_refuse(reader, key, "holds what is no float: a number, a scalar, an array");
    step->operation = FK_VARIABLE;
    for (at = 0; at < reader->argument_count; ++at) {
        const fusekit_argument *argument = &reader->arguments[at];
        if (argument->rank >= 0 || argument->dtype != FUSEKIT_F32) continue;
        step->value = floats++;
        if (fk_json_says(fk_json_inside(value), argument->name)) return 1;
    }
    return fk_refuse(reader, key, "names no f32 scalar");
}

static int fk_leaf(fk_reader *reader, const char *key, fk_json value, unsigned allowed, fk_step *step,
                   unsigned *kinds) {
    int at;
    if (allowed & FK_OF_FLOATS) return fk_float_leaf(reader, key, value, step);
    if (!fk_json_is(value, '"'))
        return fk_json_integer(value, &step->value) ||
               fk_refuse(reader, key, "holds what is no expression: an integer of 64 bits, a variable, an array");
    *kinds = fk_find_variable(reader, value, allowed, &at);
    if (*kinds == 0) return fk_refuse(reader, key, "reads a variable that it may not");
    reader->record->asks_clusters |= *kinds == FK_OF_CLUSTERS;
    step->operation = FK_VARIABLE;
    step->value = at;
    return 1;
}

typedef struct {
    fk_step *steps; /* NULL: they are only counted */
    int count;
    unsigned kinds; /* of the variables */
} fk_program;

/* Adds a step; its place, so that a jump can be set later. */
static int fk_add(fk_program *program, fk_operator operation, int64_t value) {
    if (program->steps != NULL) {
        program->steps[program->count].operation = operation;
        program->steps[program->count].value = value;
    }
    return program->count++;
}

/* Lets the jump at `from` leave out what has come since. */
static void fk_land(fk_program *program, int from) {
    if (program->steps != NULL) program->steps[from].value = program->count - from - 1;
}

/* The name of an operator of an expression, with its quotes, and how many operands it takes; 0: two or more. */
typedef struct {
    const char *name;
    fk_operator operation;
    int operands;
} fk_known_operator;

static const fk_known_operator *fk_find_operator(fk_json name, int floats) {
    static const fk_known_operator known[] = {
        {"\"fadd\"", FK_FADD, 2},     {"\"fsub\"", FK_FSUB, 2},   {"\"fmul\"", FK_FMUL, 2},
        {"\"fdiv\"", FK_FDIV, 2},     {"\"add\"", FK_ADD, 0},     {"\"sub\"", FK_SUB, 2},
        {"\"mul\"", FK_MUL, 0},       {"\"min\"", FK_MIN, 0},     {"\"max\"", FK_MAX, 0},
        {"\"floordiv\"", FK_FLOORDIV, 2}, {"\"ceildiv\"", FK_CEILDIV, 2}, {"\"mod\"", FK_MOD, 2},
        {"\"eq\"", FK_EQ, 2},         {"\"ne\"", FK_NE, 2},       {"\"lt\"", FK_LT, 2},
        {"\"le\"", FK_LE, 2},         {"\"if\"", FK_UNLESS, 3},   {"\"exp2\"", FK_EXP2, 1},
        {"\"bit_length\"", FK_BIT_LENGTH, 1}};
    int index, end = floats ? 4 : (int)(sizeof known / sizeof *known);
    for (index = floats ? 0 : 4; index < end; ++index)
        if (fk_json_says(name, known[index].name)) return &known[index];
    return NULL;
}

/* Adds the steps of an expression in postfix order. */
static int fk_steps(fk_reader *reader, const char *key, fk_json value, unsigned allowed, int depth,
                    fk_program *program) {
    const fk_known_operator *known;
    fk_json rest, item;
    int operands = 0, jump = 0;
    if (!fk_json_is(value, '[')) {
        fk_step step = {FK_PUSH, 0};
        unsigned kind = 0;
        if (!fk_leaf(reader, key, value, allowed, &step, &kind)) return 0;
        program->kinds |= kind;
        fk_add(program, step.operation, step.value);
        return 1;
    }
    if (depth == FK_MOST_EXPRESSION) return fk_refuse(reader, key, "is nested deeper than 32 levels");
    rest = fk_json_inside(value);
    if (!fk_json_next(&rest, NULL, &item)) return fk_refuse(reader, key, "holds an array without operator");
    known = fk_find_operator(item, (allowed & FK_OF_FLOATS) != 0);
    if (known == NULL) return fk_refuse(reader, key, "has an operator that is not known");
    if ((known->operation < FK_ADD || (known->operation >= FK_EQ && known->operation <= FK_LE)) && !fk_is_newer(reader, key))
        return 0;
    while (fk_json_next(&rest, NULL, &item)) {
        unsigned outer = program->kinds;
        program->kinds = 0;
        if (!fk_steps(reader, key, item, allowed, depth + 1, program)) return 0;
        if ((program->kinds & FK_OF_ADDRESSES) && (known->operation < FK_ADD || known->operation > FK_MUL))
            return fk_refuse(reader, key, "takes an address by more than add, sub and mul");
        program->kinds |= outer;
        ++operands;
        if (known->operation == FK_UNLESS && operands < 3) { /* of the second and the third operand one is left out */
            int next = fk_add(program, operands == 1 ? FK_UNLESS : FK_JUMP, 0);
            if (operands == 2) fk_land(program, jump);
            jump = next;
        } else if (known->operation != FK_UNLESS && (known->operands == 1 || operands > 1)) {
            fk_add(program, known->operation, 0);
        }
    }
    if (known->operation == FK_UNLESS) fk_land(program, jump);
    return operands == known->operands || (known->operands == 0 && operands >= 2) ||
           fk_refuse(reader, key, "has an operator of too few or many operands");
}

/* kinds: those of its variables; may be NULL. */
static int fk_compile(fk_reader *reader, const char *key, fk_json value, unsigned allowed, fk_expression *expression,
                      unsigned *kinds) {
    fk_program program;
    memset(&program, 0, sizeof program);
    if (!fk_steps(reader, key, value, allowed, 0, &program)) return 0;
    program.steps = (fk_step *)fk_take(reader->arena, (size_t)program.count, sizeof *program.steps);
    if (program.steps == NULL) return fk_no_memory(reader);
    program.count = 0;
    if (!fk_steps(reader, key, value, allowed, 0, &program)) return 0;
    expression->steps = program.steps;
    expression->count = program.count;
    if (kinds != NULL) *kinds = program.kinds;
    return 1;
}

static int fk_get_expression(fk_reader *reader, fk_json object, const char *key, unsigned allowed,
                             fk_expression *expression) {
    fk_json value;
    return fk_get(reader, object, key, &value) && fk_compile(reader, key, value, allowed, expression, NULL);
}

/* An array of `count` expressions; -1: of up to FK_MOST_RANK, whose number `found` gets. */
static int fk_get_expressions(fk_reader *reader, fk_json object, const char *key, unsigned allowed, int count,
                              fk_expression *expressions, int *found) {
    fk_json value, rest, item;
    int most = count < 0 ? FK_MOST_RANK : count, number = 0;
    if (!fk_get_array(reader, object, key, &value)) return 0;
    for (rest = fk_json_inside(value); fk_json_next(&rest, NULL, &item); ++number) {
        if (number == most) return fk_refuse(reader, key, "has too many entries");
        if (!fk_compile(reader, key, item, allowed, &expressions[number], NULL)) return 0;
    }
    if (found != NULL) *found = number;
    return number == count || count < 0 || fk_refuse(reader, key, "has too few entries");
}
