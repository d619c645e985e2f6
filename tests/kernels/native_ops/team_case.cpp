// The thread team on nodes that a test names, in a program of its own for test_team.py. Prints what went wrong, and
// exits with 1 then.
//
// `team_case nodes FOLDER` prints the processors of each usable node, a line each.
// `team_case loops A B` runs loops of a team whose nodes are processors A and B.

#include <cstdlib>
#include <iostream>
#include <random>

#include "team.h"

using agentflow::Team;

namespace {

constexpr int MOST = 40;

int fail(const char* what) {
    std::cout << what << std::endl;
    std::_Exit(1);  // the team's threads never end
}

cpu_set_t only(int processor) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    return set;
}

// Each item belongs to the node whose threads come first, in the order of the nodes: half of the threads each, or one
// more of the first.
int home_of(int64_t item, int64_t num, int num_threads) {
    return item < num * ((num_threads + 1) / 2) / num_threads ? 0 : 1;
}

void run_loop_at_homes(Team& team, int64_t num_rounds, int64_t num) {
    std::atomic<int> taken[MOST][MOST] = {};
    std::atomic<bool> has_returned{false};
    static thread_local int loop_seen = 0, last_node = -1;
    static std::atomic<int> loop_number{0};
    static thread_local bool has_left = false;
    const int number = ++loop_number;
    const pthread_t caller = pthread_self();
    team.loop_at_homes(num_rounds, num, [&](Team::Units units) {
        while (units()) {
            taken[units.round()][units.item()]++;
            if (pthread_equal(caller, pthread_self()) || team.num_threads() == 1) continue;
            const int node = home_of(units.item(), num, team.num_threads());
            if (loop_seen != number) loop_seen = number, last_node = node, has_left = false;
            if (node != last_node && has_left) has_returned = true;
            if (node != last_node) has_left = true, last_node = node;
        }
    });
    for (int64_t round = 0; round < num_rounds; round++) {
        for (int64_t item = 0; item < num; item++) {
            if (taken[round][item] != 1) fail("a unit was not run exactly once");
        }
    }
    if (has_returned) fail("a thread came back to a node whose units were all taken");
}

void run_plain_loop(Team& team, int64_t num, int64_t least) {
    std::atomic<int> taken[MOST * MOST] = {};
    team.loop(num, least, [&](int64_t first, int64_t end, int) {
        for (; first < end; first++) taken[first]++;
    });
    for (int64_t i = 0; i < num; i++) {
        if (taken[i] != 1) fail("an index was not run exactly once");
    }
}

// As many units as threads, which all wait for each other: each thread has one of its own node.
void run_meeting(int num_threads, const int* processors) {
    Team& team = *new Team({only(processors[0]), only(processors[1])});
    team.set_num_threads(num_threads);
    cpu_set_t before;
    sched_getaffinity(0, sizeof before, &before);
    const cpu_set_t first = only(processors[0]);
    sched_setaffinity(0, sizeof first, &first);
    std::atomic<int> wrong{0};
    for (int i = 0; i < 30; i++) {  // in whichever order they come
        std::atomic<int> num_met{0};
        team.loop_at_homes(1, num_threads, [&](Team::Units units) {
            while (units()) {
                num_met++;
                while (num_met < num_threads) sched_yield();
                cpu_set_t mine;
                sched_getaffinity(0, sizeof mine, &mine);
                const cpu_set_t home = only(processors[home_of(units.item(), num_threads, num_threads)]);
                if (!CPU_EQUAL(&mine, &home)) wrong++;
            }
        });
    }
    sched_setaffinity(0, sizeof before, &before);
    if (wrong) fail("a unit was not run on its node");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 3) {
        for (const cpu_set_t& node : agentflow::usable_nodes(argv[2])) {
            for (int i = 0; i < CPU_SETSIZE; i++) {
                if (CPU_ISSET(i, &node)) std::cout << i << ' ';
            }
            std::cout << std::endl;
        }
        return 0;
    }
    const int processors[] = {std::atoi(argv[2]), std::atoi(argv[3])};
    for (int num_threads = 2; num_threads <= 5; num_threads++) run_meeting(num_threads, processors);
    Team& team = *new Team({only(processors[0]), only(processors[1])});
    team.set_num_threads(5);
    run_plain_loop(team, MOST, 1);  // starts all threads, two for each node
    std::mt19937 random(0);
    for (int i = 0; i < 3000; i++) {
        team.set_num_threads(1 + int(random() % 5));
        run_loop_at_homes(team, 1 + random() % MOST, 1 + random() % MOST);
        run_plain_loop(team, 1 + random() % (MOST * MOST), random() % 3);
    }
    std::cout << "passed" << std::endl;
    std::_Exit(0);
}
