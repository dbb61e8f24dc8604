/* Matrix products from packed panels.

   C (m × n) = A (m × k) B (k × n) as tiles of TALL rows and BROAD columns that live in the vector registers. A is
   packed into panels of TALL rows, B into panels of BROAD columns, both with k running slowest, so that a tile reads
   either from front to back, whatever strides its matrix came with. What a matrix lacks to a whole panel is zeros. */

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
_Static_assert(BROAD % TALL == 0, "a panel of columns is read as panels of rows, too");

enum { DEEP = 512 };       /* k that is taken at once: a panel of A stays in the first cache */
enum { WIDE = 8 * BROAD }; /* columns that are taken at once: their panels stay in the second */

typedef real vec __attribute__((vector_size(BYTES), may_alias));
typedef real loose __attribute__((vector_size(BYTES), may_alias, aligned(sizeof(real)))); /* a vec at any address */

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

static inline real sum_of(vec v) {
    real sum = 0;
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) sum += v[l];
    return sum;
}

/* The even and the odd half of a shuffle: a0 b0 a1 b1 … */
#if defined(__GNUC__) && !defined(__clang__)
typedef __typeof__((vec){0} == (vec){0}) lanes;
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

/* Rows of A that stand as columns: four panels at a time, for whole lines of the cache. */
static void pack_columns(size m, size k, const real *a, size right, real *panels, size apart) {
    for (size i = 0; i < m; i += 4 * TALL, panels += 4 * apart)
        for (size l = 0; l < k; l++) {
            const real *from = a + i + l * right;
            if (m - i >= 4 * TALL) {
#pragma GCC unroll 4
                for (int q = 0; q < 4; q++) memcpy(panels + q * apart + l * TALL, from + q * TALL, TALL * sizeof(real));
            } else
                for (size r = 0; r < padded(m - i, TALL); r++)
                    panels[r / TALL * apart + l * TALL + r % TALL] = r < m - i ? from[r] : 0;
        }
}

/* A, whose element (i, l) stands at a[i·down + l·right], as panels of TALL rows, `apart` numbers from each other. */
static void pack_tall(size m, size k, const real *a, size down, size right, real *panels, size apart) {
    if (down == 1) {
        pack_columns(m, k, a, right, panels, apart);
        return;
    }
    for (size i = 0; i < m; i += TALL, panels += apart) {
        const real *from = a + i * down;
        size rows = least(TALL, m - i), l = 0;
        if (right == 1 && rows == TALL)
            for (; l + LANES <= k; l += LANES) {
                vec block[TALL];
#pragma GCC unroll 16
                for (int r = 0; r < TALL; r++) block[r] = *(const loose *)(from + r * down + l);
                turn(block, TALL);
#pragma GCC unroll 16
                for (int r = 0; r < TALL; r++) *(loose *)(panels + l * TALL + r * LANES) = block[r];
            }
        for (; l < k; l++)
            for (size r = 0; r < TALL; r++) panels[l * TALL + r] = r < rows ? from[r * down + l * right] : 0;
    }
}

/* B, whose element (l, j) stands at b[l·down + j·right], as panels of BROAD columns, `apart` numbers from each other. */
static void pack_broad(size k, size n, const real *b, size down, size right, real *panels, size apart) {
    for (size j = 0; j < n; j += BROAD, panels += apart) {
        const real *from = b + j * right;
        size columns = least(BROAD, n - j);
        if (right == 1) {
            for (size l = 0; l < k; l++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    *(vec *)(panels + l * BROAD + v * LANES) =
                        columns == BROAD        ? *(const loose *)(from + l * down + v * LANES)
                        : columns > v * LANES   ? load_first(from + l * down + v * LANES, columns - v * LANES)
                                                : (vec){0};
            continue;
        }
        for (size c = 0; c < BROAD; c += LANES) {
            size l = 0;
            if (down == 1 && c + LANES <= columns)
                for (; l + LANES <= k; l += LANES) {
                    vec block[LANES];
#pragma GCC unroll 16
                    for (int r = 0; r < LANES; r++) block[r] = *(const loose *)(from + (c + r) * right + l);
                    turn(block, LANES);
#pragma GCC unroll 16
                    for (int r = 0; r < LANES; r++) *(vec *)(panels + (l + r) * BROAD + c) = block[r];
                }
            for (; l < k; l++)
                for (size r = c; r < c + LANES; r++)
                    panels[l * BROAD + r] = r < columns ? from[l * down + r * right] : 0;
        }
    }
}

/* One tile: c = start + a b, or c + start + a b; `start` is a row that all rows of the tile begin with, or NULL.
   across: from one k of a to the next, TALL in a panel. */
static inline __attribute__((always_inline)) void tile_of(size k, const real *a, const size across, const real *b,
                                                          const real *start, int add, real *c, size stride,
                                                          size rows, size columns) {
    vec sums[TALL][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) sums[i][v] = (vec){0};
    for (size l = 0; l < k; l++, a += across, b += BROAD) {
        vec row[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) row[v] = *(const vec *)(b + v * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < TALL; i++)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) sums[i][v] += a[i] * row[v];
    }
    if (rows == TALL && columns == BROAD) {
#pragma GCC unroll 16
        for (int i = 0; i < TALL; i++)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) {
                loose *at = (loose *)(c + i * stride + v * LANES);
                vec sum = sums[i][v];
                if (start) sum += *(const loose *)(start + v * LANES);
                if (add) sum += *at;
                *at = sum;
            }
        return;
    }
    real edge[TALL * BROAD];
    memcpy(edge, sums, sizeof edge);
    for (size i = 0; i < rows; i++)
        for (size j = 0; j < columns; j++) {
            real sum = edge[i * BROAD + j] + (start ? start[j] : 0);
            c[i * stride + j] = add ? c[i * stride + j] + sum : sum;
        }
}

static void tile(size k, const real *a, const real *b, const real *start, int add, real *c, size stride, size rows,
                 size columns) {
    tile_of(k, a, TALL, b, start, add, c, stride, rows, columns);
}

/* c (m × n, rows `stride` apart) = start + A B, or c + start + A B, from packed panels. */
static void multiply(size m, size n, size k, const real *a, const real *b, const real *start, int add, real *c,
                     size stride) {
    for (size l = 0; l < k; l += DEEP) {
        size depth = least(DEEP, k - l);
        for (size first = 0; first < n; first += WIDE)
            for (size i = 0; i < m; i += TALL)
                for (size j = first; j < least(first + WIDE, n); j += BROAD)
                    tile(depth, a + i * k + l * TALL, b + j * k + l * BROAD, l || !start ? 0 : start + j, l || add,
                         c + i * stride + j, stride, least(TALL, m - i), least(BROAD, n - j));
    }
}

/* c = Aᵀ B, or c + Aᵀ B, over k rows of both, each packed broad. */
static void multiply_turned(size m, size n, size k, const real *a, const real *b, int add, real *c, size stride) {
    for (size i = 0; i < m; i += TALL)
        for (size j = 0; j < n; j += BROAD)
            tile_of(k, a + i / BROAD * BROAD * k + i % BROAD, BROAD, b + j * k, 0, add, c + i * stride + j, stride,
                    least(TALL, m - i), least(BROAD, n - j));
}

/* totals[i] += Σ_l panel[l·unit + i] for the columns (or rows) of one panel. */
static inline void add_sums(size k, const size unit, const real *panel, real *totals, size count) {
    real sums[TALL + BROAD] = {0}; /* room for either */
    for (size l = 0; l < k; l++)
        for (size i = 0; i < unit; i++) sums[i] += panel[l * unit + i];
    for (size i = 0; i < count; i++) totals[i] += sums[i];
}
