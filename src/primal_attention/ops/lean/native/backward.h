/* From dy and dJ to the gradients. With g = de from all that the scores went into:

       dz = (W_{e|X} g − z ⟨g, e⟩ / ‖z‖) / ‖z‖,      dW_{e|X} = zᵀ (g / ‖z‖),      dx = W_qkᵀ dz,      dW_qk = dzᵀ x

   The tokens come in stretches: first block by block from dy to dz and dx, then the rows of the gradients that sum over
   tokens. */

typedef struct {
    size *queues;
    real *w_qk, *w_x, *w_x_turned, *parts, *grad_w_x, *dz, *heads, *grad_heads, *rows_x, *rows_y, *grad_map, *shares;
    real *own;
    size of_thread;
    Output out;
} BackwardScratch;

enum { ROWS = 64 }; /* of a gradient that sums over tokens: one task */
enum { BACKWARD_QUEUES = 10, STRETCH_QUEUES = 6 };

static inline size stretch_size(const Pass *p) {
    return least(padded(STRETCH, block_size(p)), padded(p->tokens, TALL));
}

/* The longest rows that a block packs. */
static inline size tall_rows(const Pass *p) { return 2 * p->width > all_scores(p) ? 2 * p->width : all_scores(p); }

/* Not a power of two, for rows so far apart meet in few places of the cache. */
static inline size dz_stride(const Pass *p) { return 2 * p->width + LANES; }

static inline size turned_weights(const Pass *p) { return padded(head_width(p), BROAD) * p->rank; } /* of a channel */

static BackwardScratch backward_scratch(const Pass *p, size *used) {
    BackwardScratch s;
    size d = p->width, all = all_scores(p), breadth = padded(d, BROAD), inner = head_width(p), pair = 2 * p->rank;
    size tokens = stretch_size(p), one_set = 2 * d * p->rank;
    s.queues = take_bytes(p, used, (BACKWARD_QUEUES + STRETCH_QUEUES * pieces(p->tokens, tokens)) * sizeof(size));
    s.w_qk = take(p, used, breadth * 2 * d);
    s.w_x = take(p, used, weight_sets(p) * 2 * p->heads * packed_weights(p));
    s.w_x_turned = take(p, used, weight_sets(p) * 2 * p->heads * turned_weights(p));
    s.parts = take(p, used, (pieces(tokens, block_size(p)) + least(weight_sets(p), tokens)) * one_set);
    s.grad_w_x = take(p, used, weight_sets(p) * one_set);
    s.dz = take(p, used, tokens * dz_stride(p));
    s.heads = take(p, used, p->folded ? 0 : tokens * d);
    s.grad_heads = take(p, used, p->folded ? 0 : tokens * d);
    s.rows_x = take(p, used, tokens * breadth);
    s.rows_y = take(p, used, tokens * breadth);
    s.grad_map = take(p, used, p->folded ? all * d : 0);
    s.shares = take(p, used, p->heads * pair * inner);
    s.out = take_output(p, used);
    size most = landmark_scratch(p) + fold_scratch(p) + unfold_scratch(p);
    size scores = BLOCK * (p->rank + padded(p->rank, BROAD) + padded(inner, BROAD) + 2) + all;
    size block = BLOCK * (all + tall_rows(p)) + scores;
    size sums = tokens * (ROWS + padded(inner, BROAD) + padded(pair, BROAD));
    if (most < block) most = block;
    s.of_thread = padded(most < sums ? sums : most, BLOCK);
    s.own = take(p, used, s.of_thread * p->threads);
    return s;
}

/* g / ‖z‖ of m tokens and one channel, packed broad, and −⟨g, e⟩ / ‖z‖² into `along`. grad: what came through y. */
static void through_norm(const Pass *p, size row, size m, size channel, const real *twice_lambda, const real *grad,
                         real *along, real *scaled) {
    size rank = p->rank, all = all_scores(p), column = column_of(p, channel);
    const real *scores = p->scores + row * all + column, *inverse = p->inverse + row * 2 * p->heads + channel;
    const real *more = p->grad_scores ? p->grad_scores + row * all + column : 0;
    for (size i = 0; i < m; i++, grad += all, scores += all) {
        real factor = inverse[i * 2 * p->heads];
        vec sums = {0};
        for (size j = 0; j < padded(rank, BROAD); j += LANES) {
            vec g = {0};
            if (j < rank) {
                vec score = load_first(scores + j, rank - j);
                g = load_first(grad + j, rank - j) + load_first(twice_lambda + j, rank - j) * score;
                if (more) g += load_first(more + i * all + j, rank - j);
                sums += g * score;
            }
            *(vec *)(scaled + j / BROAD * BROAD * m + i * BROAD + j % BROAD) = g * factor;
        }
        /* Where ‖z‖ is below its floor the divisor is a constant. */
        along[i] = factor < 1 / SMALLEST ? -sum_of(sums) * factor * factor : 0;
    }
}

/* Rows of dz begin as z times `along`. */
static void begin_rows(size m, size k, const real *along, const real *z, size stride, real *dz, size dz_stride) {
    for (size i = 0; i < m; i++)
        for (size l = 0; l < k; l += LANES)
            store_first(dz + i * dz_stride + l, load_first(z + i * stride + l, k - l) * along[i], k - l);
}

/* dz of m tokens that share their weights, and their part of dW_{·|X}. grad: that of their scores. */
static void tokens_back(const Pass *p, const BackwardScratch *s, size row, size m, size sequence, int add, real *grad,
                        real *dz, real *part, real *own) {
    size inner = head_width(p), rank = p->rank, set = set_of(p, sequence);
    real *twice_lambda = own, *along = twice_lambda + padded(p->heads * rank, BLOCK), *tall = along + BLOCK;
    real *scaled = tall + BLOCK * rank, *broad = scaled + BLOCK * padded(rank, BROAD);
    real weight = p->grad_objective ? 2 * p->grad_objective[sequence] * energy_scale(p, sequence) : 0;
    for (size i = 0; i < p->heads * rank; i++)
        twice_lambda[i] = p->grad_objective ? weight * p->sqrt_lambda[i] * p->sqrt_lambda[i] : 0;
    for (size channel = 0; channel < 2 * p->heads; channel++) {
        const real *z = p->z + row * 2 * p->width + channel * inner;
        const real *w = s->w_x_turned + (set * 2 * p->heads + channel) * turned_weights(p);
        real *to = dz + channel * inner;
        through_norm(p, row, m, channel, twice_lambda + channel % p->heads * rank, grad + column_of(p, channel), along,
                     scaled);
        begin_rows(m, inner, along, z, 2 * p->width, to, dz_stride(p));
        for (size j = 0; j < rank; j += BROAD) { /* panel by panel of the rank */
            size columns = least(BROAD, rank - j);
            pack_tall(m, columns, scaled + j * m, BROAD, 1, tall, columns * TALL);
            multiply(m, inner, columns, tall, w + j * padded(inner, BROAD), 0, 1, to, dz_stride(p));
        }
        pack_broad(m, inner, z, 2 * p->width, 1, broad, m * BROAD);
        multiply_turned(rank, inner, m, scaled, broad, add, part + channel * rank * inner, inner);
    }
}

/* dW_{·|X} of the tokens of one block and one set. Blocks and sets both follow the tokens, so that the sum of their
   numbers, counted from the first of the stretch, is a number of its own. */
static inline real *part_at(const Pass *p, const BackwardScratch *s, Range stretch, size block, size set) {
    size first = set_of(p, sequence_of(p, stretch.from));
    return s->parts + (block + set - first) * 2 * p->width * p->rank;
}

/* A block of tokens from dy to dz and dx. */
static void backward_block(const Pass *p, const BackwardScratch *s, Range stretch, size block, real *own) {
    Range rows = piece(stretch, block_size(p), block);
    size d = p->width, all = all_scores(p), m = rows.to - rows.from, pair = 2 * p->rank, inner = head_width(p);
    size at = rows.from - stretch.from;
    real *grad = own, *rest = grad + BLOCK * all, *dz = s->dz + at * dz_stride(p);
    const real *scores = p->scores + rows.from * all;
    if (!p->grad_y)
        memset(grad, 0, m * all * sizeof(real));
    else {
        real *to = p->folded ? grad : s->grad_heads + at * d;
        pack_tall(m, d, p->grad_y + rows.from * d, d, 1, rest, d * TALL);
        multiply(m, map_rows(p), d, rest, s->out.map, 0, 0, to, map_rows(p));
    }
    if (p->grad_y && !p->folded) {
        pack_tall(m * p->heads, inner, s->grad_heads + at * d, inner, 1, rest, inner * TALL);
        multiply(m * p->heads, pair, inner, rest, s->out.score_map_back, 0, 0, grad, pair);
        if (p->grad_w_out) heads_of(p, m, scores, s->out.score_map, rest, s->heads + at * d);
    }
    size set = -1;
    for (size row = rows.from; row < rows.to;) {
        size b = sequence_of(p, row), end = least(rows.to, p->starts[b + 1]), from = row - rows.from;
        real *part = part_at(p, s, stretch, block, set_of(p, b));
        tokens_back(p, s, row, end - row, b, set_of(p, b) == set, grad + from * all, dz + from * dz_stride(p), part,
                    rest);
        set = set_of(p, b);
        row = end;
    }
    if (p->grad_x) {
        pack_tall(m, 2 * d, dz, dz_stride(p), 1, rest, 2 * d * TALL);
        multiply(m, d, 2 * d, rest, s->w_qk, 0, 0, p->grad_x + rows.from * d, d);
    }
}

/* dW_{·|X} of one set from the parts of its blocks in a stretch; one channel. */
static void add_parts(const Pass *p, const BackwardScratch *s, Range stretch, size set, size channel) {
    size count = p->rank * head_width(p);
    Range all = p->landmarks ? rows_of(p, set) : (Range){0, p->tokens};
    real *to = grad_at(p, s->grad_w_x, set, channel);
    int add = all.from < stretch.from;
    for (size block = 0; block < pieces(stretch.to - stretch.from, block_size(p)); block++) {
        if (!meet(all, piece(stretch, block_size(p), block))) continue;
        const real *from = part_at(p, s, stretch, block, set) + channel * count;
        for (size i = 0; i < count; i++) to[i] = add ? to[i] + from[i] : from[i];
        add = 1;
    }
}

/* ROWS rows of grad (m × d) += Aᵀ B over the tokens of a stretch; totals, if any, += Σ A. */
static void sum_over_tokens(const Pass *p, Range stretch, const real *a, size m, size stride, const real *packed_b,
                            real *grad, real *totals, real *own, size task) {
    size count = stretch.to - stretch.from, i = task * ROWS, rows = least(ROWS, m - i);
    pack_tall(rows, count, a + i, 1, stride, own, count * TALL);
    for (size j = 0; totals && j < rows; j += TALL)
        add_sums(count, TALL, own + j * count, totals + i + j, least(TALL, rows - j));
    multiply(rows, p->width, count, own, packed_b, 0, stretch.from > 0, grad + i * p->width, p->width);
}

/* A head's share of dW_o, where the maps are apart. */
static void add_share(const Pass *p, const BackwardScratch *s, Range stretch, real *own, size head) {
    size inner = head_width(p), pair = 2 * p->rank, count = stretch.to - stretch.from;
    real *broad = own + count * padded(inner, BROAD);
    pack_tall(inner, count, s->grad_heads + head * inner, 1, p->width, own, count * TALL);
    pack_broad(count, pair, p->scores + stretch.from * all_scores(p) + head * pair, all_scores(p), 1, broad,
               count * BROAD);
    multiply(inner, pair, count, own, broad, 0, stretch.from > 0, s->shares + head * inner * pair, pair);
}

static void backward_stretch(const Pass *p, const BackwardScratch *s, Range stretch, size *queue, real *own) {
    size d = p->width, all = all_scores(p), count = stretch.to - stretch.from, panels = pieces(d, BROAD);
    int learns = p->grad_y && p->grad_w_out;
    const real *grad_y = p->grad_y + stretch.from * d;
    TASKS(queue, pieces(count, block_size(p))) backward_block(p, s, stretch, task, own);
    TASKS(queue + 1, p->grad_w_qk ? panels : 0) {
        size j = task * BROAD;
        pack_broad(count, least(BROAD, d - j), p->x + stretch.from * d + j, d, 1, s->rows_x + j * count, 0);
    }
    if (!p->folded) {
#pragma omp barrier
    }
    TASKS(queue + 2, learns ? panels : 0) {
        size j = task * BROAD, columns = least(BROAD, d - j);
        pack_broad(count, columns, (p->folded ? grad_y : s->heads) + j, d, 1, s->rows_y + j * count, 0);
        if (p->folded) add_sums(count, BROAD, s->rows_y + j * count, p->grad_b_out + j, columns);
    }
#pragma omp barrier
    TASKS(queue + 3, p->grad_w_qk ? pieces(2 * d, ROWS) : 0)
        sum_over_tokens(p, stretch, s->dz, 2 * d, dz_stride(p), s->rows_x, p->grad_w_qk, p->grad_b_qk, own, task);
    TASKS(queue + 4, learns ? pieces(map_rows(p), ROWS) + (p->folded ? 0 : p->heads) : 0) {
        if (p->folded)
            sum_over_tokens(p, stretch, p->scores + stretch.from * all, all, all, s->rows_y, s->grad_map, 0, own, task);
        else if (task < pieces(d, ROWS))
            sum_over_tokens(p, stretch, grad_y, d, d, s->rows_y, p->grad_w_out, p->grad_b_out, own, task);
        else
            add_share(p, s, stretch, own, task - pieces(d, ROWS));
    }
    size first = set_of(p, sequence_of(p, stretch.from)), last = set_of(p, sequence_of(p, stretch.to - 1));
    TASKS(queue + 5, (last - first + 1) * 2 * p->heads)
        add_parts(p, s, stretch, first + task / (2 * p->heads), task % (2 * p->heads));
#pragma omp barrier
}

static void turn_weights(const Pass *p, const BackwardScratch *s, size task) {
    size inner = head_width(p);
    for (size j = 0; j < p->rank; j += BROAD) { /* each panel of W_{·|X} on its own */
        size rows = least(BROAD, p->rank - j);
        pack_broad(rows, inner, s->w_x + task * packed_weights(p) + j * inner, 1, BROAD,
                   s->w_x_turned + task * turned_weights(p) + j * padded(inner, BROAD), rows * BROAD);
    }
}

static void prepare_backward(const Pass *p, const BackwardScratch *s, real *own) {
    size d = p->width, *queue = s->queues;
    TASKS(queue, weight_sets(p) * p->heads) projection_weights(p, s->w_x, own, task);
    TASKS(queue + 1, p->grad_y && p->folded ? p->heads : 0) fold(p, &s->out, own, task);
    TASKS(queue + 2, p->grad_x ? pieces(d, BROAD) : 0) {
        size j = task * BROAD;
        pack_broad(2 * d, least(BROAD, d - j), p->w_qk + j, d, 1, s->w_qk + j * 2 * d, 2 * d * BROAD);
    }
    TASKS(queue + 3, 1) {
        if (p->grad_w_qk) memset(p->grad_b_qk, 0, 2 * d * sizeof(real));
        if (p->grad_w_out) memset(p->grad_b_out, 0, d * sizeof(real));
        if (!p->folded) pack_score_map(p, &s->out);
    }
#pragma omp barrier
    TASKS(queue + 4, p->grad_y ? pieces(map_rows(p), BROAD) : 0) pack_output(p, &s->out, 1, task);
    TASKS(queue + 5, weight_sets(p) * 2 * p->heads) turn_weights(p, s, task);
#pragma omp barrier
}

static void grad_of_lambda(const Pass *p) {
    for (size i = 0; i < p->heads * p->rank; i++) {
        real sum = 0;
        for (size b = 0; b < p->sequences; b++)
            sum += p->energy[b * p->heads * p->rank + i] * p->grad_objective[b] * energy_scale(p, b);
        p->grad_sqrt_lambda[i] = 2 * p->sqrt_lambda[i] * sum;
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
    TASKS(queue + 6, weight_sets(p) * p->heads) backward_to_landmarks(p, s->w_x, s->grad_w_x, own, task);
    TASKS(queue + 7, learns && p->folded ? p->heads : 0) unfold(p, s->grad_map, s->shares, own, task);
#pragma omp barrier
    TASKS(queue + 8, 2 * p->heads) backward_to_weights(p, s->grad_w_x, own, task);
    TASKS(queue + 9, 1) {
        if (learns) finish_score_map(p, s->shares);
        if (p->grad_objective) grad_of_lambda(p);
    }
}
