// Uses the team as engines do: several threads call it at once, with other numbers of threads and of items each time;
// then a child made by fork() does, too. Every item must be computed exactly once. Built with a sanitizer.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "team.h"

// Returns whether 2,000 calls all computed every item once. Some pieces take long, some calls come after a pause.
static bool computes_all(unsigned seed) {
    std::mt19937 random(seed);
    for (int call = 0; call < 2000; ++call) {
        num_threads = 1 + random() % 5;
        const int64_t items = random() % 300, piece = 1 + random() % 40;
        const bool is_slow = call % 200 == 7;
        std::vector<int> computed(items);  // no atomics: the team must order what its threads write
        share(items, piece, [&](Span some) {
            if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            for (int64_t i = some.begin; i < some.end; ++i) ++computed[i];
            share(3, 1, [&](Span inner) { if (inner.end > 3) std::abort(); });  // a call within a call is computed alone
        });
        for (const int count : computed)
            if (count != 1) return false;
        if (call % 300 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(8));  // until the helpers sleep
    }
    return true;
}

int main() {
    std::vector<std::thread> callers;
    std::atomic<int> failed{0};
    for (unsigned i = 0; i < 3; ++i) callers.emplace_back([&, i] { failed += !computes_all(i); });
    for (auto& caller : callers) caller.join();
    const pid_t child = fork();
    if (child == 0) _exit(computes_all(9) ? 0 : 1);
    int status = 1;
    waitpid(child, &status, 0);
    const bool is_right = computes_all(10) && failed == 0 && status == 0;
    std::puts(is_right ? "every item once" : "WRONG");
    return is_right ? 0 : 1;
}
