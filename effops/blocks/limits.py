"""Sizes of blocks and crossovers on a CPU, in one table.

They are constants, so that nothing is timed when a call runs. `python bench/studies/limits.py` runs a call at half and
at twice each of them. Where a larger size is no faster, the smaller one is taken.
"""

# All ops
TEMPORARY_BYTES = 4 * 2**20  # the most that a forward pass may allocate beyond inputs and output: the contract
BLOCK_BYTES = 512 * 1024  # copies of an operand, and whole calls that are too small for blocks
PAIR_BYTES = 2 * 2**20  # pairs of a block where the contract leaves as much: a block costs a dozen parallel calls
WIDTH = 512  # columns of a block, where nothing else is said
COPIED_DEPTH = 128  # coordinates of an operand that is copied for a block: with fewer a product is slower
DEPTH = 256  # terms of a dot product summed at once: a longer sum of terms of one sign loses digits

# Densities of directions
NORMALISER_SLAB = 16384  # values of a normaliser kept for the blocks that share them
NORMALISER_PIECE = 8192  # values of a normaliser computed at once, in float64
SLOW_MATRIX = 8192  # values of a matrix below which a BLAS call for it alone costs more than to add it

# Densities of points
DISTANCE_BYTES = 3 * 2**19  # pairs of a block of the product form, which costs two dozen calls
DISTANCE_WIDTH = 1024  # columns of such a block
LEAST_ROWS = 64  # rows of each matrix that a product is cut into, one for each thread
LEAST_SIDE = 8  # with fewer rows or columns the factors of the product form cost more than the product saves
PAIRS_PER_DUPLICATE = 16  # a block with a near-duplicate for every so many pairs is computed directly

# Mixtures
STATISTICS_SLAB = 65536  # results whose statistics are kept at a time, unless backward needs those of all

# broadcast_dot
PRODUCT_BYTES = 1024 * 1024  # each buffer: at most three in a forward pass

# Attention
WHOLE_KEYS = 1024  # up to so many keys a block has whole rows, whose softmax is one pass
LEAST_QUERIES = 128  # of a block, and whole rows: backward computes parts of rows twice
QUERIES, KEYS = 512, 512  # of a block of more keys: products of few queries by all keys are slower

# Additive scores
ADDITIVE_PAIR_BYTES = 128 * 1024  # scores of a block: 64 x 512 in float32
ADDITIVE_PIECE_BYTES = 3 * 2**20  # pairs times coordinates computed at once

# Log-sparse attention
DIAGONAL_ROWS = 64  # rows of a block of a diagonal
DENSE_SHARE = 1 / 8  # above this share of the offsets of a block, one matrix product of all offsets is faster
SHIFTS_PER_GROUP = 16  # single offsets whose scores are kept at a time
SCORE_BLOCKS = 8  # blocks of scores that backward keeps
