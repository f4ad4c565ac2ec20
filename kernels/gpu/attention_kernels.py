"""The Triton kernels of paged attention. One kernel computes decode and prefill, and one merges split keys. A program
of the former computes ROWS rows of scores, for some queries of one sequence and the GROUP heads that share a KV head
(packed GQA). It iterates over that head's keys in tiles of TILE keys. The block of every key is looked up separately,
so a tile may span several blocks. Softmax is online and in base 2 (Dao et al. 2023); sums are fp32.

The key axis of a sequence is divided into splits that begin at multiples of TILE:
- If PIECE is 0 (fast), tiles are distributed evenly over the splits, so bits depend on the number of splits.
- If PIECE > 0 (deterministic), a piece has PIECE keys at absolute positions, and pieces are merged in ascending order.
  In decode, a split is one piece; in prefill, a program walks all pieces of its rows. Both use the same `walk` and
  `fold` with the same ROWS, TILE and warps, so a row's bits depend only on its own query, keys and values. A tile in
  which a row sees no key does not change the row's sums (factors are exactly 1, and added sums exactly 0). Launches
  turn off the contraction of a * b + c, which may differ from kernel to kernel.

WIDE is for the interpreter, whose `tl.dot` is wrong for bf16. Operands are rounded as on the chip, and then made fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOT_SPECIALIZED = ["block_table", "context_lens", "cu_seqlens_q", "num_seqs", "num_splits", "table_row", "window"]
"""Parameters on which kernels do not specialize, so that a new value does not cause a compilation."""


@triton.jit
def find_sequence(cu_seqlens_q, program, num_seqs, QUERIES: tl.constexpr):
    """Returns a program's sequence and tile. The programs of sequence i begin at cu_seqlens_q[i] // QUERIES + i."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // QUERIES + middle <= program:
            low = middle
        else:
            high = middle
    return low, program - (tl.load(cu_seqlens_q + low) // QUERIES + low)


@triton.jit
def first_visible(position, window, WINDOWED: tl.constexpr):
    """Returns the first key that a query at `position` sees."""
    first = position * 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def split_size(first_key, keys_to, num_splits, TILE: tl.constexpr, PIECE: tl.constexpr):
    """Returns the beginning of split 0 and the number of keys per split. Splits are contiguous up to `keys_to`."""
    begin = first_key // TILE * TILE
    size = tl.maximum(tl.cdiv(tl.cdiv(keys_to - begin, TILE), num_splits), 1) * TILE
    if PIECE > 0:
        begin = first_key // PIECE * PIECE
        size = PIECE
    return begin, size


@triton.jit
def as_operand(x, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Rounds `x` to `dtype`, the dtype of the queries, for use as an operand of `tl.dot`."""
    x = x.to(dtype)
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def rescale(x, new_max):
    """Returns exp2(x - new_max) for x <= new_max, and 0 where both are -inf."""
    return tl.exp2(x - tl.where(new_max == float("-inf"), 0.0, new_max))


@triton.jit
def capped(x, cap):
    """Returns cap * tanh(x / cap), which bounds scores as in Gemma 2."""
    part = tl.exp2(tl.abs(x) / cap * -2.8853900817779268)  # 2 * log2(e)
    bounded = (1.0 - part) / (1.0 + part) * cap
    return tl.where(x < 0, -bounded, bounded)


@triton.jit
def walk(
    acc, row_max, row_sum,  # fp32 [ROWS, WIDTH], [ROWS], [ROWS]
    q,  # [ROWS, WIDTH]
    positions,  # [ROWS]
    keys_from, keys_to,  # keys_from is a multiple of TILE
    first_key,  # the first key that the first row sees
    key_cache, value_cache, table,
    scale_log2, cap_log2, window, kv_block, kv_slot,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds keys `keys_from` to `keys_to` - 1 to the rows' sums. Keys before `first_key` are not read. If MASKED is not
    set, every row must see all of these keys, and their number must be a multiple of TILE.
    """
    dims = tl.arange(0, WIDTH)[None, :]
    for start in range(keys_from, keys_to, TILE):
        keys = start + tl.arange(0, TILE)
        real = dims < HEAD_DIM
        if MASKED:
            held = (keys >= first_key) & (keys < keys_to)
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=held, other=0)
            real = held[:, None] & real
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
        offsets = (blocks.to(tl.int64) * kv_block + (keys % BLOCK_SIZE) * kv_slot)[:, None] + dims  # [TILE, WIDTH]
        k = as_operand(tl.load(key_cache + offsets, mask=real, other=0.0), q.dtype, WIDE)
        scores = tl.dot(as_operand(q, q.dtype, WIDE), tl.trans(k), input_precision="ieee") * scale_log2
        if CAPPED:
            scores = capped(scores, cap_log2)
        if MASKED:
            seen = keys[None, :] <= positions[:, None]  # [ROWS, TILE]
            if WINDOWED:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        old = rescale(row_max, new_max)
        weights = rescale(scores, new_max[:, None])
        row_sum = row_sum * old + tl.sum(weights, 1)
        v = as_operand(tl.load(value_cache + offsets, mask=real, other=0.0), q.dtype, WIDE)
        acc = tl.dot(as_operand(weights, q.dtype, WIDE), v, acc * old[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def fold(acc, row_max, row_sum, piece_acc, piece_max, piece_sum):
    """Returns the rows' acc fp32 [ROWS, WIDTH], row_max [ROWS] and row_sum [ROWS] with another piece merged
    into them.
    """
    new_max = tl.maximum(row_max, piece_max)
    old = rescale(row_max, new_max)
    new = rescale(piece_max, new_max)
    return acc * old[:, None] + piece_acc * new[:, None], new_max, row_sum * old + piece_sum * new


@triton.jit
def with_sink(acc, row_max, row_sum, sink_log2):
    """Returns acc fp32 [ROWS, WIDTH] and row_sum [ROWS] after adding a sink (a logit without a value) to
    the softmax.
    """
    new_max = tl.maximum(row_max, sink_log2)
    old = rescale(row_max, new_max)
    return acc * old[:, None], row_sum * old + tl.exp2(sink_log2 - new_max)


@triton.jit
def finish(acc, row_sum, value_scale):
    """Returns the weighted mean of the values, or zeros for rows that see no key."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None] * value_scale


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def attention_kernel(
    out, q,  # [total_q, num_heads, HEAD_DIM]
    key_cache, value_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    block_table, context_lens, cu_seqlens_q,  # [num_seqs, max_blocks], [num_seqs], [num_seqs + 1]
    partial_acc, partial_max, partial_sum,  # fp32 [num_seqs, num_heads, num_splits(, HEAD_DIM)]
    sinks,  # fp32 [num_heads]
    scale_log2, cap_log2, value_scale,
    num_seqs, num_splits, window,
    q_row, q_head, out_row, out_head, table_row, kv_block, kv_head, kv_slot,  # strides, elements
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr,
    VARLEN: tl.constexpr, DIRECT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Computes attention. The grid is (num_seqs, num_kv_heads, num_splits) or, with VARLEN, (total_q // (ROWS // GROUP)
    + num_seqs, num_kv_heads, 1).

    With VARLEN, cu_seqlens_q is read; otherwise sequence i has the single query i. With DIRECT, num_splits is 1, and
    `out` is written instead of the partial sums. WIDTH is HEAD_DIM rounded up to a power of two, at least 16.
    """
    head = tl.program_id(1)
    if VARLEN:
        QUERIES: tl.constexpr = ROWS // GROUP
        # The last tiles of a sequence have the most keys, so they start first.
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        sequence, tile = find_sequence(cu_seqlens_q, program, num_seqs, QUERIES)
        q_begin = tl.load(cu_seqlens_q + sequence)
        q_len = tl.load(cu_seqlens_q + sequence + 1) - q_begin
        first_query = tile * QUERIES
        num_queries = tl.minimum(q_len - first_query, QUERIES)
        if num_queries <= 0:
            return
    else:
        sequence = tl.program_id(0)
        q_begin = sequence
        q_len = 1
        first_query = 0
        num_queries = 1
    first_position = tl.load(context_lens + sequence) - q_len + first_query
    keys_to = first_position + num_queries
    first_key = first_visible(first_position, window, WINDOWED)
    begin, size = split_size(first_key, keys_to, num_splits, TILE, PIECE)
    split = tl.program_id(2)
    begin += split * size
    if not DIRECT and begin >= keys_to:
        return

    row = tl.arange(0, ROWS)
    positions = first_position + row // GROUP
    live = row < num_queries * GROUP
    q_rows = (q_begin + first_query + row // GROUP).to(tl.int64)
    q_heads = head * GROUP + row % GROUP
    dims = tl.arange(0, WIDTH)[None, :]
    real = live[:, None] & (dims < HEAD_DIM)
    rows = tl.load(q + (q_rows * q_row + q_heads * q_head)[:, None] + dims, mask=real, other=0.0)
    table = block_table + sequence.to(tl.int64) * table_row
    keys = key_cache + head.to(tl.int64) * kv_head
    values = value_cache + head.to(tl.int64) * kv_head
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if PIECE > 0 and DIRECT:
        for piece in range(begin, keys_to, PIECE):
            piece_acc, piece_max, piece_sum = walk(
                tl.zeros([ROWS, WIDTH], tl.float32),
                tl.full([ROWS], float("-inf"), tl.float32),
                tl.zeros([ROWS], tl.float32),
                rows, positions, tl.maximum(piece, first_key // TILE * TILE), tl.minimum(piece + PIECE, keys_to),
                first_key, keys, values, table, scale_log2, cap_log2, window, kv_block, kv_slot,
                HEAD_DIM, WIDTH, BLOCK_SIZE, TILE, True, WINDOWED, CAPPED, WIDE,
            )  # fmt: skip
            acc, row_max, row_sum = fold(acc, row_max, row_sum, piece_acc, piece_max, piece_sum)
    else:
        masked_from = tl.maximum(begin, first_key // TILE * TILE)
        if VARLEN and not WINDOWED:
            unmasked_to = (first_position + 1) // TILE * TILE
            acc, row_max, row_sum = walk(
                acc, row_max, row_sum, rows, positions, masked_from, unmasked_to,
                first_key, keys, values, table, scale_log2, cap_log2, window, kv_block, kv_slot,
                HEAD_DIM, WIDTH, BLOCK_SIZE, TILE, False, WINDOWED, CAPPED, WIDE,
            )  # fmt: skip
            masked_from = unmasked_to
        acc, row_max, row_sum = walk(
            acc, row_max, row_sum, rows, positions, masked_from, tl.minimum(begin + size, keys_to),
            first_key, keys, values, table, scale_log2, cap_log2, window, kv_block, kv_slot,
            HEAD_DIM, WIDTH, BLOCK_SIZE, TILE, True, WINDOWED, CAPPED, WIDE,
        )  # fmt: skip
    if DIRECT:
        if SINKS:
            sink = tl.load(sinks + q_heads) * 1.4426950408889634  # log2(e)
            acc, row_sum = with_sink(acc, row_max, row_sum, sink)
        where = out + (q_rows * out_row + q_heads * out_head)[:, None] + dims
        tl.store(where, finish(acc, row_sum, value_scale).to(out.dtype.element_ty), mask=real)
    else:
        partial = (sequence.to(tl.int64) * tl.num_programs(1) * GROUP + q_heads) * num_splits + split
        tl.store(partial_acc + partial[:, None] * HEAD_DIM + dims, acc, mask=real)
        tl.store(partial_max + partial, row_max, mask=live)
        tl.store(partial_sum + partial, row_sum, mask=live)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def merge_kernel(
    out,  # [num_seqs, num_heads, HEAD_DIM]
    context_lens,  # [num_seqs]
    partial_acc, partial_max, partial_sum,  # fp32 [num_seqs, num_heads, num_splits(, HEAD_DIM)]
    sinks,  # fp32 [num_heads]
    value_scale, num_splits, window, out_row, out_head,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, PIECE: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merges key splits. The grid is (num_seqs, num_heads). If PIECE is 0, SPLITS is a power of two >= num_splits."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    keys_to = tl.load(context_lens + sequence)
    first_key = first_visible(keys_to - 1, window, WINDOWED)
    begin, size = split_size(first_key, keys_to, num_splits, TILE, PIECE)
    num_live = tl.cdiv(keys_to - begin, size)
    row = (sequence * tl.num_programs(1) + head) * num_splits
    dims = tl.arange(0, WIDTH)[None, :]
    real = dims < HEAD_DIM
    if PIECE > 0:
        one = tl.arange(0, 1)
        acc = tl.zeros([1, WIDTH], tl.float32)
        row_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        for i in range(num_live):
            at = row + i + one
            piece_acc = tl.load(partial_acc + at[:, None] * HEAD_DIM + dims, mask=real, other=0.0)
            piece_max = tl.load(partial_max + at)
            piece_sum = tl.load(partial_sum + at)
            acc, row_max, row_sum = fold(acc, row_max, row_sum, piece_acc, piece_max, piece_sum)
    else:
        split = tl.arange(0, SPLITS)
        held = split < num_live
        at = row + split
        split_max = tl.load(partial_max + at, mask=held, other=float("-inf"))
        row_max = tl.max(split_max, 0, keep_dims=True)
        factor = rescale(split_max, row_max)
        split_acc = tl.load(partial_acc + at[:, None] * HEAD_DIM + dims, mask=held[:, None] & real, other=0)
        acc = tl.sum(split_acc * factor[:, None], 0, keep_dims=True)
        row_sum = tl.sum(tl.load(partial_sum + at, mask=held, other=0) * factor, 0, keep_dims=True)
    if SINKS:
        acc, row_sum = with_sink(acc, row_max, row_sum, tl.load(sinks + head) * 1.4426950408889634)
    where = out + sequence * out_row + head * out_head + dims
    tl.store(where, finish(acc, row_sum, value_scale).to(out.dtype.element_ty), mask=real)
