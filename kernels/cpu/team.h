// The thread team that the kernels of this process share. A free thread, which may be the caller, takes the next index
// of a loop. If the system takes a core away from a thread, as happens on a small machine that also runs the gateway
// and clients, only the indices that this thread has taken are delayed. A loop never waits for a sleeping thread.
//
// OpenMP's threads either spin after every loop, on cores that other processes need, or sleep, and each of the seventy
// loops of a pass must then wake them. The threads of this team spin between the loops of a pass (`Awake`) and sleep
// between passes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace ll {

// Hands out the numbers 0, 1, ... once each. A number at or above the loop's count means that no index is left.
class Claims {
   public:
    int64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }
    void restart() { next_.store(0, std::memory_order_relaxed); }

   private:
    std::atomic<int64_t> next_{0};
};

// Calls work(context, claims) on the calling thread and on up to threads - 1 others, and returns when all calls have
// returned. If the team is busy, because another thread or `work` itself uses it, the caller does all the work. An
// exception from `work` ends the process.
using Work = void (*)(void* context, Claims& claims);
void run_team(int64_t threads, Work work, void* context) noexcept;

template <class F>
void team(int64_t threads, F&& work) {
    run_team(threads, [](void* context, Claims& claims) { (*static_cast<std::remove_reference_t<F>*>(context))(claims); },
             &work);
}

// Calls work(i) for every i in [0, count). Adjacent indices run on the same thread. The calls must not depend on each
// other.
template <class F>
void team_for(int64_t threads, int64_t count, F&& work) {
    const int64_t pieces = threads > 1 ? std::min(count, 4 * threads) : 1;
    team(std::min(threads, pieces), [&](Claims& claims) {
        for (int64_t p; (p = claims.next()) < pieces;)
            for (int64_t i = count * p / pieces; i < count * (p + 1) / pieces; ++i) work(i);
    });
}

// While an object of this type exists, idle threads spin briefly before they sleep.
struct Awake {
    Awake();
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;
};

}  // namespace ll
