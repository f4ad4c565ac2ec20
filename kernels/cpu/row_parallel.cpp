// Products whose inputs are divided into parts, and the exchange of their sums between the ranks of a worker.
//
// Each part has a separate fp32 sum (ll_linear_sums). The sums are the leaves of a balanced tree of additions, of which
// each rank computes a whole branch. The order of the additions, and with it the bits, depends on the total number of
// parts, not on the number of ranks. A rank sends a single sum.
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>

#include "ranks.h"
#include "simd.h"
#include "team.h"

namespace ll {
namespace {

constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements; with fewer, waking threads costs more than it saves
constexpr int MOST_RANKS = 8;
constexpr int LOST = 6;  // the error code in kernels/cpu/ops.py

// Sends `bytes` from all[rank] to every peer, and receives as many into all[peer]. Returns when both are complete.
int exchange(const Ranks& ranks, char* all, int64_t bytes) {
    const char* own = all + ranks.rank * bytes;
    if (ranks.rehearses) {
        for (int64_t peer = 0; peer < ranks.size; ++peer)
            if (peer != ranks.rank) std::memcpy(all + peer * bytes, own, bytes);
        return 0;
    }
    int64_t sent[MOST_RANKS] = {}, received[MOST_RANKS] = {};
    const auto moved = [](ssize_t count, int64_t& so_far) {
        if (count > 0) so_far += count;
        return count > 0 || (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
    };
    for (;;) {
        pollfd waits[MOST_RANKS];
        int open = 0;
        for (int64_t peer = 0; peer < ranks.size; ++peer) {
            if (peer == ranks.rank) continue;
            const int socket = int(ranks.sockets[peer]);
            int64_t &out = sent[peer], &in = received[peer];
            if (out < bytes && !moved(send(socket, own + out, bytes - out, MSG_DONTWAIT | MSG_NOSIGNAL), out)) return LOST;
            if (in < bytes && !moved(recv(socket, all + peer * bytes + in, bytes - in, MSG_DONTWAIT), in)) return LOST;
            const int events = (out < bytes ? POLLOUT : 0) | (in < bytes ? POLLIN : 0);
            if (events) waits[open++] = {socket, short(events), 0};
        }
        if (!open) return 0;
        poll(waits, nfds_t(open), -1);
    }
}

// Returns the sum of N vectors that are `step` elements apart, as a balanced tree.
template <int N, class Count>
LL_INLINE vf tree(const float* at, int64_t step, Count count) {
    if constexpr (N == 1)
        return load_upto(at, count);
    else
        return tree<N / 2>(at, step, count) + tree<N / 2>(at + N / 2 * step, step, count);
}

template <int N, class T>
void add(T* out, const float* sums, const T* bias, int64_t rows, int64_t n, int64_t threads) {
    team_for(rows * n >= PARALLEL_FROM ? threads : 1, rows, [&](int64_t row) {
        for_vectors(n, [&](int64_t i, auto count) {
            const vf sum = tree<N>(sums + row * n + i, rows * n, count);
            store_upto(out + row * n + i, bias ? sum + load_upto(bias + i, count) : sum, count);
        });
    });
}

// out [rows, n] = the bias plus the sum of `count` arrays of that shape, which `sums` contains one after the other.
template <class T>
void add(T* out, const float* sums, int64_t count, const T* bias, int64_t rows, int64_t n, int64_t threads) {
    (count == 1 ? add<1, T> : count == 2 ? add<2, T> : count == 4 ? add<4, T> : add<8, T>)(out, sums, bias, rows, n, threads);
}

}  // namespace
}  // namespace ll

// x [rows, n_in], of which each part has n_in / num_parts columns, out [rows, n_out], bias [n_out] or null. `packed`:
// the weights of each part, as for ll_linear. num_parts and the number of ranks are 1, 2, 4 or 8. sums: memory for
// [num_parts, rows, n_out] numbers and, with several ranks, [ranks, rows, n_out] more. ranks: null for a single rank.
LL_EXPORT int ll_row_parallel(const void* x, const void* const* packed, const void* bias, void* out, float* sums,
                              const ll::Ranks* ranks, int64_t num_parts, int64_t rows, int64_t n_in, int64_t n_out,
                              int64_t x_stride, int64_t is_bf16, int64_t threads) {
    const int64_t n = rows * n_out, each = n_in / num_parts;
    for (int64_t part = 0; part < num_parts; ++part) {
        const char* from = static_cast<const char*>(x) + part * each * (is_bf16 ? 2 : 4);
        ll_linear_sums(from, packed[part], sums + part * n, rows, each, n_out, x_stride, is_bf16, threads);
    }
    int64_t count = num_parts;
    if (ranks) {
        float* all = sums + num_parts * n;
        ll::add<float>(all + ranks->rank * n, sums, count, nullptr, rows, n_out, threads);
        if (int error = ll::exchange(*ranks, reinterpret_cast<char*>(all), n * 4)) return error;
        sums = all, count = ranks->size;
    }
    if (is_bf16)
        ll::add(static_cast<ll::bf16*>(out), sums, count, static_cast<const ll::bf16*>(bias), rows, n_out, threads);
    else
        ll::add(static_cast<float*>(out), sums, count, static_cast<const float*>(bias), rows, n_out, threads);
    return 0;
}
