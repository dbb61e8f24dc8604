/* From x to y: z = W_qk x + b, e = (z_q W_{e|X}) / ‖z_q‖, r = (z_k W_{r|X}) / ‖z_k‖, y from the scores, and J. */

typedef struct {
    real *w_qk, *w_x, *energies, *own;
    size of_thread;
    Output out;
} ForwardScratch;

static ForwardScratch forward_scratch(const Pass *p, size *used) {
    ForwardScratch s;
    size d = p->width, all = all_scores(p), most = d > all ? d : all;
    s.w_qk = take(p, used, padded(2 * d, BROAD) * d);
    s.w_x = take(p, used, weight_sets(p) * 2 * p->heads * packed_weights(p));
    s.energies = take(p, used, (padded(p->tokens, BLOCK) / BLOCK + p->threads + p->sequences) * all);
    s.out = take_output(p, used);
    size prepared = landmark_scratch(p) + fold_scratch(p);
    size block = padded(BLOCK, TALL) * (most + d + padded(p->rank, BROAD));
    s.of_thread = padded(prepared > block ? prepared : block, BLOCK);
    s.own = take(p, used, s.of_thread * p->threads);
    return s;
}

/* 1/‖z‖ of m tokens of a channel, from their panels. */
static void inverse_norms(size m, size k, const real *panels, real *inverse, size stride) {
    for (size i = 0; i < m; i += TALL, panels += TALL * k) {
        real sums[4][TALL] = {{0}}; /* four sums at once: one would wait for itself */
        size l = 0;
        for (; l + 4 <= k; l += 4)
#pragma GCC unroll 4
            for (size u = 0; u < 4; u++)
                for (size r = 0; r < TALL; r++) {
                    real value = panels[(l + u) * TALL + r];
                    sums[u][r] += value * value;
                }
        for (; l < k; l++)
            for (size r = 0; r < TALL; r++) sums[0][r] += panels[l * TALL + r] * panels[l * TALL + r];
        for (size r = 0; r < least(TALL, m - i); r++) {
            real norm = sqrt(sums[0][r] + sums[1][r] + (sums[2][r] + sums[3][r]));
            inverse[(i + r) * stride] = 1 / (norm > SMALLEST ? norm : SMALLEST);
        }
    }
}

/* The scores of m tokens that share their weights, and the energies they bring. */
static void scores_of(const Pass *p, size row, size m, real *w_x, size set, real *energy, real *tall, real *raw) {
    size inner = head_width(p), rank = p->rank, all = all_scores(p), breadth = padded(rank, BROAD);
    for (size channel = 0; channel < 2 * p->heads; channel++) {
        size column = column_of(p, channel);
        real *inverse = p->inverse + row * 2 * p->heads + channel, *sums = energy + column;
        pack_tall(m, inner, p->z + row * 2 * p->width + channel * inner, 2 * p->width, 1, tall, inner * TALL);
        inverse_norms(m, inner, tall, inverse, 2 * p->heads);
        multiply(m, breadth, inner, tall, weights_at(p, w_x, set, channel), 0, 0, raw, breadth);
        for (size j = 0; j < rank; j += LANES) {
            vec squares = {0};
            for (size i = 0; i < m; i++) {
                vec score = *(vec *)(raw + i * breadth + j) * inverse[i * 2 * p->heads];
                store_first(p->scores + (row + i) * all + column + j, score, rank - j);
                squares += score * score;
            }
            store_first(sums + j, squares, rank - j);
        }
    }
}

static void forward_block(const Pass *p, const ForwardScratch *s, size block, Range rows, real *own) {
    size d = p->width, all = all_scores(p), m = rows.to - rows.from, most = d > all ? d : all;
    real *tall = own, *raw = tall + padded(BLOCK, TALL) * most, *heads = raw + BLOCK * padded(p->rank, BROAD);
    pack_tall(m, d, p->x + rows.from * d, d, 1, tall, d * TALL);
    multiply(m, 2 * d, d, tall, s->w_qk, p->b_qk, 0, p->z + rows.from * 2 * d, 2 * d);
    for (size row = rows.from; row < rows.to;) {
        size b = sequence_of(p, row), end = least(rows.to, p->starts[b + 1]);
        scores_of(p, row, end - row, s->w_x, set_of(p, b), s->energies + (block + b) * all, tall, raw);
        row = end;
    }
    const real *scores = p->scores + rows.from * all;
    if (p->folded)
        pack_tall(m, all, scores, all, 1, tall, all * TALL);
    else {
        heads_of(p, m, scores, s->out.score_map, tall, heads);
        pack_tall(m, d, heads, d, 1, tall, d * TALL);
    }
    multiply(m, d, map_rows(p), tall, s->out.map, s->out.shift, 0, p->y + rows.from * d, d);
}

/* Blocks of a thread's tokens, even ones; their numbers go on from thread to thread. */
static inline size blocks_of(Range rows) { return (rows.to - rows.from + BLOCK - 1) / BLOCK; }

static inline Range block_at(Range rows, size block) {
    size step = padded((rows.to - rows.from + blocks_of(rows) - 1) / blocks_of(rows), TALL);
    return (Range){least(rows.from + block * step, rows.to), least(rows.from + (block + 1) * step, rows.to)};
}

static void forward(const Pass *p, const ForwardScratch *s, size thread, size threads) {
    real *own = s->own + thread * s->of_thread;
    size d = p->width, all = all_scores(p);
    Range panels = share(padded(2 * d, BROAD) / BROAD, thread, threads);
    for (size j = panels.from * BROAD; j < least(panels.to * BROAD, 2 * d); j += BROAD)
        pack_broad(d, least(BROAD, 2 * d - j), p->w_qk + j * d, 1, d, s->w_qk + j * d, d * BROAD);
    projection_weights(p, s->w_x, own, thread, threads);
    fold(p, &s->out, own, thread, threads);
#pragma omp barrier
    pack_output(p, &s->out, 0, thread, threads);
#pragma omp barrier
    Range rows = tokens_of(p, thread, threads);
    size block = 0;
    for (size t = 0; t < thread; t++) block += blocks_of(tokens_of(p, t, threads));
    for (size i = 0; i < blocks_of(rows); i++) {
        Range here = block_at(rows, i);
        if (here.from < here.to) forward_block(p, s, block + i, here, own);
    }
#pragma omp barrier
    if (!p->objective) return;
    /* The energies of a sequence, block after block: e and r alike, since Λ weighs both alike. */
    Range mine = share(p->sequences, thread, threads);
    real trace = 0;
    for (size b = mine.from; b < mine.to; b++) {
        real *energy = p->energy + b * p->heads * p->rank, j = 0;
        memset(energy, 0, p->heads * p->rank * sizeof(real));
        block = 0;
        for (size t = 0; t < threads; t++) {
            rows = tokens_of(p, t, threads);
            for (size i = 0; i < blocks_of(rows); i++, block++) {
                Range here = block_at(rows, i);
                if (!meet(here, (Range){p->starts[b], p->starts[b + 1]})) continue;
                const real *from = s->energies + (block + b) * all;
                for (size head = 0; head < p->heads; head++)
                    for (size k = 0; k < p->rank; k++)
                        energy[head * p->rank + k] += from[2 * head * p->rank + k] + from[(2 * head + 1) * p->rank + k];
            }
        }
        for (size i = 0; i < p->heads * p->rank; i++) j += energy[i] * p->sqrt_lambda[i] * p->sqrt_lambda[i];
        j *= energy_scale(p, b);
        if (b == mine.from || p->projected_trace) {
            trace = 0;
            for (size head = 0; head < p->heads; head++) trace += trace_of(p, s->w_x, b, head);
        }
        p->objective[b] = j - trace / p->heads;
    }
}
