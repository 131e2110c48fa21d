/* ---- Memory for at most so many tokens: as fusekit/abi/layer_enough.py, which says why. */

/* Whether no call comes to a layout, because one before it has room and is for all the calls that it is for. */
static int fk_comes_after(const fk_layer_pass *pass, int64_t at, const unsigned char *sure) {
    int64_t index;
    for (index = 0; index < at; ++index)
        if (sure[index] && pass->layouts[index].outputs == pass->layouts[at].outputs &&
            (pass->layouts[index].lends & ~pass->layouts[at].lends) == 0)
            return 1;
    return 0;
}

enum { FK_MOST_LAYOUTS = 1024 };

/* The scratch memory that is enough for one number of tokens. asked: the outputs of all passes, contiguous; -1: any. */
static fusekit_status fk_enough_for(const fk_layer *layer, int64_t which, int64_t asked, int in_place, fk_counts counts,
                                    int64_t *most, fusekit_error *error) {
    const fk_layer_pass *pass = &layer->passes[which];
    unsigned char sure[FK_MOST_LAYOUTS] = {0};
    fk_layer_plan plan;
    int64_t begins[FK_MOST_BUFFERS], range, index, bytes;
    int fits;
    fusekit_status status = fk_extents(layer, counts, &plan, error);
    if (status != FUSEKIT_OK) return status;
    range = plan.variables[layer->ranges];
    if (asked >= 0) {
        plan.asked = plan.lent = asked;
        fk_mark_used(pass, &plan);
        status = fk_choose_layout(layer, which, in_place, &plan, error);
        if (status == FUSEKIT_OK && plan.scratch_bytes > *most) *most = plan.scratch_bytes;
        return status;
    }
    for (index = 0; index < pass->layout_count; ++index) {
        const fk_layer_layout *layout = &pass->layouts[index];
        if (layout->in_place != in_place || range < layout->since || range > layout->until ||
            fk_comes_after(pass, index, sure))
            continue;
        bytes = fk_padded(fk_lay_out(layer, &plan, layout, NULL, begins, &fits));
        if (bytes > *most) *most = bytes;
        if (index < FK_MOST_LAYOUTS) sure[index] = (unsigned char)fits;
    }
    return FUSEKIT_OK;
}

enum { FK_BOUNDS = 400 }; /* that are looked at, before one that may be more than enough is taken */

typedef struct { /* a size at the fewest and at the most tokens of a span; it never falls */
    int64_t low, high;
    int straight; /* a straight line between */
} fk_line;

typedef struct {
    const fk_layer *layer;
    int64_t which, asked, enough, left;
    int in_place;
    fk_counts most;     /* of tokens, and the capacity and rows of any number of them */
    fk_layer_plan plan; /* of one number of tokens, or of the most of a span */
    fk_line range;      /* of what the ranges of layouts are of */
    fk_line lines[FK_MOST_BUFFERS];
    fusekit_error *error;
} fk_search;

static int64_t fk_largest(int64_t a, int64_t b) { return a > b ? a : b; }

/* 0: it has no value, or is chosen by a condition. */
static int fk_line_of(const fk_expression *expression, const fk_line *variables, fk_line *result) {
    fk_line stack[FK_MOST_STACK];
    int depth = 0, index;
    for (index = 0; index < expression->count; ++index) {
        const fk_step *step = &expression->steps[index];
        fk_line a, b;
        int constant_a, constant_b, chosen;
        if (step->operation <= FK_VARIABLE) {
            if (depth == FK_MOST_STACK) return 0;
            b.low = b.high = step->value;
            b.straight = 1;
            stack[depth++] = step->operation == FK_PUSH ? b : variables[step->value];
            continue;
        }
        if (step->operation < FK_ADD || depth < 2) return 0;
        b = stack[--depth];
        a = stack[--depth];
        if (fk_overflows(step->operation, a.low, b.low) || fk_overflows(step->operation, a.high, b.high) ||
            !fk_takes(step->operation, b.low) || !fk_takes(step->operation, b.high))
            return 0;
        constant_a = a.low == a.high;
        constant_b = b.low == b.high;
        stack[depth].low = fk_apply(step->operation, a.low, b.low);
        stack[depth].high = fk_apply(step->operation, a.high, b.high);
        if (step->operation == FK_ADD || step->operation == FK_SUB || step->operation == FK_MUL) {
            stack[depth].straight = a.straight && b.straight && (step->operation != FK_MUL || constant_a || constant_b);
        } else {
            chosen = (constant_b && a.straight && a.low == stack[depth].low && a.high == stack[depth].high) ||
                     (constant_a && b.straight && b.low == stack[depth].low && b.high == stack[depth].high);
            stack[depth].straight = stack[depth].low == stack[depth].high || (step->operation == FK_MAX && chosen);
        }
        ++depth;
    }
    if (depth != 1) return 0;
    *result = stack[0];
    return 1;
}

/* The bytes of all buffers from `first` to `last` tokens; `plan` has those of `last`. */
static int fk_size_lines(fk_search *search, int64_t first, int64_t last) {
    const fk_layer *layer = search->layer;
    fk_line variables[FK_MOST_VARIABLES], extent;
    int64_t index;
    int axis;
    memset(variables, 0, FK_FIRST_LAYER_DIM * sizeof *variables);
    variables[0].low = first;
    variables[0].high = last;
    variables[1].low = variables[1].high = search->most.capacity;
    variables[2].low = variables[2].high = search->most.rows;
    for (index = 0; index < FK_FIRST_LAYER_DIM; ++index) variables[index].straight = 1;
    for (index = 0; index < layer->dim_count; ++index)
        if (!fk_line_of(&layer->dims[index].expression, variables, &variables[FK_FIRST_LAYER_DIM + index])) return 0;
    search->range = variables[layer->ranges];
    for (index = 0; index < layer->buffer_count; ++index) {
        const fk_layer_buffer *buffer = &layer->buffers[index];
        fk_line *size = &search->lines[index];
        int moving = 0;
        size->low = buffer->itemsize;
        size->high = search->plan.bytes[index];
        size->straight = 1;
        for (axis = 0; axis < buffer->rank; ++axis) {
            if (!fk_line_of(&buffer->shape[axis], variables, &extent)) return 0;
            size->low *= fk_largest(extent.low, 1);
            if (fk_largest(extent.low, 1) == fk_largest(extent.high, 1)) continue;
            size->straight &= extent.straight && extent.low >= 1 && ++moving == 1;
        }
    }
    return 1;
}

/* The most bytes between a size and the next multiple of the alignment, over `more` tokens. */
static int64_t fk_most_pad(const fk_line *size, int64_t more) {
    if (size->low == size->high || !size->straight) return fk_padded(size->high) - size->high;
    if (size->low % FK_LAYER_ALIGNMENT == 0 && (size->high - size->low) % (more * FK_LAYER_ALIGNMENT) == 0) return 0;
    return FK_LAYER_ALIGNMENT - 1;
}

/* Whether all homes of a layout have room for any number of tokens of the span. */
static int fk_is_sure(const fk_search *search, const fk_layer_layout *layout, const unsigned char *used, int64_t more) {
    int64_t ends[FK_MOST_BUFFERS], index, above;
    int high;
    for (high = 0; high < 2; ++high)
        for (index = 0; index < layout->place_count; ++index) {
            const fk_layer_place *place = &layout->places[index];
            const fk_line *size = &search->lines[place->buffer], *home;
            int64_t end = 0, room;
            for (above = 0; above < place->above_count; ++above) end = fk_largest(end, ends[place->above[above].index]);
            if (used == NULL || used[place->buffer]) end += high || !size->straight ? size->high : size->low;
            if (place->home >= 0) {
                home = &search->lines[place->home];
                room = high && home->straight ? home->high : home->low;
                if (search->layer->buffers[place->home].place == FK_IN_KEPT && home->low == home->high) room = fk_padded(room);
                if (end > room) return 0;
            }
            ends[place->buffer] = end + (used == NULL || used[place->buffer] ? fk_most_pad(size, more) : 0);
        }
    return 1;
}

static int fk_is_always(const fk_layer_layout *layout, const fk_line *range) {
    return layout->since <= range->low && range->high <= layout->until;
}

static fk_counts fk_counts_at(const fk_search *search, int64_t tokens) {
    fk_counts counts = search->most;
    counts.tokens = tokens;
    return counts;
}

/* Not less than the scratch memory of any number of tokens of the span; INT64_MAX: it cannot tell. */
static fusekit_status fk_bound(fk_search *search, int64_t first, int64_t last, int64_t *over) {
    const fk_layer_pass *pass = &search->layer->passes[search->which];
    signed char sure[FK_MOST_LAYOUTS]; /* -1: not yet known */
    int64_t begins[FK_MOST_BUFFERS], index, before, bytes;
    const unsigned char *used = search->asked < 0 ? NULL : search->plan.used;
    int fits;
    fusekit_status status = fk_extents(search->layer, fk_counts_at(search, last), &search->plan, search->error);
    *over = search->asked < 0 ? 0 : INT64_MAX;
    if (status != FUSEKIT_OK) return status;
    if (!fk_size_lines(search, first, last)) {
        *over = INT64_MAX;
        return FUSEKIT_OK;
    }
    search->plan.asked = search->asked;
    if (used != NULL) fk_mark_used(pass, &search->plan);
    memset(sure, -1, sizeof sure);
    for (index = 0; index < pass->layout_count; ++index) {
        const fk_layer_layout *layout = &pass->layouts[index];
        if (layout->in_place != search->in_place || layout->since > search->range.high ||
            layout->until < search->range.low)
            continue;
        bytes = fk_padded(fk_lay_out(search->layer, &search->plan, layout, used, begins, &fits));
        if (used != NULL) { /* the least of those that are sure */
            if (bytes < *over && (layout->lends & ~search->asked) == 0 &&
                fk_suits_outputs(pass, layout, search->asked, search->in_place) && fk_is_always(layout, &search->range) &&
                fk_is_sure(search, layout, used, last - first))
                *over = bytes;
            continue;
        }
        if (bytes <= fk_largest(*over, search->enough)) continue;
        for (before = 0; before < index && before < FK_MOST_LAYOUTS; ++before) { /* no call comes to those after a sure one */
            const fk_layer_layout *other = &pass->layouts[before];
            if (other->in_place != search->in_place || other->outputs != layout->outputs || (other->lends & ~layout->lends) != 0)
                continue;
            if (sure[before] < 0)
                sure[before] = (signed char)(fk_is_always(other, &search->range) && fk_is_sure(search, other, NULL, last - first));
            if (sure[before]) break;
        }
        if (before == index || before == FK_MOST_LAYOUTS) *over = bytes;
    }
    return FUSEKIT_OK;
}

static fusekit_status fk_at(fk_search *search, int64_t tokens) {
    return fk_enough_for(search->layer, search->which, search->asked, search->in_place, fk_counts_at(search, tokens),
                         &search->enough, search->error);
}

/* Raises what is enough to what is for any number of tokens of a span, whose last has been looked at. */
static fusekit_status fk_look(fk_search *search, int64_t first, int64_t last) {
    fusekit_status status;
    int64_t middle = first + (last - first) / 2, over;
    if (first == last) return fk_at(search, first);
    status = fk_bound(search, first, last, &over);
    if (status != FUSEKIT_OK || over <= search->enough) return status;
    if (search->left <= 0 && over < INT64_MAX) {
        search->enough = over;
        return FUSEKIT_OK;
    }
    --search->left;
    status = fk_at(search, middle);
    if (status == FUSEKIT_OK) status = fk_look(search, middle + 1, last);
    return status == FUSEKIT_OK ? fk_look(search, first, middle) : status;
}

/* The next number of tokens below `last` where a layout's range ends, or the one before its begin; 0: none. Over ranks the
 * ranges are of what has the same size for any number of them. */
static int64_t fk_turn_below(const fk_search *search, int64_t last) {
    const fk_layer_pass *pass = &search->layer->passes[search->which];
    int64_t turn = 0, index;
    if (search->layer->ranges != 0) return 0;
    for (index = 0; index < pass->layout_count; ++index) {
        const fk_layer_layout *layout = &pass->layouts[index];
        if (layout->in_place != search->in_place) continue;
        if (search->asked >= 0 && ((layout->lends & ~search->asked) != 0 ||
                                   !fk_suits_outputs(pass, layout, search->asked, search->in_place)))
            continue;
        if (layout->since - 1 < last) turn = fk_largest(turn, layout->since - 1);
        if (layout->until < last) turn = fk_largest(turn, layout->until);
    }
    return turn;
}

static fusekit_status fk_enough(const fk_layer *layer, int64_t which, int64_t asked, int in_place, fk_counts most,
                                size_t *bytes, fusekit_error *error) {
    fk_search search;
    int64_t tokens = most.tokens, last, before;
    fusekit_status status;
    *bytes = 0;
    if (layer->passes[which].step_count == 0) return FUSEKIT_OK;
    search.layer = layer;
    search.which = which;
    search.asked = asked;
    search.in_place = in_place;
    search.most = most;
    search.enough = 0;
    search.left = FK_BOUNDS;
    search.error = error;
    status = fk_at(&search, tokens);
    for (last = tokens; last > 0 && status == FUSEKIT_OK; last = before)
        status = fk_at(&search, before = fk_turn_below(&search, last));
    for (last = tokens; last > 0 && status == FUSEKIT_OK; last = before) {
        before = fk_turn_below(&search, last);
        status = fk_look(&search, before + 1, last);
    }
    *bytes = (size_t)search.enough;
    return status;
}

/* The outputs of a pass that the caller gives. */
static int64_t fk_asked(const fk_layer_pass *pass, const fk_layer_call *call) {
    int64_t asked = 0, index;
    for (index = 0; index < pass->output_count; ++index)
        if (call->addresses[pass->outputs[index].index] != 0) asked |= (int64_t)1 << index;
    return asked;
}

/* like: a backward call with all the outputs that every one will have; NULL: any. ranks: NULL of a layer on one GPU. */
static fusekit_status fk_layer_sizes(const fk_layer *layer, const fusekit_ranks *ranks, int64_t tokens,
                                     const fk_layer_call *like, fusekit_sizes *sizes, fusekit_error *error) {
    const fk_layer_pass *backward = &layer->passes[FK_PASS_BACKWARD];
    int64_t asked = like == NULL ? -1 : fk_asked(backward, like);
    fk_layer_plan plan;
    fk_counts most;
    fusekit_status status = fk_count(layer, ranks, tokens, &most, error);
    memset(sizes, 0, sizeof *sizes);
    if (status == FUSEKIT_OK) status = fk_extents(layer, most, &plan, error);
    if (status == FUSEKIT_OK) sizes->kept = (size_t)plan.kept_bytes;
    if (status == FUSEKIT_OK) status = fk_enough(layer, FK_PASS_FORWARD, -1, 0, most, &sizes->forward, error);
    if (status == FUSEKIT_OK) status = fk_enough(layer, FK_PASS_INFERENCE, -1, 0, most, &sizes->inference, error);
    if (status == FUSEKIT_OK)
        status = fk_enough(layer, FK_PASS_BACKWARD, asked, like != NULL && like->settings.in_place != 0, most,
                           &sizes->backward, error);
    return status == FUSEKIT_OK ? fk_ok(error) : status;
}
