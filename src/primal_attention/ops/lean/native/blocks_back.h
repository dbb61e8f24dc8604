/* From dy and dJ to the gradients: what is made of a block of tokens. With g = de from all that the scores went into:

       dz = (W_{e|X} g − z ⟨g, e⟩ / ‖z‖) / ‖z‖,      dW_{e|X} = zᵀ (g / ‖z‖),      dx = W_qkᵀ dz

   The tokens come in stretches (backward.h), whose blocks leave dz and what their gradients sum over tokens. */

typedef struct {
    size *queues;
    real *w_x, *parts, *grad_w_x, *dz, *heads, *grad_heads, *rows_x, *rows_y, *sums_y, *grad_map, *shares,
        *energies, *last, *own;
    size of_thread;
    Output out;
} BackwardScratch;

enum { BACKWARD_QUEUES = 6, STRETCH_QUEUES = 4 };

static inline size stretch_size(const Pass *p) {
    return least(padded(STRETCH, block_size(p)), padded(p->tokens, BROAD));
}

/* How many numbers the panels of dz have for each token: not a power of two, for those meet in few places of the cache. */
static inline size numbers_of_dz(const Pass *p) { return 2 * p->width + TALL; }

static BackwardScratch backward_scratch(const Pass *p, size *used) {
    BackwardScratch s;
    size d = p->width, all = all_scores(p), breadth = padded(d, BROAD), pair = padded(2 * p->rank, BROAD);
    size tokens = stretch_size(p), apart = p->folded ? 0 : tokens * d;
    s.queues = take_bytes(p, used, (BACKWARD_QUEUES + STRETCH_QUEUES * pieces(p->tokens, tokens)) * sizeof(size));
    s.w_x = take(p, used, weight_sets(p) * set_size(p));
    s.parts = take(p, used, (pieces(tokens, block_size(p)) + least(weight_sets(p), tokens)) * set_size(p));
    s.grad_w_x = take(p, used, weight_sets(p) * set_size(p));
    s.dz = take(p, used, tokens * numbers_of_dz(p));
    s.heads = take(p, used, apart);
    s.grad_heads = take(p, used, apart);
    s.rows_x = take(p, used, tokens * breadth);
    s.rows_y = take(p, used, tokens * breadth);
    s.sums_y = take(p, used, pieces(tokens, block_size(p)) * d);
    s.grad_map = take(p, used, p->folded ? all * d : 0);
    s.shares = take(p, used, p->heads * share_size(p));
    s.energies = take(p, used, p->grad_objective ? energies_size(p) : 0);
    s.last = take(p, used, room_of_last(p));
    s.out = take_output(p, used);
    size most = landmark_scratch(p) + fold_scratch(p) + unfold_scratch(p);
    size block = BLOCK * (2 * all + d) + 2 * BROAD * padded(p->rank, BROAD) + BROAD + all * LANES;
    if (most < block) most = block;
    s.of_thread = padded(most < tokens * pair ? tokens * pair : most, BLOCK);
    s.own = take(p, used, s.of_thread * p->threads);
    return s;
}

/* g / ‖z‖ of a panel and a channel, and −⟨g, e⟩ / ‖z‖² into `along`; zero for tokens that are not `here`.
   grad: what came through y and through the scores themselves. squares, if any, += e², a vector for each score. */
static void through_norm(const Pass *p, Tokens at, size row, size channel, const lanes *here, real lambda_weight,
                         const real *grad, real *along, real *scaled, real *squares) {
    const real *scores = at.scores + panel_at(row, all_scores(p)) + column_of(p, channel) * BROAD;
    const real *inverse = at.inverse + panel_at(row, 2 * p->heads) + channel * BROAD;
    const real *root = p->sqrt_lambda + channel % p->heads * p->rank;
    vec sums[VECTORS] = {{0}};
    for (size j = 0; j < p->rank; j++) {
        real twice_lambda = squares ? lambda_weight * root[j] * root[j] : 0;
        vec square = {0};
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) {
            size i = j * BROAD + v * LANES;
            vec score = *(const vec *)(scores + i), g = *(const vec *)(grad + i) + twice_lambda * score;
            __builtin_prefetch(scores + 2 * p->rank * BROAD + i, 0, 2); /* the next channel */
            sums[v] += g * score;
            square += either(here[v], score * score, (vec){0});
            *(vec *)(scaled + i) = either(here[v], g * *(const vec *)(inverse + v * LANES), (vec){0});
        }
        if (squares) *(vec *)(squares + j * LANES) += square;
    }
    for (int v = 0; v < VECTORS; v++) {
        vec factor = *(const vec *)(inverse + v * LANES);
        /* Where ‖z‖ is below its floor the divisor is a constant. */
        *(vec *)(along + v * LANES) = either(here[v] & (factor < 1 / SMALLEST), -sums[v] * factor * factor, (vec){0});
    }
}

/* dz of tokens that share their weights, and their part of dW_{·|X}; either adds to what the block has.
   grad: that of their scores. energies, if any: what becomes Σ e², Σ r². */
static void tokens_back(const Pass *p, const BackwardScratch *s, Tokens at, Range rows, size sequence, int add,
                        const real *grad, real *dz, real *part, real *energies, real *own) {
    size inner = head_width(p), rank = p->rank, d = p->width, all = all_scores(p), breadth = padded(rank, BROAD);
    size first = rows.from / BROAD * BROAD, set = set_of(p, sequence);
    real *along = own, *scaled = along + BROAD, *turned = scaled + BROAD * breadth;
    real *squares = energies ? turned + BROAD * breadth : 0;
    if (squares) memset(squares, 0, all * LANES * sizeof(real));
    real lambda_weight = p->grad_objective ? 2 * p->grad_objective[sequence] * energy_scale(p, sequence) : 0;
    for (size row = first; row < rows.to; row += BROAD) {
        int begun = row < rows.from; /* with the tokens of another sequence */
        lanes here[VECTORS];
        mask_of(row, rows, here);
        for (size channel = 0; channel < 2 * p->heads; channel++) {
            const real *w = weights_at(p, s->w_x, set, channel);
            const real *z = at.z + panel_at(row, 2 * d) + channel * inner * BROAD;
            real *to = dz + panel_at(row, numbers_of_dz(p)) + channel * inner * BROAD;
            size column = column_of(p, channel);
            through_norm(p, at, row, channel, here, lambda_weight, grad + panel_at(row, all) + column * BROAD, along,
                         scaled, squares ? squares + column * LANES : 0);
            for (size i = 0; i < inner; i++)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; v++) {
                    size j = i * BROAD + v * LANES;
                    __builtin_prefetch(z + inner * BROAD + j, 0, 2); /* the next channel */
                    vec share = *(const vec *)(z + j) * *(const vec *)(along + v * LANES);
                    if (begun) share += *(vec *)(to + j);
                    *(vec *)(to + j) = share;
                }
            for (size j = 0; j < rank; j += BROAD)
                multiply(inner, BROAD, least(BROAD, rank - j), in_rows(w + j * inner, BROAD), scaled + j * BROAD, 0, 0,
                         to_panels(to, 0, 1));
            pack_broad(BROAD, rank, scaled, 1, BROAD, turned, BROAD * BROAD);
            multiply(inner, breadth, BROAD, in_rows(z, BROAD), turned, BROAD * BROAD, 0,
                     to_panels(part + channel * packed_weights(p), inner * BROAD, add || row > first));
        }
    }
    for (size i = 0; squares && i < all; i++) energies[i] = sum_of(*(vec *)(squares + i * LANES));
}

/* dW_{·|X} of the tokens of one block and one set. Blocks and sets both follow the tokens, so that the sum of their
   numbers, counted from the first of the stretch, is a number of its own. */
static inline real *part_at(const Pass *p, const BackwardScratch *s, Range stretch, size block, size set) {
    size first = set_of(p, sequence_of(p, stretch.from));
    return s->parts + (block + set - first) * set_size(p);
}

/* sums = Σ rows, or sums + Σ rows. */
static void sum_rows(size m, size n, const real *rows, int add, real *sums) {
    if (!add) memset(sums, 0, n * sizeof(real));
    for (size i = 0; i < m; i++)
        for (size j = 0; j < n; j++) sums[j] += rows[i * n + j];
}

/* A block of tokens from dy to dz and dx. */
static void backward_block(const Pass *p, const BackwardScratch *s, Range stretch, size block, real *own) {
    Range rows = piece(stretch, block_size(p), block);
    size d = p->width, all = all_scores(p), m = rows.to - rows.from, begin = rows.from - stretch.from;
    Tokens at = tokens_of(p, rows, s->last);
    size apart = (stretch.to - stretch.from) * BROAD;
    real *grad = own, *more = grad + BLOCK * all, *broad = more + BLOCK * all, *dz = s->dz + panel_at(begin, numbers_of_dz(p));
    const real *scores = at.scores + panel_at(rows.from, all);
    move_tokens(p, rows, at, 1);
    if (!p->grad_y)
        memset(grad, 0, padded(m, BROAD) * all * sizeof(real));
    else {
        real *to = p->folded ? grad : s->grad_heads + panel_at(begin, d);
        pack_broad(d, m, p->grad_y + rows.from * d, 1, d, broad, d * BROAD);
        if (p->grad_w_out) {
            pack_broad(m, d, p->grad_y + rows.from * d, d, 1, s->rows_y + begin * BROAD, apart);
            sum_rows(m, d, p->grad_y + rows.from * d, 0, s->sums_y + block * d);
        }
        multiply(mapped(p), padded(m, BROAD), d, in_columns(p->folded ? s->out.map : p->w_out, mapped(p)), broad,
                 d * BROAD, 0, to_panels(to, mapped(p) * BROAD, 0));
        if (!p->folded) heads_back(p, m, to, grad);
        if (!p->folded && p->grad_w_out) heads_of(p, m, scores, s->heads + panel_at(begin, d));
    }
    if (p->grad_scores) {
        pack_broad(all, m, p->grad_scores + rows.from * all, 1, all, more, all * BROAD);
        for (size i = 0; i < padded(m, BROAD) * all; i++) grad[i] += more[i];
    }
    size set = -1;
    for (size row = rows.from; row < rows.to;) {
        size b = sequence_of(p, row), end = least(rows.to, p->starts[b + 1]);
        /* Numbers of panels count from the first token of all. */
        tokens_back(p, s, at, (Range){row, end}, b, set_of(p, b) == set, grad - panel_at(rows.from, all),
                    dz - panel_at(rows.from, numbers_of_dz(p)), part_at(p, s, stretch, block, set_of(p, b)),
                    p->grad_objective ? energies_at(p, s->energies, rows.from / block_size(p), b) : 0, broad);
        set = set_of(p, b);
        row = end;
    }
    if (p->grad_w_qk) pack_broad(m, d, p->x + rows.from * d, d, 1, s->rows_x + begin * BROAD, apart);
    if (p->grad_x)
        multiply(d, m, 2 * d, in_columns(p->w_qk, d), dz, numbers_of_dz(p) * BROAD, 0,
                 to_turned(p->grad_x + rows.from * d, d, 0));
}
