/* The lean path in C: a whole pass over the layer, forward or back, in one call and one team of threads.

   Compiled for one type of number, REAL: float or double. See ops/lean/native/__init__.py. */

#include "product.h"

#include "layer.h"

#include "weights.h"

#include "output.h"

#include "forward.h"

#include "blocks_back.h"

#include "backward.h"

/* Where in what is kept for the way back its parts stand. Returns how many numbers it has. */
static size lay_kept(Pass *p) {
    p->z = p->kept;
    p->scores = p->z + padded(p->tokens * 2 * p->width, LANES);
    p->inverse = p->scores + padded(p->tokens * all_scores(p), LANES);
    return p->inverse + p->tokens * 2 * p->heads - p->kept;
}

size primal_kept(const Pass *given) {
    Pass p = *given;
    return lay_kept(&p);
}

/* Bytes of scratch that a pass needs. */
size primal_scratch(const Pass *given, size back) {
    Pass p = *given;
    size used = 0;
    p.scratch = 0;
    if (back)
        backward_scratch(&p, &used);
    else
        forward_scratch(&p, &used);
    return used;
}

void primal_forward(Pass *p) {
    size used = 0;
    ForwardScratch s = forward_scratch(p, &used);
    lay_kept(p);
    memset(s.queues, 0, FORWARD_QUEUES * sizeof(size));
#pragma omp parallel num_threads(p->threads)
    forward(p, &s, omp_get_thread_num());
}

void primal_backward(Pass *p) {
    size used = 0;
    BackwardScratch s = backward_scratch(p, &used);
    lay_kept(p);
    memset(s.queues, 0, (BACKWARD_QUEUES + STRETCH_QUEUES * pieces(p->tokens, stretch_size(p))) * sizeof(size));
#pragma omp parallel num_threads(p->threads)
    backward(p, &s, omp_get_thread_num());
}
