/* y = W_out concat_h(W_o [e; r] + b_o) + b_out and the way back.

   Nothing stands between the two maps, so that their product M (2Hs × d, rows as the scores stand) serves where there
   are tokens enough to pay for it: `folded`. Otherwise they stay apart, and the heads' outputs stand between them. */

typedef struct {
    real *plain;          /* M */
    real *shift;          /* m = b_out + Σ_h W_out[:, h] b_o */
    real *map;            /* packed: M or W_out, as the direction needs it */
    real *score_map;      /* packed, where it is apart: W_o for the scores, */
    real *score_map_back; /* and for the gradient of the heads' outputs */
} Output;

static inline size map_rows(const Pass *p) { return p->folded ? all_scores(p) : p->width; }

static Output take_output(const Pass *p, size *used) {
    Output out;
    size d = padded(p->width, BROAD);
    out.plain = take(p, used, p->folded ? all_scores(p) * p->width : 0);
    out.shift = take(p, used, p->width);
    out.map = take(p, used, padded(map_rows(p), BROAD) * d);
    out.score_map = take(p, used, 2 * p->rank * padded(head_width(p), BROAD));
    out.score_map_back = take(p, used, padded(2 * p->rank, BROAD) * head_width(p));
    return out;
}

static inline size fold_scratch(const Pass *p) { /* of a thread */
    size inner = padded(head_width(p), BROAD), pair = padded(2 * p->rank, BROAD), d = padded(p->width, BROAD);
    return inner * pair + (pair + inner) * d;
}

/* One head's rows of M. */
static void fold(const Pass *p, const Output *out, real *scratch, size head) {
    size inner = head_width(p), pair = 2 * p->rank, d = p->width;
    real *tall = scratch, *broad = tall + padded(pair, BROAD) * padded(inner, BROAD);
    pack_tall(pair, inner, p->w_o, 1, pair, tall, inner * TALL);
    pack_broad(inner, d, p->w_out + head * inner, 1, d, broad, inner * BROAD);
    multiply(pair, d, inner, tall, broad, 0, 0, out->plain + head * pair * d, d);
}

/* The part of m that belongs to one head's rows of W_out. */
static void fold_shift(const Pass *p, const Output *out, size head) {
    size inner = head_width(p), d = p->width;
    for (size i = head * inner; i < (head + 1) * inner; i++) {
        real sum = 0;
        for (size l = 0; p->folded && p->b_o && l < d; l += inner) {
            real of_head = 0;
#pragma omp simd reduction(+ : of_head)
            for (size k = 0; k < inner; k++) of_head += p->w_out[i * d + l + k] * p->b_o[k];
            sum += of_head;
        }
        out->shift[i] = sum + (p->b_out ? p->b_out[i] : 0);
    }
}

/* One panel of what multiplies the scores (forward) or dy (backward). M must be there. */
static void pack_output(const Pass *p, const Output *out, int backward, size panel) {
    size d = p->width, rows = map_rows(p), k = backward ? d : rows, n = backward ? rows : d, j = panel * BROAD;
    /* M stands as (scores, d), W_out as (d, heads' outputs): each is turned for one of the two directions. */
    int along = p->folded != !!backward;
    const real *from = p->folded ? out->plain : p->w_out;
    pack_broad(k, least(BROAD, n - j), along ? from + j : from + j * k, along ? n : 1, along ? 1 : k, out->map + j * k,
               k * BROAD);
}

static void pack_score_map(const Pass *p, const Output *out) {
    size pair = 2 * p->rank, inner = head_width(p);
    pack_broad(pair, inner, p->w_o, 1, pair, out->score_map, pair * BROAD);
    pack_broad(inner, pair, p->w_o, pair, 1, out->score_map_back, inner * BROAD);
}

/* The heads' outputs of m tokens, (m, d). */
static void heads_of(const Pass *p, size m, const real *scores, const real *packed_w_o, real *tall, real *heads) {
    size pair = 2 * p->rank, inner = head_width(p);
    pack_tall(m * p->heads, pair, scores, pair, 1, tall, pair * TALL);
    multiply(m * p->heads, inner, pair, tall, packed_w_o, p->b_o, 0, heads, inner);
}

/* One head of dM → its columns of dW_out and its share of dW_o, (p, 2s). */
static void unfold(const Pass *p, const real *grad_map, real *shares, real *scratch, size head) {
    size inner = head_width(p), pair = 2 * p->rank, d = p->width;
    real *tall = scratch, *broad = tall + padded(d, BROAD) * padded(pair > inner ? pair : inner, BROAD);
    const real *of_head = grad_map + head * pair * d;
    real *to = p->grad_w_out + head * inner;
    pack_tall(d, pair, of_head, 1, d, tall, pair * TALL);
    pack_broad(pair, inner, p->w_o, 1, pair, broad, pair * BROAD);
    multiply(d, inner, pair, tall, broad, 0, 0, to, d);
    for (size i = 0; i < d && p->b_o; i++)
        for (size l = 0; l < inner; l++) to[i * d + l] += p->grad_b_out[i] * p->b_o[l];
    pack_tall(inner, d, p->w_out + head * inner, 1, d, tall, d * TALL);
    pack_broad(d, pair, of_head, 1, d, broad, d * BROAD);
    multiply(inner, pair, d, tall, broad, 0, 0, shares + head * inner * pair, pair);
}

static inline size unfold_scratch(const Pass *p) { /* of a thread */
    size inner = padded(head_width(p), BROAD), pair = padded(2 * p->rank, BROAD), d = padded(p->width, BROAD);
    return d * (pair > inner ? pair : inner) + pair * (inner > d ? inner : d);
}

/* dW_o from the heads' shares, and db_o = Σ_h W_out[:, h]ᵀ db_out. */
static void finish_score_map(const Pass *p, const real *shares) {
    size inner = head_width(p), numbers = 2 * p->rank * inner, d = p->width;
    memset(p->grad_w_o, 0, numbers * sizeof(real));
    memset(p->grad_b_o, 0, inner * sizeof(real));
    for (size head = 0; head < p->heads; head++) {
        for (size i = 0; i < numbers; i++) p->grad_w_o[i] += shares[head * numbers + i];
        for (size i = 0; i < d; i++)
            for (size l = 0; l < inner; l++)
                p->grad_b_o[l] += p->grad_b_out[i] * p->w_out[i * d + head * inner + l];
    }
}
