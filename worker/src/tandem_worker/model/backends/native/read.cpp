// Reads a file into memory on threads of its own and checks it chunk by chunk, while the program does other things.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <thread>

#include "simd.h"

namespace tandem {
namespace {

constexpr std::int32_t kUnknown = 0, kGood = 1, kWrong = -1;  // other negative numbers: -1000 - errno
constexpr Index kPiece = 1 << 18;  // bytes that are read and summed while they are in a core's cache

// XXH64 with seed 0, after its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
class Sum {
   public:
    // `size` is a multiple of 32 in all calls but the last.
    void add(const unsigned char* data, Index size) {
        total_ += size;
        for (; size >= 32; data += 32, size -= 32)
            for (int i = 0; i < 4; ++i) lanes_[i] = round(lanes_[i], word(data + 8 * i));
        rest_ = data;
        rest_size_ = size;
    }

    std::uint64_t result() const {
        std::uint64_t sum = kPrime5;
        if (total_ >= 32) {
            sum = turn(lanes_[0], 1) + turn(lanes_[1], 7) + turn(lanes_[2], 12) + turn(lanes_[3], 18);
            for (std::uint64_t lane : lanes_) sum = (sum ^ round(0, lane)) * kPrime1 + kPrime4;
        }
        sum += total_;
        const unsigned char* data = rest_;
        Index size = rest_size_;
        for (; size >= 8; data += 8, size -= 8) sum = turn(sum ^ round(0, word(data)), 27) * kPrime1 + kPrime4;
        if (size >= 4) {
            std::uint32_t four;
            std::memcpy(&four, data, 4);
            sum = turn(sum ^ four * kPrime1, 23) * kPrime2 + kPrime3;
            data += 4, size -= 4;
        }
        for (; size; ++data, --size) sum = turn(sum ^ *data * kPrime5, 11) * kPrime1;
        sum = (sum ^ sum >> 33) * kPrime2;
        sum = (sum ^ sum >> 29) * kPrime3;
        return sum ^ sum >> 32;
    }

   private:
    static constexpr std::uint64_t kPrime1 = 0x9e3779b185ebca87, kPrime2 = 0xc2b2ae3d27d4eb4f,
                                   kPrime3 = 0x165667b19e3779f9, kPrime4 = 0x85ebca77c2b2ae63,
                                   kPrime5 = 0x27d4eb2f165667c5;
    static std::uint64_t turn(std::uint64_t value, int bits) { return value << bits | value >> (64 - bits); }
    static std::uint64_t round(std::uint64_t lane, std::uint64_t value) {
        return turn(lane + value * kPrime2, 31) * kPrime1;
    }
    static std::uint64_t word(const unsigned char* from) {
        std::uint64_t value;
        std::memcpy(&value, from, 8);
        return value;
    }

    std::uint64_t lanes_[4] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
    std::uint64_t total_ = 0;
    const unsigned char* rest_ = nullptr;
    Index rest_size_ = 0;
};

class Reading {
   public:
    Reading(int file, unsigned char* to, Index size, Index chunk, const std::uint64_t* sums, Index num_threads)
        : file_(file), to_(to), size_(size), chunk_(chunk), count_((size + chunk - 1) / chunk), sums_(sums),
          states_(new std::atomic<std::int32_t>[count_]) {
        for (Index i = 0; i < count_; ++i) states_[i].store(kUnknown);
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
        threads_->store(std::int32_t(num_threads));
        for (Index i = 0; i < num_threads; ++i) {
            try {
                std::thread([this, threads = threads_] {
                    while (read_next()) {
                    }
                    threads->fetch_sub(1, std::memory_order_release);  // from here on this may be gone
                    threads->notify_all();
                }).detach();
            } catch (const std::exception&) {  // no more threads: who waits reads
                threads_->fetch_sub(1);
            }
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // 0 when chunks `first` to `last` are there and right; else the state of one that is not.
    std::int32_t wait(Index first, Index last) {
        for (Index chunk = first; chunk < last; ++chunk) {
            std::int32_t state;
            while ((state = states_[chunk].load(std::memory_order_acquire)) == kUnknown) {
                if (read_next()) continue;  // rather than idle
                states_[chunk].wait(kUnknown);
            }
            if (state != kGood) return state;
        }
        return 0;
    }

    // No thread touches the memory after this.
    void stop() {
        next_.store(count_);
        for (std::int32_t left; (left = threads_->load(std::memory_order_acquire));) threads_->wait(left);
    }

   private:
    bool read_next() {
        if (next_.load(std::memory_order_relaxed) >= count_) return false;
        const Index chunk = next_.fetch_add(1);
        if (chunk >= count_) return false;
        states_[chunk].store(read(chunk), std::memory_order_release);
        states_[chunk].notify_all();
        return true;
    }

    std::int32_t read(Index chunk) {
        Index at = chunk * chunk_;
        const Index end = size_ < at + chunk_ ? size_ : at + chunk_;
        Sum sum;
        while (at < end) {
            const Index stop = end < at + kPiece ? end : at + kPiece;
            for (Index from = at; from < stop;) {
                const ssize_t got = pread(file_, to_ + from, stop - from, from);
                if (got < 0 && errno == EINTR) continue;
                if (got < 0) return -1000 - errno;
                if (got == 0) return kWrong;
                from += got;
            }
            sum.add(to_ + at, stop - at);
            at = stop;
        }
        return sum.result() == sums_[chunk] ? kGood : kWrong;
    }

    const int file_;
    unsigned char* const to_;
    const Index size_, chunk_, count_;
    const std::uint64_t* const sums_;
    std::unique_ptr<std::atomic<std::int32_t>[]> states_;
    std::atomic<Index> next_{0};
    std::shared_ptr<std::atomic<std::int32_t>> threads_ = std::make_shared<std::atomic<std::int32_t>>(0);
};

}  // namespace
}  // namespace tandem

using tandem::Index;
using tandem::Reading;

// Begins to read `size` bytes of `file` to `to`; `sums` has the XXH64 of each `chunk` bytes. All of them must stay until
// `tandem_read_end`.
TANDEM_EXPORT void* tandem_read_begin(int file, unsigned char* to, Index size, Index chunk, const std::uint64_t* sums,
                                      Index num_threads) {
    return new Reading(file, to, size, chunk, sums, num_threads);
}

// Waits for chunks `first` to `last`: 0 right, -1 wrong, -1000 - errno not to be read.
TANDEM_EXPORT int tandem_read_wait(void* reading, Index first, Index last) {
    return static_cast<Reading*>(reading)->wait(first, last);
}

TANDEM_EXPORT void tandem_read_end(void* reading) {
    static_cast<Reading*>(reading)->stop();
    delete static_cast<Reading*>(reading);
}
