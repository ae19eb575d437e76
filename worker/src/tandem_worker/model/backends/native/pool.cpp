#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Index kMostThreads = 256;  // each costs a job a word to write

// A helper that found nothing to do stays awake for longer than the gaps within a decode step.
constexpr auto kAwake = std::chrono::microseconds(100);
// The caller of a job waits awake for about as long as a helper's last item takes.
constexpr auto kFinishing = std::chrono::microseconds(20);

// Whether `condition` came true within `limit`.
template <class Condition>
bool spin(Clock::duration limit, Condition condition) {
    const auto end = Clock::now() + limit;
    do {
        for (int turn = 0; turn < 32; ++turn) {
            if (condition()) return true;
            _mm_pause();
        }
    } while (Clock::now() < end);
    return condition();
}

// Items of a job that are one thread's first, neighbours: where the next one begins in memory is where the last ended.
// Their end and the next one in one word: what a thread claims is an item of the job it sees.
struct alignas(64) Share {
    std::atomic<std::uint64_t> word{0};

    void open(Index first, Index end) { word.store(std::uint64_t(end) << 32 | std::uint64_t(first)); }

    // An item, or -1 where none is left.
    Index claim() {
        if (!is_open(word.load(std::memory_order_relaxed))) return -1;
        const std::uint64_t claimed = word.fetch_add(1, std::memory_order_acquire);
        return is_open(claimed) ? Index(claimed & 0xffffffff) : -1;
    }

   private:
    static bool is_open(std::uint64_t bits) { return (bits & 0xffffffff) < bits >> 32; }
};

class Pool {
   public:
    void run(Index count, Body body, void* context) {
        const std::unique_lock<std::mutex> mine(caller_, std::try_to_lock);
        if (count <= 1 || num_threads_ == 1 || !mine) {
            for (Index item = 0; item < count; ++item) body(context, item);
            return;
        }
        body_ = body;
        context_ = context;
        count_ = count;
        done_.store(0, std::memory_order_relaxed);
        const Index threads = num_threads_;
        for (Index i = 0; i < threads; ++i) shares_[i].open(count * i / threads, count * (i + 1) / threads);
        published_.fetch_add(1);
        if (asleep_.load() > 0) published_.notify_all();
        work(0, threads);
        if (spin(kFinishing, [&] { return done_.load(std::memory_order_acquire) == count; })) return;
        // The thread with the last item may wait for a core, perhaps for this one.
        for (std::int32_t done; (done = done_.load(std::memory_order_acquire)) != count;) done_.wait(done);
    }

    // More threads than now; there is no way back to fewer.
    void grow(Index num_threads) {
        const std::lock_guard<std::mutex> mine(caller_);
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
        for (num_threads = std::min(num_threads, kMostThreads); num_threads_ < num_threads; ++num_threads_)
            std::thread([this, mine = Index(num_threads_)] { help(mine); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

   private:
    // The thread's own share first, then what others have left.
    void work(Index mine, Index threads) {
        for (Index i = 0; i < threads; ++i) {
            Share& share = shares_[(mine + i) % threads];
            for (Index item; (item = share.claim()) >= 0;) {
                // From the claim until the item counts as done this job cannot end: its fields stand still.
                const Index count = count_;
                body_(context_, item);
                if (done_.fetch_add(1, std::memory_order_release) + 1 == count) done_.notify_one();
            }
        }
    }

    [[noreturn]] void help(Index mine) {
        for (;;) {
            const std::uint32_t seen = published_.load();
            work(mine, num_threads_);
            if (spin(kAwake, [&] { return published_.load(std::memory_order_relaxed) != seen; })) continue;
            asleep_.fetch_add(1);
            published_.wait(seen);
            asleep_.fetch_sub(1);
        }
    }

    std::mutex caller_;
    std::atomic<Index> num_threads_{1};
    Body body_ = nullptr;
    void* context_ = nullptr;
    Index count_ = 0;
    Share shares_[kMostThreads];
    alignas(64) std::atomic<std::int32_t> done_{0};
    alignas(64) std::atomic<std::uint32_t> published_{0};
    std::atomic<std::int32_t> asleep_{0};
};

// Never destroyed: its threads live as long as the process.
Pool& pool() {
    static Pool* const only = new Pool;
    return *only;
}

}  // namespace

void run_items(Index count, Body body, void* context) { pool().run(count, body, context); }

}  // namespace tandem

// Use up to so many threads, the caller's included; more than 256 are never used.
TANDEM_EXPORT void tandem_use_threads(tandem::Index num_threads) { tandem::pool().grow(num_threads); }
