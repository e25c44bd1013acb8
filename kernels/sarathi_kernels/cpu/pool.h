// Threads that share the tasks of one phase after another. They are our own: torch's OpenMP threads spin between its
// operations, and two runtimes that spin on the same cores slow each other down.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace sarathi {

constexpr int SPINS_IN_PHASE = 2000;  // most waits are shorter; on a busy machine others may have the core
constexpr int SPINS_BETWEEN_RUNS = 4000;  // the host prepares the next iteration in less

// Leaves the core's units to others while waiting.
inline void relax() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
}

class Pool {
  public:
    explicit Pool(int num_threads) : size(num_threads) {
        for (int id = 1; id < size; ++id) {
            threads_.emplace_back([this, id] { serve(id); });
        }
    }

    ~Pool() {
        stop_ = true;
        wake();
        for (auto& thread : threads_) {
            thread.join();
        }
    }

    // Calls `work(thread)` on every thread, and returns when all have returned.
    void run(const std::function<void(int)>& work) {
        std::lock_guard<std::mutex> one_at_a_time(mutex_);
        work_ = &work;
        wake();
        work(0);
        barrier();
    }

    // All threads call this with the same number: each task is done by whoever is free, and all wait for the last.
    template <class Task>
    void share(int64_t num_tasks, Task&& task) {
        for (int64_t next = next_.fetch_add(1); next < num_tasks; next = next_.fetch_add(1)) {
            task(next);
        }
        barrier();
    }

    // The seconds, on average over all threads, that they waited for each other since the last call, if `is_watched`.
    double take_waited() { return static_cast<double>(std::exchange(waited_, 0)) * 1e-9 / size; }

    static int64_t now() {  // in nanoseconds
        return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }

    const int size;
    bool is_watched = false;
    int64_t released = 0;  // when all threads had arrived last, if `is_watched`

  private:
    void wake() {
        runs_.fetch_add(1);
        runs_.notify_all();
    }

    void serve(int id) {
        for (int seen = 0;;) {
            for (int spin = 0; runs_.load(std::memory_order_acquire) == seen && spin < SPINS_BETWEEN_RUNS; ++spin) {
                relax();
            }
            runs_.wait(seen);
            ++seen;
            if (stop_) {
                return;
            }
            (*work_)(id);
            barrier();
        }
    }

    void barrier() {
        const int epoch = epoch_.load();
        if (is_watched) {
            arrivals_ += now();
        }
        if (arrived_.fetch_add(1) == size - 1) {
            if (is_watched) {
                released = now();
                waited_ += size * released - arrivals_.exchange(0);
            }
            arrived_ = 0;
            next_ = 0;  // everyone has taken a task beyond the last
            epoch_.store(epoch + 1);
            epoch_.notify_all();
            return;
        }
        for (int spin = 0; epoch_.load(std::memory_order_acquire) == epoch && spin < SPINS_IN_PHASE; ++spin) {
            relax();
        }
        epoch_.wait(epoch);
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<bool> stop_{false};
    std::atomic<int64_t> arrivals_{0};  // moments, added up
    int64_t waited_ = 0;  // changed by whoever arrives last
    // Each on a line of its own, so that taking tasks does not disturb those who wait.
    alignas(64) std::atomic<int> runs_{0};
    alignas(64) std::atomic<int> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

inline std::unique_ptr<Pool> pool;  // the only one: its threads are as many as the cores to use

}  // namespace sarathi
