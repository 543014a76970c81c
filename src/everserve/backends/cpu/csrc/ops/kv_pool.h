/* Where keys and values are. The pool of a worker that has all heads is [num_blocks, num_layers, 2, G, block_size, E]:

       block   | layer 0            | layer 1 ...
               | keys      | values |
               | head 0    | head 1 ...
               | block_size rows of E

   With latent attention there is one plane instead of two, and one head: a row is a key, and begins with its value.

   The pool of a worker that has some heads of some layers is [num_blocks, num_pieces, 2, block_size, E]: a piece is what
   a block has of one (layer, head). The heads of a call are then in any pieces. */

#pragma once

#include "gemm.h"

enum { KEYS = 0, VALUES = 1 };

struct kv_pool { /* packed by ops.py */
    void *data;
    int64_t dtype, num_layers, num_heads, block_size, head_size, num_planes, layer;
    const int32_t *pieces; /* by head of the call; num_layers is then the number of all pieces. NULL: see above */
};

/* The row of one token in one head. */
ALWAYS_INLINE void *kv_row(const struct kv_pool *pool, size_t block, int keys_or_values, size_t head, size_t offset) {
    size_t layer = (size_t)(pool->pieces ? pool->pieces[head] : pool->layer);
    size_t num_planes = (size_t)pool->num_planes, number = num_planes == 1 ? 0 : (size_t)keys_or_values;
    size_t plane = (block * (size_t)pool->num_layers + layer) * num_planes + number;
    size_t first = (pool->pieces ? plane : plane * (size_t)pool->num_heads + head) * (size_t)pool->block_size;
    return (char *)pool->data + (first + offset) * (size_t)pool->head_size * (pool->dtype == F32 ? 4 : 2);
}
