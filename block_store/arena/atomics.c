/* Atomic access to the generations and states in an arena's header. Processes share the file, so plain numpy stores are
 * not enough: the writer rule (docs/design.md, Ledger) raises a generation only from a lower value, so that one of two
 * competing writers fails. This is plain C without Python, called through ctypes. */
#include <stdint.h>

/* Raises base[ids[i]] to gens[i] for i = 0..n-1. Stops at the first i whose generation is not lower and returns this i,
 * or returns -1 if all generations were raised. Ids outside the arena count as not lower. */
int64_t looseleaf_raise_generations(uint64_t *base, int64_t num_blocks, const int64_t *ids,
                                    const uint64_t *gens, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= num_blocks) return i;
        uint64_t *generation = base + ids[i];
        uint64_t now = __atomic_load_n(generation, __ATOMIC_SEQ_CST);
        do {
            if (now >= gens[i]) return i;
        } while (!__atomic_compare_exchange_n(generation, &now, gens[i], 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    }
    return -1;
}

/* Sets the byte base[ids[i]] to `state` for i = 0..n-1. Other threads see a new state only after all earlier stores of
 * this thread. On ARM, plain stores become visible in any order, but a rebuild that reads a block's state must find the
 * matching hash or writer slot. */
void looseleaf_enter_states(uint8_t *base, const int64_t *ids, uint8_t state, int64_t n) {
    for (int64_t i = 0; i < n; i++) __atomic_store_n(base + ids[i], state, __ATOMIC_RELEASE);
}

/* Returns the first i for which base[ids[i]] is not gens[i] or ids[i] is outside the arena, or -1 if all match. Fences
 * on both sides keep the loads of block data between the check before a step and the check after the step. */
int64_t looseleaf_check_generations(const uint64_t *base, int64_t num_blocks, const int64_t *ids,
                                    const uint64_t *gens, int64_t n) {
    int64_t bad = -1;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= num_blocks || __atomic_load_n(base + ids[i], __ATOMIC_ACQUIRE) != gens[i]) {
            bad = i;
            break;
        }
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return bad;
}
