/* The projection weights W_{e|X}, W_{r|X} = f(X_h)ᵀ W of each sequence, and the way back to W and to the landmarks.

   A set of weights is packed for z W: (channel, panel, p, BROAD). */

static inline size packed_weights(const Pass *p) { return padded(p->rank, BROAD) * head_width(p); } /* of a channel */

static inline real *weights_at(const Pass *p, real *w_x, size set, size channel) {
    return w_x + (set * 2 * p->heads + channel) * packed_weights(p);
}

static inline size landmark_scratch(const Pass *p) { /* of a thread */
    size n = padded(p->landmarks, BROAD), inner = padded(head_width(p), BROAD), rank = padded(p->rank, BROAD);
    return 2 * n * inner + 2 * (n + inner) * (rank + inner);
}

/* f(X_h) of a sequence, (n, p). */
static void gather(const Pass *p, size sequence, size head, real *rows) {
    size inner = head_width(p);
    const size *places = p->places + sequence * p->landmarks;
    for (size j = 0; j < p->landmarks; j++)
        memcpy(rows + j * inner, p->x + places[j] * p->width + head * inner, inner * sizeof(real));
}

static inline int has_landmarks(const Pass *p, size sequence) { return p->starts[sequence + 1] > p->starts[sequence]; }

static void projection_weights(const Pass *p, real *w_x, real *scratch, size thread, size threads) {
    size inner = head_width(p), n = p->landmarks, rank = p->rank, apart = inner * BROAD;
    Range mine = share(weight_sets(p) * p->heads, thread, threads);
    for (size task = mine.from; task < mine.to; task++) {
        size set = task / p->heads, head = task % p->heads;
        real *rows = scratch, *tall = rows + padded(n, BROAD) * padded(inner, BROAD), *broad;
        broad = tall + padded(n, BROAD) * padded(inner, BROAD);
        if (n && has_landmarks(p, set)) {
            gather(p, set, head, rows);
            pack_tall(inner, n, rows, 1, inner, tall, n * TALL);
        }
        for (size side = 0; side < 2; side++) {
            const real *w = side ? p->w_r : p->w_e;
            real *to = weights_at(p, w_x, set, side * p->heads + head);
            if (!n)
                pack_broad(inner, rank, w + head * inner * rank, rank, 1, to, apart);
            else if (!has_landmarks(p, set))
                memset(to, 0, packed_weights(p) * sizeof(real));
            else {
                pack_broad(n, rank, w + head * n * rank, rank, 1, broad, n * BROAD);
                for (size j = 0; j < rank; j += BROAD) /* as whole panels: what pads W pads W_{·|X} */
                    multiply(inner, BROAD, n, tall, broad + j * n, 0, 0, to + j * inner, BROAD);
            }
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

/* The gradient of a set of weights, (2H, s, p), is summed by each thread over its own tokens. The threads' tokens follow
   one another, so that sequence + thread numbers these sums without gaps. */
static inline real *part_at(const Pass *p, real *parts, size set, size thread, size channel) {
    return parts + ((set + thread) * 2 * p->heads + channel) * head_width(p) * p->rank;
}

/* Their total over the threads, in the place of the first that has one. */
static real *total_part(const Pass *p, real *parts, size set, size channel, size threads) {
    size count = head_width(p) * p->rank;
    Range all = p->landmarks ? (Range){p->starts[set], p->starts[set + 1]} : (Range){0, p->tokens};
    real *total = 0;
    for (size t = 0; t < threads; t++) {
        if (!meet(all, tokens_of(p, t, threads))) continue;
        real *part = part_at(p, parts, set, t, channel);
        if (total)
            for (size i = 0; i < count; i++) total[i] += part[i];
        else
            total = part;
    }
    return total;
}

/* J's share through Tr(W_{e|X}ᵀ W_{r|X}): each side's gradient is the other side. */
static void add_projected_trace(const Pass *p, real *w_x, size set, size channel, real *total) {
    real grad = 0;
    for (size b = 0; b < p->sequences; b++)
        if (set_of(p, b) == set) grad -= p->grad_objective[b] / p->heads;
    const real *other = weights_at(p, w_x, set, (channel + p->heads) % (2 * p->heads));
    for (size j = 0; j < p->rank; j++)
        for (size i = 0; i < head_width(p); i++)
            total[j * head_width(p) + i] += grad * other[j / BROAD * BROAD * head_width(p) + i * BROAD + j % BROAD];
}

/* From dW_{·|X} to the landmarks' rows of dx, sequence by sequence and head by head. */
static void backward_to_landmarks(const Pass *p, real *w_x, real *parts, real *scratch, size thread, size threads) {
    size inner = head_width(p), n = p->landmarks, rank = p->rank;
    Range mine = share(weight_sets(p) * p->heads, thread, threads);
    for (size task = mine.from; task < mine.to; task++) {
        size set = task / p->heads, head = task % p->heads;
        real *grad = scratch, *tall = grad + padded(n, BROAD) * padded(inner, BROAD);
        real *broad = tall + padded(n, BROAD) * padded(rank, BROAD);
        if (n && !has_landmarks(p, set)) continue;
        for (size side = 0; side < 2; side++) {
            size channel = side * p->heads + head;
            real *total = total_part(p, parts, set, channel, threads);
            if (p->grad_objective && p->projected_trace) add_projected_trace(p, w_x, set, channel, total);
            if (!n || !p->grad_x) continue;
            pack_tall(n, rank, (side ? p->w_r : p->w_e) + head * n * rank, rank, 1, tall, rank * TALL);
            pack_broad(rank, inner, total, inner, 1, broad, rank * BROAD);
            multiply(n, inner, rank, tall, broad, 0, side, grad, inner);
        }
        const size *places = p->places + set * n;
        for (size j = 0; p->grad_x && j < n; j++) {
            real *row = p->grad_x + places[j] * p->width + head * inner;
            for (size i = 0; i < inner; i++) row[i] += grad[j * inner + i];
        }
    }
}

/* From dW_{·|X}, totals by now, to dW_e and dW_r, head by head. */
static void backward_to_weights(const Pass *p, real *parts, real *scratch, size thread, size threads) {
    size inner = head_width(p), n = p->landmarks, rank = p->rank, count = (n ? n : inner) * rank;
    real through_trace = 0;
    if (p->grad_objective && !p->projected_trace)
        for (size b = 0; b < p->sequences; b++) through_trace -= p->grad_objective[b] / p->heads;
    Range mine = share(2 * p->heads, thread, threads);
    for (size channel = mine.from; channel < mine.to; channel++) {
        size side = channel / p->heads, head = channel % p->heads, add = 0;
        real *to = (side ? p->grad_w_r : p->grad_w_e) + head * count;
        const real *other = (side ? p->w_e : p->w_r) + head * count;
        real *rows = scratch, *tall = rows + padded(n, BROAD) * padded(inner, BROAD);
        real *broad = tall + padded(n, BROAD) * padded(inner, BROAD);
        for (size set = 0; set < weight_sets(p); set++) {
            if (n && !has_landmarks(p, set)) continue;
            size first = 0; /* the thread whose part holds the total */
            size start = n ? p->starts[set] : 0;
            while (tokens_of(p, first, threads).to <= start) first++;
            const real *total = part_at(p, parts, set, first, channel);
            if (n) {
                gather(p, set, head, rows);
                pack_tall(n, inner, rows, inner, 1, tall, inner * TALL);
                pack_broad(inner, rank, total, 1, inner, broad, inner * BROAD);
                multiply(n, rank, inner, tall, broad, 0, add, to, rank);
            } else
                for (size i = 0; i < count; i++) to[i] = total[i % rank * inner + i / rank];
            add = 1;
        }
        if (!add) memset(to, 0, count * sizeof(real));
        for (size i = 0; i < count; i++) to[i] += through_trace * other[i];
    }
}
