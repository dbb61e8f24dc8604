/* From dy and dJ to the gradients. With g = de from all that the scores went into:

       dz = (W_{e|X} g − z ⟨g, e⟩ / ‖z‖) / ‖z‖,      dW_{e|X} = zᵀ (g / ‖z‖),      dx = W_qkᵀ dz,      dW_qk = dzᵀ x

   The tokens come in stretches: first block by block from dy to dz and dx, then the rows of the gradients that sum over
   tokens. */

typedef struct {
    size *queues;
    real *w_qk, *w_x, *parts, *grad_w_x, *dz, *heads, *grad_heads, *rows_x, *rows_y, *sums_y, *grad_map, *shares,
        *energies, *last, *own;
    size of_thread;
    Output out;
} BackwardScratch;

enum { BACKWARD_QUEUES = 8, STRETCH_QUEUES = 4 };

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
    s.w_qk = take(p, used, breadth * 2 * d);
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
        multiply(mapped(p), padded(m, BROAD), d, p->folded ? in_rows(s->out.map, d) : in_panels(s->out.map, d), broad,
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
        multiply(d, m, 2 * d, in_panels(s->w_qk, 2 * d), dz, numbers_of_dz(p) * BROAD, 0,
                 to_turned(p->grad_x + rows.from * d, d, 0));
}

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

/* A task's part of dM or dW_out. */
static void add_to_map(const Pass *p, const BackwardScratch *s, Range stretch, size task) {
    size d = p->width, count = stretch.to - stretch.from, m = mapped(p), down = pieces(m, TASK_ROWS);
    Range rows = piece((Range){0, m}, TASK_ROWS, task % down), columns = piece((Range){0, d}, WIDE, task / down);
    real *to = (p->folded ? s->grad_map : p->grad_w_out) + columns.from * m + rows.from;
    sum_over_tokens(p->folded ? p->scores + panel_at(stretch.from, m) : s->heads, m, p->folded, rows,
                    columns.to - columns.from, count, s->rows_y + columns.from * count, count * BROAD,
                    to_turned(to, m, stretch.from > 0));
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
    size d = p->width, *queue = s->queues, unit = 4 * TALL;
    TASKS(queue, weight_sets(p) * p->heads) projection_weights(p, s->w_x, own, task);
    TASKS(queue + 1, p->grad_y && p->folded ? pieces(d, ROWS) : 0) fold(p, &s->out, 1, own, task);
    TASKS(queue + 2, p->grad_y && !p->folded ? pieces(d, unit) : 0)
        pack_tall(least(unit, d - task * unit), d, p->w_out + task * unit, d, s->out.map + task * unit * d);
    TASKS(queue + 3, p->grad_x ? pieces(d, unit) : 0)
        pack_tall(least(unit, d - task * unit), 2 * d, p->w_qk + task * unit, d, s->w_qk + task * unit * 2 * d);
    TASKS(queue + 4, 1) {
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
    TASKS(queue + 5, weight_sets(p) * p->heads) backward_to_landmarks(p, s->w_x, s->grad_w_x, own, task);
    TASKS(queue + 6, learns ? p->heads : 0) {
        real *share = s->shares + task * share_size(p);
        if (p->folded) unfold(p, s->grad_map, share, own, task);
        share_bias(p, share, task);
    }
#pragma omp barrier
    TASKS(queue + 7, 2 * p->heads + 1) {
        if (task < 2 * p->heads)
            backward_to_weights(p, s->grad_w_x, own, task);
        else {
            if (learns) finish_score_map(p, s->shares);
            if (p->grad_objective) grad_of_lambda(p, s, own);
        }
    }
}
