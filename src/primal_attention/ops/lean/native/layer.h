/* What a pass over the layer is given and gives, how its work is shared among threads, and where its scratch lies.

   Sequences stand one after the other in the rows of x. All that is made of a token stands in panels of BROAD tokens, the
   B of a product: (panel, channel, BROAD). z has the channels [q of each head, k of each head], 1/‖z‖ has one for each of
   these, the scores have [e, r] of each head: (H, 2, s). So the weights stay as they are, sums over a head's channels
   are sums of vectors, and what pads the last panel is no more than that. What is kept for the way back has no padding:
   there the last panel is as broad as it has tokens. */

#include <omp.h>
#include <tgmath.h>

typedef struct { /* as `Pass` in native/library.py has it */
    size sequences, tokens, width, heads, rank, landmarks; /* no landmarks: the weights do not depend on the data */
    size threads, folded, mean, projected_trace;
    const size *starts, *places; /* (sequences + 1,) rows; (sequences, landmarks) rows */
    const real *x, *w_qk, *b_qk, *w_e, *w_r, *w_o, *b_o, *w_out, *b_out, *sqrt_lambda;
    real *kept, *y, *objective, *score_rows; /* for the way back; the last: the scores as (T, 2Hs), if asked for */
    const real *grad_y, *grad_objective, *grad_scores;
    real *grad_x, *grad_w_qk, *grad_b_qk, *grad_w_e, *grad_w_r, *grad_w_o, *grad_b_o, *grad_w_out, *grad_b_out;
    real *grad_sqrt_lambda;
    char *scratch;
    real *z, *scores, *inverse; /* the parts of what is kept */
} Pass;

enum { BLOCK = 128 };    /* tokens, at most, that go through a pass together: they stay in the second cache */
enum { STRETCH = 512 }; /* tokens whose dz waits for the gradient of W_qk */
static const real SMALLEST = (real)1e-12; /* what ‖z‖ is at least taken for: EPS of ops/feature_maps.py */

static inline size head_width(const Pass *p) { return p->width / p->heads; }
static inline size all_scores(const Pass *p) { return 2 * p->heads * p->rank; }
static inline size weight_sets(const Pass *p) { return p->landmarks ? p->sequences : 1; }
static inline size set_of(const Pass *p, size sequence) { return p->landmarks ? sequence : 0; }

/* Where the scores of a channel of z stand among all scores. */
static inline size column_of(const Pass *p, size channel) {
    return (2 * (channel % p->heads) + channel / p->heads) * p->rank;
}

/* Where a panel begins that has so many numbers of each token; row: that of its first token. */
static inline size panel_at(size row, size numbers) { return row / BROAD * BROAD * numbers; }

/* What makes J's first two terms of a sequence's summed energies. */
static inline real energy_scale(const Pass *p, size sequence) {
    size length = p->starts[sequence + 1] - p->starts[sequence];
    return (real)0.5 / p->heads / (p->mean ? (length > 1 ? length : 1) : 1);
}

/* Rows from … to − 1. */
typedef struct {
    size from, to;
} Range;

static inline int meet(Range a, Range b) { return (a.from > b.from ? a.from : b.from) < least(a.to, b.to); }
static inline Range rows_of(const Pass *p, size sequence) {
    return (Range){p->starts[sequence], p->starts[sequence + 1]};
}

/* Which tokens of the panel that begins at `row` are among those of a range: a mask for each of its vectors. */
static inline void mask_of(size row, Range range, lanes *mask) {
    for (int v = 0; v < VECTORS; v++)
        for (int l = 0; l < LANES; l++) {
            size token = row + v * LANES + l;
            mask[v][l] = -(token >= range.from && token < range.to);
        }
}

/* The sequence that holds a row; empty ones hold none. */
static inline size sequence_of(const Pass *p, size row) {
    size low = 0, high = p->sequences - 1;
    while (low < high) {
        size middle = (low + high + 1) / 2;
        if (p->starts[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Tokens of a block: whole panels, and some four blocks for every thread where there are tokens enough. */
static inline size block_size(const Pass *p) {
    size even = padded(p->tokens / (4 * p->threads), BROAD), most = BLOCK / BROAD * BROAD, least_of_all = padded(32, BROAD);
    return even > most ? most : even < least_of_all ? least_of_all : even;
}

static inline size pieces(size count, size unit) { return (count + unit - 1) / unit; }
static inline Range piece(Range all, size unit, size i) {
    return (Range){all.from + i * unit, least(all.from + (i + 1) * unit, all.to)};
}

/* What is made of tokens, to be read and written in whole panels. */
typedef struct {
    real *z, *scores, *inverse;
} Tokens;

static inline size numbers_of_token(const Pass *p) { return 2 * p->width + all_scores(p) + 2 * p->heads; }

/* Room for a block that ends within a panel. */
static inline size room_of_last(const Pass *p) { return p->tokens % BROAD ? block_size(p) * numbers_of_token(p) : 0; }

/* A block's tokens where they are worked on: where they are kept, or in that room. */
static inline Tokens tokens_of(const Pass *p, Range block, real *room) {
    size d = p->width, all = all_scores(p), tokens = block_size(p);
    if (block.to % BROAD == 0) return (Tokens){p->z, p->scores, p->inverse};
    return (Tokens){room - panel_at(block.from, 2 * d), room + tokens * 2 * d - panel_at(block.from, all),
                    room + tokens * (2 * d + all) - panel_at(block.from, 2 * p->heads)};
}

/* A block's numbers from that room to where they are kept, or back. */
static void move_numbers(size numbers, Range block, real *room, real *kept, int back) {
    for (size row = block.from; row < block.to; row += BROAD) {
        size breadth = least(BROAD, block.to - row);
        real *whole = room + panel_at(row, numbers), *narrow = kept + panel_at(row, numbers);
        for (size i = 0; i < numbers; i++, whole += BROAD, narrow += breadth) {
            memcpy(back ? whole : narrow, back ? narrow : whole, breadth * sizeof(real));
            if (back) memset(whole + breadth, 0, (BROAD - breadth) * sizeof(real));
        }
    }
}
static void move_tokens(const Pass *p, Range block, Tokens at, int back) {
    if (block.to % BROAD == 0) return;
    move_numbers(2 * p->width, block, at.z, p->z, back);
    move_numbers(all_scores(p), block, at.scores, p->scores, back);
    move_numbers(2 * p->heads, block, at.inverse, p->inverse, back);
}

/* Energies: Σ e², Σ r² of the tokens of one block and one sequence. Blocks and sequences both follow the tokens, so that
   the sum of their numbers is a number of its own. */
static inline size energies_size(const Pass *p) {
    return (pieces(p->tokens, block_size(p)) + p->sequences) * all_scores(p);
}
static inline real *energies_at(const Pass *p, real *energies, size block, size sequence) {
    return energies + (block + sequence) * all_scores(p);
}

/* A sequence's energies, (H, s), block after block: e and r alike, since Λ weighs both alike. */
static void sum_energies(const Pass *p, real *energies, size sequence, real *sums) {
    Range rows = rows_of(p, sequence);
    memset(sums, 0, p->heads * p->rank * sizeof(real));
    for (size block = rows.from / block_size(p); block * block_size(p) < rows.to && rows.from < rows.to; block++) {
        const real *from = energies_at(p, energies, block, sequence);
        for (size head = 0; head < p->heads; head++)
            for (size k = 0; k < p->rank; k++)
                sums[head * p->rank + k] += from[2 * head * p->rank + k] + from[(2 * head + 1) * p->rank + k];
    }
}

/* Tasks go to whichever thread is free: cores are not equally fast at all times. No sum depends on who computes it. */
static inline size claim(size *queue) { return __atomic_fetch_add(queue, 1, __ATOMIC_RELAXED); }
#define TASKS(queue, count) for (size task; (task = claim(queue)) < (count);)

/* Scratch is cut from one piece of memory; without one, its size is counted. */
static inline void *take_bytes(const Pass *p, size *used, size count) {
    size at = *used;
    *used += padded(count, 64);
    return p->scratch ? p->scratch + at : 0;
}
static inline real *take(const Pass *p, size *used, size count) {
    return take_bytes(p, used, count * (size)sizeof(real));
}
