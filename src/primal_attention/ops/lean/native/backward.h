/* From dy and dJ to the gradients. With g = de from all that the scores went into:

       dz = (W_{e|X} g − z ⟨g, e⟩ / ‖z‖) / ‖z‖,      dW_{e|X} = zᵀ (g / ‖z‖),      dx = W_qkᵀ dz,      dW_qk = dzᵀ x

   dz is made stretch by stretch, by each thread for its own tokens; then all threads share the rows of the gradients that
   sum over tokens. */

typedef struct {
    real *w_qk, *w_x, *w_x_turned, *parts, *dz, *heads, *rows_x, *rows_y, *grad_map, *shares, *own;
    size of_thread, stretch; /* stretch: tokens of a thread */
    Output out;
} BackwardScratch;

/* The longest rows that a block packs. */
static inline size tall_rows(const Pass *p) {
    size all = all_scores(p), heads = p->heads * padded(head_width(p), TALL), most = 2 * p->width;
    if (most < all) most = all;
    return most < heads ? heads : most;
}

/* Not a power of two, for rows so far apart meet in few places of the cache. */
static inline size dz_stride(const Pass *p) { return 2 * p->width + LANES; }

static inline size turned_weights(const Pass *p) { return padded(head_width(p), BROAD) * p->rank; } /* of a channel */

static BackwardScratch backward_scratch(const Pass *p, size *used) {
    BackwardScratch s;
    size d = p->width, all = all_scores(p), breadth = padded(d, BROAD), inner = head_width(p), pair = 2 * p->rank;
    s.stretch = padded(least(STRETCH / p->threads > 64 ? STRETCH / p->threads : 64, p->tokens / p->threads + TALL), TALL);
    size tokens = s.stretch * p->threads;
    s.w_qk = take(p, used, breadth * 2 * d);
    s.w_x = take(p, used, weight_sets(p) * 2 * p->heads * packed_weights(p));
    s.w_x_turned = take(p, used, weight_sets(p) * 2 * p->heads * turned_weights(p));
    s.parts = take(p, used, (weight_sets(p) + p->threads) * 2 * d * p->rank);
    s.dz = take(p, used, tokens * dz_stride(p));
    s.heads = take(p, used, p->folded ? 0 : tokens * d);
    s.rows_x = take(p, used, tokens * breadth);
    s.rows_y = take(p, used, tokens * breadth);
    s.grad_map = take(p, used, p->folded ? all * d : 0);
    s.shares = take(p, used, (p->heads > p->threads ? p->heads : p->threads) * pair * inner);
    s.out = take_output(p, used);
    size prepared = landmark_scratch(p) + fold_scratch(p) + unfold_scratch(p);
    size output = BLOCK * (tall_rows(p) + d + p->heads * padded(pair, BROAD));
    size scores = BLOCK * (p->rank + padded(p->rank, BROAD) + padded(inner, BROAD) + 2) + all;
    size block = BLOCK * all + (output > scores ? output : scores), sums = BLOCK * tokens;
    s.of_thread = padded(prepared > block ? prepared : block, BLOCK);
    if (s.of_thread < sums) s.of_thread = sums;
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

/* Fetch what the next channel reads of m tokens while this one is multiplied: rows stand too far apart for the processor
   to foresee it. */
static void fetch_ahead(const Pass *p, size row, size m, size channel) {
    if (channel >= 2 * p->heads) return;
    const real *scores = p->scores + row * all_scores(p) + column_of(p, channel);
    const real *z = p->z + row * 2 * p->width + channel * head_width(p);
    for (size i = 0; i < m; i++, scores += all_scores(p), z += 2 * p->width) {
        for (size j = 0; j < p->rank; j += 64 / (size)sizeof(real)) __builtin_prefetch(scores + j, 0, 2);
        for (size l = 0; l < head_width(p); l += 64 / (size)sizeof(real)) __builtin_prefetch(z + l, 0, 2);
    }
}

/* Rows of dz begin as z times `along`. */
static void begin_rows(size m, size k, const real *along, const real *z, size stride, real *dz, size dz_stride) {
    for (size i = 0; i < m; i++)
        for (size l = 0; l < k; l += LANES)
            store_first(dz + i * dz_stride + l, load_first(z + i * stride + l, k - l) * along[i], k - l);
}

/* dz of m tokens that share their weights, and their share of dW_{·|X}. grad: that of their scores. */
static void tokens_back(const Pass *p, const BackwardScratch *s, size row, size m, size sequence, int add, real *grad,
                        real *dz, real *own, size thread) {
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
        fetch_ahead(p, row, m, channel + 1);
        begin_rows(m, inner, along, z, 2 * p->width, to, dz_stride(p));
        for (size j = 0; j < rank; j += BROAD) { /* panel by panel of the rank */
            size columns = least(BROAD, rank - j);
            pack_tall(m, columns, scaled + j * m, BROAD, 1, tall, columns * TALL);
            multiply(m, inner, columns, tall, w + j * padded(inner, BROAD), 0, 1, to, dz_stride(p));
        }
        pack_broad(m, inner, z, 2 * p->width, 1, broad, m * BROAD);
        multiply_turned(rank, inner, m, scaled, broad, add, part_at(p, s->parts, set, thread, channel), inner);
    }
}

/* A block of tokens from dy to dz and dx. dz: its rows in the stretch; heads: its rows of the heads' outputs, or NULL. */
static void backward_block(const Pass *p, const BackwardScratch *s, Range rows, size *last, int *share_begun, real *dz,
                           real *heads, real *own, size thread) {
    size d = p->width, all = all_scores(p), m = rows.to - rows.from, pair = 2 * p->rank, inner = head_width(p);
    real *grad = own, *rest = grad + BLOCK * all, *of_heads = rest + BLOCK * tall_rows(p);
    if (!p->grad_y)
        memset(grad, 0, m * all * sizeof(real));
    else {
        pack_tall(m, d, p->grad_y + rows.from * d, d, 1, rest, d * TALL);
        multiply(m, map_rows(p), d, rest, s->out.map, 0, 0, p->folded ? grad : of_heads, map_rows(p));
    }
    if (p->grad_y && !p->folded) {
        const real *scores = p->scores + rows.from * all;
        pack_tall(m * p->heads, inner, of_heads, inner, 1, rest, inner * TALL);
        multiply(m * p->heads, pair, inner, rest, s->out.score_map_back, 0, 0, grad, pair);
        if (heads) { /* the shares of dW_o, and the heads' outputs for dW_out */
            real *broad = of_heads + BLOCK * d;
            pack_tall(inner, m * p->heads, of_heads, 1, inner, rest, m * p->heads * TALL);
            pack_broad(m * p->heads, pair, scores, pair, 1, broad, m * p->heads * BROAD);
            multiply(inner, pair, m * p->heads, rest, broad, 0, *share_begun, s->shares + thread * inner * pair, pair);
            *share_begun = 1;
            heads_of(p, m, scores, s->out.score_map, rest, heads);
        }
    }
    for (size row = rows.from; row < rows.to;) {
        size b = sequence_of(p, row), end = least(rows.to, p->starts[b + 1]), at = row - rows.from;
        tokens_back(p, s, row, end - row, b, *last == set_of(p, b), grad + at * all, dz + at * dz_stride(p),
                    rest, thread);
        *last = set_of(p, b);
        row = end;
    }
    if (p->grad_x) {
        pack_tall(m, 2 * d, dz, dz_stride(p), 1, rest, 2 * d * TALL);
        multiply(m, d, 2 * d, rest, s->w_qk, 0, 0, p->grad_x + rows.from * d, d);
    }
}

/* The part of a thread's tokens that belongs to a stretch. */
static inline Range stretch_of(const Pass *p, const BackwardScratch *s, size stretch, size thread, size threads) {
    Range rows = tokens_of(p, thread, threads);
    return (Range){least(rows.from + stretch * s->stretch, rows.to), least(rows.from + (stretch + 1) * s->stretch, rows.to)};
}

/* Pack columns j… of the `whole` rows of a stretch, which stand thread by thread: as panels of rows of the transpose, or
   as one broad panel. local: they stand in scratch. */
static void pack_stretch(const Pass *p, const BackwardScratch *s, size stretch, const real *from, size j, size columns,
                         size stride, int local, int broad, size whole, real *panels, size threads) {
    for (size t = 0, at = 0; t < threads; t++) {
        Range rows = stretch_of(p, s, stretch, t, threads);
        size count = rows.to - rows.from;
        const real *first = from + (local ? t * s->stretch : rows.from) * stride + j;
        if (broad)
            pack_broad(count, columns, first, stride, 1, panels + at * BROAD, 0);
        else
            pack_tall(columns, count, first, 1, stride, panels + at * TALL, whole * TALL);
        at += count;
    }
}

/* grad (m × d) += Aᵀ B over the tokens of a stretch, this thread's rows of it; totals, if any, += Σ A. */
static void sum_over_tokens(const Pass *p, const BackwardScratch *s, size stretch, size count, const real *a, size m,
                            size a_stride, int local, const real *packed_b, real *grad, real *totals, real *own, size thread,
                            size threads) {
    Range mine = share(padded(m, TALL) / TALL, thread, threads);
    for (size i = mine.from * TALL; i < least(mine.to * TALL, m); i += BLOCK) {
        size end = least(least(mine.to * TALL, m), i + BLOCK);
        pack_stretch(p, s, stretch, a, i, end - i, a_stride, local, 0, count, own, threads);
        for (size j = i; totals && j < end; j += TALL)
            add_sums(count, TALL, own + (j - i) * count, totals + j, least(TALL, end - j));
        multiply(end - i, p->width, count, own, packed_b, 0, stretch > 0, grad + i * p->width, p->width);
    }
}

/* The gradients that sum over tokens, once dz of the stretch is there. */
static void backward_stretch(const Pass *p, const BackwardScratch *s, size stretch, real *own, size thread,
                             size threads) {
    size d = p->width, all = all_scores(p), count = 0;
    int learns = p->grad_y && p->grad_w_out;
    for (size t = 0; t < threads; t++) {
        Range rows = stretch_of(p, s, stretch, t, threads);
        count += rows.to - rows.from;
    }
    const real *b = p->folded ? p->grad_y : s->heads;
    Range panels = share(padded(d, BROAD) / BROAD, thread, threads);
    for (size j = panels.from * BROAD; j < least(panels.to * BROAD, d); j += BROAD) {
        size columns = least(BROAD, d - j);
        if (p->grad_w_qk) pack_stretch(p, s, stretch, p->x, j, columns, d, 0, 1, count, s->rows_x + j * count, threads);
        if (!learns) continue;
        pack_stretch(p, s, stretch, b, j, columns, d, !p->folded, 1, count, s->rows_y + j * count, threads);
        if (p->folded) add_sums(count, BROAD, s->rows_y + j * count, p->grad_b_out + j, columns);
    }
#pragma omp barrier
    if (p->grad_w_qk)
        sum_over_tokens(p, s, stretch, count, s->dz, 2 * d, dz_stride(p), 1, s->rows_x, p->grad_w_qk, p->grad_b_qk, own,
                        thread, threads);
    if (learns && p->folded)
        sum_over_tokens(p, s, stretch, count, p->scores, all, all, 0, s->rows_y, s->grad_map, 0, own, thread, threads);
    if (learns && !p->folded)
        sum_over_tokens(p, s, stretch, count, p->grad_y, d, d, 0, s->rows_y, p->grad_w_out, p->grad_b_out, own, thread,
                        threads);
#pragma omp barrier
}

static void prepare_backward(const Pass *p, const BackwardScratch *s, real *own, size thread, size threads) {
    size d = p->width, inner = head_width(p);
    Range panels = share(padded(d, BROAD) / BROAD, thread, threads);
    for (size j = panels.from * BROAD; p->grad_x && j < least(panels.to * BROAD, d); j += BROAD)
        pack_broad(2 * d, least(BROAD, d - j), p->w_qk + j, d, 1, s->w_qk + j * 2 * d, 2 * d * BROAD);
    projection_weights(p, s->w_x, own, thread, threads);
    if (p->grad_y) fold(p, &s->out, own, thread, threads);
    if (thread == 0 && p->grad_w_qk) memset(p->grad_b_qk, 0, 2 * d * sizeof(real));
    if (thread == 0 && p->grad_w_out) memset(p->grad_b_out, 0, d * sizeof(real));
#pragma omp barrier
    if (p->grad_y) pack_output(p, &s->out, 1, thread, threads);
    Range mine = share(weight_sets(p) * 2 * p->heads, thread, threads);
    for (size i = mine.from; i < mine.to; i++) {
        const real *w = s->w_x + i * packed_weights(p);
        real *to = s->w_x_turned + i * turned_weights(p);
        for (size j = 0; j < p->rank; j += BROAD) { /* each panel of W_{·|X} on its own */
            size rows = least(BROAD, p->rank - j);
            pack_broad(rows, inner, w + j * inner, 1, BROAD, to + j * padded(inner, BROAD), rows * BROAD);
        }
    }
#pragma omp barrier
}

static void backward(const Pass *p, const BackwardScratch *s, size thread, size threads) {
    real *own = s->own + thread * s->of_thread;
    size d = p->width, last = -1, stretches = 0;
    int share_begun = 0, learns = p->grad_y && p->grad_w_out;
    prepare_backward(p, s, own, thread, threads);
    for (size t = 0; t < threads; t++) {
        Range rows = tokens_of(p, t, threads);
        size needed = (rows.to - rows.from + s->stretch - 1) / s->stretch;
        if (needed > stretches) stretches = needed;
    }
    for (size stretch = 0; stretch < stretches; stretch++) {
        Range rows = stretch_of(p, s, stretch, thread, threads);
        for (size i = 0; i < blocks_of(rows); i++) {
            Range here = block_at(rows, i);
            size at = thread * s->stretch + here.from - rows.from;
            if (here.from < here.to)
                backward_block(p, s, here, &last, &share_begun, s->dz + at * dz_stride(p),
                               learns && !p->folded ? s->heads + at * d : 0, own, thread);
        }
#pragma omp barrier
        if (learns || p->grad_w_qk) backward_stretch(p, s, stretch, own, thread, threads);
    }
    backward_to_landmarks(p, s->w_x, s->parts, own, thread, threads);
    if (learns && !p->folded && !share_begun) /* a thread without tokens */
        memset(s->shares + thread * 2 * p->rank * head_width(p), 0, 2 * p->rank * head_width(p) * sizeof(real));
    if (learns && p->folded) unfold(p, s->grad_map, s->shares, own, thread, threads);
#pragma omp barrier
    backward_to_weights(p, s->parts, own, thread, threads);
    if (thread > 0) return;
    if (learns) finish_score_map(p, s->shares, p->folded ? p->heads : threads);
    for (size i = 0; p->grad_objective && i < p->heads * p->rank; i++) {
        real sum = 0;
        for (size b = 0; b < p->sequences; b++)
            sum += p->energy[b * p->heads * p->rank + i] * p->grad_objective[b] * energy_scale(p, b);
        p->grad_sqrt_lambda[i] = 2 * p->sqrt_lambda[i] * sum;
    }
}
