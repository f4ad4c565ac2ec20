"""The Triton kernels of `kernels.gpu.sampling` (long: they share their arithmetic, step by step). They find the best
token, compute weights, apply filters, draw tokens and compute log-probabilities. The arithmetic is that of
kernels/cpu/sampling.cpp, operation by operation: division, 2^x, and sums in float64. The kernels are therefore launched
without automatic fusion of multiplication and addition. A row's sums are computed as a tree within each tile of the
vocabulary, and over the tiles in ascending order, so the vocabulary determines the order.

Filters do not sort. They keep a prefix of the row in the order (logit descending, token id ascending), identified by
the key of its last logit and the first id not kept among equal logits. A bisection over keys finds the prefix, with one
pass over the row per step.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.44269504088896341)
NEVER_DRAWN = tl.constexpr(88.0)  # below the maximum: 2^x is 0 at a distance of 126 ln 2 = 87.34 or more
LEAST = tl.constexpr(-(1 << 63))
FIRST_STEPS = tl.constexpr(16)
AT_ONCE = tl.constexpr(4)
LOWEST_KEY, HIGHEST_KEY = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)


@triton.jit
def exp2(x):
    """Returns 2^x for x <= 127, and 0 below -126 and for NaN, like exp2v in kernels/cpu/simd.h."""
    shifted = x + 12582912.0  # 1.5 * 2^23: adding it rounds to an integer in the low bits
    r = x - (shifted - 12582912.0)
    p = tl.fma(r, tl.full(r.shape, 1.535336188319500e-4, tl.float32), 1.339887440266574e-3)
    p = tl.fma(p, r, 9.618437357674640e-3)
    p = tl.fma(p, r, 5.550332471162809e-2)
    p = tl.fma(p, r, 2.402264791363012e-1)
    p = tl.fma(p, r, 6.931472028550421e-1)
    p = tl.fma(p, r, 1.0)
    bits = p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return tl.where(x >= -126.0, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def key_of(x):
    """Returns an int32 that sorts like x; both zeros have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranked(x, at):
    """Returns an int64 rank of x and its id, which sorts by (x ascending, id descending); NaN counts as -inf."""
    key = key_of(tl.where(x == x, x, float("-inf"))).to(tl.int64)
    return (key << 32) | (0x7FFFFFFF - at).to(tl.int64)


@triton.jit
def id_of(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


@triton.jit
def best_kernel(best_ptr, logits_ptr, vocab, logits_row, TILE: tl.constexpr):
    """Writes best[row, tile], the rank of the tile's highest logit."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + row * logits_row + at, mask=at < vocab, other=float("-inf"))
    tl.store(best_ptr + row * tl.num_programs(1) + tile, tl.max(ranked(x, at), 0))


@triton.jit
def best_of(best_ptr, row, tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(best_ptr + row * tiles + tile, mask=tile < tiles, other=LEAST), 0)


@triton.jit
def top_of(best, heat):
    """Returns the row's highest logit divided by the temperature, and whether a token is drawn at random."""
    top = tl.div_rn(value_of((best >> 32).to(tl.int32)), heat)
    return top, (heat > 0.0) & (tl.abs(top) < float("inf"))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "min_p_ptr"])
def weigh_kernel(
    x_ptr, weight_ptr, mass_ptr, count_ptr, best_ptr, logits_ptr, temperature_ptr, min_p_ptr, vocab, logits_row,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Writes x = logit / temperature and the weight e^(x - max) of each token, and the sum and count of weights > 0 of
    each tile. Skips rows without a random draw. A token that min_p drops, or whose weight underflows to 0, gets x =
    -inf and weight 0.
    """
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    heat = tl.load(temperature_ptr + row)
    top, drawn = top_of(best_of(best_ptr, row, tiles, TILES), heat)
    if drawn:
        at = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * logits_row + at, mask=at < vocab, other=float("-inf"))
        x = tl.div_rn(x, tl.zeros_like(x) + heat)
        weight = exp2((x - top) * LOG2E)
        kept = (weight > 0.0) & (weight >= tl.load(min_p_ptr + row))
        weight = tl.where(kept, weight, 0.0)
        tl.store(x_ptr + row * vocab + at, tl.where(kept, x, float("-inf")), mask=at < vocab)
        tl.store(weight_ptr + row * vocab + at, weight, mask=at < vocab)
        tl.store(mass_ptr + row * tiles + tile, tl.sum(weight.to(tl.float64), 0))
        tl.store(count_ptr + row * tiles + tile, tl.sum(kept.to(tl.int32), 0))


@triton.jit
def in_prefix(key, at, last, limit):
    return (key > last) | ((key == last) & (at < limit))


@triton.jit
def measure(x_ptr, weight_ptr, vocab, last, limit, bound, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """Measures the tokens of the prefix whose keys are >= bound. Returns their measure (with BY_MASS the sum of their
    weights, otherwise their number), their number, their lowest key, and the highest key < bound in the prefix.
    """
    mass = tl.zeros((TILE,), tl.float64)
    count = tl.zeros((TILE,), tl.int32)
    lowest = tl.full((TILE,), HIGHEST_KEY, tl.int32)
    below = tl.full((TILE,), LOWEST_KEY, tl.int32)
    for start in range(0, vocab, AT_ONCE * TILE):
        for i in tl.static_range(AT_ONCE):  # loads of several tiles are in flight at the same time
            at = start + i * TILE + tl.arange(0, TILE)
            key = key_of(tl.load(x_ptr + at, mask=at < vocab, other=float("-inf")))
            inside = in_prefix(key, at, last, limit)
            kept = inside & (key >= bound)
            count += kept.to(tl.int32)
            lowest = tl.minimum(lowest, tl.where(kept, key, HIGHEST_KEY))
            below = tl.maximum(below, tl.where(inside & (key < bound), key, LOWEST_KEY))
            if BY_MASS:
                weight = tl.load(weight_ptr + at, mask=at < vocab, other=0.0)
                mass += tl.where(kept, weight, 0.0).to(tl.float64)
    number = tl.sum(count, 0)
    total = tl.sum(mass, 0) if BY_MASS else number.to(tl.float64)
    return total, number, tl.min(lowest, 0), tl.max(below, 0)


@triton.jit
def middle_of(low, high, step):
    """Returns a key between low and high.

    During the first steps, this is the key of their mean value, because logits are spread evenly over values. Later, it
    is the mean key, which guarantees termination.
    """
    by_value = key_of(value_of(low) * 0.5 + value_of(high) * 0.5)
    middle = tl.where(step < FIRST_STEPS, by_value, (low >> 1) + (high >> 1) + (low & high & 1))
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def after_tie(x_ptr, vocab, key, limit, nth, TILE: tl.constexpr):
    """Returns 1 plus the id of the nth token (counted from 1) with this key and an id below limit, or limit if there
    are fewer than n such tokens.
    """
    seen, found, start = nth * 0, limit, vocab * 0
    while (seen < nth) & (start < vocab):
        at = start + tl.arange(0, TILE)
        here = key_of(tl.load(x_ptr + at, mask=at < vocab, other=float("-inf")))
        tie = (here == key) & (at < limit)
        number = seen + tl.cumsum(tie.to(tl.int32), 0)
        found = tl.where(tl.max(number, 0) >= nth, tl.max(tl.where(tie & (number == nth), at, 0), 0) + 1, found)
        seen = tl.max(number, 0)
        start += TILE
    return found


@triton.jit
def narrow(x_ptr, weight_ptr, vocab, top, last, limit, target, total, count, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """Returns the shortest prefix (last, limit) within a given prefix whose measure reaches `target`. `total` and
    `count` are the measure and length of the given prefix.

    Invariant: the tokens with keys >= low reach the target, and the tokens with keys >= high do not. Both bounds move
    to keys that occur, so that any number of equal logits takes only one step.
    """
    low, high = last, key_of(top) + 1
    above, num_above = total * 0.0, count * 0  # of keys >= high
    step = 0
    while (low + 1 < high) & (total > target):
        middle = middle_of(low, high, step)
        found, number, lowest, below = measure(x_ptr, weight_ptr, vocab, last, limit, middle, BY_MASS, TILE)
        if found >= target:
            low, total, count = lowest, found, number
        else:
            high, above, num_above = below + 1, found, number
        step += 1
    limit = tl.where(low == last, limit, vocab)
    if total > target:  # not all of the tokens with the key low are needed
        each = exp2((value_of(low) - top) * LOG2E).to(tl.float64) if BY_MASS else total * 0.0 + 1.0
        needed = tl.ceil((target - above) / each).to(tl.int32)
        if needed < count - num_above:
            limit = after_tie(x_ptr, vocab, low, limit, needed, TILE)
    return low, limit


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"])
def filter_kernel(
    x_ptr, weight_ptr, mass_ptr, count_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sets to zero the weights that top_k and then top_p drop, and updates the tiles' sums. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    top, drawn = top_of(best_of(best_ptr, row, tiles, TILES), tl.load(temperature_ptr + row))
    k, p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    by_rank, by_mass = (k > 0) & (k < vocab), p < 1.0
    if drawn & (by_rank | by_mass):
        tile = tl.arange(0, TILES)
        mass = tl.sum(tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0), 0)
        count = tl.sum(tl.load(count_ptr + row * tiles + tile, mask=tile < tiles, other=0), 0)
        x_row, weight_row = x_ptr + row * vocab, weight_ptr + row * vocab
        last, limit = key_of(top - NEVER_DRAWN), vocab + 0 * count
        if by_rank:
            number = count.to(tl.float64)
            last, limit = narrow(
                x_row, weight_row, vocab, top, last, limit, k.to(tl.float64), number, count, False, TILE
            )
            mass, count, _, _ = measure(x_row, weight_row, vocab, last, limit, last, True, TILE)
        if by_mass:
            target = tl.maximum(p.to(tl.float64), 1e-300) * mass  # keeps one token if p is 0 in fp32
            last, limit = narrow(x_row, weight_row, vocab, top, last, limit, target, mass, count, True, TILE)
        for i in range(tiles):
            at = i * TILE + tl.arange(0, TILE)
            key = key_of(tl.load(x_row + at, mask=at < vocab, other=float("-inf")))
            weight = tl.load(weight_row + at, mask=at < vocab, other=0.0)
            weight = tl.where(in_prefix(key, at, last, limit), weight, 0.0)
            tl.store(weight_row + at, weight, mask=at < vocab)
            tl.store(mass_ptr + row * tiles + i, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def uniform(seed, sample, position):
    """Returns the same number in [0, 1) as `kernels.sampling.uniform`."""
    mask: tl.constexpr = 0xFFFFFFFF
    high, low, _, _ = tl.philox(
        seed,
        (position & mask).to(tl.uint32), ((position >> 32) & mask).to(tl.uint32),
        (sample & mask).to(tl.uint32), ((sample >> 32) & mask).to(tl.uint32),
    )  # fmt: skip
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "seeds_ptr", "samples_ptr", "positions_ptr"])
def draw_kernel(
    out_ptr, weight_ptr, mass_ptr, best_ptr, temperature_ptr, seeds_ptr, samples_ptr, positions_ptr, vocab, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Writes out[row], the first token in id order at which the sum of weights exceeds a random share of the total."""
    row = tl.program_id(0).to(tl.int64)
    best = best_of(best_ptr, row, tiles, TILES)
    _, drawn = top_of(best, tl.load(temperature_ptr + row))
    token = id_of(best)
    if drawn:
        tile = tl.arange(0, TILES)
        masses = tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        upto = tl.cumsum(masses, 0)
        u = uniform(tl.load(seeds_ptr + row), tl.load(samples_ptr + row), tl.load(positions_ptr + row))
        target = u * tl.max(upto, 0)
        fallback = tl.max(tl.where(masses > 0.0, tile, 0), 0)  # because of rounding, the target may be beyond every sum
        chosen = tl.min(tl.where(upto > target, tile, TILES), 0)
        chosen = tl.where(chosen < TILES, chosen, fallback)
        before = tl.max(tl.where(tile < chosen, upto, 0.0), 0)
        at = chosen * TILE + tl.arange(0, TILE)
        weight = tl.load(weight_ptr + row * vocab + at, mask=at < vocab, other=0.0)
        passed = before + tl.cumsum(weight.to(tl.float64), 0) > target
        first = tl.min(tl.where(passed & (weight > 0.0), at, vocab), 0)
        token = tl.where(first < vocab, first, tl.max(tl.where(weight > 0.0, at, 0), 0)).to(tl.int64)
    tl.store(out_ptr + row, token)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["token_ids_ptr", "ids_ptr", "top_ptr"])
def log_softmax_top_kernel(
    chosen_ptr, rank_ptr, ids_ptr, top_ptr, logits_ptr, token_ids_ptr, vocab, logits_row, k, TILE: tl.constexpr
):
    """Writes the chosen token's log-probability and rank and the k most likely tokens. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    x_row = logits_ptr + row * logits_row
    token = tl.load(token_ids_ptr + row)
    chosen = tl.load(x_row + token, mask=(token >= 0) & (token < vocab), other=float("nan"))
    best = next_best(x_row, vocab, 0x7FFFFFFFFFFFFFFF, TILE)
    top = value_of((best >> 32).to(tl.int32))
    total = tl.zeros((TILE,), tl.float64)
    above = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(x_row + at, mask=at < vocab, other=float("-inf"))
        total += exp2((x - top) * LOG2E).to(tl.float64)
        above += (x > chosen).to(tl.int64)
    log_sum = top.to(tl.float64) + tl.log(tl.sum(total, 0))
    tl.store(chosen_ptr + row, (chosen.to(tl.float64) - log_sum).to(tl.float32))
    tl.store(rank_ptr + row, tl.sum(above, 0) + 1)
    for i in range(k):
        value = value_of((best >> 32).to(tl.int32)).to(tl.float64) - log_sum
        tl.store(ids_ptr + row * k + i, id_of(best))
        tl.store(top_ptr + row * k + i, value.to(tl.float32))
        best = next_best(x_row, vocab, best, TILE)


@triton.jit
def next_best(x_row, vocab, below, TILE: tl.constexpr):
    """Returns the row's highest rank lower than `below`."""
    best = tl.full((TILE,), LEAST, tl.int64)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(x_row + at, mask=at < vocab, other=float("-inf"))
        rank = ranked(x, at)
        best = tl.maximum(best, tl.where((rank < below) & (at < vocab), rank, LEAST))
    return tl.max(best, 0)
