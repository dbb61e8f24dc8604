/* From x to y: z = W_qk x + b, e = (z_q W_{e|X}) / ‖z_q‖, r = (z_k W_{r|X}) / ‖z_k‖, y from the scores, and J. */

typedef struct {
    size *queues;
    real *w_qk, *w_x, *energies, *own;
    size of_thread;
    Output out;
} ForwardScratch;

enum { FORWARD_QUEUES = 8 };

static ForwardScratch forward_scratch(const Pass *p, size *used) {
    ForwardScratch s;
    size d = p->width, all = all_scores(p), most = d > all ? d : all;
    s.queues = take_bytes(p, used, FORWARD_QUEUES * sizeof(size));
    s.w_qk = take(p, used, padded(2 * d, BROAD) * d);
    s.w_x = take(p, used, weight_sets(p) * 2 * p->heads * packed_weights(p));
    s.energies = take(p, used, (pieces(p->tokens, block_size(p)) + p->sequences) * all);
    s.out = take_output(p, used);
    size prepared = landmark_scratch(p) + fold_scratch(p), block = BLOCK * (most + d + padded(p->rank, BROAD));
    s.of_thread = padded(prepared > block ? prepared : block, BLOCK);
    s.own = take(p, used, s.of_thread * p->threads);
    return s;
}

/* 1/‖z‖ of m tokens of a channel, from their panels. inverse: m numbers, and as many more as fill a panel. */
static void inverse_norms(size m, size k, const real *panels, real *inverse) {
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
        for (size r = 0; r < TALL; r++) {
            real norm = sqrt(sums[0][r] + sums[1][r] + (sums[2][r] + sums[3][r]));
            inverse[i + r] = 1 / (norm > SMALLEST ? norm : SMALLEST);
        }
    }
}

/* The scores of m tokens that share their weights, and the energies they bring. */
static void scores_of(const Pass *p, size row, size m, real *w_x, size set, real *energy, real *tall, real *raw) {
    size inner = head_width(p), rank = p->rank, all = all_scores(p), breadth = padded(rank, BROAD);
    real inverse[BLOCK];
    for (size channel = 0; channel < 2 * p->heads; channel++) {
        size column = column_of(p, channel);
        pack_tall(m, inner, p->z + row * 2 * p->width + channel * inner, 2 * p->width, 1, tall, inner * TALL);
        inverse_norms(m, inner, tall, inverse);
        multiply(m, breadth, inner, tall, weights_at(p, w_x, set, channel), 0, 0, raw, breadth);
        for (size j = 0; j < rank; j += LANES) {
            /* The last vector reaches back into the one before: a whole store, and the same numbers once more. */
            size back = j + LANES > rank && j ? j + LANES - rank : 0, left = rank - j + back;
            real *to = p->scores + row * all + column + j - back, *from = raw + j - back;
            vec squares = {0};
            for (size i = 0; i < m; i++) {
                vec score = *(loose *)(from + i * breadth) * inverse[i];
                store_first(to + i * all, score, left);
                squares += score * score;
            }
            store_first(energy + column + j - back, squares, left);
        }
        for (size i = 0; i < m; i++) p->inverse[(row + i) * 2 * p->heads + channel] = inverse[i];
    }
}

static void forward_block(const Pass *p, const ForwardScratch *s, size block, Range rows, real *own) {
    size d = p->width, all = all_scores(p), m = rows.to - rows.from, most = d > all ? d : all;
    real *tall = own, *raw = tall + BLOCK * most, *heads = raw + BLOCK * padded(p->rank, BROAD);
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

/* J of a sequence. Its energies come block after block: e and r alike, since Λ weighs both alike. */
static void objective_of(const Pass *p, const ForwardScratch *s, size b, real trace) {
    real *energy = p->energy + b * p->heads * p->rank, j = 0;
    Range rows = rows_of(p, b);
    memset(energy, 0, p->heads * p->rank * sizeof(real));
    for (size block = rows.from / block_size(p); block * block_size(p) < rows.to && rows.from < rows.to; block++) {
        const real *from = s->energies + (block + b) * all_scores(p);
        for (size head = 0; head < p->heads; head++)
            for (size k = 0; k < p->rank; k++)
                energy[head * p->rank + k] += from[2 * head * p->rank + k] + from[(2 * head + 1) * p->rank + k];
    }
    for (size i = 0; i < p->heads * p->rank; i++) j += energy[i] * p->sqrt_lambda[i] * p->sqrt_lambda[i];
    for (size head = 0; head < p->heads && p->projected_trace; head++) trace += trace_of(p, s->w_x, b, head);
    p->objective[b] = j * energy_scale(p, b) - trace / p->heads;
}

static void forward(const Pass *p, const ForwardScratch *s, size thread) {
    real *own = s->own + thread * s->of_thread;
    size d = p->width, *queue = s->queues, blocks = pieces(p->tokens, block_size(p));
    TASKS(queue, weight_sets(p) * p->heads) projection_weights(p, s->w_x, own, task);
    TASKS(queue + 1, p->heads) {
        if (p->folded) fold(p, &s->out, own, task);
        fold_shift(p, &s->out, task);
    }
    TASKS(queue + 2, pieces(2 * d, BROAD)) {
        size j = task * BROAD;
        pack_broad(d, least(BROAD, 2 * d - j), p->w_qk + j * d, 1, d, s->w_qk + j * d, d * BROAD);
    }
#pragma omp barrier
    TASKS(queue + 3, pieces(d, BROAD)) pack_output(p, &s->out, 0, task);
    TASKS(queue + 4, !p->folded) pack_score_map(p, &s->out);
#pragma omp barrier
    TASKS(queue + 5, blocks) forward_block(p, s, task, piece((Range){0, p->tokens}, block_size(p), task), own);
    if (!p->objective) return;
#pragma omp barrier
    real trace = 0;
    for (size head = 0; head < p->heads && !p->projected_trace; head++) trace += trace_of(p, s->w_x, 0, head);
    TASKS(queue + 6, p->sequences) objective_of(p, s, task, trace);
}
