/* From x to y: z = W_qk x + b, e = (z_q W_{e|X}) / ‖z_q‖, r = (z_k W_{r|X}) / ‖z_k‖, y from the scores, and J. */

typedef struct {
    size *queues;
    real *w_x, *energies, *last, *own;
    size of_thread;
    Output out;
} ForwardScratch;

enum { FORWARD_QUEUES = 4 };

static ForwardScratch forward_scratch(const Pass *p, size *used) {
    ForwardScratch s;
    s.queues = take_bytes(p, used, FORWARD_QUEUES * sizeof(size));
    s.w_x = take(p, used, weight_sets(p) * set_size(p));
    s.energies = take(p, used, energies_size(p));
    s.last = take(p, used, room_of_last(p));
    s.out = take_output(p, used);
    size prepared = landmark_scratch(p) + fold_scratch(p), block = BLOCK * (p->width + padded(p->rank, BROAD));
    if (prepared < p->heads * p->rank) prepared = p->heads * p->rank;
    s.of_thread = padded(prepared > block ? prepared : block, BLOCK);
    s.own = take(p, used, s.of_thread * p->threads);
    return s;
}

/* 1/‖z‖ of a panel of tokens. */
static void inverse_norms(const Pass *p, const real *z, real *inverse) {
    size inner = head_width(p);
    for (size channel = 0; channel < 2 * p->heads; channel++, inverse += BROAD) {
        vec sums[VECTORS] = {{0}};
        for (size i = 0; i < inner; i++, z += BROAD)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) sums[v] += *(const vec *)(z + v * LANES) * *(const vec *)(z + v * LANES);
        for (int v = 0; v < VECTORS; v++)
            for (int l = 0; l < LANES; l++) {
                real norm = sqrt(sums[v][l]);
                inverse[v * LANES + l] = 1 / (norm > SMALLEST ? norm : SMALLEST);
            }
    }
}

/* The scores of tokens that share their weights, and the energies they bring. */
static void scores_of(const Pass *p, Tokens at, Range rows, real *w_x, size set, real *energy, real *raw) {
    size inner = head_width(p), rank = p->rank, all = all_scores(p), d = p->width, breadth = padded(rank, BROAD);
    size first = rows.from / BROAD * BROAD, m = padded(rows.to - first, BROAD);
    lanes here[BLOCK / BROAD][VECTORS];
    for (size row = 0; row < m; row += BROAD) mask_of(first + row, rows, here[row / BROAD]);
    for (size channel = 0; channel < 2 * p->heads; channel++) {
        const real *w = weights_at(p, w_x, set, channel), *z = at.z + panel_at(first, 2 * d) + channel * inner * BROAD;
        const real *inverse = at.inverse + panel_at(first, 2 * p->heads) + channel * BROAD;
        size column = column_of(p, channel);
        real *to = at.scores + panel_at(first, all) + column * BROAD;
        for (size j = 0; j < rank; j += BROAD)
            multiply(padded(least(BROAD, rank - j), TALL), m, inner, in_columns(w + j * inner, BROAD), z, 2 * d * BROAD,
                     0, to_panels(raw + j * BROAD, breadth * BROAD, 0));
        for (size j = 0; j < rank; j++) {
            vec squares = {0};
            for (size row = 0; row < m; row += BROAD)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; v++) {
                    vec *score = (vec *)(to + panel_at(row, all) + j * BROAD + v * LANES);
                    vec other = first + row < rows.from ? *score : (vec){0};
                    *score = *(const vec *)(raw + panel_at(row, breadth) + j * BROAD + v * LANES) *
                             *(const vec *)(inverse + panel_at(row, 2 * p->heads) + v * LANES);
                    squares += either(here[row / BROAD][v], *score * *score, (vec){0});
                    *score = either(here[row / BROAD][v], *score, other);
                }
            energy[column + j] = sum_of(squares);
        }
    }
}

static void forward_block(const Pass *p, const ForwardScratch *s, size block, Range rows, real *own) {
    size d = p->width, all = all_scores(p), m = rows.to - rows.from;
    Tokens at = tokens_of(p, rows, s->last);
    real *broad = own, *raw = own + BLOCK * d;
    const real *scores = at.scores + panel_at(rows.from, all);
    pack_broad(d, m, p->x + rows.from * d, 1, d, broad, d * BROAD);
    multiply(2 * d, padded(m, BROAD), d, in_rows(p->w_qk, d), broad, d * BROAD, p->b_qk,
             to_panels(at.z + panel_at(rows.from, 2 * d), 2 * d * BROAD, 0));
    for (size row = rows.from; row < rows.to; row += BROAD)
        inverse_norms(p, at.z + panel_at(row, 2 * d), at.inverse + panel_at(row, 2 * p->heads));
    for (size row = rows.from; row < rows.to;) {
        size b = sequence_of(p, row), end = least(rows.to, p->starts[b + 1]);
        scores_of(p, at, (Range){row, end}, s->w_x, set_of(p, b), energies_at(p, s->energies, block, b), raw);
        row = end;
    }
    if (!p->folded) heads_of(p, m, scores, broad);
    multiply(d, m, mapped(p), in_rows(p->folded ? s->out.map : p->w_out, mapped(p)), p->folded ? scores : broad,
             mapped(p) * BROAD, s->out.shift, to_turned(p->y + rows.from * d, d, 0));
    for (size row = rows.from; p->score_rows && row < rows.to; row++)
        for (size j = 0; j < all; j++) p->score_rows[row * all + j] = at.scores[panel_at(row, all) + j * BROAD + row % BROAD];
    move_tokens(p, rows, at, 0);
}

/* J of a sequence. */
static void objective_of(const Pass *p, const ForwardScratch *s, size b, real trace, real *energy) {
    real j = 0;
    sum_energies(p, s->energies, b, energy);
    for (size i = 0; i < p->heads * p->rank; i++) j += energy[i] * p->sqrt_lambda[i] * p->sqrt_lambda[i];
    for (size head = 0; head < p->heads && p->projected_trace; head++) trace += trace_of(p, s->w_x, b, head);
    p->objective[b] = j * energy_scale(p, b) - trace / p->heads;
}

static void forward(const Pass *p, const ForwardScratch *s, size thread) {
    real *own = s->own + thread * s->of_thread;
    size *queue = s->queues, blocks = pieces(p->tokens, block_size(p));
    TASKS(queue, weight_sets(p) * p->heads) projection_weights(p, s->w_x, own, task);
    TASKS(queue + 1, pieces(p->width, ROWS)) {
        if (p->folded) fold(p, &s->out, own, task);
        fold_shift(p, &s->out, task);
    }
#pragma omp barrier
    TASKS(queue + 2, blocks) forward_block(p, s, task, piece((Range){0, p->tokens}, block_size(p), task), own);
    if (!p->objective) return;
#pragma omp barrier
    real trace = 0;
    for (size head = 0; head < p->heads && !p->projected_trace; head++) trace += trace_of(p, s->w_x, 0, head);
    TASKS(queue + 3, p->sequences) objective_of(p, s, task, trace, own);
}
