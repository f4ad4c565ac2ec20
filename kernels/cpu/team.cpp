#include "team.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "entries.h"

namespace ll {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto SPIN = std::chrono::microseconds(50);  // longer than any gap between two loops of a pass

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Spins until done() returns true, for at most SPIN. Returns whether it did.
template <class F>
bool spin_until(F&& done) {
    for (const auto end = Clock::now() + SPIN; Clock::now() < end;)
        for (int i = 0; i < 16; ++i) {
            if (done()) return true;
            relax();
        }
    return done();
}

// The team. A loop is open while `epoch_` is odd. To join it, a thread first increments `inside_` and then checks
// `epoch_` again. Either it sees that the loop is closed, or the caller that closes the loop sees the thread and waits
// for it. This requires sequentially consistent accesses on both sides.
class Team {
   public:
    void run(int64_t threads, Work work, void* context) {
        if (is_taken_.exchange(true)) return alone(work, context);
        together(threads, work, context);
        is_taken_.store(false);
    }

    static void alone(Work work, void* context) {
        Claims claims;
        work(context, claims);
    }

    std::atomic<int> awake{0};

   private:
    void together(int64_t threads, Work work, void* context) {
        while (started_ < threads - 1 && start()) continue;
        work_ = work, context_ = context, claims_.restart();
        seats_.store(threads - 1, std::memory_order_relaxed);
        epoch_.fetch_add(1);
        if (asleep_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work(context, claims_);
        epoch_.fetch_add(1);
        const auto all_out = [&] { return inside_.load() == 0; };
        if (spin_until(all_out)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        is_waited_for_.store(true);
        all_out_.wait(lock, all_out);
        is_waited_for_.store(false);
    }

    // Starts a thread. Returns false if the system refuses; the existing threads then do the work.
    bool start() {
        try {
            std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            return false;
        }
        ++started_;
        return true;
    }

    [[noreturn]] void serve() {
        for (uint64_t seen = 0;;) {
            const auto is_new = [&] { const uint64_t now = epoch_.load(); return now % 2 && now != seen; };
            if (!(awake.load() && spin_until(is_new)) && !is_new()) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_.fetch_add(1);
                wake_.wait(lock, is_new);
                asleep_.fetch_sub(1);
            }
            inside_.fetch_add(1);
            if (const uint64_t now = epoch_.load(); now % 2 && now != seen) {
                seen = now;
                if (seats_.fetch_sub(1) > 0) work_(context_, claims_);
            }
            if (inside_.fetch_sub(1) == 1 && is_waited_for_.load()) {
                std::lock_guard<std::mutex> lock(mutex_);
                all_out_.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, all_out_;
    std::atomic<uint64_t> epoch_{0};
    std::atomic<int64_t> inside_{0}, seats_{0}, asleep_{0};
    std::atomic<bool> is_taken_{false}, is_waited_for_{false};
    Claims claims_;
    Work work_ = nullptr;
    void* context_ = nullptr;
    int64_t started_ = 0;
};

// Returns the team of this process. It is never destroyed, because its threads outlive main. A forked child has none of
// these threads and starts a new team.
Team*& shared() {
    static Team* team = [] {
        pthread_atfork(nullptr, nullptr, [] { shared() = new Team; });
        return new Team;
    }();
    return team;
}

}  // namespace

void run_team(int64_t threads, Work work, void* context) noexcept {
    threads > 1 ? shared()->run(threads, work, context) : Team::alone(work, context);
}

Awake::Awake() { shared()->awake.fetch_add(1); }
Awake::~Awake() { shared()->awake.fetch_sub(1); }

}  // namespace ll

// Returns this build's `run_team`, for builds without threads of their own (linear_amx.cpp).
LL_EXPORT void* ll_team() { return reinterpret_cast<void*>(&ll::run_team); }
