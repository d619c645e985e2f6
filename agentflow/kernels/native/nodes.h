// NUMA nodes: groups of processors with local memory, which they read faster than the memory of other nodes.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace agentflow {

constexpr int MAX_NODES = 16;

// Parses a list of processors in the format of Linux, such as "0-3,8". Skips processors from CPU_SETSIZE on.
inline cpu_set_t processors_in(const std::string& list) {
    cpu_set_t found;
    CPU_ZERO(&found);
    const char* at = list.c_str();
    int first, last, length;
    while (std::sscanf(at, "%d%n", &first, &length) == 1) {
        at += length;
        last = first;
        if (std::sscanf(at, "-%d%n", &last, &length) == 1) at += length;
        for (int i = std::max(first, 0); i <= std::min(last, CPU_SETSIZE - 1); i++) CPU_SET(i, &found);
        if (*at != ',') break;
        at++;
    }
    return found;
}

// The processors of each node that this process may use, for the first MAX_NODES nodes with such processors. With one node, or
// with none because the system lists no nodes, memory and threads need no placement.
inline std::vector<cpu_set_t> usable_nodes(const std::string& folder = "/sys/devices/system/node") {
    std::vector<cpu_set_t> nodes;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return nodes;
    std::string line;
    std::getline(std::ifstream(folder + "/online"), line);
    const cpu_set_t online = processors_in(line);  // a list of nodes, in the same format
    for (int i = 0; i < CPU_SETSIZE && int(nodes.size()) < MAX_NODES; i++) {
        if (!CPU_ISSET(i, &online)) continue;
        line.clear();
        std::getline(std::ifstream(folder + "/node" + std::to_string(i) + "/cpulist"), line);
        cpu_set_t node = processors_in(line);
        CPU_AND(&node, &node, &allowed);
        if (CPU_COUNT(&node) > 0) nodes.push_back(node);
    }
    return nodes;
}

}  // namespace agentflow
