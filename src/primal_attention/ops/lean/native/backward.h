/* The way back: stretch after stretch of tokens, first block by block from dy to dz and dx, then the rows of the gradients
   that sum over tokens, such as dW_qk = dzᵀ x; at last what is made of those sums. */

/* dW_{·|X} of one set from the parts of its blocks in a stretch; one channel. */
static void add_parts(const Pass *p, const BackwardScratch *s, Range stretch, size set, size channel) {
    Range all = p->landmarks ? rows_of(p, set) : (Range){0, p->tokens};
    real *to = weights_at(p, s->grad_w_x, set, channel);
    int add = all.from < stretch.from;
    for (size block = 0; block < pieces(stretch.to - stretch.from, block_size(p)); block++) {
        if (!meet(all, piece(stretch, block_size(p), block))) continue;
        const real *from = part_at(p, s, stretch, block, set) + channel * packed_weights(p);
        for (size i = 0; i < packed_weights(p); i++) to[i] = add ? to[i] + from[i] : from[i];
        add = 1;
    }
}

/* Rows `which` of C (+)= Aᵀ B over `count` tokens. A has so many numbers of each token, in panels; if those are what is
   kept, the last one may be narrow. */
static void sum_over_tokens(const real *a, size numbers, int kept, Range which, size n, size count, const real *b,
                            size apart, Result to) {
    size whole = kept ? count / BROAD * BROAD : count, m = which.to - which.from;
    if (whole)
        multiply(m, n, whole, as_broad(a + which.from * BROAD, numbers * BROAD), b, apart, 0, to);
    if (whole == count) return;
    size rest = count - whole;
    to.add |= whole > 0;
    multiply(m, n, rest, in_rows(a + panel_at(whole, numbers) + which.from * rest, rest), b + whole * BROAD, apart, 0, to);
}

/* What sums over tokens is cut into tasks of TASK_ROWS rows and WIDE columns. All rows of the same columns come one after the
   other: the second cache then holds what a thread reads of B from one task to the next. */
enum { TASK_ROWS = 2 * ROWS };
static inline size sum_tasks(const Pass *p, size m) { return pieces(m, TASK_ROWS) * pieces(p->width, WIDE); }

/* A task's part of dW_qk, and of db. */
static void add_to_qk(const Pass *p, const BackwardScratch *s, Range stretch, size task) {
    size d = p->width, count = stretch.to - stretch.from, numbers = numbers_of_dz(p), down = pieces(2 * d, TASK_ROWS);
    Range rows = piece((Range){0, 2 * d}, TASK_ROWS, task % down), columns = piece((Range){0, d}, WIDE, task / down);
    for (size i = rows.from; columns.from == 0 && i < rows.to; i++) {
        vec sum = {0};
        for (size row = 0; row < count; row += BROAD)
            for (int v = 0; v < VECTORS; v++) sum += *(const vec *)(s->dz + panel_at(row, numbers) + i * BROAD + v * LANES);
        p->grad_b_qk[i] += sum_of(sum);
    }
    sum_over_tokens(s->dz, numbers, 0, rows, columns.to - columns.from, count, s->rows_x + columns.from * count,
                    count * BROAD, to_rows(p->grad_w_qk + rows.from * d + columns.from, d, stretch.from > 0));
}

/* A task's part of dMᵀ, or of dW_outᵀ, which comes turned. */
static void add_to_map(const Pass *p, const BackwardScratch *s, Range stretch, size task) {
    size d = p->width, count = stretch.to - stretch.from, m = mapped(p), down = pieces(m, TASK_ROWS);
    Range rows = piece((Range){0, m}, TASK_ROWS, task % down), columns = piece((Range){0, d}, WIDE, task / down);
    int add = stretch.from > 0;
    sum_over_tokens(p->folded ? p->scores + panel_at(stretch.from, m) : s->heads, m, p->folded, rows,
                    columns.to - columns.from, count, s->rows_y + columns.from * count, count * BROAD,
                    p->folded ? to_rows(s->grad_map + rows.from * d + columns.from, d, add)
                              : to_turned(p->grad_w_out + columns.from * m + rows.from, m, add));
}

/* A head's share of dW_o, where the maps are apart. */
static void add_share(const Pass *p, const BackwardScratch *s, Range stretch, real *own, size head) {
    size inner = head_width(p), pair = 2 * p->rank, all = all_scores(p), count = stretch.to - stretch.from;
    for (size row = 0; row < count; row += BROAD) {
        size breadth = least(BROAD, count - row);
        pack_broad(breadth, pair, p->scores + panel_at(stretch.from + row, all) + head * pair * breadth, 1, breadth,
                   own + row * BROAD, padded(count, BROAD) * BROAD);
    }
    sum_over_tokens(s->grad_heads, p->width, 0, (Range){head * inner, (head + 1) * inner}, pair, count, own,
                    padded(count, BROAD) * BROAD, to_rows(s->shares + head * share_size(p), pair, stretch.from > 0));
}

static void backward_stretch(const Pass *p, const BackwardScratch *s, Range stretch, size *queue, real *own) {
    size d = p->width, count = stretch.to - stretch.from;
    int learns = p->grad_y && p->grad_w_out, add = stretch.from > 0;
    TASKS(queue, pieces(count, block_size(p))) backward_block(p, s, stretch, task, own);
#pragma omp barrier
    TASKS(queue + 1, p->grad_w_qk ? sum_tasks(p, 2 * d) : 0) add_to_qk(p, s, stretch, task);
    TASKS(queue + 2, learns ? sum_tasks(p, mapped(p)) + (p->folded ? 0 : p->heads) : 0) {
        if (task < sum_tasks(p, mapped(p)))
            add_to_map(p, s, stretch, task);
        else
            add_share(p, s, stretch, own, task - sum_tasks(p, mapped(p)));
    }
    size first = set_of(p, sequence_of(p, stretch.from)), last = set_of(p, sequence_of(p, stretch.to - 1));
    size channels = (last - first + 1) * 2 * p->heads;
    TASKS(queue + 3, channels + learns) {
        if (task < channels)
            add_parts(p, s, stretch, first + task / (2 * p->heads), task % (2 * p->heads));
        else
            sum_rows(pieces(count, block_size(p)), d, s->sums_y, add, p->grad_b_out);
    }
#pragma omp barrier
}

static void prepare_backward(const Pass *p, const BackwardScratch *s, real *own) {
    size d = p->width, *queue = s->queues;
    TASKS(queue, weight_sets(p) * p->heads) projection_weights(p, s->w_x, own, task);
    TASKS(queue + 1, p->grad_y && p->folded ? pieces(d, ROWS) : 0) fold(p, &s->out, own, task);
    TASKS(queue + 2, 1) {
        if (p->grad_w_qk) memset(p->grad_b_qk, 0, 2 * d * sizeof(real));
        if (p->grad_w_out && !p->grad_y) memset(p->grad_b_out, 0, d * sizeof(real));
    }
#pragma omp barrier
}

static void grad_of_lambda(const Pass *p, const BackwardScratch *s, real *energy) {
    size count = p->heads * p->rank;
    real *to = p->grad_sqrt_lambda;
    memset(to, 0, count * sizeof(real));
    for (size b = 0; b < p->sequences; b++) {
        real factor = 2 * p->grad_objective[b] * energy_scale(p, b);
        sum_energies(p, s->energies, b, energy);
        for (size i = 0; i < count; i++) to[i] += factor * p->sqrt_lambda[i] * energy[i];
    }
}

static void backward(const Pass *p, const BackwardScratch *s, size thread) {
    real *own = s->own + thread * s->of_thread;
    size *queue = s->queues + BACKWARD_QUEUES, unit = stretch_size(p);
    int learns = p->grad_y && p->grad_w_out;
    prepare_backward(p, s, own);
    for (size i = 0; i < pieces(p->tokens, unit); i++, queue += STRETCH_QUEUES)
        backward_stretch(p, s, piece((Range){0, p->tokens}, unit, i), queue, own);
    queue = s->queues;
    TASKS(queue + 3, weight_sets(p) * p->heads) backward_to_landmarks(p, s->w_x, s->grad_w_x, own, task);
    TASKS(queue + 4, learns ? p->heads : 0) {
        real *share = s->shares + task * share_size(p);
        if (p->folded) unfold(p, s->grad_map, share, own, task);
        share_bias(p, share, task);
    }
#pragma omp barrier
    TASKS(queue + 5, 2 * p->heads + 1) {
        if (task < 2 * p->heads)
            backward_to_weights(p, s->grad_w_x, own, task);
        else {
            if (learns) finish_score_map(p, s->shares);
            if (p->grad_objective) grad_of_lambda(p, s, own);
        }
    }
}
