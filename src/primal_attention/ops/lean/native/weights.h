/* The projection weights W_{e|X}, W_{r|X} = f(X_h)ᵀ W of each sequence, and the way back to W and to the landmarks.

   A set of weights, and its gradient, stand by channel in panels of BROAD directions: (channel, panel, p, BROAD). */

static inline size packed_weights(const Pass *p) { return padded(p->rank, BROAD) * head_width(p); } /* of a channel */
static inline size set_size(const Pass *p) { return 2 * p->heads * packed_weights(p); }

static inline real *weights_at(const Pass *p, real *w_x, size set, size channel) {
    return w_x + set * set_size(p) + channel * packed_weights(p);
}

static inline size landmark_scratch(const Pass *p) { /* of a thread */
    size n = padded(p->landmarks, BROAD), inner = padded(head_width(p), BROAD), rank = padded(p->rank, BROAD);
    return 2 * n * inner + (n + inner) * rank;
}

/* f(X_h) of a sequence, (n, p). */
static void gather(const Pass *p, size sequence, size head, real *rows) {
    size inner = head_width(p);
    const size *places = p->places + sequence * p->landmarks;
    for (size j = 0; j < p->landmarks; j++)
        memcpy(rows + j * inner, p->x + places[j] * p->width + head * inner, inner * sizeof(real));
}

static inline int has_landmarks(const Pass *p, size sequence) { return p->starts[sequence + 1] > p->starts[sequence]; }

/* One head of one set. */
static void projection_weights(const Pass *p, real *w_x, real *scratch, size task) {
    size inner = head_width(p), n = p->landmarks, rank = p->rank, apart = inner * BROAD;
    size set = task / p->heads, head = task % p->heads;
    real *broad = scratch, *rows = broad + n * padded(rank, BROAD);
    if (n && has_landmarks(p, set)) gather(p, set, head, rows);
    for (size side = 0; side < 2; side++) {
        const real *w = side ? p->w_r : p->w_e;
        real *to = weights_at(p, w_x, set, side * p->heads + head);
        if (!n)
            pack_broad(inner, rank, w + head * inner * rank, rank, 1, to, apart);
        else if (!has_landmarks(p, set))
            memset(to, 0, packed_weights(p) * sizeof(real));
        else {
            pack_broad(n, rank, w + head * n * rank, rank, 1, broad, n * BROAD);
            multiply(inner, padded(rank, BROAD), n, in_columns(rows, inner), broad, n * BROAD, 0,
                     to_panels(to, apart, 0)); /* what pads W pads W_{·|X} */
        }
    }
}

/* Tr of a head under J: W_eᵀ W_r, or that of a sequence's W_{·|X}. */
static real trace_of(const Pass *p, real *w_x, size sequence, size head) {
    const real *e, *r;
    size count;
    if (p->projected_trace) {
        e = weights_at(p, w_x, set_of(p, sequence), head);
        r = weights_at(p, w_x, set_of(p, sequence), p->heads + head);
        count = packed_weights(p);
    } else {
        count = (p->landmarks ? p->landmarks : head_width(p)) * p->rank;
        e = p->w_e + head * count, r = p->w_r + head * count;
    }
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size i = 0; i < count; i++) sum += e[i] * r[i];
    return sum;
}

/* J's share through Tr(W_{e|X}ᵀ W_{r|X}): each side's gradient is the other side. */
static void add_projected_trace(const Pass *p, real *w_x, size set, size channel, real *to) {
    real grad = 0;
    for (size b = 0; b < p->sequences; b++)
        if (set_of(p, b) == set) grad -= p->grad_objective[b] / p->heads;
    const real *other = weights_at(p, w_x, set, (channel + p->heads) % (2 * p->heads));
    for (size i = 0; i < packed_weights(p); i++) to[i] += grad * other[i];
}

/* From dW_{·|X} to the landmarks' rows of dx: one head of one set. */
static void backward_to_landmarks(const Pass *p, real *w_x, real *grads, real *scratch, size task) {
    size inner = head_width(p), n = p->landmarks, rank = p->rank, set = task / p->heads, head = task % p->heads;
    real *broad = scratch, *of_rows = broad + BROAD * padded(inner, BROAD);
    if (n && !has_landmarks(p, set)) return;
    for (size side = 0; side < 2; side++) {
        size channel = side * p->heads + head;
        const real *w = (side ? p->w_r : p->w_e) + head * n * rank;
        real *grad = weights_at(p, grads, set, channel);
        if (p->grad_objective && p->projected_trace) add_projected_trace(p, w_x, set, channel, grad);
        if (!n || !p->grad_x) continue;
        for (size j = 0; j < rank; j += BROAD) { /* panel by panel of the directions */
            size count = least(BROAD, rank - j);
            pack_broad(count, inner, grad + j * inner, 1, BROAD, broad, count * BROAD);
            multiply(n, inner, count, in_rows(w + j, rank), broad, count * BROAD, 0, to_rows(of_rows, inner, side || j));
        }
    }
    const size *places = p->places + set * n;
    for (size j = 0; p->grad_x && j < n; j++) {
        real *row = p->grad_x + places[j] * p->width + head * inner;
        for (size i = 0; i < inner; i++) row[i] += of_rows[j * inner + i];
    }
}

/* From dW_{·|X} of all sets to dW_e or dW_r: one channel. */
static void backward_to_weights(const Pass *p, real *grads, real *rows, size channel) {
    size inner = head_width(p), n = p->landmarks, rank = p->rank, count = (n ? n : inner) * rank;
    size side = channel / p->heads, head = channel % p->heads, add = 0;
    real *to = (side ? p->grad_w_r : p->grad_w_e) + head * count, through_trace = 0;
    const real *other = (side ? p->w_e : p->w_r) + head * count;
    for (size set = 0; set < weight_sets(p); set++) {
        const real *grad = weights_at(p, grads, set, channel);
        if (!n)
            for (size i = 0; i < inner; i++)
                for (size j = 0; j < rank; j++)
                    to[i * rank + j] = grad[j / BROAD * BROAD * inner + i * BROAD + j % BROAD];
        else if (has_landmarks(p, set)) {
            gather(p, set, head, rows);
            multiply(n, rank, inner, in_rows(rows, inner), grad, inner * BROAD, 0, to_rows(to, rank, add));
            add = 1;
        }
    }
    if (!p->grad_objective || p->projected_trace) return;
    for (size b = 0; b < p->sequences; b++) through_trace -= p->grad_objective[b] / p->heads;
    for (size i = 0; i < count; i++) to[i] += through_trace * other[i];
}
