// The thread team of this process's kernels. A loop's indices are handed out one by one to whichever thread is free,
// including the caller. When the system takes a core from a thread, as happens on a small machine that also runs the
// gateway and clients, the thread delays only the indices that it has taken. Nothing waits for a thread that sleeps.
//
// OpenMP's threads either spin after every loop, on cores that others need, or sleep, and then each of a pass's seventy
// loops pays for waking them. These threads spin between the loops of a pass (`Awake`) and sleep outside a pass.
// Independent of kernels.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace ll {

// Hands out 0, 1, ... once each. A number at or above the loop's count means that nothing is left.
class Claims {
   public:
    int64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }
    void restart() { next_.store(0, std::memory_order_relaxed); }

   private:
    std::atomic<int64_t> next_{0};
};

// Calls work(context, claims) on the caller and on up to threads - 1 others; returns when all have returned. If two
// threads call it at once, or work calls it, the later caller computes alone. An exception from work ends the process.
using Work = void (*)(void* context, Claims& claims);
void run_team(int64_t threads, Work work, void* context) noexcept;

template <class F>
void team(int64_t threads, F&& work) {
    run_team(threads, [](void* context, Claims& claims) { (*static_cast<std::remove_reference_t<F>*>(context))(claims); },
             &work);
}

// Calls work(i) for every i in [0, count), neighbours on one thread. The calls must not depend on each other.
template <class F>
void team_for(int64_t threads, int64_t count, F&& work) {
    const int64_t pieces = threads > 1 ? std::min(count, 4 * threads) : 1;
    team(std::min(threads, pieces), [&](Claims& claims) {
        for (int64_t p; (p = claims.next()) < pieces;)
            for (int64_t i = count * p / pieces; i < count * (p + 1) / pieces; ++i) work(i);
    });
}

// While an object of this type exists, threads that find nothing to do spin briefly before they sleep.
struct Awake {
    Awake();
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;
};

}  // namespace ll
