#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

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

// A job's number of items and its next one in one word: what a thread claims is an item of the job it sees.
struct Word {
    std::uint64_t bits;
    static Word of(Index count) { return {std::uint64_t(count) << 32}; }
    Index count() const { return bits >> 32; }
    Index next() const { return bits & 0xffffffff; }
    bool open() const { return next() < count(); }
};

class Pool {
   public:
    void run(Index count, Body body, void* context) {
        const std::unique_lock<std::mutex> mine(caller_, std::try_to_lock);
        if (count <= 1 || num_helpers_ == 0 || !mine) {
            for (Index item = 0; item < count; ++item) body(context, item);
            return;
        }
        body_ = body;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        word_.store(Word::of(count).bits);
        published_.fetch_add(1);
        if (asleep_.load() > 0) published_.notify_all();
        work();
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
        for (; num_helpers_ < num_threads - 1; ++num_helpers_) std::thread([this] { help(); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

   private:
    void work() {
        while (Word{word_.load(std::memory_order_relaxed)}.open()) {
            const Word claimed{word_.fetch_add(1, std::memory_order_acquire)};
            if (!claimed.open()) return;
            // From here until the item counts as done this job cannot end: its fields stand still.
            const Index count = claimed.count();
            body_(context_, claimed.next());
            if (done_.fetch_add(1, std::memory_order_release) + 1 == count) done_.notify_one();
        }
    }

    [[noreturn]] void help() {
        for (;;) {
            const std::uint32_t seen = published_.load();
            work();
            if (spin(kAwake, [&] { return published_.load(std::memory_order_relaxed) != seen; })) continue;
            asleep_.fetch_add(1);
            published_.wait(seen);
            asleep_.fetch_sub(1);
        }
    }

    std::mutex caller_;
    Index num_helpers_ = 0;
    Body body_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<std::uint64_t> word_{0};
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

// Use up to so many threads, the caller's included.
TANDEM_EXPORT void tandem_use_threads(tandem::Index num_threads) { tandem::pool().grow(num_threads); }
