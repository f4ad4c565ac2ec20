// Attention over block tables (long: every way of dividing the work shares one class). The class divides queries into
// tiles and keys into pieces, distributes them over threads and finds the keys in memory. Decode of few sequences
// splits the key axis over threads and then merges the results. Larger batches compute a piece that several sequences
// share only once. In prefill, one thread computes all pieces of a tile. All paths use piece.h, or all use
// attention_amx.cpp, so they return the same bits.
#include <algorithm>
#include <atomic>
#include <vector>

#include "piece.h"
#include "team.h"

namespace ll {
namespace {

std::atomic<bool> prefetching{true};
using AttendOnTiles = void (*)(void* tiles, int n, int lo, int hi);
std::atomic<AttendOnTiles> on_tiles{nullptr};
#if defined(LL_AVX512)
constexpr int TILE_ROWS = 96;  // query rows that share packed keys; no effect on bits
#else
constexpr int TILE_ROWS = 48;
#endif
constexpr int64_t MOST_AHEAD = 64 << 10;  // most bytes of a unit's keys or values; twice that must stay in the L2 cache

template <class T, class E>
struct Attention {
    T* out;
    const T* q;
    const E *k, *v;
    const int32_t *block_table, *context_lens, *cu;
    int64_t out_token, out_head, q_token, q_head, k_block, k_head, k_slot, v_block, v_head, v_slot, table_row;
    int64_t num_blocks, max_blocks, total_q, num_seqs, heads, kv_heads, block_size, d, window;
    bool by_word;  // keys are stored by word (kernels/kv_cache.py)
    float scale, softcap;
    const float* sinks;  // [heads], or null
    bool prefetch;
    AttendOnTiles attend_on_tiles;  // null: in vectors
    // Set by `share` for sequences that share their first pieces: the number of these pieces, and the merged results.
    std::vector<int64_t> shared_pieces = {};  // [num_seqs], or empty
    std::vector<float> shared_totals = {};    // [num_seqs, kv_heads, group * (dpad + 2)]: o, m, l

    bool in_tiles() const { return IN_PAIRS<T, E> && attend_on_tiles && d % GROUP_KEYS == 0; }
    int group() const { return int(heads / kv_heads); }
    int64_t q_begin(int64_t seq) const { return cu ? cu[seq] : seq; }
    int64_t q_len(int64_t seq) const { return cu ? cu[seq + 1] - cu[seq] : 1; }
    int64_t position(int64_t seq, int64_t i) const { return context_lens[seq] - q_len(seq) + i; }
    int64_t first_key(int64_t pos) const { return window && pos >= window ? pos - window + 1 : 0; }

    void pack_q(Tile<T, E>& t, int row, const T* from) const {
        if constexpr (IN_INTEGERS<T, E>)
            t.q_scales[row] = DotOf<T, E>::pack_q(t.q_row(row), from, int(d));
        else if constexpr (IS_8_BITS<E>)
            Words<T>::pack_q(t.q_row(row), from, int(d));
        else
            Dot<T>::pack_q(t.q_row(row), from, int(d));
    }

    int check() const {
        if (cu && (cu[0] != 0 || cu[num_seqs] != total_q)) return 2;
        for (int64_t s = 0; s < num_seqs; ++s) {
            int64_t n = q_len(s), len = context_lens[s];
            if (n < 0 || len < 0 || (len > 0 && n > len)) return 2;
            if (len == 0 || n == 0) continue;
            int64_t last = (len - 1) / block_size;
            if (last >= max_blocks) return 1;
            for (int64_t b = first_key(position(s, 0)) / block_size; b <= last; ++b) {
                int32_t id = block_table[s * table_row + b];
                if (id < 0 || id >= num_blocks) return 1;
            }
        }
        return 0;
    }

    size_t tile_bytes(int rows) const { return Tile<T, E>::bytes(rows, int(d)); }

    void place(Tile<T, E>& t, char* memory, int rows) const {
        t.place(memory, rows, int(d), scale, softcap);
        t.word_step = by_word ? block_size : 0;
    }

    // Sets the tile up for query tokens [i0, i0 + n) of a sequence and the heads of one KV head.
    void begin(Tile<T, E>& t, char* memory, int64_t seq, int64_t kv_head, int64_t i0, int n) const {
        const int g = group(), rows = n * g;
        place(t, memory, rows);
        for (int r = 0; r < rows; ++r) {
            const T* row = q + (q_begin(seq) + i0 + r / g) * q_token + (kv_head * g + r % g) * q_head;
            pack_q(t, r, row);
            t.total_m[r] = NEG_INF, t.total_l[r] = 0.f;
        }
        if (!shared_pieces.empty() && shared_pieces[seq]) {
            const float* from = totals_of(seq, kv_head);
            std::memcpy(t.total_o, from, size_t(rows) * t.dpad * 4);
            std::memcpy(t.total_m, from + rows * t.dpad, rows * 4);
            std::memcpy(t.total_l, from + rows * (t.dpad + 1), rows * 4);
        }
    }

    // Returns the sink of a head if a row's last key, the one before `end`, lies in the piece.
    float sink(int64_t head, int64_t end) const {
        return sinks && end <= PIECE ? sinks[head] * UNIT<T, E> : NEG_INF;
    }

    // Sets the tile's pointers to the piece of keys [base, base + PIECE), and [lo, hi) to those that any row sees.
    // Returns false if there are none.
    bool see(Tile<T, E>& t, int64_t seq, int64_t kv_head, int64_t i0, int64_t base, int& lo, int& hi) const {
        const int g = group();
        lo = PIECE, hi = 0;
        for (int r = 0; r < t.rows; ++r) {
            int64_t pos = position(seq, i0 + r / g);
            int64_t from = first_key(pos) - base, to = pos + 1 - base;
            t.lo[r] = int(from < 0 ? 0 : from > PIECE ? PIECE : from);
            t.hi[r] = int(to < 0 ? 0 : to > PIECE ? PIECE : to);
            t.sinks[r] = sink(kv_head * g + r % g, to);
            if (t.lo[r] >= t.hi[r]) continue;
            lo = t.lo[r] < lo ? t.lo[r] : lo, hi = t.hi[r] > hi ? t.hi[r] : hi;
        }
        if (lo >= hi) return false;
        locate_piece(t, seq, kv_head, base, lo, hi);
        return true;
    }

    void attend_located(Tile<T, E>* tiles, int n, int lo, int hi) const {
        in_tiles() ? attend_on_tiles(tiles, n, lo, hi) : attend(tiles, n, lo, hi);
    }

    // The block and the slot of a position, and then of later ones. Divisions for each block take longer.
    struct Place {
        const int32_t* block;
        int64_t slot;
        Place(const Attention& a, int64_t seq, int64_t position)
            : block(a.block_table + seq * a.table_row + position / a.block_size), slot(position % a.block_size) {}
        void advance(int64_t n, int64_t block_size) {
            if ((slot += n) == block_size) slot = 0, ++block;
        }
    };

    // Lists pointers to the vectors of keys that are stored by word, for the groups that contain positions [base + lo,
    // base + hi). A vector without such a position is replaced by a neighbour that has one.
    void locate_words(Tile<T, E>& t, int64_t seq, int64_t kv_head, int64_t base, int lo, int hi) const {
        const int first = lo / W, last = (hi - 1) / W;
        Place place(*this, seq, base + first * W);
        for (int g = first; g <= last; ++g, place.advance(W, block_size))
            t.by_word[g] = reinterpret_cast<const float*>(k + *place.block * k_block + kv_head * k_head) + place.slot;
        for (int g = lo / GROUP_KEYS * GROUP_KEYS / W; g < first; ++g) t.by_word[g] = t.by_word[first];
        for (int g = last + 1; g * W < (hi + GROUP_KEYS - 1) / GROUP_KEYS * GROUP_KEYS; ++g)
            t.by_word[g] = t.by_word[last];
    }

    // Lists pointers to the keys, unless they are stored by word, and to the values of positions [base + lo, base + hi),
    // with their scales.
    void locate(Tile<T, E>& t, int64_t seq, int64_t kv_head, int64_t base, int lo, int hi) const {
        if (by_word) locate_words(t, seq, kv_head, base, lo, hi);
        Place place(*this, seq, base + lo);
        for (int at = lo, n; at < hi; at += n, place.advance(n, block_size)) {
            n = int(std::min(hi - at, int(block_size - place.slot)));
            const E* key = k + *place.block * k_block + kv_head * k_head + place.slot * k_slot;
            const E* value = v + *place.block * v_block + kv_head * v_head + place.slot * v_slot;
            for (int i = 0; i < n; ++i) t.values[at + i] = value + i * v_slot;
            for (int i = 0; i < n && !by_word; ++i) t.keys[at + i] = key + i * k_slot;
            if constexpr (IS_8_BITS<E>)
                for (int i = 0; i < n; ++i)
                    t.key_scales[at + i] = scale_of(key + i * k_slot, d),
                    t.value_scales[at + i] = scale_of(value + i * v_slot, d);
        }
    }

    // One of k and v, with its strides.
    struct Cache {
        const E* at;
        int64_t block, head, slot;
    };

    // Adds positions [from, to) of some KV heads to the memory that is prefetched. If `with_rest` is set, the sequence's
    // last position stands for the rest of its block.
    void locate(Ahead& ahead, const Cache& cache, bool with_rest, int64_t seq, int64_t kv_head, int64_t num_heads,
                int64_t from, int64_t to) const {
        const int64_t width = d + SCALE_WIDTH<E>;
        Place place(*this, seq, from);
        for (int64_t at = from, n; at < to; at += n, place.advance(n, block_size)) {
            const int64_t slot = place.slot;
            n = cache.slot == width ? std::min(to - at, block_size - slot) : 1;  // a block's slots may be contiguous
            const int64_t size = (with_rest && at + n == context_lens[seq] ? block_size - slot : n) * width;
            const E* first = cache.at + *place.block * cache.block + kv_head * cache.head + slot * cache.slot;
            if (cache.head == size)  // one run for all heads
                ahead.add(first, num_heads * size);
            else
                for (int64_t h = 0; h < num_heads; ++h) ahead.add(first + h * cache.head, size);
        }
    }

    void locate_keys(Ahead& ahead, int64_t seq, int64_t kv_head, int64_t num_heads, int64_t from, int64_t to) const {
        // By word, every key is in most lines of its block, so the last keys need the rest of the block.
        locate(ahead, {k, k_block, k_head, k_slot}, by_word, seq, kv_head, num_heads, from, to);
    }

    void locate_values(Ahead& ahead, int64_t seq, int64_t kv_head, int64_t num_heads, int64_t from, int64_t to) const {
        locate(ahead, {v, v_block, v_head, v_slot}, false, seq, kv_head, num_heads, from, to);
        if (ahead.count) ahead.begin(1);
    }

    // Adds what is prefetched of a later piece. On tiles, scores take too little time for the piece's values.
    void locate_ahead(Ahead& ahead, int64_t seq, int64_t kv_head, int64_t num_heads, int64_t from, int64_t to) const {
        locate_keys(ahead, seq, kv_head, num_heads, from, to);
        if (in_tiles()) locate_values(ahead, seq, kv_head, num_heads, from, to);
    }

    // Sets the piece's pointers. Keys outside [lo, hi) point to zeros: those slots and blocks may hold anything.
    void locate_piece(Tile<T, E>& t, int64_t seq, int64_t kv_head, int64_t base, int lo, int hi) const {
        if (!by_word) std::fill(t.keys, t.keys + lo, t.zeros), std::fill(t.keys + hi, t.keys + PIECE, t.zeros);
        if constexpr (IS_8_BITS<E>)
            for (float* scales : {t.key_scales, t.value_scales})
                std::fill(scales, scales + lo, 0.f), std::fill(scales + hi, scales + PIECE, 0.f);
        if constexpr (IN_INTEGERS<T, E>)
            std::fill(t.values + lo / 4 * 4, t.values + lo, t.zeros),
                std::fill(t.values + hi, t.values + (hi + 3) / 4 * 4, t.zeros);
        locate(t, seq, kv_head, base, lo, hi);
    }

    T* out_row(int64_t seq, int64_t i, int64_t head) const {
        return out + (q_begin(seq) + i) * out_token + head * out_head;
    }

    void finish(Tile<T, E>& t, int64_t seq, int64_t kv_head, int64_t i0) const {
        const int g = group();
        for (int r = 0; r < t.rows; ++r)
            finish_row<E>(out_row(seq, i0 + r / g, kv_head * g + r % g), t.total_o + size_t(r) * t.dpad, t.total_m[r],
                          t.total_l[r], t.d);
    }

    void merge(Tile<T, E>& t) const {
        for (int r = 0; r < t.rows; ++r)
            merge_row<T, E>(t.total_o + size_t(r) * t.dpad, t.total_m[r], t.total_l[r], t.o + size_t(r) * t.dpad, t.m[r],
                            t.l[r], t.dpad);
    }

    // What a thread needs to compute units.
    struct Memory {
        Scratch scratch;
        std::vector<Tile<T, E>> tiles;
        Prefetch ahead;
    };

    struct Unit {
        int64_t seq, kv_head, at;  // kv_head: the first one; at: first query of the tile, or index of the piece
    };

    // Begin and end of the keys that a unit reads, without the pieces that `share` has computed.
    int64_t keys_begin(const Unit& w) const {
        const int64_t first = std::max<int64_t>(0, first_key(position(w.seq, w.at)));
        return shared_pieces.empty() ? first : std::max(first, shared_pieces[w.seq] * PIECE);
    }
    int64_t keys_end(const Unit& w, int n) const { return position(w.seq, w.at + n - 1) + 1; }

    // The units of a thread, in the order in which it computes them: a stretch of neighbours, then the next stretch.
    // Selects the keys to prefetch, about one piece ahead and at the rate at which keys are used. It looks across units
    // and stretches, since a sequence's last piece may be short and the next piece long.
    struct Following {
        const Attention& a;
        const std::vector<Unit>& units;
        const int tile;
        const int64_t num_heads;  // KV heads of a unit
        const int64_t together;
        int64_t stretch, next_stretch;  // the stretch that the thread is in, and the one after it
        int64_t in = -1, unit = -1, key = 0, lead = 0;  // prefetch position; keys from the thread's piece to it

        int64_t first_of(int64_t stretch) const { return int64_t(units.size()) - 1 - stretch * together; }
        int64_t last_of(int64_t stretch) const { return std::max<int64_t>(0, first_of(stretch) - together + 1); }

        void enter(int64_t u) { unit = u, key = a.keys_begin(units[u]); }

        // Moves to the next known unit; returns false if none is known yet.
        bool go_on() {
            if (in >= 0 && unit > last_of(in)) return enter(unit - 1), true;
            if (in == next_stretch || first_of(next_stretch) < 0) return false;
            in = next_stretch;
            return enter(first_of(in)), true;
        }

        // Selects the keys to prefetch while the next piece is computed: the n keys before `to` of unit `current`.
        void fill(Ahead& ahead, int64_t current, int64_t to, int n) {
            lead -= n;
            if (in < 0 || lead < 0) in = stretch, unit = current, key = to, lead = 0;
            const int want = int(std::min<int64_t>({PIECE, 2 * n, n + PIECE - lead}));
            int found = 0;
            while (found < want) {
                const Unit& w = units[unit];
                const int64_t end = a.keys_end(w, a.queries(w, tile)), upto = std::min(end, key + want - found);
                if (key < upto) {
                    a.locate_ahead(ahead, w.seq, w.kv_head, num_heads, key, upto);
                    found += int(upto - key), key = upto;
                } else if (!go_on()) {
                    break;
                }
            }
            lead += found;
            if (found) ahead.begin((found + n - 1) / n);
        }
    };

    int queries(const Unit& w, int tile) const { return int(std::min<int64_t>(q_len(w.seq) - w.at, tile)); }

    void walk(const std::vector<Unit>& units, int tile, int64_t num_heads, int threads) const {
        // Adjacent units stay together, so that the prefetch crosses units, unless a thread would have none. Long tiles
        // come first.
        const int64_t count = units.size(), most = std::min<int64_t>(4, count / (4 * threads));
        const int64_t together = std::max<int64_t>(1, most);
        team(count > 1 ? threads : 1, [&](Claims& claims) {
            static thread_local Memory memory;
            memory.tiles.resize(num_heads);
            Following next{*this, units, tile, num_heads, together, 0, claims.next()};
            while (next.first_of(next.stretch = next.next_stretch) >= 0) {
                next.next_stretch = claims.next();
                for (int64_t u = next.first_of(next.stretch); u >= next.last_of(next.stretch); --u)
                    compute(memory, next, u);
            }
        });
    }

    void compute(Memory& memory, Following& next, int64_t u) const {
        const Unit& w = next.units[u];
        const int n = queries(w, next.tile), num_heads = int(next.num_heads);
        const size_t bytes = tile_bytes(n * group());
        char* scratch = memory.scratch.reserve(bytes * num_heads);
        Tile<T, E>* tiles = memory.tiles.data();
        Prefetch& ahead = memory.ahead;
        for (int h = 0; h < num_heads; ++h) {
            begin(tiles[h], scratch + h * bytes, w.seq, w.kv_head + h, w.at, n);
            tiles[h].ahead = &ahead;
        }
        const int64_t begins = keys_begin(w), ends = keys_end(w, n);
        for (int64_t p = begins / PIECE; p * PIECE < ends; ++p) {
            const int64_t from = std::max(begins, p * PIECE), to = std::min(ends, (p + 1) * PIECE);
            ahead.clear();
            if (prefetch) {
                if (!in_tiles()) locate_values(ahead.values, w.seq, w.kv_head, num_heads, from, to);
                next.fill(ahead.keys, u, to, int(to - from));
            }
            int lo, hi;
            for (int h = 0; h < num_heads; ++h)
                if (!see(tiles[h], w.seq, w.kv_head + h, w.at, p * PIECE, lo, hi)) break;
            if (lo >= hi) continue;
            attend_located(tiles, num_heads, lo, hi);
            for (int h = 0; h < num_heads; ++h) merge(tiles[h]);
        }
        for (int h = 0; h < num_heads; ++h) finish(tiles[h], w.seq, w.kv_head + h, w.at);
    }

    // --- decode: pieces that several sequences share

    size_t totals_width() const { return size_t(group()) * (Tile<T, E>::padded(int(d)) + 2); }
    const float* totals_of(int64_t seq, int64_t kv_head) const {
        return shared_totals.data() + (seq * kv_heads + kv_head) * totals_width();
    }

    struct Sharers {
        std::vector<int64_t> seqs;
        int64_t pieces;  // number of leading pieces that lie in the same blocks for all of them
    };

    // Number of whole leading pieces whose blocks two sequences share.
    int64_t common_pieces(int64_t a, int64_t b) const {
        const int64_t most = std::min(context_lens[a], context_lens[b]) / PIECE, blocks = PIECE / block_size;
        const int32_t *x = block_table + a * table_row, *y = block_table + b * table_row;
        int64_t pieces = 0;
        while (pieces < most && !std::memcmp(x + pieces * blocks, y + pieces * blocks, blocks * 4)) ++pieces;
        return pieces;
    }

    // Sequences that share any piece share the first one, so they are sorted by its blocks and only neighbours
    // are compared.
    std::vector<Sharers> sharers() const {
        std::vector<int64_t> order;
        for (int64_t s = 0; s < num_seqs; ++s)
            if (context_lens[s] >= PIECE) order.push_back(s);
        const auto first_piece = [&](int64_t s) { return block_table + s * table_row; };
        const auto compare = [&](int64_t a, int64_t b) {
            return std::memcmp(first_piece(a), first_piece(b), PIECE / block_size * 4);
        };
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
            const int difference = compare(a, b);
            return difference ? difference < 0 : a < b;
        });
        std::vector<Sharers> found;
        size_t family = 0;  // index in `found` of the first entry with the same first piece
        for (size_t i = 0; i < order.size(); ++i) {
            const int64_t s = order[i];
            if (i && compare(order[i - 1], s)) family = found.size();
            const auto joins = [&](const Sharers& with) {
                return with.seqs.size() == 1 || common_pieces(with.seqs[0], s) >= with.pieces;
            };
            auto with = std::find_if(found.begin() + family, found.end(), joins);
            if (with == found.end()) {
                found.push_back({{s}, 0});
            } else {
                if (with->seqs.size() == 1) with->pieces = common_pieces(with->seqs[0], s);
                with->seqs.push_back(s);
            }
        }
        return found;
    }

    // Computes each piece that sequences share (samples and beams of a prompt, requests with a common prefix) once, for
    // the rows of all of them. A row's bits do not depend on its tile, so they are the same as without sharing.
    void share(int threads) {
        if (window || PIECE % block_size || num_seqs < 2) return;
        struct Together {
            const int64_t* seqs;
            int n;
            int64_t pieces;
        };
        const std::vector<Sharers> found = sharers();
        int64_t sharing = 0;
        for (const Sharers& with : found) sharing += with.seqs.size() > 1 ? with.seqs.size() : 0;
        // Tiles are full, or smaller if threads would otherwise be idle.
        const int64_t most = std::max<int64_t>(2, std::min<int64_t>(TILE_ROWS / group(), sharing * kv_heads / threads));
        std::vector<Together> tiles;
        std::vector<int64_t> pieces(num_seqs);
        for (const Sharers& with : found) {
            const int64_t count = with.seqs.size(), parts = (count + most - 1) / most;
            for (int64_t part = 0; count > 1 && part < parts; ++part) {
                const int64_t from = count * part / parts, to = count * (part + 1) / parts;
                if (to - from < 2) continue;
                tiles.push_back({with.seqs.data() + from, int(to - from), with.pieces});
                for (int64_t i = from; i < to; ++i) pieces[with.seqs[i]] = with.pieces;
            }
        }
        if (tiles.empty()) return;
        shared_totals.resize(num_seqs * kv_heads * totals_width());
        team(threads, [&](Claims& claims) {
            static thread_local Memory memory;
            memory.tiles.resize(1);
            for (int64_t u; (u = claims.next()) < int64_t(tiles.size()) * kv_heads;) {
                const Together& tile = tiles[u / kv_heads];
                together(memory, tile.seqs, tile.n, tile.pieces, u % kv_heads);
            }
        });
        shared_pieces = std::move(pieces);
    }

    void together(Memory& memory, const int64_t* seqs, int n, int64_t pieces, int64_t kv_head) {
        const int g = group(), rows = n * g;
        Tile<T, E>& t = memory.tiles[0];
        Prefetch& ahead = memory.ahead;
        t.ahead = &ahead;
        place(t, memory.scratch.reserve(tile_bytes(rows)), rows);
        for (int r = 0; r < rows; ++r) {
            pack_q(t, r, q + q_begin(seqs[r / g]) * q_token + (kv_head * g + r % g) * q_head);
            t.total_m[r] = NEG_INF, t.total_l[r] = 0.f, t.lo[r] = 0, t.hi[r] = PIECE;
        }
        for (int64_t p = 0; p < pieces; ++p) {
            for (int r = 0; r < rows; ++r)
                t.sinks[r] = sink(kv_head * g + r % g, context_lens[seqs[r / g]] - p * PIECE);
            locate(t, seqs[0], kv_head, p * PIECE, 0, PIECE);
            ahead.clear();
            if (prefetch && !in_tiles()) locate_values(ahead.values, seqs[0], kv_head, 1, p * PIECE, (p + 1) * PIECE);
            if (prefetch && p + 1 < pieces) {
                locate_ahead(ahead.keys, seqs[0], kv_head, 1, (p + 1) * PIECE, (p + 2) * PIECE);
                ahead.keys.begin(1);
            }
            attend_located(&t, 1, 0, PIECE);
            merge(t);
        }
        for (int i = 0; i < n; ++i) {
            float* to = shared_totals.data() + (seqs[i] * kv_heads + kv_head) * totals_width();
            std::memcpy(to, t.total_o + size_t(i) * g * t.dpad, size_t(g) * t.dpad * 4);
            std::memcpy(to + g * t.dpad, t.total_m + i * g, g * 4);
            std::memcpy(to + g * (t.dpad + 1), t.total_l + i * g, g * 4);
        }
    }

    void prefill(int threads, int64_t num_heads = 1) const {
        const int tile = TILE_ROWS / group() > 0 ? TILE_ROWS / group() : 1;
        std::vector<Unit> units;
        for (int64_t s = 0; s < num_seqs; ++s)
            for (int64_t i = 0; i < q_len(s); i += tile)
                for (int64_t h = 0; h < kv_heads; h += num_heads) units.push_back({s, h, i});
        walk(units, tile, num_heads, threads);
    }

    // Returns for how many KV heads a unit of decode computes a piece before the next piece. Their keys are neighbours
    // in a block, and long runs of memory are read faster than short ones.
    int64_t heads_together(int threads) const {
        const int64_t bytes = PIECE * (d + SCALE_WIDTH<E>) * int64_t(sizeof(E));
        int64_t n = std::clamp<int64_t>(MOST_AHEAD / bytes, 1, kv_heads);
        while (n > 1 && (kv_heads % n || num_seqs * kv_heads / n < 4 * threads)) --n;
        return n;
    }

    // Decodes batches with too few (sequence, KV head) pairs to use all threads: computes pieces separately, then
    // merges them.
    void split_decode(int threads) const {
        std::vector<Unit> units;
        std::vector<size_t> first(num_seqs * kv_heads + 1);
        for (int64_t s = 0; s < num_seqs; ++s)
            for (int64_t h = 0; h < kv_heads; ++h) {
                first[s * kv_heads + h] = units.size();
                const int64_t begins = keys_begin({s, h, 0}), ends = keys_end({s, h, 0}, 1);
                for (int64_t p = begins / PIECE; p * PIECE < ends; ++p) units.push_back({s, h, p});
            }
        first[num_seqs * kv_heads] = units.size();
        const int g = group(), dpad = Tile<T, E>::padded(int(d));
        const size_t width = totals_width();
        std::vector<float> partial(units.size() * width);
        team(threads, [&](Claims& claims) {
            static thread_local Memory memory;
            memory.tiles.resize(1);
            Tile<T, E>& t = memory.tiles[0];
            for (size_t u; (u = claims.next()) < units.size();) {
                const Unit& w = units[u];
                begin(t, memory.scratch.reserve(tile_bytes(g)), w.seq, w.kv_head, 0, 1);
                t.ahead = &memory.ahead;
                t.ahead->clear();
                const int64_t base = w.at * PIECE;
                int lo, hi;
                if (see(t, w.seq, w.kv_head, 0, base, lo, hi)) {
                    if (prefetch) locate_values(t.ahead->values, w.seq, w.kv_head, 1, base + lo, base + hi);
                    attend_located(&t, 1, lo, hi);
                }
                float* p = partial.data() + u * width;
                std::memcpy(p, t.o, size_t(g) * dpad * 4);
                std::memcpy(p + g * dpad, t.m, g * 4), std::memcpy(p + g * dpad + g, t.l, g * 4);
            }
        });
        team_for(threads, num_seqs * kv_heads, [&](int64_t w) {
            static thread_local Scratch scratch;
            Tile<T, E> t;
            begin(t, scratch.reserve(tile_bytes(g)), w / kv_heads, w % kv_heads, 0, 1);
            for (size_t u = first[w]; u < first[w + 1]; ++u) {
                const float* p = partial.data() + u * width;
                for (int r = 0; r < g; ++r)
                    merge_row<T, E>(t.total_o + size_t(r) * dpad, t.total_m[r], t.total_l[r], p + r * dpad,
                                    p[g * dpad + r], p[g * dpad + g + r], dpad);
            }
            finish(t, w / kv_heads, w % kv_heads, 0);
        });
    }

    int run(int threads) {
        if (int error = check()) return error;
        bool one_each = total_q == num_seqs;
        for (int64_t s = 0; one_each && s < num_seqs; ++s) one_each = q_len(s) == 1;
        if (one_each && threads > 1 && num_seqs * kv_heads < 2 * threads)
            return split_decode(threads), 0;
        if (one_each) share(threads);
        prefill(threads, one_each ? heads_together(threads) : 1);
        return 0;
    }
};

}  // namespace
}  // namespace ll

// Switches the prefetch on or off for the whole process, to measure its benefit. It is on by default.
LL_EXPORT int ll_attention_prefetch(int64_t on) {
    ll::prefetching = on != 0;
    return 0;
}

// Sets the function that attends to a piece on AMX tiles, `ll_amx_attend`, for the whole process. Null: vectors.
LL_EXPORT int ll_attention_tiles(void* entry) {
    ll::on_tiles = reinterpret_cast<ll::AttendOnTiles>(entry);
    return 0;
}

// Returns the size of a tile of queries, which both builds must agree about.
LL_EXPORT int ll_attention_tile_bytes() { return int(sizeof(ll::Tile<ll::bf16, ll::bf16>)); }

// Layouts are as in kernels/paged_prefill.py. If cu_seqlens_q is null, each sequence has one query. A window or softcap
// of 0 and null sinks mean none. Strides are in elements. kv_type is the type of k and v (entries.h).
LL_EXPORT int ll_attention(void* out, const void* q, const void* k, const void* v, const int32_t* block_table,
                           const int32_t* context_lens, const int32_t* cu_seqlens_q, int64_t out_token,
                           int64_t out_head, int64_t q_token, int64_t q_head, int64_t k_block, int64_t k_head,
                           int64_t k_slot, int64_t v_block, int64_t v_head, int64_t v_slot, int64_t table_row,
                           int64_t num_blocks, int64_t max_blocks, int64_t total_q, int64_t num_seqs, int64_t heads,
                           int64_t kv_heads, int64_t block_size, int64_t d, int64_t window, int64_t by_word,
                           int64_t is_bf16, int64_t kv_type, int64_t threads, const float* sinks, float scale,
                           float softcap) {
    return ll::for_types(is_bf16, kv_type, [&](auto q_tag, auto kv_tag) {
        using T = decltype(q_tag);
        using E = decltype(kv_tag);
        ll::Attention<T, E> a{static_cast<T*>(out), static_cast<const T*>(q), static_cast<const E*>(k),
                              static_cast<const E*>(v), block_table, context_lens, cu_seqlens_q, out_token, out_head,
                              q_token, q_head, k_block, k_head, k_slot, v_block, v_head, v_slot, table_row, num_blocks,
                              max_blocks, total_q, num_seqs, heads, kv_heads, block_size, d, window, by_word != 0,
                              scale, softcap, sinks, ll::prefetching, ll::on_tiles};
        return a.run(int(threads));
    });
}
