/* Matrix products from packed panels.

   C (m × n) = A (m × k) B (k × n) as tiles of TALL rows and BROAD columns that live in the vector registers. Of A a tile
   reads single numbers, so that A may stand as it came: in rows, in columns or as panels of its own. Of B it reads whole
   vectors: B stands in panels of BROAD columns with k running slowest. What B lacks to a whole panel is zeros. C comes as
   rows, as panels that the next product takes for its B, or turned. */

#include <stdint.h>
#include <string.h>

typedef REAL real;
typedef int64_t size;

#if defined(__AVX512F__) /* 32 registers of 64 bytes: 16 hold the tile */
enum { BYTES = 64, TALL = 8, VECTORS = 2 };
#elif defined(__AVX__) /* 16 of 32 bytes: 12 hold the tile */
enum { BYTES = 32, TALL = 4, VECTORS = 3 };
#elif defined(__aarch64__) /* 32 of 16 bytes: 16 hold the tile */
enum { BYTES = 16, TALL = 4, VECTORS = 4 };
#else
enum { BYTES = 16, TALL = 4, VECTORS = 2 };
#endif
enum { LANES = BYTES / sizeof(real), BROAD = VECTORS * LANES };

enum { DEEP = 1024 / BROAD * BROAD }; /* k that is taken at once: TALL rows of A stay in the first cache */
enum { WIDE = 8 * BROAD };            /* columns that are taken at once: their panels stay in the second */

typedef real vec __attribute__((vector_size(BYTES), may_alias));
typedef real loose __attribute__((vector_size(BYTES), may_alias, aligned(sizeof(real)))); /* a vec at any address */
typedef __typeof__((vec){0} == (vec){0}) lanes;

static inline size least(size a, size b) { return a < b ? a : b; }
static inline size padded(size n, size unit) { return (n + unit - 1) / unit * unit; }

/* A vector's first lanes, zero beyond, from and to memory that ends there. */
#ifdef __AVX512F__
#include <immintrin.h>
static inline vec load_first(const real *from, size count) {
    if (count >= LANES) return *(const loose *)from;
    unsigned lanes = (1u << count) - 1;
    return sizeof(real) == 4 ? (vec)_mm512_maskz_loadu_ps(lanes, from) : (vec)_mm512_maskz_loadu_pd(lanes, from);
}
static inline void store_first(real *to, vec v, size count) {
    unsigned lanes = (1u << count) - 1;
    if (count >= LANES)
        *(loose *)to = v;
    else if (sizeof(real) == 4)
        _mm512_mask_storeu_ps(to, lanes, (__m512)v);
    else
        _mm512_mask_storeu_pd(to, lanes, (__m512d)v);
}
#else
static inline vec load_first(const real *from, size count) {
    if (count >= LANES) return *(const loose *)from;
    vec v = {0};
    for (size l = 0; l < count; l++) v[l] = from[l];
    return v;
}
static inline void store_first(real *to, vec v, size count) {
    if (count >= LANES)
        *(loose *)to = v;
    else
        for (size l = 0; l < count; l++) to[l] = v[l];
}
#endif

/* v where the mask is set, else what `other` has. */
static inline vec either(lanes mask, vec v, vec other) { return (vec)((mask & (lanes)v) | (~mask & (lanes)other)); }

/* The even and the odd half of a shuffle: a0 b0 a1 b1 … */
#if defined(__GNUC__) && !defined(__clang__)
static inline vec shuffled(vec a, vec b, int half) {
    lanes from;
    for (int l = 0; l < LANES / 2; l++) {
        from[2 * l] = l + half * (LANES / 2);
        from[2 * l + 1] = from[2 * l] + LANES;
    }
    return __builtin_shuffle(a, b, from);
}
#else
static inline vec shuffled(vec a, vec b, int half) {
    vec both;
    for (int l = 0; l < LANES / 2; l++) {
        both[2 * l] = a[l + half * (LANES / 2)];
        both[2 * l + 1] = b[l + half * (LANES / 2)];
    }
    return both;
}
#endif

/* Halves onto halves: one number after the other would wait for itself. */
static inline real sum_of(vec v) {
    for (int half = LANES / 2; half; half /= 2) v = shuffled(v, v, 0) + shuffled(v, v, 1);
    return v[0];
}

/* `count` rows of LANES numbers, a power of two of them, become LANES rows of `count`: every round of shuffles turns the
   address (row, lane), read as one binary number, by one bit. */
static inline __attribute__((always_inline)) void turn(vec *rows, const int count) {
    vec next[TALL + LANES]; /* room for either */
    for (int bit = 1; bit < count; bit *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < count / 2; i++) {
            next[2 * i] = shuffled(rows[i], rows[i + count / 2], 0);
            next[2 * i + 1] = shuffled(rows[i], rows[i + count / 2], 1);
        }
#pragma GCC unroll 16
        for (int i = 0; i < count; i++) rows[i] = next[i];
    }
}

/* B, whose element (l, j) stands at b[l·down + j·right], one of both 1, as panels of BROAD columns, `apart` numbers from
   each other. */
static void pack_broad(size k, size n, const real *b, size down, size right, real *panels, size apart) {
    for (size l = 0; right == 1 && l < k; l++) /* row by row, as memory likes it */
        for (size j = 0; j < n; j += BROAD)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                size left = n - j - v * LANES;
                *(vec *)(panels + j / BROAD * apart + l * BROAD + v * LANES) =
                    left > 0 ? load_first(b + l * down + j + v * LANES, left) : (vec){0};
            }
    for (size j = 0; right != 1 && j < padded(n, BROAD); j += LANES) {
        real *to = panels + j / BROAD * apart + j % BROAD;
        for (size l = 0; l < k; l += LANES) {
            vec block[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                block[r] = j + r < n ? load_first(b + (j + r) * right + l, k - l) : (vec){0};
            turn(block, LANES);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                if (l + r < k) *(vec *)(to + (l + r) * BROAD) = block[r];
        }
    }
}

/* A: its element (i, l) stands at at[i·step + l], turned at at[i + l·step]. `apart`, if not 0: as a B whose columns are
   A's, in panels so far from each other; at[i·BROAD + l] in the first. */
typedef struct {
    const real *at;
    size step, next; /* from TALL rows to the next */
    int turned;
    size apart;
} Left;
static inline Left in_rows(const real *a, size step) { return (Left){a, step, TALL * step, 0, 0}; }
static inline Left in_columns(const real *a, size step) { return (Left){a, step, TALL, 1, 0}; }
static inline Left as_broad(const real *a, size apart) { return (Left){a, BROAD, TALL * BROAD, 0, apart}; }

/* C: its element (i, j) stands at at[i·step + j] in rows, at at[i + j·step] turned, else in panels as a B. */
typedef struct {
    real *at;
    size step, apart;
    int turned, add; /* add to what stands there */
} Result;
static inline Result to_rows(real *c, size step, int add) { return (Result){c, step, BROAD, 0, add}; }
static inline Result to_turned(real *c, size step, int add) { return (Result){c, step, BROAD * step, 1, add}; }
static inline Result to_panels(real *c, size apart, int add) { return (Result){c, BROAD, apart, 0, add}; }

/* One tile; `start` has a number for each row that it begins with, or is NULL; `ahead` is where A goes on. */
static inline __attribute__((always_inline)) void tile_of(size k, const real *a, size step, const int turned,
                                                          size apart, const real *ahead, const real *b,
                                                          const real *start, const Result *form, int add, real *c,
                                                          size rows, size columns) {
    size stride = form->step;
    for (int i = 0; i < (form->turned ? BROAD : TALL); i++) /* C's lines come while the sums are formed */
        for (int v = 0; v < (form->turned ? 1 : VECTORS); v++) __builtin_prefetch(c + i * stride + v * LANES, 1, 3);
    vec sums[TALL][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) sums[i][v] = (vec){0} + (start && i < rows ? start[i] : 0);
    size most = apart ? BROAD : k;
    for (size begin = 0; begin < k; begin += most, a += apart ? apart - BROAD : 0, ahead += apart)
        for (size l = 0; l < (apart ? least(BROAD, k - begin) : k); l++, a += turned ? step : 1, b += BROAD) {
            vec row[VECTORS];
            __builtin_prefetch(ahead + (turned ? l * step : apart ? l * TALL : l % TALL * step + l / TALL * TALL), 0, 3);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) row[v] = *(const vec *)(b + v * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < TALL; i++)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; v++) sums[i][v] += a[turned ? i : i * step] * row[v];
        }
    if (!form->turned) {
#pragma GCC unroll 16
        for (int i = 0; i < TALL; i++)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) {
                real *at = c + i * stride + v * LANES;
                size count = columns - v * LANES;
                if (i >= rows || count <= 0) continue;
                if (add) sums[i][v] += load_first(at, count);
                store_first(at, sums[i][v], count);
            }
        return;
    }
    real edge[BROAD * TALL];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) {
        vec block[TALL];
#pragma GCC unroll 16
        for (int i = 0; i < TALL; i++) block[i] = sums[i][v];
        turn(block, TALL);
        memcpy(edge + v * LANES * TALL, block, sizeof block);
    }
    if (rows == TALL && columns == BROAD) {
#pragma GCC unroll 32
        for (int j = 0; j < BROAD; j++, c += stride) {
            real *sum = edge + j * TALL;
            if (add)
                for (int i = 0; i < TALL; i++) sum[i] += c[i];
            memcpy(c, sum, TALL * sizeof(real));
        }
        return;
    }
    for (size j = 0; j < columns; j++, c += stride) {
        real *sum = edge + j * TALL;
        if (rows == TALL) {
            if (add)
                for (int i = 0; i < TALL; i++) sum[i] += c[i];
            memcpy(c, sum, TALL * sizeof(real));
        } else
            for (size i = 0; i < rows; i++) c[i] = add ? c[i] + sum[i] : sum[i];
    }
}

typedef void Tile(size k, const real *a, size step, size apart, const real *ahead, const real *b, const real *start,
                  const Result *form, int add, real *c, size rows, size columns);
static void tile(size k, const real *a, size step, size apart, const real *ahead, const real *b, const real *start,
                 const Result *form, int add, real *c, size rows, size columns) {
    tile_of(k, a, step, 0, 0, ahead, b, start, form, add, c, rows, columns);
}
static void tile_turned(size k, const real *a, size step, size apart, const real *ahead, const real *b,
                        const real *start, const Result *form, int add, real *c, size rows, size columns) {
    tile_of(k, a, step, 1, 0, ahead, b, start, form, add, c, rows, columns);
}
static void tile_broad(size k, const real *a, size step, size apart, const real *ahead, const real *b,
                       const real *start, const Result *form, int add, real *c, size rows, size columns) {
    tile_of(k, a, BROAD, 0, apart, ahead, b, start, form, add, c, rows, columns);
}

/* C = start + A B, or C + start + A B; the panels of B are `apart` numbers from each other. */
static void multiply(size m, size n, size k, Left a, const real *b, size apart, const real *start, Result c) {
    real few[TALL * DEEP]; /* the last rows of A, where they are fewer than TALL */
    for (size l = 0; l < k; l += DEEP) {
        size depth = least(DEEP, k - l);
        for (size first = 0; first < n; first += WIDE)
            for (size i = 0; i < m; i += TALL) {
                size rows = least(TALL, m - i), step = a.step;
                const real *from = a.at + i / TALL * a.next + (a.apart ? l / BROAD * a.apart : a.turned ? l * step : l);
                Tile *one = a.apart ? tile_broad : a.turned ? tile_turned : tile;
                if (rows < TALL) {
                    for (size h = 0; h < depth; h++)
                        for (size r = 0; r < TALL; r++) {
                            size at = a.apart ? h / BROAD * a.apart + r * BROAD + h % BROAD
                                              : a.turned ? h * step + r : r * step + h;
                            few[h * TALL + r] = r < rows ? from[at] : 0;
                        }
                    from = few, step = TALL, one = tile_turned;
                }
                for (size j = first; j < least(first + WIDE, n); j += BROAD)
                    one(depth, from, step, a.apart, i + TALL >= m ? from : from + a.next,
                        b + j / BROAD * apart + l * BROAD, l || !start ? 0 : start + i, &c, l || c.add,
                        c.at + j / BROAD * c.apart + i * (c.turned ? 1 : c.step), rows, least(BROAD, n - j));
            }
    }
}
