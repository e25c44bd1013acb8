// Threads that share the tasks of one phase after another. They are not torch's, whose OpenMP threads spin between
// operations, and two runtimes that spin on the same cores slow each other down.
#pragma once

#ifdef __linux__
#include <pthread.h>
#endif

#include <algorithm>
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
constexpr int64_t PAGE = 4096, ROWS_OF_TASK = 4;
constexpr int SPINS_BETWEEN_RUNS = 4000;  // the host prepares the next iteration in less

// Where the calling thread may compute, as long as this lives: on one core, or wherever it could before (below 0).
struct Bound {
#ifdef __linux__
    cpu_set_t before, wanted;
    bool is_bound;
    explicit Bound(int core) {
        CPU_ZERO(&wanted);
        CPU_SET(core, &wanted);  // does nothing below 0
        is_bound = core >= 0 && !pthread_getaffinity_np(pthread_self(), sizeof before, &before) &&
                   !pthread_setaffinity_np(pthread_self(), sizeof wanted, &wanted);
    }
    ~Bound() {
        if (is_bound) {
            pthread_setaffinity_np(pthread_self(), sizeof before, &before);
        }
    }
#else
    explicit Bound(int) {}
#endif
    Bound(const Bound&) = delete;
};

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
    // By thread its core, below 0 for any, and its node of memory: from 0, those of a node one behind the other.
    Pool(const std::vector<int32_t>& cores, const std::vector<int32_t>& nodes)
        : size(static_cast<int>(cores.size())), cores_(cores), nodes_(nodes), parts_(nodes.back() + 1) {
        for (int id = 0; id < size; ++id) {
            parts_[nodes[id]].end = id + 1;
        }
        for (int id = 1; id < size; ++id) {
            threads_.emplace_back([this, id] { serve(id); });
        }
    }

    ~Pool() {
        stop_ = true;
        advance(runs_);
        for (auto& thread : threads_) {
            thread.join();
        }
    }

    // Calls `work(thread)` on every thread, and returns when all have returned.
    void run(const std::function<void(int)>& work) {
        std::lock_guard<std::mutex> one_at_a_time(mutex_);
        const Bound bound(cores_[0]);  // others of the process may compute on all cores in between
        work_ = &work;
        advance(runs_);
        work(0);
        barrier();
    }

    // All threads call this with the same number: each task is done by whoever is free, and all wait for the last. A
    // node's threads begin with its share of them, where it has the weights that they read (see `sarathi_copy`).
    template <class Task>
    void share(int64_t num_tasks, Task&& task) {
        const int num_parts = static_cast<int>(parts_.size());
        for (int i = 0; i < num_parts; ++i) {
            const int number = (own_part_ + i) % num_parts;
            Part& part = parts_[number];
            const int64_t end = num_tasks * part.end / size;
            const int64_t first = number ? num_tasks * parts_[number - 1].end / size : 0;
            for (int64_t next = first + part.taken++; next < end; next = first + part.taken++) {
                task(next);
            }
        }
        barrier();
    }

    // The same row by row, a few of them to a task.
    template <class Work>
    void share_rows(int64_t num_rows, Work&& work) {
        share((num_rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK, [&](int64_t task) {
            const int64_t first = task * ROWS_OF_TASK;
            for (int64_t row = first; row < std::min(num_rows, first + ROWS_OF_TASK); ++row) {
                work(row);
            }
        });
    }

    // The time, on average over all threads, that they waited for each other since the last call, if `is_watched`.
    int64_t take_waited() { return std::exchange(waited_, 0) / size; }

    static int64_t now() {  // in nanoseconds
        return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    }

    const int size;
    bool is_watched = false;
    int64_t released = 0;  // when all threads had arrived last, if `is_watched`

  private:
    struct alignas(64) Part {  // of the tasks
        std::atomic<int64_t> taken{0};
        int end = 0;  // number of its last thread, and one more
    };

    static void advance(std::atomic<int>& number) {
        number.fetch_add(1);
        number.notify_all();
    }

    static void await(const std::atomic<int>& number, int old, int spins) {
        for (int spin = 0; number.load(std::memory_order_acquire) == old && spin < spins; ++spin) {
            relax();
        }
        number.wait(old);
    }

    void serve(int id) {
        const Bound bound(cores_[id]);
        own_part_ = nodes_[id];
        for (int seen = 0;; ++seen) {
            await(runs_, seen, SPINS_BETWEEN_RUNS);
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
            for (Part& part : parts_) {
                part.taken = 0;  // everyone has taken a task beyond the last
            }
            advance(epoch_);
        } else {
            await(epoch_, epoch, SPINS_IN_PHASE);
        }
    }

    static inline thread_local int own_part_ = 0;
    const std::vector<int32_t> cores_, nodes_;
    std::vector<Part> parts_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<bool> stop_{false};
    std::atomic<int64_t> arrivals_{0};  // moments, added up
    int64_t waited_ = 0;  // changed by whoever arrives last
    // Each on a separate line, so that taking tasks does not disturb those who wait.
    alignas(64) std::atomic<int> runs_{0};
    alignas(64) std::atomic<int> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
};

inline std::unique_ptr<Pool> pool;  // the only one: its threads are as many as the cores to use

}  // namespace sarathi
