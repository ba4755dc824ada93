// The team: the threads that share the work of a kernel with the thread that calls it.
//
// A kernel calls `share(items, piece, body)`. Each thread owns a contiguous part of the items, so it works on the same
// columns and rows in every step. It takes its part piece by piece. A thread that has finished its own part takes
// pieces of the others' parts. So nobody waits for a thread that sleeps or that the system does not let run: only a
// piece that such a thread has begun must be waited for. Which thread computes a piece changes no bit of the result.
//
// Threads that wait spin first, because waking a thread takes tens of microseconds, and then sleep. On a machine with
// other work, spinning takes time from whoever is waited for. So a thread that finds out that it, or its partner, was
// kept from running makes all spin only briefly for a while.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

// This namespace has a name, and its functions are inline: all libraries of kernels in a process share one team.
namespace nanovllm {

constexpr int64_t MOST_THREADS = 256;
constexpr int64_t MICROSECOND = 1000;  // all times are in nanoseconds
constexpr int64_t SPIN = 3000 * MICROSECOND;         // how long idle threads spin: longer than a step's pauses
constexpr int64_t BRIEF_SPIN = 60 * MICROSECOND;     // the same on a busy machine
constexpr int64_t LATE = 100 * MICROSECOND;          // a wait within an operator that was never this long by itself
constexpr int64_t BUSY_FOR = 100000 * MICROSECOND;   // for how long a machine counts as busy after a sign of it

inline int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Tells the processor that this thread waits.
inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// The items from `begin` to `end`. `is_first` says whether it is the first piece of this call that this thread takes.
struct Span {
    int64_t begin, end;
    bool is_first;
};

class Team {
  public:
    using Body = void (*)(const void* context, Span piece);

    // Calls body for pieces that make up all items; returns when all have been computed. If the team is at work for
    // another thread of the process, the caller computes alone.
    void share(int64_t threads, int64_t items, int64_t piece, Body body, const void* context) {
        threads = std::min(threads, MOST_THREADS);
        if (threads <= 1 || items <= piece || is_taken_.exchange(true, std::memory_order_acquire))
            return body(context, {0, items, true});
        hire(threads);
        open(threads, items, piece, body, context);
        const int64_t start = now();
        take_pieces(0);
        close(now() - start);
        is_taken_.store(false, std::memory_order_release);
    }

  private:
    // state_ is the number of the call, whether the call is open to helpers, and how many help now.
    static constexpr uint32_t HELPERS = 0x3ff, OPEN = 0x400, CALL = 0x800;
    static_assert(MOST_THREADS <= HELPERS, "");

    struct alignas(64) Part { std::atomic<int64_t> next{0}; int64_t end = 0; };  // of the items: owned by one thread
    struct alignas(64) Sleeper {
        std::atomic<bool> is_asleep{false};
        std::mutex mutex;
        std::condition_variable condition;

        // Sleeps until is_over() is true. Whoever makes it true must call `wake` afterwards.
        template <class IsOver> void sleep(IsOver is_over) {
            std::unique_lock<std::mutex> lock(mutex);
            is_asleep.store(true);  // before is_over looks: so either it sees the change, or `wake` sees this
            while (!is_over()) condition.wait(lock);
            is_asleep.store(false);
        }
        void wake() {
            if (!is_asleep.load()) return;
            { std::lock_guard<std::mutex> lock(mutex); }
            condition.notify_one();
        }
    };

    // Starts the threads that are missing. If the system refuses one, those that there are do all.
    void hire(int64_t threads) {
        if (num_members_ >= threads || is_refused_) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // a new thread inherits it: signals go to the caller's threads
        try {
            for (; num_members_ < threads; ++num_members_)
                std::thread([this, me = num_members_] { help_for_ever(me); }).detach();
        } catch (const std::system_error&) { is_refused_ = true; }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void open(int64_t threads, int64_t items, int64_t piece, Body body, const void* context) {
        body_ = body;
        context_ = context;
        piece_ = piece;
        threads_.store(threads, std::memory_order_relaxed);
        for (int64_t i = 0; i < threads; ++i) {
            parts_[i].next.store(i * items / threads, std::memory_order_relaxed);
            parts_[i].end = (i + 1) * items / threads;
        }
        // Nobody changes the state of a closed call without helpers.
        state_.store(((state_.load(std::memory_order_relaxed) & ~(HELPERS | OPEN)) + CALL) | OPEN);
        for (int64_t i = 1; i < std::min(threads, num_members_); ++i) sleepers_[i].wake();
    }

    // Computes the pieces of thread `me`'s own part, then those of the others that nobody has begun.
    void take_pieces(int64_t me) {
        const int64_t threads = threads_.load(std::memory_order_relaxed);
        bool is_first = true;
        for (int64_t i = 0; i < threads; ++i) {
            Part& part = parts_[(me + i) % threads];
            while (part.next.load(std::memory_order_relaxed) < part.end) {
                const int64_t begin = part.next.fetch_add(piece_, std::memory_order_relaxed);
                if (begin >= part.end) break;
                body_(context_, {begin, std::min(begin + piece_, part.end), is_first});
                is_first = false;
            }
        }
    }

    // Ends the call: no further helper enters, and those that are in it finish their pieces. These are parts of what the
    // caller did in `took`. Whoever takes longer than that for one was kept from running.
    void close(int64_t took) {
        if ((state_.fetch_and(~OPEN) & HELPERS) == 0) return;
        const auto is_over = [this] { return (state_.load() & HELPERS) == 0; };
        const int64_t start = now(), usual = std::max(took, LATE);
        if (spin(is_busy() ? BRIEF_SPIN : usual, is_over)) return;
        sleepers_[0].sleep(is_over);
        if (now() - start > usual) note_busy();
    }

    void help_for_ever(int64_t me) {
        uint32_t seen = 0;  // the last call that this thread has seen
        for (;;) {
            const auto is_over = [&] { return (state_.load() & ~(HELPERS | OPEN)) != seen; };
            const bool is_needed = me < threads_.load(std::memory_order_relaxed);
            if (!is_needed || !spin(is_busy() ? BRIEF_SPIN : SPIN, is_over)) sleepers_[me].sleep(is_over);
            uint32_t state = state_.load();
            seen = state & ~(HELPERS | OPEN);
            if (me >= threads_.load(std::memory_order_relaxed)) continue;
            while (state & OPEN && (state & ~(HELPERS | OPEN)) == seen)
                if (state_.compare_exchange_weak(state, state + 1)) {
                    take_pieces(me);
                    if (((state_.fetch_sub(1) - 1) & (HELPERS | OPEN)) == 0) sleepers_[0].wake();
                    break;
                }
        }
    }

    // Waits for at most `limit`; returns whether is_over() became true. Where the clock jumps, this thread did not run.
    template <class IsOver> bool spin(int64_t limit, IsOver is_over) {
        const int64_t start = now();
        for (int64_t before = start;;) {
            for (int i = 0; i < 32; ++i) {
                if (is_over()) return true;
                pause();
            }
            const int64_t time = now();
            if (time - before > LATE) {
                note_busy();
                return is_over();
            }
            if (time - start > limit) return false;
            before = time;
        }
    }

    bool is_busy() const { return now() < busy_until_.load(std::memory_order_relaxed); }

    // Notes a sign that other processes want the cores. One sign alone may be the system's own work; the machine counts
    // as busy if another one follows soon.
    void note_busy() {
        const int64_t time = now(), before = last_sign_.exchange(time, std::memory_order_relaxed);
        if (time - before < BUSY_FOR) busy_until_.store(time + BUSY_FOR, std::memory_order_relaxed);
    }

    std::atomic<bool> is_taken_{false};
    bool is_refused_ = false;
    int64_t num_members_ = 1;  // with the caller
    alignas(64) std::atomic<uint32_t> state_{0};
    alignas(64) std::atomic<int64_t> threads_{0}, busy_until_{0}, last_sign_{-BUSY_FOR};
    Body body_ = nullptr;
    const void* context_ = nullptr;
    int64_t piece_ = 0;
    Part parts_[MOST_THREADS];
    Sleeper sleepers_[MOST_THREADS];  // the first one is the caller's
};

// Returns the team of this process, which is never freed: its threads sleep until the process ends. A child made by
// fork() has none of these threads, so it makes a team of its own.
inline Team& team() {
    static std::atomic<Team*> of_process{nullptr};
    static const int is_registered = pthread_atfork(nullptr, nullptr, [] { of_process.store(nullptr); });
    (void)is_registered;
    Team* found = of_process.load(std::memory_order_acquire);
    if (found == nullptr) {
        Team* made = new Team;
        if (of_process.compare_exchange_strong(found, made)) return *made;
        delete made;  // another thread was faster; `found` is its team
    }
    return *found;
}

}  // namespace nanovllm

namespace {

using nanovllm::Span;

// How many threads share the work of the kernel that this thread runs. Whoever calls a kernel says it.
thread_local int64_t num_threads = 1;

// Calls body(Span) for pieces of at most `piece` items that make up 0..items. `items` or more: the caller's thread does
// all at once.
template <class Body> void share(int64_t items, int64_t piece, const Body& body) {
    nanovllm::team().share(
        num_threads, items, piece,
        [](const void* context, Span some) { (*static_cast<const Body*>(context))(some); }, &body);
}

// The usual piece: a quarter of a thread's part. So the last one to finish is waited for a quarter of the time at most.
inline int64_t quarter(int64_t items) { return std::max<int64_t>(items / (4 * num_threads), 1); }

// The same, but all items where there are fewer than SMALL elements: then the other threads cost more than they save.
constexpr int64_t SMALL = 1 << 14;
inline int64_t quarter_unless_small(int64_t items, int64_t elements) {
    return elements > SMALL ? quarter(items) : items;
}

}  // namespace
