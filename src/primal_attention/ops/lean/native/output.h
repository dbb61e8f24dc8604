/* y = W_out concat_h(W_o [e; r] + b_o) + b_out and the way back.

   Nothing stands between the two maps, so that their product M (d × 2Hs) serves where there are tokens enough to pay for
   it: `folded`. Otherwise they stay apart, and the heads' outputs, (panel, d, BROAD), stand between them. */

typedef struct {
    real *map;   /* M; none where the maps are apart */
    real *shift; /* m = b_out + Σ_h W_out[:, h] b_o */
} Output;

/* What of a token W_out or M is applied to: scores or the heads' outputs. */
static inline size mapped(const Pass *p) { return p->folded ? all_scores(p) : p->width; }

static Output take_output(const Pass *p, size *used) {
    Output out;
    out.map = take(p, used, p->folded ? all_scores(p) * p->width : 0);
    out.shift = take(p, used, p->width);
    return out;
}

static inline size fold_scratch(const Pass *p) { /* of a thread */
    return padded(2 * p->rank, BROAD) * head_width(p) + p->width;
}

enum { ROWS = 64 }; /* of a map or of a gradient that sums over tokens: one task */

/* ROWS rows of M. */
static void fold(const Pass *p, const Output *out, real *broad, size task) {
    size inner = head_width(p), pair = 2 * p->rank, all = all_scores(p), d = p->width;
    size i = task * ROWS, rows = least(ROWS, d - i);
    pack_broad(inner, pair, p->w_o, pair, 1, broad, inner * BROAD);
    for (size head = 0; head < p->heads; head++)
        multiply(rows, pair, inner, in_rows(p->w_out + i * d + head * inner, d), broad, inner * BROAD, 0,
                 to_rows(out->map + i * all + head * pair, all, 0));
}

/* ROWS numbers of m. */
static void fold_shift(const Pass *p, const Output *out, size task) {
    size inner = head_width(p), d = p->width;
    for (size i = task * ROWS; i < least((task + 1) * ROWS, d); i++) {
        const real *row = p->w_out + i * d;
        vec sum = {0};
        for (size head = 0; p->folded && p->b_o && head < p->heads; head++, row += inner)
            for (size l = 0; l < inner; l += LANES) sum += load_first(row + l, inner - l) * load_first(p->b_o + l, inner - l);
        out->shift[i] = sum_of(sum) + (p->b_out ? p->b_out[i] : 0);
    }
}

/* The heads' outputs of m tokens from their scores. */
static void heads_of(const Pass *p, size m, const real *scores, real *heads) {
    size pair = 2 * p->rank, inner = head_width(p), d = p->width;
    for (size head = 0; head < p->heads; head++)
        multiply(inner, padded(m, BROAD), pair, in_rows(p->w_o, pair), scores + head * pair * BROAD,
                 all_scores(p) * BROAD, p->b_o, to_panels(heads + head * inner * BROAD, d * BROAD, 0));
}

/* And back: the gradient of the scores from that of the heads' outputs. */
static void heads_back(const Pass *p, size m, const real *grad_heads, real *grad) {
    size pair = 2 * p->rank, inner = head_width(p), d = p->width;
    for (size head = 0; head < p->heads; head++)
        multiply(pair, padded(m, BROAD), inner, in_columns(p->w_o, pair), grad_heads + head * inner * BROAD, d * BROAD, 0,
                 to_panels(grad + head * pair * BROAD, all_scores(p) * BROAD, 0));
}

/* What a head adds to dW_o, (p, 2s), and to db_o. */
static inline size share_size(const Pass *p) { return head_width(p) * (2 * p->rank + 1); }
static void share_bias(const Pass *p, real *share, size head) {
    size inner = head_width(p), d = p->width;
    real *to = share + inner * 2 * p->rank;
    memset(to, 0, inner * sizeof(real));
    for (size i = 0; i < d; i++)
        for (size l = 0; l < inner; l++) to[l] += p->grad_b_out[i] * p->w_out[i * d + head * inner + l];
}

static inline size unfold_scratch(const Pass *p) { /* of a thread */
    size inner = padded(head_width(p), BROAD), pair = padded(2 * p->rank, BROAD), d = padded(p->width, BROAD);
    return pair * (inner > d ? inner : d);
}

/* One head of dMᵀ, (2Hs, d), → its columns of dW_out and its share of dW_o. */
static void unfold(const Pass *p, const real *grad_map, real *share, real *broad, size head) {
    size inner = head_width(p), pair = 2 * p->rank, d = p->width;
    const real *of_head = grad_map + head * pair * d;
    real *to = p->grad_w_out + head * inner;
    pack_broad(pair, inner, p->w_o, 1, pair, broad, pair * BROAD);
    multiply(d, inner, pair, in_columns(of_head, d), broad, pair * BROAD, 0, to_rows(to, d, 0));
    for (size i = 0; i < d && p->b_o; i++)
        for (size l = 0; l < inner; l++) to[i * d + l] += p->grad_b_out[i] * p->b_o[l];
    pack_broad(d, pair, of_head, 1, d, broad, d * BROAD);
    multiply(inner, pair, d, in_columns(p->w_out + head * inner, d), broad, d * BROAD, 0, to_rows(share, pair, 0));
}

/* dW_o and db_o from the heads' shares. */
static void finish_score_map(const Pass *p, const real *shares) {
    size inner = head_width(p), numbers = 2 * p->rank * inner;
    memset(p->grad_w_o, 0, numbers * sizeof(real));
    memset(p->grad_b_o, 0, inner * sizeof(real));
    for (size head = 0; head < p->heads; head++, shares += share_size(p)) {
        for (size i = 0; i < numbers; i++) p->grad_w_o[i] += shares[i];
        for (size l = 0; l < inner; l++) p->grad_b_o[l] += shares[numbers + l];
    }
}
